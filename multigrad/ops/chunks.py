"""Loops over the chunks of something too large to be computed at once, in either of two ways.

What a loop makes chunk by chunk is called a whole here: `Written`, in Python, keeps the chunks themselves,
and joins them when they are all there; `InPlace`, in a compiled program, has one tensor from the beginning,
of which it overwrites a part.
"""

from collections.abc import Callable
from typing import Any, Protocol

from keras import ops

from multigrad.ops.dtypes import dtype_of, exact

State = Any
Body = Callable[[Any, Any, State], State]
"""`state = body(start, size, state)` for the chunk of this size, which starts there."""


class Loops(Protocol):
    """What either way has. A chunk lies along the axis, `0` or `-1`."""

    def loop(self, length: Any, size: int, body: Body, state: State) -> State:
        """The last state, after chunks of the size, and one of what is left of the length.

        In place, the length may be a tensor that has its value when the program is compiled, as have the
        sizes of the chunks then.
        """

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A whole of which no chunk is there yet. They are zero where that can be seen."""

    def chunk(self, whole: Any, axis: int, start: Any, size: int) -> Any:
        """A chunk of a whole, which was put there."""

    def put(self, whole: Any, axis: int, start: Any, part: Any) -> Any:
        """The whole with `part` for the chunk."""

    def add(self, whole: Any, axis: int, start: Any, part: Any) -> Any:
        """The whole with `part` added to the chunk, or for it where there was none; in single precision."""

    def joined(self, whole: Any, axis: int) -> Any:
        """The tensor."""


class Written:
    def loop(self, length: Any, size: int, body: Body, state: State) -> State:
        for start in range(0, length, size):
            state = body(start, min(size, length - start), state)
        return state

    def empty(self, shape: tuple[int, ...], dtype: str) -> dict[int, Any]:
        return {}  # chunks, by where they start

    def chunk(self, whole: dict[int, Any], axis: int, start: int, size: int) -> Any:
        return whole[start]

    def put(self, whole: dict[int, Any], axis: int, start: int, part: Any) -> dict[int, Any]:
        whole[start] = part  # in the place of what was there, of which nobody holds another one then
        return whole

    def add(self, whole: dict[int, Any], axis: int, start: int, part: Any) -> dict[int, Any]:
        part = ops.cast(part, exact(dtype_of(part)))
        return self.put(whole, axis, start, whole[start] + part if start in whole else part)

    def joined(self, whole: dict[int, Any], axis: int) -> Any:
        return ops.concatenate(list(whole.values()), axis=axis)


class InPlace:
    def loop(self, length: Any, size: int, body: Body, state: State) -> State:
        known = isinstance(length, int)
        smaller, larger = (min, max) if known else (ops.minimum, ops.maximum)
        size = smaller(size, length)  # in a program no chunk may be too large, not even one that never comes
        count = length // larger(size, 1)
        rest = length - count * size
        state = ops.fori_loop(0, count, lambda i, state: body(i * size, size, state), state)
        if known:
            return body(length - rest, rest, state) if rest else state
        # Where nothing is left, it does not run: a vectorized map cannot take what has no rows.
        return ops.fori_loop(0, smaller(rest, 1), lambda i, state: body(length - rest, rest, state), state)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return ops.zeros(shape, dtype)

    def chunk(self, whole: Any, axis: int, start: Any, size: int) -> Any:
        shape = list(ops.shape(whole))
        shape[axis] = size
        return ops.slice(whole, _corner(whole, axis, start), shape)

    def put(self, whole: Any, axis: int, start: Any, part: Any) -> Any:
        return ops.slice_update(whole, _corner(whole, axis, start), ops.cast(part, whole.dtype))

    def add(self, whole: Any, axis: int, start: Any, part: Any) -> Any:
        before = self.chunk(whole, axis, start, part.shape[axis])
        return self.put(whole, axis, start, before + ops.cast(part, whole.dtype))

    def joined(self, whole: Any, axis: int) -> Any:
        return whole


def _corner(whole: Any, axis: int, start: Any) -> tuple[Any, ...]:
    corner: list[Any] = [0] * len(whole.shape)
    corner[axis] = start
    return tuple(corner)

"""Loops over the chunks of a computation that is too large for memory.

A loop writes its results into buffers, chunk by chunk. `Unrolled` loops in Python. Its buffers are dicts of
chunks, which are concatenated at the end. `InPlace` loops in a compiled program. Its buffers are tensors, of
which each step overwrites a part.
"""

from collections.abc import Callable
from typing import Any, Protocol

from keras import ops

from multigrad.ops.dtypes import dtype_of, wide_dtype

State = Any
Body = Callable[[Any, Any, State], State]
"""`state = body(start, size, state)` for the chunk of this size that begins at `start`."""


class Loops(Protocol):
    """The interface of both kinds of loops. A chunk lies along the axis `0` or `-1`."""

    def loop(self, length: Any, size: int, body: Body, state: State) -> State:
        """Return the last state, after chunks of this size, and a smaller one for the rest of the length.

        In place, the length may be a symbolic scalar tensor. The sizes of the chunks are then tensors, too.
        """

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a new buffer. In `InPlace` buffers, chunks that are not written are zero."""

    def read(self, buffer: Any, axis: int, start: Any, size: int) -> Any:
        """Return a chunk that was written to the buffer."""

    def write(self, buffer: Any, axis: int, start: Any, part: Any) -> Any:
        """Return the buffer with `part` as the chunk."""

    def add(self, buffer: Any, axis: int, start: Any, part: Any) -> Any:
        """Return the buffer with `part` added to the chunk, in float32 for half precision."""

    def joined(self, buffer: Any, axis: int) -> Any:
        """Return the tensor of a buffer."""


class Unrolled:
    """Loops in Python, whose buffers map the starts of chunks to chunks."""

    def loop(self, length: Any, size: int, body: Body, state: State) -> State:
        for start in range(0, length, size):
            state = body(start, min(size, length - start), state)
        return state

    def empty(self, shape: tuple[int, ...], dtype: str) -> dict[int, Any]:
        return {}

    def read(self, buffer: dict[int, Any], axis: int, start: int, size: int) -> Any:
        return buffer[start]

    def write(self, buffer: dict[int, Any], axis: int, start: int, part: Any) -> dict[int, Any]:
        buffer[start] = part  # mutated, which releases the former chunk: nothing else refers to the buffer
        return buffer

    def add(self, buffer: dict[int, Any], axis: int, start: int, part: Any) -> dict[int, Any]:
        part = ops.cast(part, wide_dtype(dtype_of(part)))
        return self.write(buffer, axis, start, buffer[start] + part if start in buffer else part)

    def joined(self, buffer: dict[int, Any], axis: int) -> Any:
        return ops.concatenate(list(buffer.values()), axis=axis)


class InPlace:
    """Loops in a compiled program, whose buffers are tensors."""

    def loop(self, length: Any, size: int, body: Body, state: State) -> State:
        static = isinstance(length, int)
        smaller, larger = (min, max) if static else (ops.minimum, ops.maximum)
        size = smaller(size, length)  # a program must not contain a larger chunk, even if it never runs
        count = length // larger(size, 1)
        remainder = length - count * size
        state = ops.fori_loop(0, count, lambda i, state: body(i * size, size, state), state)
        if static:
            return body(length - remainder, remainder, state) if remainder else state
        # A loop of at most one step, because a vectorized map does not accept an empty chunk.
        return ops.fori_loop(
            0, smaller(remainder, 1), lambda i, state: body(length - remainder, remainder, state), state
        )

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return ops.zeros(shape, dtype)

    def read(self, buffer: Any, axis: int, start: Any, size: int) -> Any:
        shape = list(ops.shape(buffer))
        shape[axis] = size
        return ops.slice(buffer, _start_indices(buffer, axis, start), shape)

    def write(self, buffer: Any, axis: int, start: Any, part: Any) -> Any:
        return ops.slice_update(buffer, _start_indices(buffer, axis, start), ops.cast(part, buffer.dtype))

    def add(self, buffer: Any, axis: int, start: Any, part: Any) -> Any:
        previous = self.read(buffer, axis, start, part.shape[axis])
        return self.write(buffer, axis, start, previous + ops.cast(part, buffer.dtype))

    def joined(self, buffer: Any, axis: int) -> Any:
        return buffer


def _start_indices(buffer: Any, axis: int, start: Any) -> tuple[Any, ...]:
    indices: list[Any] = [0] * len(buffer.shape)
    indices[axis] = start
    return tuple(indices)

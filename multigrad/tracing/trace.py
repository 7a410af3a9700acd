"""`trace_gradients`: a context in which ops tell what flows through them.

While one is open, an op's `Call` is one of another kind, whose run and whose pullback are observed; the
function, the rule and what the backend makes of them stay as they are. While none is open, nothing is asked.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from multigrad import backend, custom_gradient
from multigrad.answer import slot_paths
from multigrad.errors import distinct_names, message
from multigrad.tracing.process_wide import Shared
from multigrad.tracing.records import Call, Step, Values, as_dict, largest_of
from multigrad.tracing.table import table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Trace:
    """What was recorded in a context of `trace_gradients`, which says more; `print` shows it as a table."""

    def __init__(self, exploding: float) -> None:
        self.calls: list[Call] = []
        """Each call of an op, in the order in which they came to their end."""
        self.steps: list[Step] = []
        """Each run of a rule, in order."""
        self.open = True
        """Whether the context has not ended."""
        self._exploding = exploding
        self._lock = threading.Lock()  # PyTorch may pull in a thread of its own

    def add_call(self, op: str, within: str | None, inputs: Values, outputs: Values) -> Call:
        """A function has run."""
        with self._lock:
            call = Call(op, len(self.calls) + 1, within, inputs, outputs)
            self.calls.append(call)
        return call

    def add_step(self, of: Call, upstream: Values, downstream: Values) -> None:
        """A rule has run."""
        with self._lock:
            first = largest_of(self.steps[0].upstream) if self.steps else None
            self.steps.append(Step(of, upstream, downstream, self._exploding, first))

    def __str__(self) -> str:
        return table_of(self.calls, self.steps)

    def __repr__(self) -> str:
        return f"<Trace of {len(self.calls)} calls and {len(self.steps)} steps back>"

    def to_dict(self) -> dict[str, Any]:
        """What was recorded, as plain data that JSON can write.

        ```python
        import json
        import multigrad

        square = multigrad.op_custom_gradient(lambda x: (x * x, lambda upstream: upstream * 2.0 * x))
        with multigrad.trace_gradients() as trace:
            multigrad.grad(square)(3.0)
        text = json.dumps(trace.to_dict())
        print(trace.to_dict()["steps"][0]["downstream"]["x"]["value"])  # 6.0
        ```

        Returns:
            A dict with two lists. An entry of `"calls"` has `"op"`, `"call"` (the number), `"within"`,
            `"inputs"`, `"outputs"` and `"flags"`; one of `"steps"` has `"op"`, `"call"`, `"upstream"`,
            `"current"`, `"downstream"` and `"flags"`. Tensors stand under their paths, as `"shape"`,
            `"dtype"`, `"mean"`, `"largest"`, `"zeros"` (a share), `"nans"`, `"infinities"` (counts) and,
            for a scalar, `"value"`; None is a gradient that there is not. NaN, Inf and complex numbers
            are strings such as `"nan"` and `"-inf"`, which `float` and `complex` read back.
        """
        return as_dict(self.calls, self.steps)

    def plot(self, calls: Sequence[int] | None = None) -> "Figure":
        """Draw the chain of calls, and the gradient that flows back along it.

        ```python
        import multigrad

        square = multigrad.op_custom_gradient(lambda x: (x * x, lambda upstream: upstream * 2.0 * x))
        with multigrad.trace_gradients() as trace:
            multigrad.grad(lambda x: square(square(x)))(3.0)
        figure = trace.plot()
        ```

        Arguments:
            calls: the numbers of the calls to draw; by default all, but those within another op.

        Returns:
            A `matplotlib.figure.Figure`. Values flow down on the left. On the right flows the gradient of
            the first step of each call, up, in an arrow that is the wider the larger it is, by the logarithm
            of its largest absolute value. An arrow has a gap where something other than an op lies
            between two calls. Red is what has a flag.

        Raises:
            ImportError: where matplotlib is not installed.
            ValueError: where there is no such call.
        """
        from multigrad.tracing.plot import picture_of  # matplotlib is an extra

        return picture_of(self.calls, self.steps, calls)


_OPEN: ContextVar[tuple[Trace, ...]] = ContextVar("open traces", default=())
_WITHIN: ContextVar["_Record | _Again | None"] = ContextVar("whose function or rule runs", default=None)


@contextlib.contextmanager
def trace_gradients(*, exploding: float = 1e4) -> Iterator[Trace]:
    """Record what flows through every op that is called in a context, forward and back.

    ```python
    from multigrad import grad, op_custom_gradient, trace_gradients

    @op_custom_gradient
    def square(x):
        return x ** 2, lambda upstream: upstream * 2.0 * x

    with trace_gradients() as trace:
        grad(lambda x: square(square(square(x))))(2.0)
    print(trace)
    # call        x   output   upstream   current   downstream
    # 3 square   16      256          1        32           32
    # 2 square    4       16         32         8          256
    # 1 square    2        4        256         4         1024
    ```

    `current` is the op's own derivative, `downstream / upstream`, where both are scalars.

    Arguments:
        exploding: a gradient is called exploding when it is more than so many times larger than the
            step's own upstream gradient, or than the one that the first step of the trace began with,
            each by its largest absolute value.

    Returns:
        A context that gives a `Trace`. Its `calls` and `steps` have what was recorded, as NumPy arrays.
        `print(trace)` shows it as a table, `trace.to_dict()` gives it to programs, and `trace.plot()`
        draws it. What holds NaN or Inf, is all zero, or explodes is said in words.

    - Recorded is what is called in this context, and in this thread, and what comes back to such a call
      while the context is open, in whatever thread. Each run of a rule is one step: a second derivative
      adds one more.
    - Compiled functions (`jax.jit`, `tf.function`, `torch.compile`, and a `fit` that uses them) run
      uncompiled in it, whenever they were compiled. So they can be seen, are slower, and may differ by
      rounding. TensorFlow's and PyTorch's switches for this are for all threads. Of functions in
      `tf.data`, TensorFlow warns that they stay as they are.
    - Where one trace is open inside another, both record.
    - Not recorded is what has no values: a call with a symbolic tensor, what is exported, and what
      TensorFlow vectorizes (`tf.vectorized_map`, `tape.jacobian`).
    - Under `jax.vmap`, each example is a call of its own; under `torch.func.vmap`, the batch is one. In
      forward mode no gradient comes back; and on JAX none is seen of an op with `forward_mode=True`.
      `multigrad.jvp` asks the rules for what it transposes: those runs are steps, too.
    - All values are copied to the host's memory and kept as long as the trace. Outside of the context
      nothing is recorded, and nothing costs.

    Raises:
        RuntimeError: inside of a function that is being compiled.

    What is raised inside of the context passes through, and what was recorded before it remains.
    """
    if backend.active.is_compiling():
        raise RuntimeError(
            message(
                "trace_gradients",
                "it was called inside of a function that is being compiled, where there are no values",
                required="a place in which the program runs",
                got="a function under jax.jit, tf.function or torch.compile",
                mend="open the trace around the call of the compiled function",
            )
        )
    trace = Trace(exploding)
    token = _OPEN.set((*_OPEN.get(), trace))
    try:
        with backend.active.uncompiled(), _OBSERVING:
            yield trace
    finally:
        trace.open = False
        _OPEN.reset(token)


@contextlib.contextmanager
def _observing() -> Iterator[None]:
    """Calls are observed, where they are in the context of a trace."""
    usual = custom_gradient.apply

    def apply(call: custom_gradient.Call, tensors: Sequence[Any]) -> Any:
        return usual(_Call(call) if _OPEN.get() else call, tensors)

    custom_gradient.apply = apply
    try:
        yield
    finally:
        custom_gradient.apply = usual


_OBSERVING = Shared(_observing)


class _Call(custom_gradient.Call):
    """A call that is recorded."""

    __slots__ = ("_record",)
    _record: "_Record"

    def __init__(self, call: custom_gradient.Call) -> None:
        super().__init__(call.f, call.back, call.options)

    def run(
        self, tensors: Sequence[Any], f: Callable[..., Any] | None = None, place: Any = None
    ) -> custom_gradient.Ran:
        """Run the function and record it."""
        around = _WITHIN.get()
        record = self._record = around.inner(self.name) if around else _Record(self.name)
        with _within(_Again(record) if record.ran else record):
            outputs, rule, inputs, back = super().run(tensors, f, place)
        if not record.ran:
            record.note_run(back, inputs, outputs)
        return outputs, rule, inputs, _Pullback(back, record)

    def run_again(self, inputs: Sequence[Any], first: custom_gradient.Pullback) -> custom_gradient.Ran:
        """Run the function for a second derivative. The ops in it are those of the first run."""
        with _within(_Again(self._record)):
            return super().run_again(inputs, first)


class _Pullback(custom_gradient.Pullback):
    """A pullback that is recorded."""

    def __init__(self, back: custom_gradient.Pullback, record: "_Record") -> None:
        self.__dict__ |= vars(back)
        self._back, self._record = back, record

    @property
    def untraced(self) -> custom_gradient.Pullback:
        return self._back

    def pull(
        self,
        rule: Callable[..., Any],
        upstream: Sequence[Any],
        needed: Sequence[bool],
        specs: list[backend.Spec | None],
    ) -> Sequence[Any]:
        with _within(self._record):
            gradients = self._back.pull(rule, upstream, needed, specs)
        self._record.note_step(upstream, gradients)
        return gradients


@contextlib.contextmanager
def _within(record: "_Record | _Again") -> Iterator[None]:
    token = _WITHIN.set(record)
    try:
        yield
    finally:
        _WITHIN.reset(token)


class _Record:
    """What the open traces get to know of one call: as often as the call has values.

    It holds no tensor. Where a framework runs one call for several examples, there are as many `Call`s of a
    trace, and the steps come back in the same order.
    """

    def __init__(self, op: str, within: str | None = None) -> None:
        self.op, self._within = op, within
        self.ran = False
        self.others: list[_Record] = []
        """Those of the ops that were called in its function, and behind them, in its rule."""
        self._calls: list[tuple[Trace, list[Call], Iterator[int]]] = [
            (trace, [], itertools.count()) for trace in _OPEN.get()
        ]

    def inner(self, op: str) -> "_Record":
        """The record of an op that is called in this one."""
        self.others.append(_Record(op, self.op))
        return self.others[-1]

    def note_run(self, back: custom_gradient.Pullback, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """The function has run, though there may be no values yet."""
        self.ran = True
        self._inputs, self._outputs = _input_paths(back), _output_paths(back)

        def add(values: Sequence[np.ndarray | None]) -> None:
            own, others = self._by_path(values)
            for trace, calls, _ in self._calls:
                if trace.open:
                    calls.append(trace.add_call(self.op, self._within, own, others))

        _observe(add, [*inputs, *outputs])

    def note_step(self, upstream: Sequence[Any], gradients: Sequence[Any]) -> None:
        """The rule has run, though there may be no values yet."""

        def add(values: Sequence[np.ndarray | None]) -> None:
            downstream, arriving = self._by_path(values)
            for trace, calls, places in self._calls:
                if trace.open and calls:
                    trace.add_step(calls[next(places) % len(calls)], arriving, downstream)

        _observe(add, [*gradients, *upstream])

    def _by_path(self, values: Sequence[np.ndarray | None]) -> tuple[Values, Values]:
        count = len(self._inputs)
        inputs = zip(self._inputs, values[:count], strict=True)
        return dict(inputs), dict(zip(self._outputs, values[count:], strict=True))


class _Again:
    """The second run of a recorded function, in which the same ops are called once more."""

    def __init__(self, record: _Record) -> None:
        self._record, self._others = record, iter(tuple(record.others))

    def inner(self, op: str) -> _Record:
        """The record that the op has of the first run."""
        return next(self._others, None) or self._record.inner(op)


def _observe(callback: Callable[[Sequence[np.ndarray | None]], None], tensors: Sequence[Any]) -> None:
    """Give the values to `callback`, None for None."""
    present = [tensor is not None for tensor in tensors]

    def scatter(*values: np.ndarray) -> None:
        every = iter(values)
        callback([next(every) if there else None for there in present])

    backend.active.observe(scatter, [tensor for tensor in tensors if tensor is not None])


def _input_paths(back: custom_gradient.Pullback) -> list[str]:
    named = zip(back.binding.names(), back.arguments.template, strict=True)
    slots = {slot: path.replace("'", "", 2) for path, slot in slot_paths(named)}
    return distinct_names([*[slots[place] for place in sorted(slots)], *back.variables.names()])


def _output_paths(back: custom_gradient.Pullback) -> list[str]:
    slots = {slot: path for path, slot in slot_paths([("output", back.output.template)])}
    return [slots[place] for place in sorted(slots)]

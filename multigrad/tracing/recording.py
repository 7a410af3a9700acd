"""Record calls of ops and of layers while a trace is open, and pass layers to the taps of a `GradientLogger`.

`recording` replaces `op.apply`, so that every call of an op becomes a `_RecordedCall`, which also reports its
values to a `CallRecorder`. The function, the rule and the backend are the same as outside of a trace. While
no trace is open, `op.apply` is the function of the backend, so that ops have no overhead.

`hooking_layers` replaces two methods of Keras: `keras.Operation.__call__`, through which Keras calls the
`call` of every layer, and `keras.Layer.stateless_call`, through which `fit` calls the model on JAX. The
outputs of a traced layer pass an identity op, whose rule records the gradient, before Keras adds a mask.
No layer is changed, and outside of the context the methods of Keras are restored.
"""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np

from multigrad import backend, op
from multigrad.common.errors import distinct_names
from multigrad.common.process_wide import Shared
from multigrad.common.type_sets import HoldsNoTensor
from multigrad.core.call import Call, Run
from multigrad.core.expected_gradients import paths_of
from multigrad.core.rule import Rule
from multigrad.core.structure import Slot, leaves_of, rebuild
from multigrad.tracing.records import CallRecord, Values
from multigrad.tracing.trace import Trace

OPEN_TRACES: ContextVar[tuple[Trace, ...]] = ContextVar("open traces", default=())
"""The traces that are open in this thread or task, outermost first."""

TAPS: ContextVar[Any] = ContextVar("taps of the training step", default=None)
"""The `Taps` of the step that this thread runs or traces. Its method `call` runs the call of a layer."""

_ENCLOSING: ContextVar["tuple[CallRecorder, Iterator[CallRecorder]] | None"] = ContextVar(
    "enclosing call", default=None
)
"""The recorder of the call whose function or rule is running. If it runs again, ops in it keep the recorders
of the first run, which follow."""

_LAYER: ContextVar[keras.Layer | None] = ContextVar("traced layer", default=None)
"""The innermost layer whose call is running."""


@contextlib.contextmanager
def replacing(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module, class or object. Keras, which tracks attributes, does not see it."""
    access: Any = type if isinstance(owner, type) else object
    is_own, before = name in vars(owner), vars(owner).get(name)
    access.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            access.__setattr__(owner, name, before)
        else:
            access.__delattr__(owner, name)


@contextlib.contextmanager
def setting(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a context variable in a context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def _record_calls() -> Iterator[None]:
    """Record the calls of ops in the contexts that have an open trace."""
    apply = op.apply

    def apply_recorded(call: Call, tensors: Sequence[Any]) -> Sequence[Any]:
        if not OPEN_TRACES.get():
            return apply(call, tensors)
        recorded = _RecordedCall(call)
        outputs = apply(recorded, tensors)
        call.layout = recorded.layout
        return outputs

    with replacing(op, "apply", apply_recorded):
        yield


recording = Shared(_record_calls)
"""Records calls while any thread is in this context. It replaces `op.apply` once for all threads."""


class _RecordedCall(Call):
    """A call that is recorded."""

    __slots__ = ("_recorder",)
    _recorder: "CallRecorder"

    def __init__(self, call: Call) -> None:
        super().__init__(call.f, call.arguments, call.higher_order)

    def run(self, tensors: Sequence[Any], strip: Callable[[Any], Any] | None = None) -> Run:
        """Run the function. Record its inputs and outputs in the first run; a backend may run it again."""
        self._recorder = recorder = recorder_here(self.name)
        with enclose_run(recorder):
            run = super().run(tensors, strip)
        if not recorder.has_run:
            paths = _input_paths(run.rule), paths_of([("output", run.rule.output.template)])
            recorder.record_run(*paths, run.inputs, run.outputs)
        run.rule = _RecordedRule(run.rule, recorder)
        return run

    def rerun(self, inputs: Sequence[Any], first: Rule) -> Run:
        """Run the function again for a second derivative. Ops in it are not recorded a second time."""
        with enclose_run(self._recorder):
            run = super().rerun(inputs, first)
        run.rule = _RecordedRule(run.rule, self._recorder)
        return run


class _RecordedRule(Rule):
    """The rule of a recorded call."""

    def __init__(self, rule: Rule, recorder: "CallRecorder") -> None:
        self.__dict__ |= vars(rule)
        self._recorder = recorder

    def call(self, user_rule: Any, scope_values: Any, upstream: Sequence[Any], *how: Any) -> Sequence[Any]:
        """Call the rule and record its gradients."""
        with setting(_ENCLOSING, (self._recorder, iter(()))):
            gradients = super().call(user_rule, scope_values, upstream, *how)
        self._recorder.record_step(upstream, gradients)
        return gradients


def enclose_run(recorder: "CallRecorder") -> AbstractContextManager[None]:
    """Return a context in which the function of a call runs, for the first time or again."""
    return setting(_ENCLOSING, (recorder, iter(tuple(recorder.nested) if recorder.has_run else ())))


def recorder_here(op: str, layer: str = "", traces: Sequence[Trace] | None = None) -> "CallRecorder":
    """Return the recorder of a call that is made here. `layer` is the class of a layer."""
    enclosing, nested = _ENCLOSING.get() or (None, iter(()))
    recorder = next(nested, None)
    if recorder is None:
        recorder = CallRecorder(op, enclosing.op if enclosing else None, layer, traces)
        if enclosing is not None:
            enclosing.nested.append(recorder)
    return recorder


class CallRecorder(HoldsNoTensor):
    """Adds one call of an op, and the steps of its rule, to the traces that are open at the call.

    It holds no tensors, because tensors may be traced: `backend.active.observe` delivers their values, once
    or several times. Under `jax.vmap`, one call adds one `CallRecord` for each example, and the steps arrive
    in the order of the examples.
    """

    def __init__(self, op: str, within: str | None, layer: str, traces: Sequence[Trace] | None) -> None:
        self.op, self._within, self._layer = op, within, layer
        self.has_run = False
        self.nested: list[CallRecorder] = []
        """The recorders of the ops that the function called, followed by those that the rule called."""
        self._records: list[tuple[Trace, list[CallRecord], Iterator[int]]] = [
            (trace, [], itertools.count()) for trace in (OPEN_TRACES.get() if traces is None else traces)
        ]
        """For each trace: the records of this call, and a counter of its steps."""

    def record_run(
        self,
        input_paths: Sequence[str],
        output_paths: Sequence[str],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
    ) -> None:
        """Record the inputs and outputs of the function as soon as they have values."""
        self.has_run = True
        self._input_paths, self._output_paths = input_paths, output_paths

        def add(values: Sequence[np.ndarray | None]) -> None:
            input_values, output_values = self._split_by_path(values)
            for trace, records, _ in self._records:
                if trace.open:
                    call = trace.add_call(self.op, self._within, input_values, output_values, self._layer)
                    records.append(call)

        _observe(add, [*inputs, *outputs])

    def record_step(self, upstream: Sequence[Any], gradients: Sequence[Any] | None) -> None:
        """Record the gradients of the rule once they have values. A layer has only upstream gradients."""

        def add(values: Sequence[np.ndarray | None]) -> None:
            if gradients is None:
                downstream_values: Values = {}
                upstream_values: Values = dict(zip(self._output_paths, values, strict=True))
            else:
                downstream_values, upstream_values = self._split_by_path(values)
            for trace, records, step_count in self._records:
                if trace.open and records:
                    record = records[next(step_count) % len(records)]
                    trace.add_step(record, upstream_values, downstream_values)

        _observe(add, [*(gradients or ()), *upstream])

    def _split_by_path(self, values: Sequence[np.ndarray | None]) -> tuple[Values, Values]:
        """Return the values of the inputs and of the outputs, each by path."""
        count = len(self._input_paths)
        by_input = dict(zip(self._input_paths, values[:count], strict=True))
        return by_input, dict(zip(self._output_paths, values[count:], strict=True))


def _observe(callback: Callable[[Sequence[np.ndarray | None]], None], tensors: Sequence[Any]) -> None:
    """Call `callback` with the values of tensors, and None for each None, when they are known."""
    is_present = [tensor is not None for tensor in tensors]

    def with_none(*values: np.ndarray) -> None:
        remaining = iter(values)
        callback([next(remaining) if present else None for present in is_present])

    backend.active.observe(with_none, [tensor for tensor in tensors if tensor is not None])


def _input_paths(rule: Rule) -> list[str]:
    paths = [path.replace("'", "", 2) for path in paths_of(rule.arguments.named())]
    return distinct_names([*paths, *rule.variables.names()])


@contextlib.contextmanager
def _hook_layers() -> Iterator[None]:
    call, stateless_call = keras.Operation.__call__, keras.Layer.stateless_call

    def call_hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, keras.Layer):
            return call(self, *args, **kwargs)

        def run() -> Any:
            return _record_call(self, args, kwargs, lambda: (call(self, *args, **kwargs),))[0]

        taps = TAPS.get()
        return run() if taps is None else taps.call(self, run)

    def stateless_call_recorded(
        self: Any, variables: Any, state: Any, *args: Any, return_losses: bool = False, **kwargs: Any
    ) -> Any:
        def run() -> Any:
            return stateless_call(self, variables, state, *args, return_losses=return_losses, **kwargs)

        return _record_call(self, args, kwargs, run)

    hooked = replacing(keras.Operation, "__call__", call_hooked)
    with hooked, replacing(keras.Layer, "stateless_call", stateless_call_recorded):
        yield


def _record_call(
    layer: keras.Layer, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[[], Any]
) -> tuple[Any, ...]:
    """Return the tuple that `run()` returns, whose first item is the output of the layer. Record the call."""
    is_symbolic = any(isinstance(leaf, keras.KerasTensor) for leaf in leaves_of((args, kwargs)))
    if not OPEN_TRACES.get() or is_symbolic:
        return run()
    caller = _LAYER.get()
    paths = {
        trace: path
        for trace in OPEN_TRACES.get()
        if trace.layers is not None and (path := trace.layers.path_of(layer, caller)) is not None
    }
    if not paths:
        return run()
    recorder = recorder_here(next(iter(paths.values())), type(layer).__name__, list(paths))
    with setting(_LAYER, layer), enclose_run(recorder):
        outputs, *others = run()
    return (outputs if recorder.has_run else _record(recorder, layer, args, kwargs, outputs), *others)


hooking_layers = Shared(_hook_layers)
"""Records and taps calls of layers while any thread is in this context. It replaces the methods for all."""


def _record(
    recorder: CallRecorder, layer: keras.Layer, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any
) -> Any:
    """Record a call, and return its outputs after an identity that records their gradient."""
    names = list(inspect.signature(layer.call).parameters)
    named = [(names[i] if i < len(names) else f"[{i}]", value) for i, value in enumerate(args)]
    inputs, input_paths = _tensors_of([*named, *kwargs.items()])
    tensors, output_paths = _tensors_of([("output", outputs)])
    recorder.record_run(input_paths, output_paths, inputs, tensors)
    tied = iter(_tie(recorder, tensors))
    types = backend.active.TENSORS
    return rebuild(outputs, lambda leaf: next(tied) if types[type(leaf)] else leaf)


def _tensors_of(named: Sequence[tuple[str, Any]]) -> tuple[list[Any], list[str]]:
    types, tensors = backend.active.TENSORS, []

    def take(leaf: Any) -> Any:
        if not types[type(leaf)]:
            return leaf
        tensors.append(leaf)
        return Slot(len(tensors) - 1)

    paths = paths_of([(name, rebuild(value, take)) for name, value in named])
    return tensors, paths


def _tie(recorder: CallRecorder, tensors: Sequence[Any]) -> Sequence[Any]:
    """Return the tensors, tied to a rule that records their gradients. The trace omits the identity."""

    def rule(*upstream: Any) -> Any:
        recorder.record_step(upstream, None)
        return upstream

    identity = op.op_custom_gradient(lambda *tensors: (tensors, rule), name=recorder.op)
    with setting(OPEN_TRACES, ()):
        return identity(*tensors) if tensors else ()

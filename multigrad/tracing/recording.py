"""Record calls of ops while a trace is open.

`recording` replaces `op.apply`, so that every call of an op becomes a `_RecordedCall`, which also reports its
values to a `CallRecorder`. The function, the rule and the backend are the same as outside of a trace. While
no trace is open, `op.apply` is the function of the backend, so that ops have no overhead.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import numpy as np

from multigrad import backend, op
from multigrad.common.errors import distinct_names
from multigrad.common.process_wide import Shared
from multigrad.common.type_sets import HoldsNoTensor
from multigrad.core.call import Call, Run
from multigrad.core.expected_gradients import paths_of
from multigrad.core.rule import Rule
from multigrad.tracing.records import CallRecord, Values
from multigrad.tracing.trace import Trace

OPEN_TRACES: ContextVar[tuple[Trace, ...]] = ContextVar("open traces", default=())
"""The traces that are open in this thread or task, outermost first."""

ENCLOSING: ContextVar["CallRecorder | _RerunRecorder | None"] = ContextVar("enclosing call", default=None)
"""The recorder of the call whose function or rule is running."""


@contextlib.contextmanager
def replacing(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or a class in a context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


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
        with setting(ENCLOSING, self._recorder):
            gradients = super().call(user_rule, scope_values, upstream, *how)
        self._recorder.record_step(upstream, gradients)
        return gradients


def enclose_run(recorder: "CallRecorder") -> AbstractContextManager[None]:
    """Return a context in which the function of a call runs, for the first time or again."""
    return setting(ENCLOSING, _RerunRecorder(recorder) if recorder.has_run else recorder)


def recorder_here(op: str, layer: str = "", traces: Sequence[Trace] | None = None) -> "CallRecorder":
    """Return the recorder of a call that is made here. `layer` is the class of a layer."""
    enclosing = ENCLOSING.get()
    return enclosing.recorder_of(op, layer, traces) if enclosing else CallRecorder(op, None, layer, traces)


class CallRecorder(HoldsNoTensor):
    """Adds one call of an op, and the steps of its rule, to the traces that are open at the call.

    It holds no tensors, because tensors may be traced: `backend.active.observe` delivers their values, once
    or several times. Under `jax.vmap`, one call adds one `CallRecord` for each example, and the steps arrive
    in the order of the examples.
    """

    def __init__(
        self, op: str, within: str | None, layer: str = "", traces: Sequence[Trace] | None = None
    ) -> None:
        self.op, self._within, self._layer = op, within, layer
        self.has_run = False
        self.nested: list[CallRecorder] = []
        """The recorders of the ops that the function called, followed by those that the rule called."""
        self._records: list[tuple[Trace, list[CallRecord], Iterator[int]]] = [
            (trace, [], itertools.count()) for trace in (OPEN_TRACES.get() if traces is None else traces)
        ]
        """For each trace: the records of this call, and a counter of its steps."""

    def recorder_of(self, op: str, layer: str = "", traces: Sequence[Trace] | None = None) -> "CallRecorder":
        """Return the recorder of an op or layer that this call's function or rule calls."""
        self.nested.append(CallRecorder(op, self.op, layer, traces))
        return self.nested[-1]

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


class _RerunRecorder:
    """The recorder of a call whose function runs again. Ops in it keep the recorders of the first run."""

    def __init__(self, recorder: CallRecorder) -> None:
        self._recorder, self._nested = recorder, iter(tuple(recorder.nested))

    def recorder_of(self, op: str, layer: str = "", traces: Sequence[Trace] | None = None) -> CallRecorder:
        """Return the recorder that the op or layer has from the first run."""
        return next(self._nested, None) or self._recorder.recorder_of(op, layer, traces)


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

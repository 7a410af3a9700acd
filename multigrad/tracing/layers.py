"""Record calls of layers while a trace of a model is open, and pass them to the taps of a `GradientLogger`.

`hooking_layers` replaces two methods of Keras: `keras.Operation.__call__`, through which Keras calls the
`call` of every layer, and `keras.Layer.stateless_call`, through which `fit` calls the model on JAX. The
outputs of a traced layer pass an identity op, whose rule records the gradient, before Keras adds a mask.
No layer is changed, and outside of the context the methods of Keras are restored.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import keras

from multigrad import backend
from multigrad.common.process_wide import Shared
from multigrad.core.expected_gradients import paths_of
from multigrad.core.structure import Slot, leaves_of, rebuild
from multigrad.op import op_custom_gradient
from multigrad.tracing.recording import (
    OPEN_TRACES,
    CallRecorder,
    enclose_run,
    recorder_here,
    replacing,
    setting,
)

_LAYER: ContextVar[keras.Layer | None] = ContextVar("traced layer", default=None)
"""The innermost layer whose call is running."""

TAPS: ContextVar[Any] = ContextVar("taps of the training step", default=None)
"""The `Taps` of the step that this thread runs or traces. Its method `call` runs the call of a layer."""


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
    if not OPEN_TRACES.get() or _is_symbolic(args, kwargs):
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


def _is_symbolic(args: Any, kwargs: Any) -> bool:
    return any(isinstance(leaf, keras.KerasTensor) for leaf in leaves_of((args, kwargs)))


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

    identity = op_custom_gradient(lambda *tensors: (tensors, rule), name=recorder.op)
    with setting(OPEN_TRACES, ()):
        return identity(*tensors) if tensors else ()

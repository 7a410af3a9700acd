"""The state that Keras has while a layer is called: its arguments such as `training`, autocast and device.

A rule runs after the layer has returned. It must see the state that its function saw: the layers that it
calls read from it whether they are in training, variables the dtype in which a layer computes, and new
tensors their device.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from multigrad import backend
from multigrad.common.keras_internals import global_state

_CALL = "current_call_ctx"  # the arguments of the outermost layer call, which inner layers read
_SCOPES = ("autocast_scope", "torch_device")


class Context:
    """A copy of Keras's state: the attributes of the layer's call, and the active scopes by name."""

    __slots__ = ("attributes", "call", "kind", "scopes")

    def __init__(self, call: Any, scopes: dict[str, Any]) -> None:
        self.kind, self.scopes = type(call), scopes
        # A weak reference, because the call holds its layer.
        self.call = None if call is None else weakref.ref(call)
        # Copied now, because each inner layer changes the attributes of the call.
        self.attributes = None if call is None else {**vars(call), "entry_layer": None}


def current_context() -> Context | None:
    """Return the present state, None outside of layers and devices."""
    state = vars(global_state.GLOBAL_STATE_TRACKER)
    call, device = state.get(_CALL), state.get("torch_device")
    if call is None and device is None:
        return None
    return Context(call, {name: state.get(name) for name in _SCOPES})


def outermost_layer() -> Any:
    """Return the outermost layer whose call runs here, None outside of layers."""
    return getattr(global_state.get_global_attribute(_CALL), "entry_layer", None)


@contextlib.contextmanager
def restore_context(context: Context | None) -> Iterator[None]:
    """Restore a state for a while. None leaves the present state unchanged."""
    if context is None or _is_compiled_with(context):
        yield
        return
    call = None
    if context.attributes is not None:
        call = object.__new__(context.kind)
        vars(call).update(context.attributes)
    state = {_CALL: call, **context.scopes}
    before = {name: global_state.get_global_attribute(name) for name in state}
    _set(state)
    try:
        yield
    finally:
        _set(before)


def _is_compiled_with(context: Context) -> bool:
    """Return whether Dynamo traces this code together with the call of the layer.

    The state is then still active. Dynamo cannot set it.
    """
    if not backend.active.is_reading_code():
        return False
    call = global_state.get_global_attribute(_CALL)
    return call is not None and context.call is not None and call is context.call()


def _set(state: dict[str, Any]) -> None:
    for name, value in state.items():
        global_state.set_global_attribute(name, value)

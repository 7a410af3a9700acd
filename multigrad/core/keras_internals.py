"""What Keras has in force around a call beside values of variables: the phase of the layers, and the like.

A rule runs when all of that has ended, and is to meet what its function met: layers that it calls know from
those around them whether they are in training, a variable has the dtype that a layer computes in, and a
tensor is made on the device of a `keras.device`.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

# Private: Keras (3.15) has no public way to ask for any of this, or to put it in force again.
# What is in force in a thread are attributes of its `GLOBAL_STATE_TRACKER`, which `keras.utils.clear_session`
# replaces.
from keras.src.backend.common import global_state as global_state

from multigrad import backend

_CALL = "current_call_ctx"  # in which a layer tells those within it how it was called
_SCOPES = ("autocast_scope", "torch_device")


class Context:
    """What is in force at this place of the program: the call of a layer, and scopes by Keras's names."""

    __slots__ = ("call", "kind", "scopes", "told")

    def __init__(self, call: Any, scopes: dict[str, Any]) -> None:
        self.kind, self.scopes = type(call), scopes
        # It knows the layer with which it ends, and lives no longer than that is called.
        self.call = None if call is None else weakref.ref(call)
        # By now: each layer within notes there how it was called itself.
        self.told = None if call is None else {**vars(call), "entry_layer": None}


def context_here() -> Context | None:
    """The context of this place, None outside of all."""
    state = vars(global_state.GLOBAL_STATE_TRACKER)
    call, device = state.get(_CALL), state.get("torch_device")
    if call is None and device is None:
        return None
    return Context(call, {name: state.get(name) for name in _SCOPES})


@contextlib.contextmanager
def in_force(context: Context | None) -> Iterator[None]:
    """The context of another place, here; what is in force here, if that is None."""
    if context is None or _is_read_there(context):
        yield
        return
    call = None
    if context.told is not None:
        call = object.__new__(context.kind)
        vars(call).update(context.told)
    state = {_CALL: call, **context.scopes}
    before = {name: global_state.get_global_attribute(name) for name in state}
    _put(state)
    try:
        yield
    finally:
        _put(before)


def _is_read_there(context: Context) -> bool:
    """Whether a compiler of Python reads this along with that place, where nothing can be put in force."""
    if not backend.active.is_reading_code():
        return False
    call = global_state.get_global_attribute(_CALL)
    return call is not None and context.call is not None and call is context.call()


def _put(state: dict[str, Any]) -> None:
    for name, value in state.items():
        global_state.set_global_attribute(name, value)

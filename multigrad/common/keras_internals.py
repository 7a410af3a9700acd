"""The private names of Keras (3.12 to 3.15), except those of its state during a call (`core/context.py`).

They are looked up when multigrad is imported. A missing name raises an ImportError then. Keras has no public
names for them.
"""

from typing import Any

import keras

from multigrad.common.frameworks import look_up

# Read and restore the state that Keras has while a layer is called. It consists of attributes of
# `GLOBAL_STATE_TRACKER`, one set per thread. `keras.utils.clear_session` replaces the tracker, so each use
# reads it from the module.
global_state = look_up("keras.src.backend.common.global_state")
for _name in ("GLOBAL_STATE_TRACKER", "get_global_attribute", "set_global_attribute"):
    look_up(f"keras.src.backend.common.global_state.{_name}")
# The mask of a tensor.
get_mask = look_up("keras.src.backend.common.masking.get_keras_mask")
set_mask = look_up("keras.src.backend.common.masking.set_keras_mask")
# Set the value of a variable. The public `assign` converts the value, which takes 5 us for each variable.
look_up("keras.Variable._direct_assign")


def scope_here() -> keras.StatelessScope | None:
    """Return the active scope, in which variables may have other values. `original_scope` is undocumented."""
    with keras.StatelessScope(initialize_variables=False) as scope:
        return scope.original_scope


# Functions in Python, because Dynamo (PyTorch 2.13) does not trace an `operator.attrgetter`.


def stored_value(variable: keras.Variable) -> Any:
    """Return the value of a variable outside of every scope, None until it is initialized.

    The public `value` casts it for autocast, whose result cannot be differentiated, and returns a placeholder
    for a variable that is not initialized. Keras sets the attribute in each variable, so a test looks it up.
    """
    return variable._value


def set_stored_value(variable: keras.Variable, value: Any) -> None:
    """Set the value of a variable outside of every scope, without a conversion."""
    variable._direct_assign(value)


def stored_dtype(variable: keras.Variable) -> str:
    """Return the dtype of a variable without autocast, which the public `dtype` follows.

    Keras sets the attribute in each variable, so a test looks it up.
    """
    dtype: str = variable._dtype
    return dtype

"""OpenVINO, which has no derivatives: the forward pass runs, and a gradient is an error."""

import keras

from multigrad.backend.numpy import (
    CONVERTIBLE,
    STAND_INS,
    after,
    apply,
    as_tensor,
    assign,
    compiled,
    concrete,
    conform,
    constant,
    defaults_of,
    is_compiling,
    is_differentiable,
    is_reading_code,
    jacobian,
    library_code,
    may_record,
    observe,
    program,
    sizes,
    snapshot,
    specs_of,
    uncompiled,
    unrecorded,
    value_and_grad,
    vjp,
    wide,
)
from multigrad.kinds import TypeSet

__all__ = [
    "CONVERTIBLE",
    "STAND_INS",
    "TENSORS",
    "after",
    "apply",
    "as_tensor",
    "assign",
    "compiled",
    "concrete",
    "conform",
    "constant",
    "defaults_of",
    "is_compiling",
    "is_differentiable",
    "is_reading_code",
    "jacobian",
    "library_code",
    "may_record",
    "observe",
    "program",
    "sizes",
    "snapshot",
    "specs_of",
    "uncompiled",
    "unrecorded",
    "value_and_grad",
    "vjp",
    "wide",
]

# Keras's own class, which has no public name.
TENSORS = TypeSet(type(keras.ops.convert_to_tensor(0.0)))

"""OpenVINO, which has no derivatives: the forward pass runs, and a gradient is an error."""

import keras

from multigrad.backend.numpy import (
    CONVERTIBLE,
    FOREIGN,
    STAND_INS,
    apply,
    compiled,
    concrete,
    conform,
    gradients_expected,
    host_call,
    is_compiling,
    is_differentiable,
    jacobian,
    may_record,
    needs_plain_rule,
    observe,
    specs_of,
    value_and_grad,
    vjp,
    wide,
)
from multigrad.backend.usual import (
    after,
    as_tensor,
    assign,
    constant,
    defaults_of,
    host_code,
    is_constant,
    is_reading_code,
    jit,
    library_code,
    program,
    sizes,
    snapshot,
    uncompiled,
    unrecorded,
)
from multigrad.kinds import TypeSet

# Keras's own class, which has no public name.
TENSORS = TypeSet(type(keras.ops.convert_to_tensor(0.0)))

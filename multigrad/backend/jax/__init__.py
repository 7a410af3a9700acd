"""JAX.

The native way to bind a custom derivative is `jax.custom_vjp`: `fwd` returns outputs and residuals,
`bwd` maps residuals and cotangents to gradients. It deviates here in five things.

- A function that closes over tracers is an error in JAX. Here they are lifted and become arguments, for
  which the rule has no gradient, as on the other backends.
- An outer derivative differentiates `fwd` as it stands, and loses the rule. So what runs on tracers here
  ties its outputs to the rule again.
- An output that does not depend on what is mapped is one for the whole batch in `jax.vmap`, and comes with
  the sum of all upstream gradients. Here outputs are mapped wherever anything is that the rule may use.
- Cotangents of complex arrays are the conjugates of what TensorFlow and PyTorch call gradients, and
  the rule sees the latter.
- Where a derivative is taken at once, in reverse mode, an op is a primitive and no `custom_vjp`, which takes
  less time.

Its rooms: `op.py` for an op and its derivatives, `reverse.py` for reverse mode, `residuals.py` for what is
kept between forward and backward, `gradients.py` for the calculus; they share `tensors.py` and
`primitives.py`.
"""

from collections.abc import Sequence
from typing import Any

import jax

from multigrad.backend import Call
from multigrad.backend.jax.gradients import (
    compiled,
    gradients_expected,
    jacobian,
    may_record,
    needs_plain_rule,
    program,
    uncompiled,
    value_and_grad,
    vjp,
)
from multigrad.backend.jax.op import Op, tie
from multigrad.backend.jax.residuals import Step, residuals_of
from multigrad.backend.jax.tensors import (
    CONVERTIBLE,
    FLOATING,
    FOREIGN,
    STAND_INS,
    TENSORS,
    TRACERS,
    any_traced,
    assign,
    concrete,
    conform,
    is_compiling,
    is_differentiable,
    observe,
    specs_of,
    wide,
)
from multigrad.backend.usual import (
    after,
    as_tensor,
    constant,
    defaults_of,
    is_reading_code,
    library_code,
    sizes,
    snapshot,
    unrecorded,
)
from multigrad.closure import lift, restore


def apply(call: Call, tensors: Sequence[Any]) -> Any:
    closed_over, template, opaque = lift(call.f, TRACERS, borrowed=True)
    inputs = list(tensors)
    if opaque or call.has_objects() or call.may_read():
        return _apply_as_it_stands(call, inputs)
    if not any([FLOATING[x.dtype] for x in inputs]) or not (closed_over or any_traced(inputs)):
        outputs, _, _, back = call.run_foreseen(inputs)
        return back.output.join(_without_gradient(outputs))
    layouts = []

    def run(inputs: list[Any], closed: list[Any]) -> Step:
        ran = outputs, _, _, back = call.run_foreseen(inputs, restore(template, closed))
        layouts.append(back.output)
        return list(outputs), residuals_of(call, ran, closed)

    outputs = Op(run, call.name, call.options.forward_mode)(inputs, closed_over)
    return layouts[0].join(outputs)


def _apply_as_it_stands(call: Call, tensors: list[Any]) -> Any:
    """The op for a function that may reach tracers through an object or a list, where they cannot be lifted.

    It runs outside, in the presence of whatever it reaches, and its outputs are tied to the inputs. JAX
    differentiates it for nothing then, which a compiled program drops.
    """
    ran = call.run(tensors)
    outputs, _, inputs, back = ran
    inputs, own = list(inputs), list(outputs)
    if not any([FLOATING[x.dtype] for x in inputs]):
        own = _without_gradient(outputs)
    elif any_traced([*inputs, *own]):
        own = tie(inputs, own, residuals_of(call, ran), call.name, call.options.forward_mode)
    return back.output.join(own)


def _without_gradient(outputs: Sequence[Any]) -> list[Any]:
    """Outputs that no rule answers for: a tracer that the function reached has no gradient through it."""
    return [jax.lax.stop_gradient(o) if isinstance(o, jax.core.Tracer) else o for o in outputs]

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
from multigrad.backend.jax.compiled_function import is_constant, jit
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
from multigrad.backend.jax.host_call import host_call
from multigrad.backend.jax.op import Op, tie
from multigrad.backend.jax.primitives import TangentGate
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
    is_integer,
    observe,
    specs_of,
    wide,
)
from multigrad.backend.usual import (
    after,
    as_tensor,
    constant,
    defaults_of,
    host_code,
    is_reading_code,
    library_code,
    sizes,
    snapshot,
    unrecorded,
)
from multigrad.closure import lift, restore
from multigrad.errors import TouchedVariable
from multigrad.reachable import reachable_tensors


def apply(call: Call, tensors: Sequence[Any]) -> Any:
    inputs = list(tensors)
    differentiable = any([FLOATING[x.dtype] for x in inputs])
    if differentiable and any_traced(inputs) and _uses_tensors_alone(call):
        try:
            return _apply_inside(call, inputs)
        except TouchedVariable:
            call.note_touched()
    return _apply_outside(call, inputs)


def _uses_tensors_alone(call: Call) -> bool:
    """Whether the function can use no tracer but its inputs, so that it may run wherever JAX puts it."""
    if call.touches_variables() or call.has_objects():
        return False
    tracers, _, opaque = lift(call.f, TRACERS, borrowed=True)
    return not (tracers or opaque)


def _apply_inside(call: Call, inputs: list[Any]) -> Any:
    """The op whose function runs where JAX takes the derivative, on values of the level around it."""
    layouts = []

    def step(inputs: list[Any], rest: Any) -> Step:
        ran = outputs, _, _, back = call.run(inputs, strict=True)
        layouts.append(back.output)
        return list(outputs), residuals_of(call, ran)

    outputs = Op(call.name, call.options.forward_mode, step)(inputs, [])
    return layouts[0].join(outputs)


def _apply_outside(call: Call, tensors: list[Any]) -> Any:
    """The op whose function runs here, in the presence of whatever it reaches.

    It runs on values without tangents, those of variables among them, and its outputs are tied to the inputs.
    """
    closed_over, template, opaque = lift(call.f, TRACERS, borrowed=True)
    if (opaque or call.has_objects()) and _reaches_others(call, closed_over):
        return _apply_as_it_stands(call, tensors)
    gate = TangentGate()
    ran = outputs, _, stripped, back = call.run([gate.strip(array) for array in tensors], read_as=gate.strip)
    inputs = [gate.original(array) for array in stripped]
    if not _are_to_be_tied(inputs, outputs):
        return back.output.join(_without_gradient(outputs))
    residuals = residuals_of(call, ran, closed_over)
    if residuals.computed:
        gate.open()

    def again(moved: list[Any], fixed: list[Any], closed_over: list[Any]) -> Step:
        integers = iter(fixed)
        whole = [
            new if FLOATING[old.dtype] else next(integers) if is_integer(old) else old  # a key is no operand
            for new, old in zip(moved, inputs, strict=True)
        ]
        ran = outputs, *_ = call.run_again(whole, back, restore(template, closed_over))
        return list(outputs), residuals_of(call, ran, closed_over)

    forward_mode = call.options.forward_mode
    return back.output.join(
        tie(inputs, list(outputs), residuals, call.name, forward_mode, again, closed_over)
    )


def _reaches_others(call: Call, lifted: Sequence[Any]) -> bool:
    """Whether the function reaches tracers through objects. It cannot run again without those."""
    known = set(map(id, lifted))
    roots = (call.f, *call.objects())
    return any(id(tracer) not in known for root in roots for tracer in reachable_tensors(root, TRACERS))


def _apply_as_it_stands(call: Call, tensors: list[Any]) -> Any:
    """The op whose function runs here with tangents. JAX differentiates it, and uses that only where the rule
    uses what the function computed.
    """
    ran = outputs, _, inputs, back = call.run(tensors)
    if not _are_to_be_tied(inputs, outputs):
        return back.output.join(_without_gradient(outputs))
    residuals = residuals_of(call, ran).settled()
    return back.output.join(tie(list(inputs), list(outputs), residuals, call.name, call.options.forward_mode))


def _are_to_be_tied(inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    return any([FLOATING[x.dtype] for x in inputs]) and any_traced([*inputs, *outputs])


def _without_gradient(outputs: Sequence[Any]) -> list[Any]:
    """Outputs that no rule answers for: a tracer that the function reached has no gradient through it."""
    return [jax.lax.stop_gradient(o) if isinstance(o, jax.core.Tracer) else o for o in outputs]

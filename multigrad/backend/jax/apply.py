"""One call of an op on JAX: run the function inside of the op or before it, and apply the rule."""

from collections.abc import Sequence
from typing import Any

import jax

from multigrad.backend.base import Call
from multigrad.backend.jax.op import FirstRun, Op, tie
from multigrad.backend.jax.primitives import TangentGate
from multigrad.backend.jax.residuals import Step, residuals_of
from multigrad.backend.jax.tensors import FLOATING, TRACERS, any_traced, varying_alike
from multigrad.core.closure import lift, restore
from multigrad.core.errors import TouchedVariable
from multigrad.core.reachable import reachable_tensors


def apply(call: Call, tensors: Sequence[Any]) -> Any:
    inputs = varying_alike(list(tensors))
    differentiable = any([FLOATING[x.dtype] for x in inputs])
    if differentiable and any_traced(inputs) and _uses_tensors_alone(call):
        try:
            return _apply_inside(call, inputs)
        except TouchedVariable:
            call.note_touched()
    return _apply_outside(call, inputs)


def _uses_tensors_alone(call: Call) -> bool:
    """Return whether the inputs are the only tracers that the function can use, so that JAX may run it."""
    if call.touches_variables() or call.has_objects():
        return False
    tracers, _, opaque = lift(call.f, TRACERS, borrowed=True)
    return not (tracers or opaque)


def _apply_inside(call: Call, inputs: list[Any]) -> Any:
    """Return the output of the call, whose function runs when JAX evaluates or differentiates the op."""
    pullbacks = []

    def run(inputs: list[Any], rest: Any) -> Step:
        ran = outputs, _, _, pullback = call.run(inputs, strict=True)
        pullbacks.append(pullback)
        return list(outputs), residuals_of(call, ran)

    def run_again(inputs: list[Any], rest: Any) -> Step:
        outputs, rule, ran_on, _ = call.run_again(inputs, pullbacks[-1])
        return list(outputs), residuals_of(call, (outputs, rule, ran_on, pullbacks[-1]))

    outputs = Op(call.name, call.options.forward_mode, run, run_again)(inputs, [])
    return pullbacks[0].output.join(outputs)


def _apply_outside(call: Call, tensors: list[Any]) -> Any:
    """Return the output of the call, whose function runs before the op, so that it can use any tracer.

    It runs on inputs and variables without tangents. Its outputs are then tied to the inputs by the rule.
    """
    closed_over, template, opaque = lift(call.f, TRACERS, borrowed=True)
    if (opaque or call.has_objects()) and _reaches_more_tracers(call, closed_over):
        return _apply_with_tangents(call, tensors)
    gate = TangentGate(concrete_order=1)
    inputs = list(tensors)
    ran = call.run(
        gate.strip(tensors),
        read_as=lambda value: gate.strip(varying_alike([value, *tensors])[:1])[0],
        values=inputs,
    )
    outputs, _, _, pullback = ran
    if not _need_tie(inputs, outputs):
        return pullback.output.join(_without_gradient(outputs))
    residuals = residuals_of(call, ran, closed_over)
    if residuals.computed:
        gate.open(taken=gate.met)
    is_floating = [FLOATING[x.dtype] for x in inputs]

    def run_again(floating: list[Any], first: FirstRun) -> Step:
        remaining = iter(first.integers)
        new_inputs = [new if f else next(remaining) for new, f in zip(floating, is_floating, strict=True)]
        f = restore(template, first.closed_over)
        outputs, rule, ran_on, _ = call.run_again(new_inputs, pullback, f)
        return list(outputs), residuals_of(call, (outputs, rule, ran_on, pullback), first.closed_over)

    name, forward_mode = call.name, call.options.forward_mode
    outputs = tie(inputs, list(outputs), residuals, name, forward_mode, run_again, gate, closed_over)
    return pullback.output.join(outputs)


def _reaches_more_tracers(call: Call, lifted: Sequence[Any]) -> bool:
    """Return whether the function reaches tracers in objects. It cannot run again with other ones."""
    lifted_ids = set(map(id, lifted))
    roots = (call.f, *call.objects())
    return any(id(tracer) not in lifted_ids for root in roots for tracer in reachable_tensors(root, TRACERS))


def _apply_with_tangents(call: Call, tensors: list[Any]) -> Any:
    """Return the output of the call, whose function runs before the op on inputs with tangents.

    JAX differentiates the function, and uses this derivative only for intermediate results in the rule.
    """
    ran = outputs, _, inputs, pullback = call.run(tensors)
    if not _need_tie(inputs, outputs):
        return pullback.output.join(_without_gradient(outputs))
    residuals = residuals_of(call, ran).with_tangents()
    outputs = tie(list(inputs), list(outputs), residuals, call.name, call.options.forward_mode)
    return pullback.output.join(outputs)


def _need_tie(inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    return any([FLOATING[x.dtype] for x in inputs]) and any_traced([*inputs, *outputs])


def _without_gradient(outputs: Sequence[Any]) -> list[Any]:
    """Return the outputs without tangents. A tracer that the function reached has no gradient through it."""
    return [jax.lax.stop_gradient(o) if isinstance(o, jax.core.Tracer) else o for o in outputs]

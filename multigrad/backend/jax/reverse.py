"""An op as a primitive, in reverse mode.

For reverse mode, JAX asks a primitive for its outputs and a linear function of the tangents, which it
transposes. This skips the overhead of a `jax.custom_vjp`, which takes longer than several operations. In all
other cases the primitive calls a `jax.custom_vjp`.

This module is for JAX 0.10, and not imported in other versions.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from multigrad.backend.jax.primitives import GateState, gate_p, zeros_like_tangents
from multigrad.backend.jax.private import (
    REVERSE_IS_KNOWN,
    LinearizeTrace,
    Primitive,
    Zero,
    instantiate_zeros,
    primitive_batchers,
    primitive_linearizations,
    primitive_transposes,
    register_lowering,
    set_current_trace,
)
from multigrad.backend.jax.residuals import Pull
from multigrad.backend.jax.tensors import as_arrays, conjugate, is_differentiable, scatter
from multigrad.core.errors import message

if TYPE_CHECKING:
    from multigrad.backend.jax.op import Op

if not REVERSE_IS_KNOWN:  # the rules below would break other versions
    raise ImportError(f"{__name__} is for JAX 0.10, not for JAX {jax.__version__}")

# The linear function has the name that a `custom_vjp` uses. JAX (0.10) does not cache primitives of this
# name.
_op_p, _pull_p = Primitive("multigrad"), Primitive("custom_lin")
_op_p.multiple_results = _pull_p.multiple_results = True


def bind(op: "Op", inputs: list[Any], rest: Any) -> list[Any]:
    """Return the outputs of an op."""
    leaves, tree = jax.tree.flatten(rest) if rest else ((), None)
    return _op_p.bind(*inputs, *leaves, op=op, count=len(inputs), tree=tree)


@_op_p.def_bind_with_trace
def _bind_with_trace(trace: Any, operands: Sequence[Any], avals: Any, params: Any) -> Sequence[Any]:
    if type(trace) is LinearizeTrace:
        return trace.process_primitive(_op_p, operands, params)
    with set_current_trace(trace):
        return params["op"].by_custom_rule(*_parts(operands, params["count"], params["tree"]))


def _parts(operands: Sequence[Any], count: int, tree: Any) -> tuple[list[Any], Any]:
    arrays = as_arrays(operands)
    return arrays[:count], [] if tree is None else jax.tree.unflatten(tree, arrays[count:])


def _linearized(
    is_vjp: bool, perturbed: Sequence[bool], *primals: Any, op: "Op", count: int, tree: Any
) -> tuple[Sequence[Any], Sequence[bool], Sequence[Any], Callable[..., Sequence[Any]]]:
    """Return the outputs, whether each has a tangent, the residuals, and a function of those and tangents."""
    inputs, rest = _parts(primals, count, tree)
    needed = tuple(perturbed[:count])
    outputs, residuals = op.differentiated(inputs, rest, needed)
    avals = [jax.typeof(output).to_tangent_aval() for output in outputs]
    floating = tuple([any(needed) and is_differentiable(output) for output in outputs])

    def push(arrays: Sequence[Any], *tangents: Any) -> list[Any]:
        used = [tangent for tangent, need in zip(tangents, needed, strict=False) if need]
        like = tuple([aval for aval, f in zip(avals, floating, strict=True) if f])
        params = {"pull": residuals.pull, "needed": needed, "to": floating, "like": like, "name": op.name}
        pushed = iter(_pull_p.bind(*arrays, *used, **params))
        return [next(pushed) if f else Zero(aval) for aval, f in zip(avals, floating, strict=True)]

    return outputs, floating, residuals.arrays, push


def _transposed(
    cotangents: Sequence[Any],
    *operands: Any,
    pull: Pull,
    needed: Sequence[bool],
    to: Sequence[bool],
    **params: Any,
) -> list[Any]:
    """Return the cotangents of the tangents: the gradients that the rule returns."""
    count = len(operands) - sum(needed)
    upstream = scatter(conjugate(as_arrays(map(instantiate_zeros, cotangents))), to)
    gradients = conjugate(pull(list(operands[:count]), upstream, needed))
    used = [gradient for gradient, need in zip(gradients, needed, strict=True) if need]
    pairs = zip(used, operands[count:], strict=True)
    return [*[None] * count, *[Zero(x.aval) if gradient is None else gradient for gradient, x in pairs]]


def _no_forward_mode(*operands: Any, name: str, **params: Any) -> NoReturn:
    raise TypeError(
        message(
            name,
            "the op has no forward-mode derivative",
            required="an op with forward_mode=True",
            got="forward_mode=False",
            fix="write @op_custom_gradient(forward_mode=True), or use jax.vjp",
            see="jax#forward-mode",
        )
    )


_pull_p.def_abstract_eval(lambda *operands, like, **params: like)
_pull_p.def_impl(_no_forward_mode)
primitive_transposes[_pull_p] = _transposed
primitive_batchers[_pull_p] = _no_forward_mode
register_lowering(_pull_p, _no_forward_mode)
primitive_linearizations[_op_p] = _linearized


def _linearized_gate(
    is_vjp: bool, perturbed: Sequence[bool], *arrays: Any, gate: GateState, level: int, end: Any
) -> tuple[Sequence[Any], Sequence[bool], Sequence[Any], Callable[..., Sequence[Any]]]:
    """Return the linearization that JAX would derive from the jvp of the gate in ten times the time."""
    outputs = gate_p.bind(*arrays, gate=gate, level=level + 1, end=end)
    if gate.passes(level):
        return outputs, perturbed, (), lambda residuals, *tangents: tangents
    zeros = zeros_like_tangents(outputs)
    return outputs, [False] * len(outputs), (), lambda residuals, *tangents: zeros


primitive_linearizations[gate_p] = _linearized_gate

"""An op of JAX, whose derivative is the rule, at any order and under all transformations.

JAX differentiates the forward pass of an inner derivative without the rule. So in this forward pass the
outputs are tied to the inputs again: by another op, or in a traced program by a primitive that becomes this
op when the program is differentiated or mapped.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multigrad.backend.base import F
from multigrad.backend.jax.primitives import NOTHING, TangentGate, identity, mapped_alike
from multigrad.backend.jax.private import (
    REVERSE_IS_KNOWN,
    ClosedJaxpr,
    DynamicJaxprTracer,
    Zero,
    fancy_primitive_batchers,
    instantiate_zeros,
    primitive_jvps,
)
from multigrad.backend.jax.residuals import Residuals, Step
from multigrad.backend.jax.tensors import (
    FLOATING,
    any_traced,
    as_arrays,
    concrete,
    conjugate,
    is_differentiable,
    scatter,
    varying_alike,
)
from multigrad.core.errors import message
from multigrad.core.linearity import FAR, not_linear, require_linear, trial

if REVERSE_IS_KNOWN:  # otherwise an op is always a `jax.custom_vjp`
    from multigrad.backend.jax import reverse


Run = Callable[[list[Any], Any], Step]
"""Runs the function of an op on (inputs, rest)."""


class Op:
    """A function of (inputs, rest) whose derivative with respect to the inputs is the rule.

    Arguments:
        name: the name of the op in messages.
        forward_mode: whether JAX's forward mode can differentiate the op.
        run: returns the outputs and the residuals for (inputs, rest).
        run_again: does the same after `run`, on inputs with tangents. None if the residuals of `run` have
            tangents.
    """

    __slots__ = ("forward_mode", "name", "run", "run_again")

    def __init__(self, name: str, forward_mode: bool, run: Run, run_again: Run | None) -> None:
        self.name, self.forward_mode, self.run, self.run_again = name, forward_mode, run, run_again

    def __call__(self, inputs: list[Any], rest: Any) -> list[Any]:
        by_primitive = REVERSE_IS_KNOWN and not self.forward_mode
        if by_primitive and not jax.sharding.get_abstract_mesh().manual_axes:
            return reverse.bind(self, inputs, rest)
        return self.by_custom_rule(varying_alike(inputs), rest)

    def by_custom_rule(self, inputs: list[Any], rest: Any) -> list[Any]:
        """Return the outputs of a `jax.custom_jvp` or `jax.custom_vjp`."""
        return _with_jvp(self)(inputs, rest) if self.forward_mode else _with_vjp(self)(inputs, rest)

    def primal(self, inputs: list[Any], rest: Any) -> list[Any]:
        """Return the outputs if no derivative is taken."""
        inputs = as_arrays(inputs)
        outputs, residuals = self.run(inputs, rest)
        # With forward mode, gradients reach the inputs only by their tangents, which are mapped as the inputs
        # are.
        sources = [*filter(is_differentiable, inputs), *([] if self.forward_mode else residuals.arrays)]
        return mapped_alike(self.name, outputs, sources) if any_traced(sources) else outputs

    def differentiated(self, inputs: list[Any], rest: Any, needed: Iterable[bool]) -> Step:
        """Return the outputs and the residuals for a derivative, which can be differentiated again."""
        needed = tuple(needed)
        if not (any_traced(inputs) or (rest and any_traced(jax.tree.leaves(rest)))):
            outputs, residuals = self.run(inputs, rest)
            return outputs, residuals.tied_to(outputs, inputs, needed)
        outputs, residuals = self.run_traced(inputs, rest)
        # An outer derivative of these outputs must use the rule.
        in_program = any([isinstance(x, DynamicJaxprTracer) for x in inputs])
        tie_outputs = _tie_later if in_program else tie
        outputs = tie_outputs(inputs, outputs, residuals, self.name, self.forward_mode)
        return outputs, residuals.tied_to(outputs, inputs, needed)

    def run_traced(self, inputs: list[Any], rest: Any) -> Step:
        """Return the outputs and residuals on traced inputs, which an outer derivative may differentiate."""
        gate = TangentGate(concrete_order=0)
        outputs, residuals = self.run(gate.strip(inputs), rest)
        if residuals.computed and gate.met:
            return self.run_with_tangents(inputs, rest)
        if residuals.computed:
            gate.open(taken=True)
        return outputs, residuals

    def run_with_tangents(self, inputs: list[Any], rest: Any) -> Step:
        """Return the outputs and residuals with tangents, because the rule uses an intermediate result."""
        assert self.run_again is not None
        try:
            outputs, residuals = self.run_again(inputs, rest)
        except Exception as error:  # of any type, such as an AssertionError of Pallas
            raise _not_differentiable(self.name, error) from error
        return outputs, residuals.with_tangents()


class TiedOp(Op):
    """An op whose function has run without tangents before. Its rest is a `FirstRun`.

    Arguments:
        first_gate: the gate of this run, None if the residuals have tangents. If it made an input concrete,
            the run could not tell the input from its `stop_gradient`, and a derivative of the gradient needs
            another run.
    """

    __slots__ = ("first_gate",)

    def __init__(
        self, name: str, forward_mode: bool, run_again: Run | None, first_gate: TangentGate | None
    ) -> None:
        super().__init__(name, forward_mode, lambda inputs, rest: (rest.outputs, rest.residuals), run_again)
        self.first_gate = first_gate

    def run_traced(self, inputs: list[Any], rest: Any) -> Step:
        first = outputs, residuals = rest.outputs, rest.residuals
        if self.first_gate is None or not (residuals.computed or self.first_gate.made_concrete):
            return first
        gate = TangentGate(concrete_order=0)
        stripped = gate.strip(inputs)
        # The program may be differentiated again, and a closed gate would strip the tangents of residuals.
        again_later = gate.is_in_program and not self.first_gate.is_open
        if not (gate.met or again_later):
            return first
        if gate.met and self.first_gate.made_concrete:
            assert self.run_again is not None
            outputs, residuals = self.run_again(stripped, rest)
        return self.run_with_tangents(inputs, rest) if residuals.computed else (outputs, residuals)


class FirstRun(NamedTuple):
    """The result of the run before the op, and the additional arrays that another run needs."""

    outputs: list[Any]
    residuals: Residuals
    integers: list[Any]
    """The inputs without a derivative, if the function may run again: integers, booleans and random keys."""
    closed_over: list[Any]
    """The tracers that the function closes over."""


def _not_differentiable(name: str, error: Exception) -> NotImplementedError:
    return NotImplementedError(
        message(
            name,
            "the rule uses an intermediate result of the function, or an object that may hold one, and the "
            "function failed when it ran again to be differentiated",
            required="for a derivative of the gradient, a function that can run again and that JAX can "
            "differentiate, or a rule that closes over inputs, outputs and constants only",
            got=f"{type(error).__name__}: {error}",
            fix="compute the intermediate result in a separate op that returns it; create constants outside "
            "of the function; an object of another library, such as a sparse matrix, can be a global "
            "variable",
            see="jax#derivative-of-the-gradient",
        )
    )


def _with_vjp(op: Op) -> Callable[[list[Any], Any], list[Any]]:
    """Return the op as a `jax.custom_vjp`."""

    def primal(inputs: list[Any], rest: Any) -> list[Any]:
        return op.primal(inputs, rest)

    def fwd(inputs: list[Any], rest: Any) -> Step:
        needed = [leaf.perturbed for leaf in inputs]
        if rest:
            leaves, tree = jax.tree.flatten(jax.custom_derivatives.custom_vjp_primal_tree_values(rest))
            rest = jax.tree.unflatten(tree, as_arrays(leaves))
        return op.differentiated(as_arrays([leaf.value for leaf in inputs]), rest, needed)

    def fwd_for_all(inputs: list[Any], rest: Any) -> Step:
        return op.differentiated(as_arrays(inputs), rest, [True] * len(inputs))

    def bwd(residuals: Residuals, cotangents: list[Any]) -> tuple[list[Any], None]:
        return conjugate(residuals(_upstream(cotangents))), None

    function = jax.custom_vjp(_signed(primal))
    # In `jax.shard_map`, JAX (0.12) has no symbolic zeros, which say which gradients are needed.
    has_zeros = not jax.sharding.get_abstract_mesh().manual_axes
    function.defvjp(_signed(fwd if has_zeros else fwd_for_all), _signed(bwd), symbolic_zeros=has_zeros)
    return function


def _upstream(cotangents: Sequence[Any]) -> list[Any]:
    upstream: list[Any] = []
    for cotangent in as_arrays(cotangents):
        if not is_differentiable(cotangent):
            upstream.append(None)
        elif isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
            upstream.append(instantiate_zeros(Zero(cotangent.aval)))  # vary as the output does
        else:
            upstream.append(cotangent)
    return conjugate(upstream)


_SIGNATURE = inspect.signature(lambda *operands: None)


def _signed(function: F) -> F:
    """Return the function with a stored signature, because JAX reads it four times per call of a
    `custom_vjp`.

    Binding arguments to `*operands` takes less time than binding them to one parameter each.
    """
    function.__signature__ = _SIGNATURE  # type: ignore[attr-defined] # every function can have it
    return function


def _with_jvp(op: Op) -> Callable[[list[Any], Any], list[Any]]:
    """Return the op as a `jax.custom_jvp`. Its jvp is the transpose of the rule, which must be linear."""

    def jvp(primals: tuple[list[Any], Any], tangents: Any) -> tuple[list[Any], list[Any]]:
        inputs, rest = primals
        inputs = as_arrays(inputs)
        outputs, residuals = op.differentiated(inputs, rest, [True] * len(inputs))
        floating = [is_differentiable(output) for output in outputs]

        def vjp(upstream: list[Any]) -> list[Any]:
            gradients = conjugate(residuals(scatter(conjugate(upstream), floating)))
            return [
                jnp.zeros_like(x) if gradient is None else gradient
                for x, gradient in zip(inputs, gradients, strict=True)
                if is_differentiable(x)
            ]

        floating_tangents = [t for x, t in zip(inputs, tangents[0], strict=True) if is_differentiable(x)]
        like = [o for o, f in zip(outputs, floating, strict=True) if f]
        transpose = jax.linear_transpose(vjp, like)
        if not any_traced([*inputs, *outputs]):
            tried = [jnp.asarray(trial(o.shape), o.dtype) for o in like]
            require_linear(op.name, vjp(tried), vjp([FAR * u for u in tried]), concrete)
        try:
            (pushed,) = transpose(floating_tangents)
        except (AssertionError, NotImplementedError) as error:  # JAX cannot transpose an operation
            raise not_linear(op.name, "a step that has no transpose") from error
        pairs = zip(scatter(pushed, floating), outputs, strict=True)
        return outputs, [np.zeros(o.shape, jax.dtypes.float0) if t is None else t for t, o in pairs]

    function = jax.custom_jvp(op.primal)
    function.defjvp(jvp)
    return function


def _only_differentiable(inputs: list[Any]) -> list[Any]:
    """Return the inputs with a constant for each that is not differentiable.

    The op must not use a random key, because the function has used it. JAX can check that keys are used once.
    """
    return [x if FLOATING[x.dtype] else np.zeros((), bool) for x in varying_alike(inputs)]


def tie(
    inputs: list[Any],
    outputs: list[Any],
    residuals: Residuals,
    name: str,
    forward_mode: bool,
    run_again: Run | None = None,
    first_gate: TangentGate | None = None,
    closed_over: Sequence[Any] = (),
) -> list[Any]:
    """Return computed outputs as the outputs of a `TiedOp`, whose derivative is the rule.

    If the rule uses intermediate results, `run_again` computes them again on inputs with tangents.
    """
    integers: list[Any] = []
    if not all([FLOATING[x.dtype] for x in inputs]):
        if residuals.computed and run_again is not None:
            integers = [x for x in inputs if not FLOATING[x.dtype]]
        inputs = _only_differentiable(inputs)
    outputs = [jax.lax.stop_gradient(output) for output in outputs]  # the op does not use their tangents
    residuals = residuals.tied_to(outputs, inputs, residuals.needed)
    first = FirstRun(outputs, residuals, integers, list(closed_over))
    return TiedOp(name, forward_mode, run_again, first_gate)(inputs, first)


_tied_p = identity()


def _tie_later(
    inputs: list[Any], outputs: list[Any], residuals: Residuals, name: str, forward_mode: bool
) -> list[Any]:
    """Bind a primitive in a traced program that calls `tie` if the program is differentiated or mapped.

    Binding a primitive takes a tenth of the time of `tie`, and most programs are not differentiated again.
    """
    if not all([FLOATING[x.dtype] for x in inputs]):
        inputs = _only_differentiable(inputs)
    outputs = varying_alike([*outputs, *inputs])[: len(outputs)]
    operands, tree = jax.tree.flatten((outputs, inputs, residuals))
    later = _TieLater(len(outputs), len(inputs), tree, name, forward_mode)
    return _tied_p.bind(*operands, tie=later, end=ClosedJaxpr(NOTHING, ()))[: len(outputs)]


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)  # JAX 0.7 and 0.8 cache it weakly
class _TieLater:
    """Calls `tie` on the operands of the primitive: the outputs, the inputs and the arrays of the rule."""

    outputs: int
    inputs: int
    tree: Any
    name: str
    forward_mode: bool

    def __call__(self, *operands: Any) -> list[Any]:
        outputs, inputs, residuals = jax.tree.unflatten(self.tree, operands)
        return tie(inputs, outputs, residuals, self.name, self.forward_mode)

    def input_indices(self) -> range:
        """Return the indices of the inputs among the operands."""
        return range(self.outputs, self.outputs + self.inputs)


def _differentiate_tied(
    primals: Sequence[Any], tangents: Sequence[Any], *, tie: _TieLater, end: Any
) -> tuple[list[Any], list[Any]]:
    perturbed = [i for i in tie.input_indices() if type(tangents[i]) is not Zero]

    def tie_perturbed(*values: Any) -> list[Any]:
        operands = list(primals)
        for i, value in zip(perturbed, values, strict=True):
            operands[i] = value
        return tie(*operands)

    # The tangents of outputs and residuals are ignored: they come from the function, not from the rule.
    outputs, pushed = jax.jvp(
        tie_perturbed, [primals[i] for i in perturbed], [tangents[i] for i in perturbed]
    )
    output_tangents = [
        tangent if is_differentiable(output) else Zero(jax.typeof(output).to_tangent_aval())
        for output, tangent in zip(outputs, pushed, strict=True)
    ]
    return [*outputs, *primals[tie.outputs :]], [*output_tangents, *tangents[tie.outputs :]]


def _map_tied(
    axis: Any, operands: Sequence[Any], axes: Sequence[int | None], *, tie: _TieLater, end: Any
) -> tuple[list[Any], list[int | None]]:
    operands = as_arrays(operands)
    sources: Iterable[int] = range(tie.outputs, len(operands))
    if tie.forward_mode:
        sources = [i for i in tie.input_indices() if is_differentiable(operands[i])]
    map_all = any(axes[i] is not None for i in sources)
    out_axes = [0 if map_all or a is not None else None for a in axes[: tie.outputs]]
    settings = {"axis_size": axis.size, "axis_name": axis.name, "spmd_axis_name": axis.spmd_name}
    outputs = jax.vmap(tie, tuple(axes), out_axes, **settings)(*operands)
    return [*outputs, *operands[tie.outputs :]], [*out_axes, *axes[tie.outputs :]]


primitive_jvps[_tied_p] = _differentiate_tied
fancy_primitive_batchers[_tied_p] = _map_tied

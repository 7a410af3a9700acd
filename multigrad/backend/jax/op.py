"""An op of JAX: its derivative is the rule, of any order and wherever it is transformed.

An outer derivative differentiates what an inner one computes as it stands, and loses the rule. So the outputs
of that are tied to it again: at once, or where a program is written down, by a primitive that does so later.
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
    is_integer,
    scatter,
    varying_alike,
)
from multigrad.core.errors import message
from multigrad.core.linearity import FAR, not_linear, require_linear, trial

# In other versions an op is a `jax.custom_vjp` throughout.
_REVERSE_IS_KNOWN = REVERSE_IS_KNOWN
if _REVERSE_IS_KNOWN:
    from multigrad.backend.jax import reverse


class Op:
    """An op of JAX on (inputs, rest) whose derivative is the rule with respect to the inputs alone.

    Arguments:
        name: how messages call the op.
        forward_mode: whether the rule is to serve JAX's forward mode, too.
        step: computes the outputs and the residuals.
    """

    __slots__ = ("forward_mode", "name", "step")

    def __init__(self, name: str, forward_mode: bool, step: Callable[[list[Any], Any], Step]) -> None:
        self.name, self.forward_mode, self.step = name, forward_mode, step

    def __call__(self, inputs: list[Any], rest: Any) -> list[Any]:
        by_primitive = _REVERSE_IS_KNOWN and not self.forward_mode
        if by_primitive and not jax.sharding.get_abstract_mesh().manual_axes:
            return reverse.bind(self, inputs, rest)
        return self.by_custom_rule(varying_alike(inputs), rest)

    def by_custom_rule(self, inputs: list[Any], rest: Any) -> list[Any]:
        """The outputs, by what JAX has for rules of one's own, wherever it meets them."""
        return _with_jvp(self)(inputs, rest) if self.forward_mode else _with_vjp(self)(inputs, rest)

    def primal(self, inputs: list[Any], rest: Any) -> list[Any]:
        """The outputs, of which no derivative is taken."""
        inputs = as_arrays(inputs)
        outputs, residuals = self.step(inputs, rest)
        # In forward mode nothing comes back but by the tangents, which are mapped as what they come from.
        beside = [*filter(is_differentiable, inputs), *([] if self.forward_mode else residuals.arrays)]
        return mapped_alike(self.name, outputs, beside) if any_traced(beside) else outputs

    def differentiated(self, inputs: list[Any], rest: Any, needed: Iterable[bool]) -> Step:
        """The outputs and the residuals of a derivative, which may be differentiated in its turn."""
        needed = tuple(needed)
        if not (any_traced(inputs) or (rest and any_traced(jax.tree.leaves(rest)))):
            outputs, residuals = self.step(inputs, rest)
            return outputs, residuals.tied_to(outputs, inputs, needed)
        outputs, residuals = self.run_traced(inputs, rest)
        # The rule is to stay in force in that.
        written = any([isinstance(x, DynamicJaxprTracer) for x in inputs])
        tied = _tie_later if written else tie
        outputs = tied(inputs, outputs, residuals, self.name, self.forward_mode)
        return outputs, residuals.tied_to(outputs, inputs, needed)

    def run_traced(self, inputs: list[Any], rest: Any) -> Step:
        """The outputs and residuals where another derivative is being taken, or may be."""
        gate = TangentGate()
        stripped = [gate.strip(array) for array in inputs]
        if gate.met:
            return self.run_for_derivative(lambda: self.step(inputs, rest), lambda: self.step(stripped, rest))
        outputs, residuals = self.step(stripped, rest)
        if residuals.computed:
            gate.open()
        return outputs, residuals

    def run_for_derivative(self, run: Callable[[], Step], run_stripped: Callable[[], Step]) -> Step:
        """The outputs and residuals with tangents. A function that has no derivative runs without.

        Its rule may then use inputs and outputs, which have theirs, and nothing that it computed.
        """
        try:
            outputs, residuals = run()
        except (TypeError, ValueError, NotImplementedError) as error:
            outputs, residuals = run_stripped()
            if residuals.computed:
                raise _not_differentiable(self.name, error) from error
        return outputs, residuals.settled()


class Tied(Op):
    """An op whose function has run without tangents. Its rest is a `Ties`.

    Arguments:
        again: runs the function once more; None where what it computed has its tangents.
    """

    __slots__ = ("again",)

    def __init__(self, name: str, forward_mode: bool, again: "Again | None") -> None:
        super().__init__(name, forward_mode, lambda inputs, rest: (rest.outputs, rest.residuals))
        self.again = again

    def run_traced(self, inputs: list[Any], rest: Any) -> Step:
        again, done = self.again, (rest.outputs, rest.residuals)
        if again is None or all([isinstance(x, DynamicJaxprTracer) for x in inputs if any_traced([x])]):
            return done
        gate = TangentGate()
        _ = [gate.strip(array) for array in inputs]
        if not gate.met:
            return done
        return self.run_for_derivative(lambda: again(inputs, rest.fixed, rest.closed_over), lambda: done)


class Ties(NamedTuple):
    """What a function left for the op that its outputs become."""

    outputs: list[Any]
    residuals: Residuals
    fixed: list[Any]
    """The integers among the inputs, where the function may run again."""
    closed_over: list[Any]
    """The tracers that the function closes over."""


Again = Callable[[list[Any], list[Any], list[Any]], Step]
"""Runs a function on inputs, of which integers come apart, around tracers that it closes over."""


def _not_differentiable(name: str, error: Exception) -> NotImplementedError:
    return NotImplementedError(
        message(
            name,
            "the rule uses what the function computed on the way, and JAX cannot differentiate the function",
            required="for a derivative of the gradient, a function that JAX differentiates, or a rule that "
            "closes over inputs, outputs and constants alone",
            got=f"{type(error).__name__}: {error}",
            fix="return what the rule uses as an output of an op of its own; an object of another library, "
            "such as a sparse matrix, can be a global variable",
        )
    )


def _with_vjp(op: Op) -> Callable[[list[Any], Any], list[Any]]:
    """The op in reverse mode: a `jax.custom_vjp`."""

    def primal(inputs: list[Any], rest: Any) -> list[Any]:
        return op.primal(inputs, rest)

    def fwd(inputs: list[Any], rest: Any) -> Step:
        needed = [leaf.perturbed for leaf in inputs]
        if rest:
            leaves, tree = jax.tree.flatten(jax.custom_derivatives.custom_vjp_primal_tree_values(rest))
            rest = jax.tree.unflatten(tree, as_arrays(leaves))
        return op.differentiated(as_arrays([leaf.value for leaf in inputs]), rest, needed)

    def fwd_of_all(inputs: list[Any], rest: Any) -> Step:
        return op.differentiated(as_arrays(inputs), rest, [True] * len(inputs))

    def bwd(residuals: Residuals, cotangents: list[Any]) -> tuple[list[Any], None]:
        return conjugate(residuals(_upstream(cotangents))), None

    whole = jax.custom_vjp(_signed(primal))
    # JAX (0.12) does not tell in `jax.shard_map` which gradients are needed.
    told = not jax.sharding.get_abstract_mesh().manual_axes
    whole.defvjp(_signed(fwd if told else fwd_of_all), _signed(bwd), symbolic_zeros=told)
    return whole


def _upstream(cotangents: Sequence[Any]) -> list[Any]:
    upstream: list[Any] = []
    for cotangent in as_arrays(cotangents):
        if not is_differentiable(cotangent):
            upstream.append(None)
        elif isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
            upstream.append(instantiate_zeros(Zero(cotangent.aval)))  # they vary as the output does
        else:
            upstream.append(cotangent)
    return conjugate(upstream)


_SIGNATURE = inspect.signature(lambda *operands: None)


def _signed(function: F) -> F:
    """The function with a signature, which JAX asks for four times in a call of a `custom_vjp`, and Python
    would find out anew. To bind arguments to this one takes less time than to one with a name for each.
    """
    function.__signature__ = _SIGNATURE  # type: ignore[attr-defined] # any function has room for it
    return function


def _with_jvp(op: Op) -> Callable[[list[Any], Any], list[Any]]:
    """The op in both modes: its jvp is the transpose of the rule, which must be linear in upstream."""

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

        own = [t for x, t in zip(inputs, tangents[0], strict=True) if is_differentiable(x)]
        like = [o for o, f in zip(outputs, floating, strict=True) if f]
        transpose = jax.linear_transpose(vjp, like)
        if not any_traced([*inputs, *outputs]):
            tried = [jnp.asarray(trial(o.shape), o.dtype) for o in like]
            require_linear(op.name, vjp(tried), vjp([FAR * u for u in tried]), concrete)
        try:
            (pushed,) = transpose(own)
        except (AssertionError, NotImplementedError) as error:  # of a step that JAX cannot transpose
            raise not_linear(op.name, "a step that has no transpose") from error
        whole = zip(scatter(pushed, floating), outputs, strict=True)
        return outputs, [np.zeros(o.shape, jax.dtypes.float0) if t is None else t for t, o in whole]

    whole = jax.custom_jvp(op.primal)
    whole.defjvp(jvp)
    return whole


def _differentiable_alone(inputs: list[Any]) -> list[Any]:
    """The inputs, with a stand-in for each that has no derivative.

    A random key is not to be used once more when the function has used it, which JAX can be asked to check.
    """
    return [x if FLOATING[x.dtype] else np.zeros((), bool) for x in varying_alike(inputs)]


def tie(
    inputs: list[Any],
    outputs: list[Any],
    residuals: Residuals,
    name: str,
    forward_mode: bool,
    again: Again | None = None,
    closed_over: Sequence[Any] = (),
) -> list[Any]:
    """Outputs that are there already, as an op of the inputs whose derivative is the rule.

    For a derivative of what the function computed on the way, `again` runs it on inputs with tangents.
    """
    fixed: list[Any] = []
    if not all([FLOATING[x.dtype] for x in inputs]):
        if again is not None:
            fixed = [x for x in inputs if is_integer(x)]
        inputs = _differentiable_alone(inputs)
    outputs = [jax.lax.stop_gradient(output) for output in outputs]  # the op has no use for their tangents
    residuals = residuals.tied_to(outputs, inputs, residuals.needed)
    return Tied(name, forward_mode, again)(inputs, Ties(outputs, residuals, fixed, list(closed_over)))


_tied_p = identity()


def _tie_later(
    inputs: list[Any], outputs: list[Any], residuals: Residuals, name: str, forward_mode: bool
) -> list[Any]:
    """The same as `tie`, in a program that is written down: done where that is differentiated or mapped.

    To write a primitive takes a tenth of the time, and few programs ever are.
    """
    if not all([FLOATING[x.dtype] for x in inputs]):
        inputs = _differentiable_alone(inputs)
    outputs = varying_alike([*outputs, *inputs])[: len(outputs)]
    operands, tree = jax.tree.flatten((outputs, inputs, residuals))
    later = _Tie(len(outputs), len(inputs), tree, name, forward_mode)
    return _tied_p.bind(*operands, tie=later, end=ClosedJaxpr(NOTHING, ()))[: len(outputs)]


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)  # JAX 0.7 and 0.8 cache it weakly
class _Tie:
    """What ties outputs to inputs, all of which are among its operands, behind them the rule's arrays."""

    outputs: int
    inputs: int
    tree: Any
    name: str
    forward_mode: bool

    def __call__(self, *operands: Any) -> list[Any]:
        outputs, inputs, residuals = jax.tree.unflatten(self.tree, operands)
        return tie(inputs, outputs, residuals, self.name, self.forward_mode)

    def places_of_inputs(self) -> range:
        """Where they stand among the operands."""
        return range(self.outputs, self.outputs + self.inputs)


def _differentiate_tied(
    primals: Sequence[Any], tangents: Sequence[Any], *, tie: _Tie, end: Any
) -> tuple[list[Any], list[Any]]:
    moved = [i for i in tie.places_of_inputs() if type(tangents[i]) is not Zero]

    def by_moved(*values: Any) -> list[Any]:
        operands = list(primals)
        for i, value in zip(moved, values, strict=True):
            operands[i] = value
        return tie(*operands)

    # The tangents of outputs and residuals are those of the function, in whose place the rule stands.
    outputs, pushed = jax.jvp(by_moved, [primals[i] for i in moved], [tangents[i] for i in moved])
    own = [
        tangent if is_differentiable(output) else Zero(jax.typeof(output).to_tangent_aval())
        for output, tangent in zip(outputs, pushed, strict=True)
    ]
    return [*outputs, *primals[tie.outputs :]], [*own, *tangents[tie.outputs :]]


def _map_tied(
    axis: Any, operands: Sequence[Any], places: Sequence[int | None], *, tie: _Tie, end: Any
) -> tuple[list[Any], list[int | None]]:
    operands = as_arrays(operands)
    beside: Iterable[int] = range(tie.outputs, len(operands))
    if tie.forward_mode:
        beside = [i for i in tie.places_of_inputs() if is_differentiable(operands[i])]
    everywhere = any(places[i] is not None for i in beside)
    to = [0 if everywhere or place is not None else None for place in places[: tie.outputs]]
    of_axis = {"axis_size": axis.size, "axis_name": axis.name, "spmd_axis_name": axis.spmd_name}
    outputs = jax.vmap(tie, tuple(places), to, **of_axis)(*operands)
    return [*outputs, *operands[tie.outputs :]], [*to, *places[tie.outputs :]]


primitive_jvps[_tied_p] = _differentiate_tied
fancy_primitive_batchers[_tied_p] = _map_tied

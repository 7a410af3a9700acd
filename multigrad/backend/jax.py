"""JAX.

The native way to bind a custom derivative is `jax.custom_vjp`: `fwd` returns outputs and residuals,
`bwd` maps residuals and cotangents to gradients. It deviates here in three things.

- A function that closes over tracers is an error in JAX. Here they are lifted and become arguments, for
  which the rule has no gradient, as on the other backends.
- An outer derivative differentiates `fwd` as it stands, and loses the rule. So an `fwd` that runs on
  tracers ties its outputs to the rule again (`_tie`).
- Cotangents of complex arrays are the conjugates of what TensorFlow and PyTorch call gradients, and
  the rule sees the latter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from multigrad.backend import Call, F, Spec
from multigrad.closure import TypeSet, lift, restore

TENSORS = TypeSet(jax.Array, jax.core.Tracer)
CONVERTIBLE = TypeSet(keras.Variable, np.ndarray, np.generic)
_TRACERS = TypeSet(jax.core.Tracer)


def library_code(function: F) -> F:
    return function


def as_tensor(value: Any) -> Any:
    return keras.ops.convert_to_tensor(value)


class _Subtypes(dict[Any, bool]):
    """Which dtypes are of a kind, looked up once each."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def __missing__(self, dtype: Any) -> bool:
        self[dtype] = found = bool(jnp.issubdtype(dtype, self._kind))
        return found


_FLOATING = _Subtypes(jnp.inexact)
_COMPLEX = _Subtypes(jnp.complexfloating)


def is_differentiable(tensor: Any) -> bool:
    return _FLOATING[tensor.dtype]


def specs_of(tensors: Sequence[Any]) -> tuple[Spec | None, ...]:
    return tuple([(t.shape, t.dtype, None) if _FLOATING[t.dtype] else None for t in tensors])


def sizes(shape: Any) -> tuple[int | None, ...]:
    return tuple(shape)


def conform(gradient: Any, spec: Spec) -> Any:
    shape, dtype, _ = spec
    extra = gradient.ndim - len(shape)
    own = zip(gradient.shape[extra:], shape, strict=True)
    axes = (*range(extra), *[extra + i for i, (got, wanted) in enumerate(own) if got != wanted])
    if axes:
        gradient = gradient.sum(axes).reshape(shape)
    if _COMPLEX[gradient.dtype] and not _COMPLEX[dtype]:
        gradient = gradient.real
    return gradient.astype(dtype)


def concrete(tensor: Any) -> np.ndarray | None:
    return None if isinstance(tensor, jax.core.Tracer) else np.asarray(tensor)


_Pull = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
"""Arrays, among them those of a rule, and upstream gradients to gradients."""


def apply(call: Call, tensors: Sequence[Any]) -> Sequence[Any]:
    closed_over, template, _ = lift(call.f, _TRACERS)
    if not closed_over and not _any_traced(tensors):
        return call.run(tensors)[0]  # where nothing is traced, nothing is differentiated

    def run(inputs: list[Any], closed: list[Any], needed: list[bool] | None) -> _Step:
        outputs, rule = call.run(inputs, restore(template, closed))
        if needed is None:
            return list(outputs), None
        return list(outputs), _residuals(call, inputs, outputs, rule, needed)

    return _op(run, call.forward_mode)(list(tensors), closed_over)


def _any_traced(tree: Any) -> bool:
    return any([_TRACERS[type(leaf)] for leaf in jax.tree.leaves(tree)])


@jax.tree_util.register_pytree_node_class
class _Residuals:
    """A rule between forward and backward: arrays that JAX sees, and the code around them.

    `pull` maps arrays and upstream gradients to gradients. `outputs` has the slots of `arrays` in which
    an output of the op stands, each with the output's index.
    """

    __slots__ = ("arrays", "outputs", "pull")

    def __init__(
        self,
        arrays: list[Any],
        pull: _Pull,
        outputs: tuple[tuple[int, int], ...],
    ) -> None:
        self.arrays, self.pull, self.outputs = arrays, pull, outputs

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self.arrays, (self.pull, self.outputs)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "_Residuals":
        return cls(list(arrays), *static)

    def tied_to(self, outputs: Sequence[Any]) -> "_Residuals":
        """With `outputs` where the function's own outputs stood."""
        arrays = list(self.arrays)
        for slot, index in self.outputs:
            arrays[slot] = outputs[index]
        return _Residuals(arrays, self.pull, self.outputs)

    def __call__(self, upstream: Sequence[Any]) -> Sequence[Any]:
        return self.pull(self.arrays, upstream)


_Step = tuple[list[Any], _Residuals | None]


def _residuals(
    call: Call, inputs: list[Any], outputs: Sequence[Any], rule: Callable[..., Any], needed: list[bool]
) -> _Residuals:
    arrays, template, opaque = lift(rule, TENSORS, call.f)
    if opaque and _any_traced((inputs, outputs)):
        arrays, pull = _traced(call, outputs, rule, needed)
    else:

        def pull(arrays: Sequence[Any], upstream: Sequence[Any]) -> Sequence[Any]:
            return call.pull(restore(template, arrays), upstream, needed)

    # An output that the rule uses is differentiated by the rule; one that is an input is the input.
    places = {id(output): index for index, output in enumerate(outputs)}
    for array in inputs:
        places.pop(id(array), None)
    slots = tuple((s, places[id(array)]) for s, array in enumerate(arrays) if id(array) in places)
    return _Residuals(arrays, pull, slots)


def _traced(
    call: Call, outputs: Sequence[Any], rule: Callable[..., Any], needed: list[bool]
) -> tuple[list[Any], _Pull]:
    """The arrays that a rule uses, where some are held by an object that cannot be lifted."""
    places: list[int] = []

    def flat(*upstream: Any) -> list[Any]:
        every = iter(upstream)
        gradients = call.pull(rule, [next(every) if f else None for f in floating], needed)
        places[:] = [i for i, gradient in enumerate(gradients) if gradient is not None]
        return [gradients[i] for i in places]

    floating = [is_differentiable(output) for output in outputs]
    like = [jax.typeof(o) for o, f in zip(outputs, floating, strict=True) if f]
    jaxpr = jax.make_jaxpr(flat)(*[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in like])

    def pull(arrays: Sequence[Any], upstream: Sequence[Any]) -> Sequence[Any]:
        own = [u for u, f in zip(upstream, floating, strict=True) if f]
        answer = jax.core.eval_jaxpr(jaxpr.jaxpr, arrays, *own)
        gradients: list[Any] = [None] * len(needed)
        for i, gradient in zip(places, answer, strict=True):
            gradients[i] = gradient
        return gradients

    return list(jaxpr.consts), pull


def _conjugate(arrays: Sequence[Any]) -> list[Any]:
    """Between JAX's cotangents and the gradients of the other frameworks, either way."""
    return [a.conj() if a is not None and _COMPLEX[a.dtype] else a for a in arrays]


def _upstream(cotangents: Sequence[Any]) -> list[Any]:
    upstream: list[Any] = []
    for cotangent in cotangents:
        if not is_differentiable(cotangent):
            upstream.append(None)
        elif isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
            upstream.append(jnp.zeros(cotangent.shape, cotangent.dtype))
        else:
            upstream.append(cotangent)
    return _conjugate(upstream)


def _op(
    step: Callable[[list[Any], Any, list[bool] | None], _Step], forward_mode: bool
) -> Callable[[list[Any], Any], list[Any]]:
    """An op of JAX on (inputs, rest) whose derivative is the rule with respect to the inputs alone.

    `step` computes its outputs, and its residuals where it is told which inputs are differentiated.
    """

    def primal(inputs: list[Any], rest: Any) -> list[Any]:
        return step(inputs, rest, None)[0]

    def differentiated(inputs: list[Any], rest: Any, needed: list[bool]) -> tuple[list[Any], _Residuals]:
        outputs, residuals = step(inputs, rest, needed)
        assert residuals is not None
        if _any_traced((inputs, rest)):
            # This may itself be differentiated, in which the rule is to stay in force: tie the outputs
            # to the inputs by an op that has them already.
            outputs = [jax.lax.stop_gradient(output) for output in outputs]
            tie = _op(lambda inputs, rest, needed: rest, forward_mode)
            outputs = tie(inputs, (outputs, residuals.tied_to(outputs)))
        return outputs, residuals.tied_to(outputs)

    if forward_mode:
        return _with_jvp(primal, differentiated)

    def fwd(inputs: list[Any], rest: Any) -> tuple[list[Any], _Residuals]:
        needed = [leaf.perturbed for leaf in inputs]
        inputs, rest = jax.custom_derivatives.custom_vjp_primal_tree_values((inputs, rest))
        return differentiated(inputs, rest, needed)

    def bwd(residuals: _Residuals, cotangents: list[Any]) -> tuple[list[Any], None]:
        return _conjugate(residuals(_upstream(cotangents))), None

    op = jax.custom_vjp(primal)
    op.defvjp(fwd, bwd, symbolic_zeros=True)
    return op


def _with_jvp(
    primal: Callable[[list[Any], Any], list[Any]],
    differentiated: Callable[[list[Any], Any, list[bool]], tuple[list[Any], _Residuals]],
) -> Callable[[list[Any], Any], list[Any]]:
    """The op in both modes: its jvp is the transpose of the rule, which must be linear in upstream."""

    def jvp(primals: tuple[list[Any], Any], tangents: Any) -> tuple[list[Any], list[Any]]:
        inputs, rest = primals
        outputs, residuals = differentiated(inputs, rest, [True] * len(inputs))
        floating = [is_differentiable(output) for output in outputs]

        def vjp(upstream: list[Any]) -> list[Any]:
            every = iter(_conjugate(upstream))
            whole = [next(every) if f else None for f in floating]
            gradients = _conjugate(residuals(whole))
            return [
                jnp.zeros_like(x) if gradient is None else gradient
                for x, gradient in zip(inputs, gradients, strict=True)
                if is_differentiable(x)
            ]

        own = [t for x, t in zip(inputs, tangents[0], strict=True) if is_differentiable(x)]
        transpose = jax.linear_transpose(vjp, [o for o, f in zip(outputs, floating, strict=True) if f])
        (answer,) = transpose(own)
        every = iter(answer)
        none = jax.dtypes.float0
        pushed = [
            next(every) if f else np.zeros(o.shape, none) for o, f in zip(outputs, floating, strict=True)
        ]
        return outputs, pushed

    op = jax.custom_jvp(primal)
    op.defjvp(jvp)
    return op


def value_and_grad(
    function: Callable[..., tuple[Any, Any]], tensors: Sequence[Any]
) -> tuple[tuple[Any, Any], list[Any]]:
    places = tuple(range(len(tensors)))
    answer, gradients = jax.value_and_grad(function, places, has_aux=True)(*tensors)
    return answer, _conjugate(gradients)

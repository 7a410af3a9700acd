"""The three primitives of an op: `strip` (in `strip.py`), `tie` and `push`.

- `strip` removes the tangents of the inputs, so that JAX does not differentiate the function.
- `tie` returns the outputs. Their tangents are `push` of the tangents of the inputs.
- `push` maps the tangents of the inputs to those of the outputs, and is linear in them. Its transpose is the
  rule, so that reverse mode calls the rule. Its value, in forward mode, is the transpose of the rule.

So both modes have one definition, at every order: a derivative of `push` differentiates the rule, and the
outputs on which a rule depends are tied as well.

Each primitive takes the flat arrays as operands. `jax.vmap` maps a primitive by noting the mapped axes in its
parameter `batch`; `push` then maps the rule. No parameter holds an array or a tracer, so that JAX's caches
keep none alive. JAX drops a cached result when a jaxpr among the parameters is freed. So equations get an
empty one, `end`.

`strip` and `tie` are not in the compiled program. They have the name of JAX's own identity, for converters to
other formats, which know primitives by their names. `push` has the name that `jax.custom_vjp` uses for its
linear function, whose results JAX does not cache.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from multigrad.backend.base import Rule
from multigrad.backend.jax import private
from multigrad.backend.jax.tensors import (
    FLOATING,
    as_arrays,
    broadcast_along,
    conjugate,
    gather,
    move_axes_first,
    scatter,
    varying_alike,
)
from multigrad.common.closure import OTHER
from multigrad.common.errors import closed_over_error, held_error, message

Linear = Callable[..., Sequence[Any]]
"""A linear function of residuals and tangents."""

Batch = tuple[tuple[Any, tuple[int | None, ...]], ...]
"""For each `jax.vmap` around an equation, outermost last: its axis, and the mapped axis of each operand. The
mapped axes of an operand are its first ones."""

_NOTHING = jax.make_jaxpr(lambda: ())().jaxpr


def empty_end() -> Any:
    return private.ClosedJaxpr(_NOTHING, ())


def identity() -> Any:
    """Return a primitive that returns its operands."""
    primitive = private.Primitive("optimization_barrier")
    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, **_: list(operands))
    primitive.def_abstract_eval(lambda *operands, **_: list(operands))
    private.register_lowering(primitive, lambda _, *operands, **params: operands)
    return primitive


def differentiate(primitive: Any, linearize: Callable[..., tuple[Any, ...]]) -> None:
    """Define both modes of a primitive.

    `linearize(nonzero, *primals, **params)` gets whether each operand has a tangent. It returns the results,
    whether each has a tangent, residuals, and a linear function of the residuals and the tangents.
    """

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        nonzero = [type(tangent) is not private.Zero for tangent in tangents]
        results, _, residuals, linear = linearize(nonzero, *primals, **params)
        return results, linear(residuals, *tangents)

    private.primitive_jvps[primitive] = jvp
    # JAX would derive this from the jvp, in ten times the time.
    private.define_linearization(primitive, linearize)


def zero_tangents(arrays: Sequence[Any]) -> list[Any]:
    """Return symbolic zeros as the tangents of arrays."""
    return [private.Zero(jax.typeof(array).to_tangent_aval()) for array in arrays]


# ------------------------------------------------------------------ push


class TiedRule:
    """How `push` calls the rule of one call.

    Arguments:
        rule: the rule.
        closed_over_path: where the function may find a differentiated tensor other than its arguments.
        is_open: whether the function is differentiated in derivatives of the gradient.
        is_inner: whether the op is in a rule, and takes the inputs of the outer op.
        stores: whether the function stores an array on an object that the rule can reach.
    """

    slots: Sequence[int]
    """The index of each residual among the operands of `tie`, which sets this attribute and the following."""
    inputs: int
    """The number of inputs."""
    floating: Sequence[bool]
    """For each output, whether it has a tangent."""
    has_ended = False
    """Whether the call has ended. A derivative that is taken later is that of a program."""

    def __init__(
        self, rule: Rule, closed_over_path: str | None, is_open: bool, is_inner: bool, stores: bool
    ) -> None:
        self.rule, self.closed_over_path = rule, closed_over_path
        self.is_open, self.is_inner, self.stores = is_open, is_inner, stores

    @property
    def name(self) -> str:
        """The name of the op in messages."""
        return self.rule.name

    def gradients(
        self,
        residuals: Sequence[Any],
        cotangents: Sequence[Any],
        needed: Sequence[bool],
        batch: Batch,
        transposed: bool = False,
    ) -> list[Any]:
        """Return the needed gradients, None for zero. `cotangents` are those of the floating outputs."""
        if not any(needed):
            return []  # only a tensor that the function closes over is differentiated, which raises an error

        def needed_gradients(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            upstream = scatter(conjugate(cotangents), self.floating)
            try:
                pulled = self.rule.pull(residuals, upstream, needed, transposed)
            except jax.errors.UnexpectedTracerError as error:
                raise TypeError(held_error(self.name)) from error
            return gather(conjugate(pulled), needed)

        for axis, axes in batch:
            needed_gradients = jax.vmap(
                needed_gradients,
                in_axes=(list(axes), 0),
                axis_size=axis.size,
                axis_name=axis.name,
                spmd_axis_name=axis.spmd_name,
            )
        return needed_gradients(list(residuals), list(cotangents))


_push_p = private.Primitive("custom_lin")
_push_p.multiple_results = True


def _push(
    *operands: Any, tied: TiedRule, needed: tuple[bool, ...], batch: Batch, avals: tuple[Any, ...]
) -> list[Any]:
    """Return the transpose of the rule, applied to tangents: the value of `push`."""
    residuals, tangents = operands[: len(tied.slots)], operands[len(tied.slots) :]

    def gradients(cotangents: list[Any]) -> list[Any]:
        pairs = zip(
            tied.gradients(residuals, cotangents, needed, batch, transposed=True), tangents, strict=True
        )
        return [jnp.zeros_like(t) if g is None else g for g, t in pairs]

    # The rule is linear, so its derivative is the same at every upstream gradient. At ones, a rule that
    # divides by the norm of its upstream gradient is differentiable.
    ones = [np.ones(aval.shape, aval.dtype) for aval in avals]
    try:
        (pushed,) = jax.vjp(gradients, ones)[1](list(tangents))
    except Exception as error:
        problem = message(
            tied.name,
            "forward mode computes the transpose of the rule, and fails for this rule",
            required="a rule of operations that JAX can differentiate, without calls of the host",
            got=f"{type(error).__name__}, in the rule",
            fix="use reverse mode, or call the host in the function in place of the rule",
            see="limits#forward-mode",
        )
        error.add_note(problem)
        raise
    return list(pushed)


def _transpose_push(
    cotangents: Sequence[Any],
    *operands: Any,
    tied: TiedRule,
    needed: tuple[bool, ...],
    batch: Batch,
    avals: tuple[Any, ...],
) -> list[Any]:
    count = len(tied.slots)
    residuals, tangents = operands[:count], operands[count:]
    nothing: list[Any] = [None] * count
    if all([type(cotangent) is private.Zero for cotangent in cotangents]):
        return [*nothing, *[private.Zero(tangent.aval) for tangent in tangents]]
    dense = as_arrays(map(private.instantiate_zeros, cotangents))
    gradients = tied.gradients(as_arrays(residuals), dense, needed, batch)
    pairs = zip(gradients, tangents, strict=True)
    return [*nothing, *[private.Zero(t.aval) if gradient is None else gradient for gradient, t in pairs]]


def _differentiate_push(
    primals: Sequence[Any], tangents: Sequence[Any], *, tied: TiedRule, **params: Any
) -> tuple[Sequence[Any], Sequence[Any]]:
    count = len(tied.slots)
    results = _push_p.bind(*primals, tied=tied, **params)
    derivatives = zero_tangents(results)
    if any([type(tangent) is not private.Zero for tangent in tangents[count:]]):
        dense = map(private.instantiate_zeros, tangents[count:])
        derivatives = _push_p.bind(*primals[:count], *dense, tied=tied, **params)
    moved = [i for i in range(count) if type(tangents[i]) is not private.Zero]
    if moved:

        def of_residuals(*values: Any) -> list[Any]:
            operands = list(primals)
            for i, value in zip(moved, values, strict=True):
                operands[i] = value
            return _push(*operands, tied=tied, **params)

        more = jax.jvp(of_residuals, [primals[i] for i in moved], [tangents[i] for i in moved])[1]
        pairs = zip(derivatives, more, strict=True)
        derivatives = [b if type(a) is private.Zero else a + b for a, b in pairs]
    return results, derivatives


def _map_push(
    axis: Any,
    operands: Sequence[Any],
    axes: Sequence[int | None],
    *,
    tied: TiedRule,
    batch: Batch,
    avals: tuple[Any, ...],
    **params: Any,
) -> tuple[Sequence[Any], Sequence[int | None]]:
    if all([a is None for a in axes]):
        results = _push_p.bind(*operands, tied=tied, batch=batch, avals=avals, **params)
        return results, [None] * len(avals)
    arrays, mapped_axes = move_axes_first(operands, axes)
    count = len(tied.slots)
    pairs = zip(arrays[count:], mapped_axes[count:], strict=True)
    tangents = [broadcast_along(axis, tangent, 0) if a is None else tangent for tangent, a in pairs]
    avals = tuple([aval.update(shape=(axis.size, *aval.shape)) for aval in avals])
    batch = (*batch, (axis, mapped_axes[:count]))
    results = _push_p.bind(*arrays[:count], *tangents, tied=tied, batch=batch, avals=avals, **params)
    return results, [0] * len(avals)


_push_p.def_impl(_push)
_push_p.def_abstract_eval(lambda *operands, avals, **params: list(avals))
private.register_lowering(_push_p, private.lower_function(_push))
private.primitive_jvps[_push_p] = _differentiate_push
private.primitive_transposes[_push_p] = _transpose_push
private.fancy_primitive_batchers[_push_p] = _map_push


# ------------------------------------------------------------------ tie


def tie(tied: TiedRule, outputs: Sequence[Any], inputs: Sequence[Any], residuals: Sequence[Any]) -> list[Any]:
    """Return the outputs, whose derivative with respect to the inputs is the rule."""
    first_input, first_other = len(outputs), len(outputs) + len(inputs)
    slots: list[int] = []
    others: list[Any] = []
    for residual, role in zip(residuals, tied.rule.roles, strict=True):
        if role == OTHER or not FLOATING[residual.dtype]:
            slots.append(first_other + len(others))
            others.append(residual)
        else:
            slots.append(first_input + role if role < len(inputs) else role - len(inputs))
    # The op must not use a random key, because the function has used it. JAX can check that keys are used
    # once.
    inputs = [x if FLOATING[x.dtype] else np.zeros((), bool) for x in inputs]
    tied.slots, tied.inputs, tied.floating = slots, len(inputs), [FLOATING[o.dtype] for o in outputs]
    operands = varying_alike([*outputs, *inputs, *others])
    results = _tie_p.bind(*operands, tied=tied, level=0, batch=(), end=empty_end())
    tied.has_ended = True
    return as_arrays(results[: len(outputs)])


_tie_p = identity()


def _linearize_tie(
    nonzero: Sequence[bool], *operands: Any, tied: TiedRule, level: int, batch: Batch, end: Any
) -> tuple[list[Any], Sequence[bool], Sequence[Any], Linear]:
    count, last = len(tied.floating), len(tied.floating) + tied.inputs
    needed = tuple(nonzero[count:last])
    if tied.stores and any(needed) and (level or tied.has_ended):
        raise TypeError(held_error(tied.name))
    # Tied again, for a derivative around this one.
    results = _tie_p.bind(*operands, tied=tied, level=level + 1, batch=batch, end=end)
    zeros = zero_tangents(results)
    # The inputs are stripped, so the tangent of an output is that of a tensor which is not an input. If the
    # function is differentiated in later derivatives, these tangents cannot be told from those of the inputs.
    is_checked = not tied.is_inner and (level == 0 or not tied.is_open)
    closed_over = [i for i in range(count) if nonzero[i] and is_checked]
    if not (any(needed) or closed_over):
        return results, [False] * len(results), (), lambda residuals, *tangents: zeros
    outputs = results[:count]
    residuals = [outputs[slot] if slot < count else operands[slot] for slot in tied.slots]
    avals = tuple([zero.aval for zero in gather(zeros[:count], tied.floating)])
    by_residual = tuple([(axis, tuple([axes[slot] for slot in tied.slots])) for axis, axes in batch])

    def linear(residuals: Sequence[Any], *tangents: Any) -> list[Any]:
        of_inputs = list(tangents[count:last])
        for position, (axis, axes) in enumerate(reversed(batch)):
            mapped = zip(of_inputs, needed, axes[count:last], strict=True)
            of_inputs = [broadcast_along(axis, t, position) if n and a is None else t for t, n, a in mapped]
        pushed = iter(
            _push_p.bind(
                *residuals,
                *gather(of_inputs, needed),
                tied=tied,
                needed=needed,
                batch=by_residual,
                avals=avals,
            )
        )
        results = [next(pushed) if f else zero for zero, f in zip(zeros, tied.floating, strict=False)]
        for i in closed_over:
            results[i] += _closed_over_p.bind(tangents[i], name=tied.name, path=tied.closed_over_path)
        return [*results, *zeros[count:]]

    has_tangent = [*tied.floating, *[False] * (len(results) - count)]
    return results, has_tangent, residuals, linear


def _map_tie(
    axis: Any,
    operands: Sequence[Any],
    axes: Sequence[int | None],
    *,
    tied: TiedRule,
    batch: Batch,
    **params: Any,
) -> tuple[list[Any], Sequence[int | None]]:
    """Map each output. An output that depends on no mapped input would get the sum of the upstream gradients
    over the batch."""
    if all([a is None for a in axes]):
        return _tie_p.bind(*operands, tied=tied, batch=batch, **params), axes
    arrays, mapped_axes = move_axes_first(operands, axes)
    count = len(tied.floating)
    for i in range(count):
        if mapped_axes[i] is None:
            arrays[i] = broadcast_along(axis, arrays[i], 0)
    mapped_axes = (*[0] * count, *mapped_axes[count:])
    return _tie_p.bind(*arrays, tied=tied, batch=(*batch, (axis, mapped_axes)), **params), mapped_axes


differentiate(_tie_p, _linearize_tie)
private.fancy_primitive_batchers[_tie_p] = _map_tie


# ------------------------------------------------------------------ closed over

# Returns the tangent of a tensor that is not an input of the op. Its transpose and its value raise an error.
_closed_over_p = private.Primitive("multigrad_closed_over")


def _raise_closed_over(*_: Any, name: str, path: str | None) -> NoReturn:
    raise TypeError(closed_over_error(name, path))


def _transpose_closed_over(cotangent: Any, tangent: Any, **params: Any) -> list[Any]:
    return [cotangent] if type(cotangent) is private.Zero else _raise_closed_over(**params)


def _differentiate_closed_over(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    (tangent,) = tangents
    derivative = tangent if type(tangent) is private.Zero else _closed_over_p.bind(tangent, **params)
    return _closed_over_p.bind(*primals, **params), derivative


_closed_over_p.def_impl(_raise_closed_over)
_closed_over_p.def_abstract_eval(lambda tangent, **params: tangent)
private.register_lowering(_closed_over_p, lambda _, *operands, **params: _raise_closed_over(**params))
private.primitive_jvps[_closed_over_p] = _differentiate_closed_over
private.primitive_transposes[_closed_over_p] = _transpose_closed_over
private.fancy_primitive_batchers[_closed_over_p] = lambda _, operands, axes, **params: (
    _closed_over_p.bind(*operands, **params),
    axes[0],
)

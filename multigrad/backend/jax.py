"""JAX.

The native way to bind a custom derivative is `jax.custom_vjp`: `fwd` returns outputs and residuals,
`bwd` maps residuals and cotangents to gradients. It deviates here in four things.

- A function that closes over tracers is an error in JAX. Here they are lifted and become arguments, for
  which the rule has no gradient, as on the other backends.
- An outer derivative differentiates `fwd` as it stands, and loses the rule. So an `fwd` that runs on
  tracers ties its outputs to the rule again (`_tie`).
- An output that does not depend on what is mapped is one for the whole batch in `jax.vmap`, and comes with
  the sum of all upstream gradients. Here outputs are mapped wherever anything is that the rule may use.
- Cotangents of complex arrays are the conjugates of what TensorFlow and PyTorch call gradients, and
  the rule sees the latter.
"""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, set_current_trace
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import DynamicJaxprTracer

from multigrad.backend import Call, F, Ran, Spec
from multigrad.closure import lift, restore
from multigrad.errors import message
from multigrad.kinds import TypeSet
from multigrad.linear import FAR, not_linear, require_linear, trial

# Private: JAX (0.10) has no public name for the trace of reverse mode, nor for what a primitive does in it.
# In other versions an op is a `jax.custom_vjp` throughout.
_ReverseMode: Any = None
_LINEARIZATIONS: dict[Primitive, Callable[..., Any]] | None = None
if jax.__version_info__[:2] == (0, 10):
    from jax._src.interpreters import ad as private

    _ReverseMode, _LINEARIZATIONS = private.LinearizeTrace, private.primitive_linearizations

TENSORS = TypeSet(jax.Array, jax.core.Tracer)
CONVERTIBLE = TypeSet(keras.Variable, np.ndarray, np.generic)
STAND_INS = TypeSet()
_TRACERS = TypeSet(jax.core.Tracer)


def after(tensor: Any, other: Any) -> Any:
    return tensor


def library_code(function: F) -> F:
    return function


def constant(function: F) -> F:
    return function


def is_reading_code() -> bool:
    return False


def defaults_of(function: types.FunctionType) -> int:
    return len(function.__defaults__ or ())


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


def snapshot(tensor: Any) -> Any:
    return tensor


def assign(variable: keras.Variable, value: Any) -> None:
    if isinstance(value, jax.core.Tracer) and not isinstance(variable._value, jax.core.Tracer):
        raise TypeError(
            message(
                variable.path,
                "a traced value is assigned to a variable outside of a stateless scope, and would outlive "
                "its trace",
                required="a value that is there, or a keras.StatelessScope, as in `stateless_call`",
                got=f"a {type(value).__name__}",
                mend="call the layer through `stateless_call`, or outside of jax.lax.scan and its like",
            )
        )
    variable.assign(value)


def is_differentiable(tensor: Any) -> bool:
    return _FLOATING[tensor.dtype]


def specs_of(tensors: Sequence[Any]) -> list[Spec | None]:
    return [(t.shape, t.dtype, None) if _FLOATING[t.dtype] else None for t in tensors]


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


def apply(call: Call, tensors: Sequence[Any]) -> Any:
    closed_over, template, opaque = lift(call.f, _TRACERS)
    inputs = list(tensors)
    if opaque or call.has_objects() or call.may_read():
        return _apply_as_it_stands(call, inputs)
    if not any([_FLOATING[x.dtype] for x in inputs]) or not (closed_over or _any_traced(inputs)):
        outputs, _, _, back = call.run_foreseen(inputs)
        return back.output.join(_without_gradient(outputs))
    layouts = []

    def run(inputs: list[Any], closed: list[Any]) -> _Step:
        ran = outputs, _, _, back = call.run_foreseen(inputs, restore(template, closed))
        layouts.append(back.output)
        return list(outputs), _residuals(call, ran, closed)

    outputs = _Op(run, call.name, call.options.forward_mode)(inputs, closed_over)
    return layouts[0].join(outputs)


def _apply_as_it_stands(call: Call, tensors: list[Any]) -> Any:
    """The op for a function that may reach tracers through an object, where they cannot be lifted.

    It runs outside, in the presence of whatever it reaches, and its outputs are tied to the inputs. JAX
    differentiates it for nothing then, which a compiled program drops.
    """
    ran = call.run(tensors)
    outputs, _, inputs, back = ran
    inputs, own = list(inputs), list(outputs)
    if not any([_FLOATING[x.dtype] for x in inputs]):
        own = _without_gradient(outputs)
    elif _any_traced([*inputs, *own]):
        own = _tie(inputs, own, _residuals(call, ran), call.name, call.options.forward_mode)
    return back.output.join(own)


def _without_gradient(outputs: Sequence[Any]) -> list[Any]:
    """Outputs that no rule answers for: a tracer that the function reached has no gradient through it."""
    return [jax.lax.stop_gradient(o) if isinstance(o, jax.core.Tracer) else o for o in outputs]


def _any_traced(arrays: Sequence[Any]) -> bool:
    return any([isinstance(array, jax.core.Tracer) for array in arrays])


_Pull = Callable[[Sequence[Any], Sequence[Any], Sequence[bool]], Sequence[Any]]
"""Arrays of a rule, upstream gradients, and which gradients are needed, to gradients."""


@jax.tree_util.register_pytree_node_class
class _Residuals:
    """A rule between forward and backward: arrays that JAX sees, and the code around them.

    `outputs` has the slots of `arrays` in which an output of the op stands, each with the output's index.
    `needed` says which gradients are of use to the derivative that this is for.
    """

    __slots__ = ("arrays", "needed", "outputs", "pull")

    def __init__(
        self,
        arrays: list[Any],
        pull: _Pull,
        outputs: tuple[tuple[int, int], ...],
        needed: tuple[bool, ...],
    ) -> None:
        self.arrays, self.pull, self.outputs, self.needed = arrays, pull, outputs, needed

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self.arrays, (self.pull, self.outputs, self.needed)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "_Residuals":
        return cls(list(arrays), *static)

    def tied_to(self, outputs: Sequence[Any], needed: tuple[bool, ...]) -> "_Residuals":
        """With `outputs` where the function's own outputs stood, for a derivative that has use for these."""
        arrays = list(self.arrays)
        for slot, index in self.outputs:
            arrays[slot] = outputs[index]
        return _Residuals(arrays, self.pull, self.outputs, needed)

    def __call__(self, upstream: Sequence[Any]) -> Sequence[Any]:
        return self.pull(self.arrays, upstream, self.needed)


_Step = tuple[list[Any], _Residuals]
"""The outputs of a function, and what its rule uses."""


def _residuals(call: Call, ran: Ran, closed_over: Sequence[Any] = ()) -> _Residuals:
    outputs, rule, inputs, back = ran
    if call.options.forward_mode:
        back = back.untraced  # in reverse mode, too, it is the transpose of a transpose that runs
    arrays, template, opaque = lift(rule, TENSORS, call.f)
    everything = (True,) * len(inputs)
    specs = specs_of(inputs)

    def pull_lifted(arrays: Sequence[Any], upstream: Sequence[Any], needed: Sequence[bool]) -> Sequence[Any]:
        return back.pull(restore(template, arrays), upstream, needed, specs)

    pull: _Pull = pull_lifted
    if opaque and _any_traced([*inputs, *outputs, *closed_over]):
        arrays, pull = _traced((outputs, rule, inputs, back), specs)
    # An output that the rule uses is differentiated by the rule; one that is an input is the input.
    places: dict[int, int] = {}
    for index, output in enumerate(outputs):
        places.setdefault(id(output), index)
    for array in inputs:
        places.pop(id(array), None)
    slots = tuple([(s, places[id(array)]) for s, array in enumerate(arrays) if id(array) in places])
    return _Residuals(arrays, pull, slots, everything)


def _traced(ran: Ran, specs: list[Spec | None]) -> tuple[list[Any], _Pull]:
    """The arrays that a rule uses, where some may be reached through an object that cannot be lifted."""
    outputs, rule, inputs, back = ran
    places: list[int] = []

    def flat(*upstream: Any) -> list[Any]:
        gradients = back.pull(rule, _scatter(upstream, floating), [True] * len(inputs), specs)
        places[:] = [i for i, gradient in enumerate(gradients) if gradient is not None]
        return [gradients[i] for i in places]

    floating = [is_differentiable(output) for output in outputs]
    own = [output for output, f in zip(outputs, floating, strict=True) if f]
    like: list[Any] = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in own]
    if jax.sharding.get_abstract_mesh().manual_axes:
        like = _varying_alike([*own, *inputs])[: len(own)]  # only an array says along what it varies
    jaxpr = jax.make_jaxpr(flat)(*like)

    def pull(arrays: Sequence[Any], upstream: Sequence[Any], needed: Sequence[bool]) -> list[Any]:
        own = [u for u, f in zip(upstream, floating, strict=True) if f]
        answer = jax.core.eval_jaxpr(jaxpr.jaxpr, arrays, *own)
        gradients: list[Any] = [None] * len(needed)
        for i, gradient in zip(places, answer, strict=True):
            gradients[i] = gradient
        return gradients

    return list(jaxpr.consts), pull


def _scatter(values: Sequence[Any], where: Sequence[bool]) -> list[Any]:
    """The values in the places that `where` marks, and None in the rest."""
    remaining = iter(values)
    return [next(remaining) if marked else None for marked in where]


def _arrays(values: Sequence[Any]) -> list[Any]:
    """Python numbers, which come back as such from where JAX traced them, as arrays."""
    return [value if TENSORS[type(value)] else jnp.asarray(value) for value in values]


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


def _tie(
    inputs: list[Any], outputs: list[Any], residuals: _Residuals, name: str, forward_mode: bool
) -> list[Any]:
    """Outputs that are there already, as an op of the inputs whose derivative is the rule."""
    outputs = [jax.lax.stop_gradient(output) for output in outputs]  # the op has no use for their tangents
    op = _Op(lambda inputs, rest: rest, name, forward_mode)
    return op(inputs, (outputs, residuals.tied_to(outputs, residuals.needed)))


class _Op:
    """An op of JAX on (inputs, rest) whose derivative is the rule with respect to the inputs alone.

    `step` computes its outputs and the residuals.
    """

    __slots__ = ("forward_mode", "name", "step")

    def __init__(self, step: Callable[[list[Any], Any], _Step], name: str, forward_mode: bool) -> None:
        self.step, self.name, self.forward_mode = step, name, forward_mode

    def __call__(self, inputs: list[Any], rest: Any) -> list[Any]:
        if jax.sharding.get_abstract_mesh().manual_axes:
            inputs = _varying_alike(inputs)
        elif _LINEARIZATIONS is not None and not self.forward_mode:
            more, tree = jax.tree.flatten(rest) if rest else ((), None)
            return _op_p.bind(*inputs, *more, op=self, count=len(inputs), tree=tree)
        return _with_jvp(self)(inputs, rest) if self.forward_mode else _with_vjp(self)(inputs, rest)

    def primal(self, inputs: list[Any], rest: Any) -> list[Any]:
        """The outputs, of which no derivative is taken."""
        outputs, residuals = self.step(inputs, rest)
        # In forward mode nothing comes back but by the tangents, which are mapped as what they come from.
        beside = [*filter(is_differentiable, inputs), *([] if self.forward_mode else residuals.arrays)]
        return _mapped_alike(self.name, outputs, beside) if _any_traced(beside) else outputs

    def differentiated(self, inputs: list[Any], rest: Any, needed: Iterable[bool]) -> _Step:
        """The outputs and the residuals of a derivative, which may be differentiated in its turn."""
        outputs, residuals = self.step(inputs, rest)
        if _any_traced(inputs) or (rest and _any_traced(jax.tree.leaves(rest))):
            # The rule is to stay in force in that.
            tie = _tie_later if any([isinstance(x, DynamicJaxprTracer) for x in inputs]) else _tie
            outputs = tie(inputs, outputs, residuals, self.name, self.forward_mode)
        return outputs, residuals.tied_to(outputs, tuple(needed))


def _with_vjp(op: _Op) -> Callable[[list[Any], Any], list[Any]]:
    """The op in reverse mode, wherever JAX meets it."""

    def primal(inputs: list[Any], rest: Any) -> list[Any]:
        return op.primal(inputs, rest)

    def fwd(inputs: list[Any], rest: Any) -> _Step:
        needed = [leaf.perturbed for leaf in inputs]
        if rest:
            rest = jax.custom_derivatives.custom_vjp_primal_tree_values(rest)
        return op.differentiated(_arrays([leaf.value for leaf in inputs]), rest, needed)

    def bwd(residuals: _Residuals, cotangents: list[Any]) -> tuple[list[Any], None]:
        return _conjugate(residuals(_upstream(cotangents))), None

    whole = jax.custom_vjp(_signed(primal))
    whole.defvjp(_signed(fwd), _signed(bwd), symbolic_zeros=True)
    return whole


_SIGNATURE = inspect.signature(lambda *operands: None)


def _signed(function: F) -> F:
    """The function with a signature, which JAX asks for four times in a call of a `custom_vjp`, and Python
    would find out anew. To bind arguments to this one takes less time than to one with a name for each.
    """
    function.__signature__ = _SIGNATURE  # type: ignore[attr-defined] # any function has room for it
    return function


# In reverse mode, JAX asks a primitive for its outputs and for a linear function, and transposes that. So it
# comes to an op without what a `jax.custom_vjp` goes through on the way, which takes longer than a few
# operations. Everywhere else an op is a `jax.custom_vjp`.
#
# The linear function has the name of that of a `custom_vjp`, of which JAX (0.10) keeps nothing for later.
_op_p, _pull_p = Primitive("multigrad"), Primitive("custom_lin")
_op_p.multiple_results = _pull_p.multiple_results = True


@_op_p.def_bind_with_trace
def _bind_op(trace: Any, operands: Sequence[Any], avals: Any, params: Any) -> Sequence[Any]:
    if type(trace) is _ReverseMode:
        return trace.process_primitive(_op_p, operands, params)
    with set_current_trace(trace):
        return _with_vjp(params["op"])(*_inputs_and_rest(operands, params["count"], params["tree"]))


def _inputs_and_rest(operands: Sequence[Any], count: int, tree: Any) -> tuple[list[Any], Any]:
    return list(operands[:count]), [] if tree is None else jax.tree.unflatten(tree, operands[count:])


def _linearized(
    is_vjp: bool, moved: Sequence[bool], *primals: Any, op: _Op, count: int, tree: Any
) -> tuple[Sequence[Any], Sequence[bool], Sequence[Any], Callable[..., Sequence[Any]]]:
    """The outputs, which of them have a tangent, the residuals, and the function of these and of tangents."""
    inputs, rest = _inputs_and_rest(primals, count, tree)
    needed = tuple(moved[:count])
    outputs, residuals = op.differentiated(_arrays(inputs), rest, needed)
    avals = [jax.typeof(output).to_tangent_aval() for output in outputs]
    floating = [any(needed) and is_differentiable(output) for output in outputs]

    def push(arrays: Sequence[Any], *tangents: Any) -> list[Any]:
        own = [tangent for tangent, need in zip(tangents, needed, strict=False) if need]
        like = [aval for aval, f in zip(avals, floating, strict=True) if f]
        how = {"pull": residuals.pull, "needed": needed, "to": floating, "like": like, "name": op.name}
        pushed = iter(_pull_p.bind(*arrays, *own, **how))
        return [next(pushed) if f else ad.Zero(aval) for aval, f in zip(avals, floating, strict=True)]

    return outputs, floating, residuals.arrays, push


def _transposed(
    cotangents: Sequence[Any],
    *operands: Any,
    pull: _Pull,
    needed: Sequence[bool],
    to: Sequence[bool],
    **params: Any,
) -> list[Any]:
    """The cotangents of the tangents that were pushed: what the rule makes of those of the outputs."""
    count = len(operands) - sum(needed)
    upstream = _scatter(_conjugate([*map(ad.instantiate_zeros, cotangents)]), to)
    gradients = _conjugate(pull(list(operands[:count]), upstream, needed))
    own = [gradient for gradient, need in zip(gradients, needed, strict=True) if need]
    pairs = zip(own, operands[count:], strict=True)
    return [*[None] * count, *[ad.Zero(x.aval) if gradient is None else gradient for gradient, x in pairs]]


def _no_forward_mode(*operands: Any, name: str, **params: Any) -> NoReturn:
    raise TypeError(
        message(
            name,
            "a forward-mode derivative was asked for, which it was defined without",
            required="an op with forward_mode=True",
            got="one with forward_mode=False, of which `jax.linearize` gives the value alone",
            mend="write @op_custom_gradient(forward_mode=True), or use jax.vjp",
        )
    )


_pull_p.def_abstract_eval(lambda *operands, like, **params: like)
_pull_p.def_impl(_no_forward_mode)
ad.primitive_transposes[_pull_p] = _transposed
batching.primitive_batchers[_pull_p] = _no_forward_mode
mlir.register_lowering(_pull_p, _no_forward_mode)
if _LINEARIZATIONS is not None:
    _LINEARIZATIONS[_op_p] = _linearized


def _mapped_alike(name: str, outputs: Sequence[Any], beside: Sequence[Any]) -> list[Any]:
    """The outputs, mapped wherever something beside them is, and varying as that does."""
    outputs = _varying_alike([*outputs, *beside])[: len(outputs)]
    return _mapped_alike_p.bind(*outputs, *beside, outputs=len(outputs), name=name)[: len(outputs)]


def _identity() -> Primitive:
    """A primitive that gives its operands as they are, of which one says how it is transformed.

    It costs nothing, and is gone from the compiled program. `jax.extend` and `jax.interpreters` are for
    this, but may change from one version to another (JAX 0.10). It has the name of JAX's own that is the
    identity, too, for programs that convert JAX's by names.
    """
    primitive = Primitive("optimization_barrier")
    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, **_: list(operands))
    primitive.def_abstract_eval(lambda *operands, **_: list(operands))
    mlir.register_lowering(primitive, lambda _, *operands, **params: operands, cacheable=False)
    return primitive


_mapped_alike_p, _tied_p = _identity(), _identity()


def _map_alike(
    axis: Any, operands: Sequence[Any], places: Sequence[int | None], *, outputs: int, name: str
) -> tuple[list[Any], Sequence[int | None]]:
    own, beside = list(operands[:outputs]), operands[outputs:]
    if any(place is not None for place in places[outputs:]):
        own = [
            jnp.broadcast_to(x, (axis.size, *x.shape)) if place is None else jnp.moveaxis(x, place, 0)
            for x, place in zip(_arrays(own), places, strict=False)
        ]
        places = [*[0] * outputs, *places[outputs:]]
    return _mapped_alike_p.bind(*own, *beside, outputs=outputs, name=name), places


def _without_rule(primals: Sequence[Any], tangents: Sequence[Any], *, outputs: int, name: str) -> NoReturn:
    """It stands in what a rule differentiates, and so is differentiated only where JAX left the rule out."""
    raise NotImplementedError(
        message(
            name,
            "JAX differentiates the function itself, past its rule, as of every jax.custom_jvp there",
            required="a derivative that JAX takes by the rule",
            got="one of another derivative in a loop, of an op with forward_mode=True",
            mend="leave forward_mode out, or take both derivatives inside of the loop's body",
        )
    )


batching.fancy_primitive_batchers[_mapped_alike_p] = _map_alike
ad.primitive_jvps[_mapped_alike_p] = _without_rule


def _tie_later(
    inputs: list[Any], outputs: list[Any], residuals: _Residuals, name: str, forward_mode: bool
) -> list[Any]:
    """The same as `_tie`, in a program that is written down: done where that is differentiated or mapped.

    To write a primitive takes a tenth of the time, and few programs ever are.
    """
    outputs = _varying_alike([*outputs, *inputs])[: len(outputs)]
    operands, tree = jax.tree.flatten((outputs, inputs, residuals))
    tie = _Tie(len(outputs), len(inputs), tree, name, forward_mode)
    # JAX (0.10) keeps what it found out by the parameters until a jaxpr among them ends, as this one does
    # with the program. Without one, rules and what they hold would be kept after it.
    return _tied_p.bind(*operands, tie=tie, end=ClosedJaxpr(_NOTHING, ()))[: len(outputs)]


_NOTHING = jax.make_jaxpr(lambda: ())().jaxpr


class _Tie(NamedTuple):
    """What ties outputs to inputs, all of which are among its operands, behind them the rule's arrays."""

    outputs: int
    inputs: int
    tree: Any
    name: str
    forward_mode: bool

    def __call__(self, *operands: Any) -> list[Any]:
        outputs, inputs, residuals = jax.tree.unflatten(self.tree, operands)
        return _tie(inputs, outputs, residuals, self.name, self.forward_mode)

    def places_of_inputs(self) -> range:
        """Where they stand among the operands."""
        return range(self.outputs, self.outputs + self.inputs)


def _differentiate_tied(
    primals: Sequence[Any], tangents: Sequence[Any], *, tie: _Tie, end: Any
) -> tuple[list[Any], list[Any]]:
    moved = [i for i in tie.places_of_inputs() if type(tangents[i]) is not ad.Zero]

    def by_moved(*values: Any) -> list[Any]:
        operands = list(primals)
        for i, value in zip(moved, values, strict=True):
            operands[i] = value
        return tie(*operands)

    # The tangents of outputs and residuals are those of the function, in whose place the rule stands.
    outputs, pushed = jax.jvp(by_moved, [primals[i] for i in moved], [tangents[i] for i in moved])
    own = [
        tangent if is_differentiable(output) else ad.Zero(jax.typeof(output).to_tangent_aval())
        for output, tangent in zip(outputs, pushed, strict=True)
    ]
    return [*outputs, *primals[tie.outputs :]], [*own, *tangents[tie.outputs :]]


def _map_tied(
    axis: Any, operands: Sequence[Any], places: Sequence[int | None], *, tie: _Tie, end: Any
) -> tuple[list[Any], list[int | None]]:
    operands = _arrays(operands)
    beside: Iterable[int] = range(tie.outputs, len(operands))
    if tie.forward_mode:
        beside = [i for i in tie.places_of_inputs() if is_differentiable(operands[i])]
    everywhere = any(places[i] is not None for i in beside)
    to = [0 if everywhere or place is not None else None for place in places[: tie.outputs]]
    of_axis = {"axis_size": axis.size, "axis_name": axis.name, "spmd_axis_name": axis.spmd_name}
    outputs = jax.vmap(tie, tuple(places), to, **of_axis)(*operands)
    return [*outputs, *operands[tie.outputs :]], [*to, *places[tie.outputs :]]


ad.primitive_jvps[_tied_p] = _differentiate_tied
batching.fancy_primitive_batchers[_tied_p] = _map_tied


def _varying_alike(arrays: list[Any]) -> list[Any]:
    """The arrays, each varying along every axis of `jax.shard_map` along which one of them does.

    JAX's own operations do so with theirs, too. Its transpose is the sum over devices.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return arrays
    varying = [jax.typeof(array).mat.varying for array in arrays]  # JAX 0.10; earlier it was `.vma`
    everywhere = frozenset().union(*varying)
    return [
        jax.lax.pcast(array, tuple(everywhere - own), to="varying")
        for array, own in zip(arrays, varying, strict=True)
    ]


def _with_jvp(op: _Op) -> Callable[[list[Any], Any], list[Any]]:
    """The op in both modes: its jvp is the transpose of the rule, which must be linear in upstream."""

    def jvp(primals: tuple[list[Any], Any], tangents: Any) -> tuple[list[Any], list[Any]]:
        inputs, rest = primals
        inputs = _arrays(inputs)
        outputs, residuals = op.differentiated(inputs, rest, [True] * len(inputs))
        floating = [is_differentiable(output) for output in outputs]

        def vjp(upstream: list[Any]) -> list[Any]:
            gradients = _conjugate(residuals(_scatter(_conjugate(upstream), floating)))
            return [
                jnp.zeros_like(x) if gradient is None else gradient
                for x, gradient in zip(inputs, gradients, strict=True)
                if is_differentiable(x)
            ]

        own = [t for x, t in zip(inputs, tangents[0], strict=True) if is_differentiable(x)]
        like = [o for o, f in zip(outputs, floating, strict=True) if f]
        transpose = jax.linear_transpose(vjp, like)
        if not _any_traced([*inputs, *outputs]):
            tried = [jnp.asarray(trial(o.shape), o.dtype) for o in like]
            require_linear(op.name, vjp(tried), vjp([FAR * u for u in tried]), concrete)
        try:
            (pushed,) = transpose(own)
        except (AssertionError, NotImplementedError) as error:  # of a step that JAX cannot transpose
            raise not_linear(op.name, "a step that has no transpose") from error
        whole = zip(_scatter(pushed, floating), outputs, strict=True)
        return outputs, [np.zeros(o.shape, jax.dtypes.float0) if t is None else t for t, o in whole]

    whole = jax.custom_jvp(op.primal)
    whole.defjvp(jvp)
    return whole


def value_and_grad(
    function: Callable[..., tuple[Any, Any]], tensors: Sequence[Any], variables: int
) -> tuple[tuple[Any, Any], list[Any]]:
    if not tensors:  # of which JAX has no gradient
        return function(), []
    places = tuple(range(len(tensors)))
    answer, gradients = jax.value_and_grad(function, places, has_aux=True)(*tensors)
    return answer, _conjugate(gradients)


def vjp(
    function: Callable[..., tuple[Sequence[Any], Any]], tensors: Sequence[Any]
) -> tuple[tuple[Sequence[Any], Any], Callable[[Sequence[Any]], Sequence[Any]]]:
    outputs, pull, aux = jax.vjp(function, *tensors, has_aux=True)
    return (outputs, aux), lambda upstream: _conjugate(pull(_conjugate(upstream)))


def jacobian(
    function: Callable[..., tuple[Sequence[Any], Any]], tensors: Sequence[Any]
) -> tuple[Any, list[list[Any]]]:
    (outputs, aux), pull = vjp(function, tensors)
    zeros = [jnp.zeros_like(output) for output in outputs]
    rows = []
    for place, output in enumerate(outputs):

        def row(upstream: Any, place: int = place) -> Sequence[Any]:
            return pull([*zeros[:place], upstream, *zeros[place + 1 :]])

        basis = jnp.eye(output.size, dtype=output.dtype).reshape(output.size, *output.shape)
        gradients = jax.vmap(row)(basis)
        rows.append([g.reshape(output.shape + t.shape) for g, t in zip(gradients, tensors, strict=True)])
    return aux, rows


def may_record() -> bool:
    return True


def needs_plain_rule() -> bool:
    return False


def gradients_expected(tensors: Sequence[Any]) -> list[bool]:
    # Beside what is being differentiated, what is only written down is a constant.
    traced = [isinstance(tensor, jax.core.Tracer) for tensor in tensors]
    inner = [t and not isinstance(x, DynamicJaxprTracer) for x, t in zip(tensors, traced, strict=True)]
    return inner if any(inner) else traced


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


@functools.lru_cache(256)
def program(function: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    return jax.jit(functools.partial(function, True, *static))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function)


def wide() -> contextlib.AbstractContextManager[Any]:
    return jax.enable_x64(True)


def observe(callback: Callable[..., None], tensors: Sequence[Any]) -> None:
    # At once where nothing is traced, and where it is for a derivative or a batch: per example of that.
    jax.debug.callback(lambda *values: callback(*map(np.array, values)), *tensors)


def is_compiling() -> bool:
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    return jax.disable_jit()

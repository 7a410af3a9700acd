"""TensorFlow.

The native way to bind a custom derivative is `tf.custom_gradient`, whose function returns an output and
a closure. In a graph it registers each closure under a name of its own and for ever, so that the graph
of every `tf.function` that calls it outlives the function. Here what is registered knows the graph weakly,
and finds the rule on it; and what is recorded on the tapes is recorded as `tf.custom_gradient` does.

A SavedModel takes each rule with it, traced, under its name. The name is no other op's in any process: a
rule that was not saved is missed with an error, and not mistaken for another one.

The function itself is recorded too: a second derivative goes through what the rule closed over. Where
that is an output of the op, the rule is given the tied one, so that it stays in force.
"""

import contextlib
import contextvars
import functools
import gc
import itertools
import platform
import types
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Private: TensorFlow (2.21) has no public name for recording an operation with a gradient of one's own on
# the active tapes, except through the registry that keeps graphs alive; and none for its record of the
# variables that are read, which is how `tf.custom_gradient` knows them.
from tensorflow.python.eager import record

from multigrad.backend import Call, F, Pullback, Spec
from multigrad.closure import lift, restore
from multigrad.errors import message
from multigrad.kinds import TypeSet
from multigrad.linear import FAR, require_linear, trial
from multigrad.shared import Shared

TENSORS = TypeSet(tf.Tensor)
CONVERTIBLE = TypeSet(keras.Variable, tf.Variable, tf.IndexedSlices, np.ndarray, np.generic)
STAND_INS = TypeSet()
_NAMES = map(f"MultigradRule-{uuid.uuid4().hex}-{{}}".format, itertools.count())
_RULES = "_multigrad_rules"
_VARIABLE = "_multigrad_variable"
_LOST = (
    "the rule of an op was lost, because something copied its operations. Was it tf.vectorized_map? Take the "
    "gradient inside of it. A SavedModel? Save it with experimental_custom_gradients=True."
)


def after(tensor: Any, other: Any) -> Any:
    if tf.executing_eagerly():
        return tensor
    with tf.control_dependencies([other]):
        return tf.identity(tensor)


def library_code(function: F) -> F:
    """Keep AutoGraph out, as `tf.custom_gradient` does."""
    return tf.autograph.experimental.do_not_convert(function)


def constant(function: F) -> F:
    return function


def is_reading_code() -> bool:
    return False


def defaults_of(function: types.FunctionType) -> int:
    return len(function.__defaults__ or ())


def as_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value.value if isinstance(value, keras.Variable) else value)


def snapshot(tensor: Any) -> Any:
    return tensor


def assign(variable: keras.Variable, value: Any) -> None:
    variable.assign(value)


def is_differentiable(tensor: Any) -> bool:
    dtype = tensor.dtype
    return dtype.is_floating or dtype.is_complex


def specs_of(tensors: Sequence[Any]) -> list[Spec | None]:
    eager = tf.executing_eagerly()  # where every shape is known
    return [_spec(tensor, eager) if is_differentiable(tensor) else None for tensor in tensors]


def _spec(tensor: Any, known: bool) -> Spec:
    shape = tensor.shape
    return shape, tensor.dtype, None if known or shape.is_fully_defined() else tensor


def sizes(shape: Any) -> tuple[int | None, ...] | None:
    return None if isinstance(shape, tf.TensorShape) and shape.rank is None else tuple(shape)


def conform(gradient: Any, spec: Spec) -> Any:
    shape, dtype, like = spec
    if like is not None or not gradient.shape.is_fully_defined():
        sizes = shape if like is None else tf.shape(like)
        given = tf.shape(gradient)
        fits = tf.debugging.assert_equal(
            tf.broadcast_dynamic_shape(sizes, given), given, "a gradient has the wrong shape"
        )
        with tf.control_dependencies([fits]):
            axes, _ = tf.raw_ops.BroadcastGradientArgs(s0=sizes, s1=given)
        gradient = tf.reshape(tf.reduce_sum(gradient, axes), sizes)
        gradient.set_shape(shape)
    elif gradient.shape != shape:
        extra = gradient.shape.rank - shape.rank
        own = zip(gradient.shape[extra:], shape, strict=True)
        axes = [*range(extra), *[extra + i for i, (got, wanted) in enumerate(own) if got != wanted]]
        gradient = tf.reshape(tf.reduce_sum(gradient, axes), shape)
    return gradient if gradient.dtype == dtype else tf.cast(gradient, dtype)


def concrete(tensor: Any) -> np.ndarray | None:
    return np.asarray(tensor.numpy()) if hasattr(tensor, "numpy") else None


def apply(call: Call, tensors: Sequence[Any]) -> Any:
    eager = tf.executing_eagerly()
    with record.VariableWatcher() as watcher:
        outputs, rule, tensors, back = call.run(tensors, place=_Place(call.name, watcher))
    if not outputs or (eager and not record.could_possibly_record()):
        return back.output.join(outputs)
    specs = specs_of(_here(tensors))
    if not any(specs):
        return back.output.join([tf.stop_gradient(output) for output in outputs])  # of what it closes over
    residuals, template, _ = lift(rule, TENSORS, call.f)
    own = _own_eagerly(outputs) if eager else _own_in_graph(outputs, tensors, _here(residuals))
    # An output that the rule uses is differentiated by the rule; one that is an input is the input.
    places: dict[int, Any] = {}
    for output, replacement in zip(outputs, own, strict=True):
        places.setdefault(id(output), replacement)
    places.update(zip(map(id, tensors), tensors, strict=True))
    tied = [places.get(id(residual), residual) for residual in residuals]
    tied_rule = restore(template, _here(tied))
    floating = [is_differentiable(output) for output in outputs]
    needed = [True] * len(tensors)

    def backward(*upstream: Any, back: Pullback = back) -> Sequence[Any]:
        own = zip(upstream, floating, strict=False)
        whole = [tf.convert_to_tensor(u) if f else None for u, f in own]
        return back.pull(tied_rule, whole, needed, specs)

    if not eager:

        def of_all(*upstream: Any) -> Sequence[Any]:
            """The gradients of all that the operation of `own` takes."""
            others = len(upstream) - len(outputs) - len(tensors)
            return [*[None] * len(outputs), *backward(*upstream), *[None] * others]

        _register(own[0].op, of_all)
    forward = functools.partial(backward, back=back.untraced) if eager else backward
    _record(call.name, own, list(tensors), backward, forward)
    return back.output.join(own)


class _Place:
    """Where the function of a call runs: the graph in which the variables that it reads get their values.

    A branch or a loop within has a graph of its own, out of which no tensor comes but its outputs. So has a
    `tf.function`, which is not traced anew in the next call: Keras is not asked for its variables then. But
    TensorFlow notes all that is accessed, and what the scope has not seen is added when the function ends.
    """

    __slots__ = ("_graph", "_name", "_seen", "_watcher")

    def __init__(self, name: str, watcher: Any) -> None:
        self._name, self._watcher, self._graph = name, watcher, _graph()
        self._seen: dict[int, keras.Variable] = {}

    def sees(self, variable: keras.Variable) -> bool:
        """Whether the variable is read here, and not within a function that is traced once."""
        graph = _graph()
        while graph is not self._graph:
            if not getattr(graph, "is_control_flow_graph", False):
                return False
            graph = graph.outer_graph
        self._seen[id(variable)] = variable
        return True

    def sees_assigned(self, variable: keras.Variable, known: bool) -> None:
        """The same for an assignment; `known` is whether the function has read the variable before."""
        if self.sees(variable) and known and _graph() is not self._graph:
            raise TypeError(
                message(
                    self._name,
                    "the function assigns a variable in a branch or a loop, after it has read it",
                    required="trainable variables that keep their values there",
                    got=f"variable {variable.path!r}",
                    mend="carry the value through the loop, and assign it behind",
                )
            )

    def as_tensor(self, value: Any) -> Any:
        """The value of a variable."""
        if _graph() is self._graph:
            return as_tensor(value)
        with tf.init_scope() if self._graph is None else self._graph.as_default():
            return as_tensor(value)

    def leave(self, scope: Any) -> None:
        """The function has ended: add to `scope` what was read past Keras."""
        accessed = self._watcher.watched_variables()
        if accessed:
            parts = tf.distribute.get_strategy().experimental_local_results
            values = [variable._value for variable in self._seen.values()]
            seen = {id(part) for value in values for part in (value, *parts(value))}
            for value in accessed:
                if id(value) not in seen:
                    self._add(value, scope)

    def _add(self, value: Any, scope: Any) -> None:
        variable = _variable_of(value)
        if variable is None:
            scope.add(value, as_tensor(value))
        else:
            scope.get_current_value(variable)


def _variable_of(value: Any) -> keras.Variable | None:
    """The Keras Variable whose value this tf.Variable is, None where it is no Keras Variable's.

    Keras alone knows whether a variable is frozen, and a tf.Variable does not know whose it is: it is asked
    once what refers to it.
    """
    known = getattr(value, _VARIABLE, None)
    if known is None:
        holders = gc.get_referrers(value)
        holders += gc.get_referrers(*[holder for holder in holders if type(holder) is dict])
        owners = [holder for holder in holders if issubclass(type(holder), keras.Variable)]
        known = next((weakref.ref(owner) for owner in owners if owner._value is value), lambda: None)
        setattr(value, _VARIABLE, known)
    return known()


def _graph() -> Any:
    """The graph that is being built, None where none is."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _record(
    name: str,
    own: Sequence[Any],
    inputs: Sequence[Any],
    backward: Callable[..., Sequence[Any]],
    forward: Callable[..., Sequence[Any]],
) -> None:
    """Give `own` its gradient on the tapes, and by the transpose of `forward` a derivative in forward mode.

    The tapes come first: the derivative is computed from the rule, which may use what is in `own`.
    """
    record.record_operation_backprop_only(_TYPE, own, inputs, backward)
    record.record_operation_forwardprop_only(
        _TYPE, own, inputs, functools.partial(_linear_backward, name, forward), None
    )


# The type of operation that a tape is told of. It treats some of TensorFlow's own in a way of their own.
_TYPE = "Multigrad"


def _linear_backward(name: str, backward: Callable[..., Sequence[Any]], *upstream: Any) -> Sequence[Any]:
    """`backward`, seen to be linear where values are at hand."""
    token = _TRANSPOSED.set(name)
    try:
        if tf.executing_eagerly():
            with record.stop_recording():
                floating = [u is not None and is_differentiable(u) for u in upstream]
                pairs = list(zip(upstream, floating, strict=True))
                tried = [tf.constant(trial(u.shape), u.dtype) if f else u for u, f in pairs]
                further = [FAR * u if f else u for u, f in zip(tried, floating, strict=True)]
                near, far = backward(*tried), backward(*further)
                require_linear(name, near, far, concrete)
        return backward(*upstream)
    finally:
        _TRANSPOSED.reset(token)


# The op whose rule is transposed here for forward mode, in which TensorFlow (2.21) records on no tape.
_TRANSPOSED: contextvars.ContextVar[str | None] = contextvars.ContextVar("transposed", default=None)


def _require_tapes() -> None:
    """See that a gradient can be taken here; it would be zero."""
    name = _TRANSPOSED.get()
    if name is not None:
        raise NotImplementedError(
            message(
                name,
                "its rule takes a gradient, for which TensorFlow has no forward mode",
                required="a rule of operations and of ops",
                got="one that calls a gradient function, itself or in an op",
                mend="take the derivative by multigrad.jvp, or in reverse mode",
            )
        )


def _here(tensors: Sequence[Any]) -> Sequence[Any]:
    """The tensors as the graph that is being built has them, where some come from around it.

    The gradient of a branch or a loop is built in a graph beside its own, and what it takes from there must
    be there. A plain `tf.Graph` has none around it.
    """
    capture = getattr(_graph(), "capture", None)
    return tensors if capture is None else [capture(tensor) for tensor in tensors]


def _own_eagerly(outputs: Sequence[Any]) -> list[Any]:
    """Tensors that are this call's alone, so that they can be given its gradient."""
    with record.stop_recording():
        return [tf.raw_ops.Identity(input=output) for output in outputs]


def _own_in_graph(outputs: Sequence[Any], tensors: Sequence[Any], residuals: Sequence[Any]) -> list[Any]:
    """The same in a graph, by one operation whose gradient is the rule.

    It takes the inputs, too, as a gradient is asked for by what an operation takes. A tape is told of the
    outputs alone: it makes zeros for each one that is not used.

    Where it is copied without that gradient, the guards get one, if only zeros, and say so. They guard the
    inputs, as there may be no way to these from the outputs. A guard comes behind all of the op's tensors, so
    that it is copied with any. And it stands beside: converters to other formats do not know it.
    """
    places = [len(outputs) + i for i, tensor in enumerate(tensors) if is_differentiable(tensor)]
    known = set(map(id, (*outputs, *tensors)))
    # Of what is mapped, the rule may be all that uses anything.
    others = [residual for residual in residuals if id(residual) not in known]
    with record.stop_recording():
        together = tf.raw_ops.IdentityN(input=[*outputs, *tensors, *others])
        guards = [tf.raw_ops.PreventGradient(input=together[place], message=_LOST) for place in places]
        graph = tf.compat.v1.get_default_graph()
        with graph.gradient_override_map({"IdentityN": next(_NAMES)}):
            own = tf.raw_ops.IdentityN(input=[*outputs, *tensors, *guards, *others])
    return list(own[: len(outputs)])


def _register(op: Any, backward: Callable[..., Sequence[Any]]) -> None:
    """Give the operation its gradient on the graph, for `_gradient`."""
    rules = getattr(op.graph, _RULES, None)
    if rules is None:
        rules = {}
        setattr(op.graph, _RULES, rules)
    gradient = op.get_attr("_gradient_op_type").decode()
    rules[gradient] = backward
    tf.RegisterGradient(gradient)(functools.partial(_gradient, gradient, weakref.ref(op.graph)))


@library_code
def _gradient(name: str, graph: Any, op: Any, *upstream: Any) -> Sequence[Any]:
    """The gradient of the operation of this name; `op` is None where it is traced for a SavedModel."""
    own = graph()
    if own is None or (op is not None and op.graph is not own):
        raise LookupError(_LOST)
    return getattr(own, _RULES)[name](*upstream)


def value_and_grad(
    function: Callable[..., tuple[Any, Any]], tensors: Sequence[Any], variables: int
) -> tuple[tuple[Any, Any], list[Any]]:
    _require_tapes()
    own = [tf.identity(tensor) for tensor in tensors]  # apart from the same tensor closed over
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(own)
        value, aux = function(*own)
    gradients = tape.gradient(value, own, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return (value, aux), [tf.convert_to_tensor(gradient) for gradient in gradients]


def vjp(
    function: Callable[..., tuple[Sequence[Any], Any]], tensors: Sequence[Any]
) -> tuple[tuple[Sequence[Any], Any], Callable[[Sequence[Any]], Sequence[Any]]]:
    _require_tapes()
    own = [tf.identity(tensor) for tensor in tensors]
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(own)
        outputs, aux = function(*own)
        # Of these alone the tape is asked: an op that returns an output has another one in its rule.
        ends = [tf.identity(output) for output in outputs]

    def pull(upstream: Sequence[Any]) -> list[Any]:
        gradients = tape.gradient(ends, own, list(upstream), tf.UnconnectedGradients.ZERO)
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    return (outputs, aux), pull


def jacobian(
    function: Callable[..., tuple[Sequence[Any], Any]], tensors: Sequence[Any]
) -> tuple[Any, list[list[Any]]]:
    _require_tapes()
    own = [tf.identity(tensor) for tensor in tensors]
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(own)
        outputs, aux = function(*own)
    zero = tf.UnconnectedGradients.ZERO
    return aux, [list(tape.jacobian(output, own, unconnected_gradients=zero)) for output in outputs]


def may_record() -> bool:
    return record.could_possibly_record()


def needs_plain_rule() -> bool:
    return may_record()  # it is copied for a Jacobian, and in forward mode there are no tapes


def gradients_expected(tensors: Sequence[Any]) -> list[bool]:
    return [may_record() and (tf.executing_eagerly() or _has_xla())] * len(tensors)


_UNRECORDED = contextvars.ContextVar("unrecorded", default=False)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    token = _UNRECORDED.set(True)
    try:
        with record.stop_recording():
            yield
    finally:
        _UNRECORDED.reset(token)


@functools.lru_cache(256)
def program(function: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    written = functools.partial(function, False, *static)
    if not _has_xla():
        return written
    in_programs = functools.partial(function, True, *static)
    # Two, as TensorFlow takes what it has traced for any number of rows for a number that is known, too.
    for_some, for_any = [tf.function(in_programs, autograph=False, jit_compile=True) for _ in range(2)]

    def in_place(*tensors: list[tf.Tensor]) -> Any:
        traced = for_any if tensors[0][0].shape[0] is None else for_some
        specs = [[tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in some] for some in tensors]
        with tf.init_scope():  # apart from the graph that is being built, which it would keep alive
            whole = traced.get_concrete_function(*specs)
        return whole(*tensors)

    def run(rows: list[tf.Tensor], upstream: list[tf.Tensor], others: list[tf.Tensor]) -> Any:
        eager = tf.executing_eagerly()
        # XLA differentiates no loop in place, and of a graph a derivative may be asked for later.
        if may_record() or not (eager or _UNRECORDED.get()):
            return written(rows, upstream, others)
        count = rows[0].shape[0]
        known = count is not None
        if not known:
            count, rows, upstream = _alike(rows, upstream)
        # It is compiled anew for each number of rows, and gets one of few where calls have several.
        room = count if known and not eager else _room(count)
        if known and room == count:
            return in_place(rows, upstream, others)
        more = room - count
        more_rows = [tf.concat([t, tf.broadcast_to(t[-1:], (more, *t.shape[1:]))], 0) for t in rows]
        more_upstream = [tf.pad(tensor, [[0, more], [0, 0]]) for tensor in upstream]
        of_rows, of_others = in_place(more_rows, more_upstream, others)
        return [tensor[:count] for tensor in of_rows], of_others

    return run


def _has_xla() -> bool:
    return not (platform.system() == "Darwin" and tf.config.list_physical_devices("GPU"))  # none for Metal


def _alike(*lists: list[tf.Tensor]) -> list[Any]:
    """How many rows the tensors have, and the tensors, seen to have as many, which a graph finds out late.

    Where it runs, by an assertion, which XLA leaves out: to that the shape says the same.
    """
    first, *others = itertools.chain(*lists)
    count = tf.shape(first)[0]
    same = [tf.debugging.assert_equal(tf.shape(other)[0], count, _UNLIKE) for other in others]
    with tf.control_dependencies(same):
        return [count, *[[tf.reshape(t, (count, *t.shape[1:])) for t in tensors] for tensors in lists]]


_UNLIKE = "there must be one row of each for each of something: of tokens, say, as many labels as features"


def _room(count: Any) -> Any:
    """The next of few numbers: a multiple of 64, or at most an eighth larger."""
    powers = tf.constant([1 << power for power in range(10, 31)])
    step = tf.reduce_max(tf.where(count >= powers, powers // 8, 64))
    return -(-count // step) * step


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Without AutoGraph, as Keras's own training, and not called as it is: TensorFlow warns of many functions
    # of one code.
    whole = tf.function(function, autograph=False)
    return lambda *tensors: whole.get_concrete_function(*tensors)(*tensors)


def wide() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def observe(callback: Callable[..., None], tensors: Sequence[Any]) -> None:
    # What is in a graph while `uncompiled` is in force is written down for later, or elsewhere.
    if all([hasattr(tensor, "numpy") for tensor in tensors]):
        callback(*[np.array(tensor.numpy()) for tensor in tensors])


def is_compiling() -> bool:
    return not tf.executing_eagerly()


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


_EAGERLY = Shared(_eagerly)  # TensorFlow's switch is one for all threads


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    return _EAGERLY

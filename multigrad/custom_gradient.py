"""`op_custom_gradient`, and one call of an op told from top to bottom."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_args, get_origin, overload

import keras

from multigrad import backend, names, symbolic
from multigrad.answer import read
from multigrad.backend import Options
from multigrad.binding import Binding, Signature, name_of, signature_of
from multigrad.context import Context, context_here, in_force
from multigrad.errors import describe, message
from multigrad.kinds import HoldsNoTensor
from multigrad.leaves import FLAT_LAYOUTS, ONE, Layout, Refused, Symbolic, split
from multigrad.rule import FLAT, HYBRID, WHOLE, form_of, is_handed, is_plain, own_arguments
from multigrad.variables import (
    NONE_READ,
    Pinned,
    ReadBy,
    Reads,
    Unassigned,
    Variables,
    in_scope,
    under_values_of,
)

_framework = backend.active
_TENSORS = _framework.TENSORS

P = ParamSpec("P")
R = TypeVar("R")


@overload
def op_custom_gradient(
    f: Callable[P, tuple[R, Any]],
    *,
    name: str | None = None,
    forward_mode: bool = False,
    higher_order: bool = True,
) -> Callable[P, R]: ...


@overload
def op_custom_gradient(
    f: None = None,
    *,
    name: str | None = None,
    forward_mode: bool = False,
    higher_order: bool = True,
) -> Callable[[Callable[P, tuple[R, Any]]], Callable[P, R]]: ...


def op_custom_gradient(
    f: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    forward_mode: bool = False,
    higher_order: bool = True,
) -> Callable[..., Any]:
    """Define a function and its gradient rule, for every backend of Keras.

    ```python
    from keras import ops
    from multigrad import grad, op_custom_gradient

    @op_custom_gradient
    def log1pexp(x):
        def rule(upstream):
            return upstream * ops.sigmoid(x)
        return ops.maximum(x, 0.0) + ops.log1p(ops.exp(-ops.abs(x))), rule

    print(log1pexp(100.0), grad(log1pexp)(100.0))  # 100.0 1.0
    ```

    The rule returns the vector-Jacobian product. For `y = f(x)` and a loss `L`, it gets the upstream gradient
    `dL/dy` and returns `dL/dx`. A rule that does not multiply by its upstream gradient cuts the chain.

    Arguments:
        f: a function of any arguments that returns a pair `output, rule`. It gets tensors, NumPy arrays and
            Keras Variables, alone or nested in tuples, lists and dicts, as tensors. It gets Python numbers
            and all other objects unchanged. Floating and complex tensors have a gradient. The output is a
            tensor or a nested structure; objects in it that are not tensors are passed through. `f` can be a
            function, method, lambda, partial or callable object, and can be defined anew in every call.
        name: the name of the op in messages. The default is the name of the function. A name of the form
            `package>name` registers the op with Keras, so that a model with it can be saved, and loaded where
            an op of this name is defined.
        forward_mode: whether JAX's own forward mode (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) works on the
            op. The rule must then be linear in its upstream gradient. On other backends forward mode always
            works, and the option has no effect.
        higher_order: whether the gradient can be differentiated. For that, PyTorch keeps the inputs of an op
            alive if its rule uses an intermediate value of the function. Without it, PyTorch keeps only what
            the rule uses, and a second derivative raises an error. On other backends it has no effect.

    The signature of the rule selects how it is called:

    - `rule(U)`, if it has one positional parameter, of any name, or `upstream` as its only keyword-only one;
    - `rule(u1, ..., uN)`, if it has as many as the output has tensors, or is `rule(*us)`;
    - `rule(*args, upstream=U)`, with the positional arguments of the op, if it has a parameter `upstream`
      after others, as in `rule(*args, upstream=None)` or `rule(x, y, *, upstream)`. It closes over the
      keyword-only arguments of the op.

    Each form may have a further parameter `variables`: the list of the trainable Keras Variables that `f`
    read without being given them, in the order of the first reading. The rule then returns the pair
    `gradients, gradients_of_variables`. While the rule runs, the variables have the values that they had in
    `f`, and a layer that the rule calls is in training if the layer that called the op is.

    `U` is the upstream gradient in the structure of the output: zeros for a tensor that nobody used, and
    None for an output without a gradient (integers, strings, None). Flattened tensors have the order of
    `keras.tree.flatten`: the keys of a dict are sorted, and those of an `OrderedDict` keep their order.

    The rule returns one of these. If several fit, the first one applies:

    - a tensor, if one argument is differentiable;
    - a tuple or list with one entry per argument, or per differentiable argument, each in the structure
      of its argument, or with one entry per flattened tensor;
    - a dict from argument names to such entries, with a tuple for `*args`.

    None stands for zero. A function of no arguments stands for a gradient that is computed only if it is
    needed; the tapes of eager TensorFlow need all of them. Arguments without a gradient have None or zero.
    Gradients for Python floats and complex numbers are discarded; a result that could belong to such a number
    or to a tensor raises an error. A gradient is cast to the dtype of its argument, and summed over the axes
    along which broadcasting enlarged it.

    Returns:
        A function with the name, documentation and parameters of `f`. It returns the output alone and is
        differentiated by the rule, to any order. In a rule, an input or output of the op is differentiated as
        such. An intermediate value of the function is differentiated through the function, which PyTorch and
        JAX run once more for it. A tensor that `f` closes over has no gradient through the op.

    Raises:
        TypeError: if `f` does not return such a pair; if the signature or the result of the rule fits none of
            these forms, or is ambiguous; if the rule has a default for an argument that it does not get; if
            `f` reads trainable variables and the rule has no parameter `variables`; or if an argument is a
            sparse tensor.
        ValueError: if a gradient has another shape than its argument, or another op is registered under the
            name.

    On a KerasTensor, such as `keras.Input` returns, the op is one node of a Functional model.

    References:
        The closure form is that of TensorFlow's `tf.custom_gradient`.
    """
    if f is None:
        return functools.partial(
            op_custom_gradient, name=name, forward_mode=forward_mode, higher_order=higher_order
        )
    options = Options(forward_mode, higher_order)
    if isinstance(f, (staticmethod, classmethod)):
        return type(f)(op_custom_gradient(f.__func__, name=name, **options._asdict()))
    if not callable(f):
        raise TypeError(
            message(
                "op_custom_gradient",
                "there is nothing to decorate",
                required="a function that returns `output, rule`",
                got=describe(f),
                mend="write @op_custom_gradient above the function",
            )
        )
    if name is not None and not isinstance(name, str):
        raise TypeError(
            message(
                "op_custom_gradient",
                "the name is no string",
                argument="'name'",
                required="a string, or None",
                got=describe(name),
                mend='write @op_custom_gradient(name="...")',
            )
        )
    define = functools.partial(_define, f, name or name_of(f), options)
    if name is None or ">" not in name:
        return names.refuse_config(define(), name or name_of(f))
    return names.register(name, f, options, define)


@_framework.library_code
def _define(f: Callable[..., Any], title: str, options: Options) -> Callable[..., Any]:
    """The op of `f`, which messages call `title`."""
    signature = signature_of(f)
    full = signature.full
    usual = None if full is None else Pullback(title, full, FLAT_LAYOUTS[full.count])
    count = -1 if full is None else full.count

    def op(*args: Any, **kwargs: Any) -> Any:
        if usual is not None and len(args) == count and not kwargs:
            for value in args:
                if not _TENSORS[type(value)]:
                    break
            else:
                # Usually every parameter gets a tensor, by position.
                return apply(Call(f, usual, options), args)
        try:
            tensors, back = _prepare(title, signature, args, kwargs)
        except Symbolic:
            return symbolic.apply(_define(f, title, options), title, args, kwargs)
        return apply(Call(f, back, options), tensors)

    defined: Any = functools.update_wrapper(_framework.library_code(op), f)
    pair = getattr(f, "__annotations__", {}).get("return")
    if get_origin(pair) is tuple:  # the output and the rule, of which `help` shows the output
        output = get_args(pair)[0]
        defined.__annotations__ = {**f.__annotations__, "return": output}
        defined.__signature__ = inspect.signature(f).replace(return_annotation=output)
    return defined


def _prepare(
    title: str, signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], "Pullback"]:
    """The tensors in the arguments, and the pullback of such a call."""
    try:
        values, binding = signature.bind(args, kwargs)
    except TypeError as error:
        raise signature.misfit(title, args, kwargs, error) from error
    try:
        tensors, arguments = split(values)
    except Symbolic:
        raise
    except Refused as refused:
        raise refused.error(title, zip(binding.names(), values, strict=True)) from None
    return tensors, Pullback(title, binding, arguments)


class Call:
    """One call of an op, as a backend sees it: flat tensors to flat tensors, and the way back.

    It holds no tensor of the call, and nothing that a run of the function finds out.

    Arguments:
        f: the function.
        back: the pullback of an output that is one tensor.
        options: what the op was defined with.
    """

    __slots__ = ("back", "f", "options")

    def __init__(self, f: Callable[..., Any], back: "Pullback", options: Options) -> None:
        self.f = f
        self.options = options
        self.back = back

    @property
    def name(self) -> str:
        """How messages call the op."""
        return self.back.name

    def run(
        self,
        tensors: Sequence[Any],
        *,
        strict: bool = False,
        read_as: Callable[[Any], Any] | None = None,
        place: Any = None,
    ) -> "Ran":
        """Run the function: its flat outputs, its rule, the inputs of the op, and the pullback.

        The inputs are `tensors` itself, or, where the function read trainable variables, these and the
        values of those.

        Arguments:
            strict: whether the function is to touch no variable; `TouchedVariable` is raised where it does.
            read_as: makes of the value of a variable the one that the function reads.
            place: where the function runs, if that matters to how variables are read.
        """
        back, scope, context = self.back, Reads(), context_here()
        if strict:
            scope.strict = True
        if read_as is not None:
            scope.read_as = read_as
        if place is not None:
            scope.place = place
        with scope:
            returned = self.f(*tensors) if back.flat else back.call(self.f, tensors)
        if place is not None:
            place.leave(scope)
        # Usually it is a tensor and a rule of one parameter, and no variable has to do with it.
        around = scope.original_scope
        if type(around) is Unassigned:
            around = None
        if (
            around is None
            and not (scope.variables or scope.state)
            and type(returned) is tuple
            and len(returned) == 2
        ):
            output, rule = returned
            if _TENSORS[type(output)] and is_plain(rule):
                return (output,), rule, tensors, back if context is None else back.anew(context)
        return self._accept(returned, tensors, scope, around, context)

    def run_again(
        self, inputs: Sequence[Any], first: "Pullback", f: Callable[..., Any] | None = None
    ) -> "Ran":
        """Run the function once more, for a derivative of the rule's residuals.

        Variables have the values that are among `inputs`, and assignments end with the run. `f` stands in for
        the function, with another closure.
        """
        count = len(inputs) - len(first.variables)
        scope = Pinned(first.variables, inputs[count:], first.around)
        with scope, in_force(first.context):
            returned = self.back.call(f or self.f, inputs[:count])
        return self._accept(returned, inputs[:count], scope, first.around, first.context)

    def _accept(
        self,
        returned: Any,
        tensors: Sequence[Any],
        scope: Reads | Pinned,
        around: keras.StatelessScope | None,
        context: Context | None,
    ) -> "Ran":
        """What `run` returns, for anything that a function may return and read."""
        name, binding = self.back.name, self.back.binding
        if type(returned) not in (tuple, list) or len(returned) != 2 or not callable(returned[1]):
            raise self._no_pair(returned)
        output, given = returned
        try:
            with scope:  # in which a variable is read that is an output itself
                outputs, layout = split(output, whole=True)
        except Refused as refused:
            raise refused.error(name, [("the output", output)]) from None
        form, takes = form_of(name, given, binding, len(outputs))
        variables, rule = scope.read(), given
        if form == HYBRID:
            arguments = self.back.arguments.join(tensors)
            rule = functools.partial(rule, *arguments[: own_arguments(name, given, binding)])
        handed = is_handed(name, given, takes, variables.names())
        if handed or around is not None or variables.state:
            rule = under_values_of(name, rule, variables, scope.latest(), around, handed)
        inputs = (*tensors, *scope.values) if variables else tensors
        back = self.back.anew(context)
        back.output, back.form = layout, form
        back.variables, back.handed, back.around = variables, handed, around
        back.plain = False
        return outputs, rule, inputs, back

    def rehearsal(self) -> AbstractContextManager[Any]:
        """A context behind which variables are as they were before, whatever a rule assigned in it."""
        return Pinned(NONE_READ, ())

    def objects(self) -> Sequence[Any]:
        """The arguments that are no tensors, such as `self`."""
        return self.back.arguments.static_leaves()

    def has_objects(self) -> bool:
        """Whether an argument is an object through which tensors may be reached, such as `self`."""
        return self.back.arguments.has_objects()

    def touches_variables(self) -> bool:
        """Whether a run of the function, or of another of its code, touched a variable."""
        return _code_of(self.f) in _TOUCHING

    def note_touched(self) -> None:
        """Remember that one did."""
        if len(_TOUCHING) >= _KEPT:
            _TOUCHING.clear()
        _TOUCHING.add(_code_of(self.f))

    def may_read_another(self) -> bool:
        """Whether it may read a variable that has another value here than its own, in a scope."""
        return in_scope()

    def _no_pair(self, returned: Any) -> TypeError:
        return TypeError(
            message(
                self.name,
                "the function did not return an output and the rule of its gradient",
                required="a pair `output, rule`, whose second item is a function",
                got=describe(returned),
                mend="end the function with `return output, rule`",
            )
        )


# Codes whose functions touched a variable: the next run need not begin where that is not possible.
_TOUCHING: set[Any] = set()
_KEPT = 4096


def _code_of(f: Any) -> Any:
    return getattr(f, "__code__", type(f))


class Pullback(HoldsNoTensor):
    """How the rule of one run is called, and its answer read. It holds neither the rule nor its tensors.

    Arguments:
        name: how messages call the op.
        binding, arguments: how the arguments of the call were bound, and their layout.
    """

    # What a run finds out, as it is for most of them.
    plain = True
    """Whether it is as it is for most of them: one tensor, and a rule of one parameter."""
    output: Layout = ONE
    """The layout of the output."""
    form = WHOLE
    """The form of the rule."""
    variables: Variables = NONE_READ
    """The trainable variables that the function read."""
    handed = False
    """Whether the rule is handed them."""
    around: keras.StatelessScope | None = None
    """The scope around the call, in which Keras finds variables."""
    context: Context | None = None
    """What Keras knows of the layers around the call."""

    def __init__(self, name: str, binding: Binding, arguments: Layout) -> None:
        self.name, self.binding, self.arguments = name, binding, arguments
        self.flat = arguments.flat and not binding.keywords
        """Whether the function is called with the tensors as they are."""

    def anew(self, context: Context | None) -> "Pullback":
        """A pullback of the same call, in which the rule is to meet this context."""
        kind = Pullback if context is None else _InContext
        back = kind(self.name, self.binding, self.arguments)
        back.context = context
        return back

    def call(self, function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        """What the function returns for the arguments around these tensors."""
        return self.binding.call(function, self.arguments.join(tensors))

    def reading(self, read: Callable[[Any], Any]) -> AbstractContextManager[Any]:
        """A context in which `read` reads what variables hold that are not pinned for the rule."""
        return ReadBy(read)

    @property
    def untraced(self) -> "Pullback":
        """The same, of which no trace takes notice."""
        return self

    def pull(
        self,
        rule: Callable[..., Any],
        upstream: Sequence[Any],
        needed: Sequence[bool],
        specs: list[backend.Spec | None],
    ) -> Sequence[Any]:
        """Call the rule: the gradient of each input, None for zero or where not needed.

        Arguments:
            rule: what `run` returned, or the same around other tensors.
            upstream: the upstream gradient of each tensor in the output, None where it has none.
            needed: for each input, whether its gradient is of use to anybody.
            specs: for each input, what it requires of its gradient.
        """
        if _framework.is_reading_code():  # which enters no scope in a rule, and refuses assignments itself
            answer = self._answer(rule, upstream)
        else:
            scope = Unassigned()
            scope.name = self.name
            with scope:
                answer = self._answer(rule, upstream)
        if self.handed:
            return self._read_both(answer, needed, specs)
        return read(self, answer, specs, needed)

    def _answer(self, rule: Callable[..., Any], upstream: Sequence[Any]) -> Any:
        """Call the rule in its form."""
        if self.plain:
            return rule(upstream[0])
        if self.form == FLAT:
            return rule(*upstream)
        whole = self.output.join_tensors_only(upstream)
        return rule(whole) if self.form == WHOLE else rule(upstream=whole)

    def _read_both(
        self, answer: Any, needed: Sequence[bool], specs: list[backend.Spec | None]
    ) -> Sequence[Any]:
        """The gradients of the arguments and of the variables, for a rule that was handed the latter."""
        if type(answer) not in (tuple, list) or len(answer) != 2:
            raise TypeError(
                message(
                    self.name,
                    "the rule was handed variables and returned no gradients of theirs",
                    required="a pair `gradients, gradients_of_variables`",
                    got=describe(answer),
                    mend="return both, with one entry per variable in the second",
                )
            )
        count = len(specs) - len(self.variables)
        of_variables = _OfVariables(self.name, FLAT_LAYOUTS[len(self.variables)], self.variables)
        own = read(self, answer[0], specs[:count], needed[:count])
        theirs = read(of_variables, answer[1], specs[count:], needed[count:])
        return [*own, *theirs]


class _InContext(Pullback):
    """The pullback of a call inside of a layer."""

    def pull(
        self,
        rule: Callable[..., Any],
        upstream: Sequence[Any],
        needed: Sequence[bool],
        specs: list[backend.Spec | None],
    ) -> Sequence[Any]:
        with in_force(self.context):
            return super().pull(rule, upstream, needed, specs)


class _OfVariables(NamedTuple):
    """What a rule that is handed variables answers for beside the arguments."""

    name: str
    arguments: Layout
    binding: Variables


Ran = tuple[Sequence[Any], Callable[..., Any], Sequence[Any], Pullback]
"""What a run gives: outputs, rule, inputs, and how the rule is called."""

apply: Callable[[Call, Sequence[Any]], Any] = _framework.apply
"""What an op does with a call. While a trace is open it is another function (`trace.py`), so that nothing has
to be asked while none is."""

"""`op_custom_gradient`, and one call of an op told from top to bottom."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from multigrad import backend, names, symbolic
from multigrad.answer import read
from multigrad.binding import Binding, name_of, signature_of
from multigrad.errors import describe, message
from multigrad.leaves import FLAT_LAYOUTS, ONE, Layout, Refused, Symbolic, flat_layout, split
from multigrad.reach import may_reach
from multigrad.rule import FLAT, HYBRID, WHOLE, form_of, own_arguments, takes_variables
from multigrad.variables import NONE_READ, Pinned, Reads, Variables, under_values_of

_framework = backend.active
_TENSORS = _framework.TENSORS

P = ParamSpec("P")
R = TypeVar("R")


@overload
def op_custom_gradient(
    f: Callable[P, tuple[R, Any]], *, name: str | None = None, forward_mode: bool = False
) -> Callable[P, R]: ...


@overload
def op_custom_gradient(
    f: None = None, *, name: str | None = None, forward_mode: bool = False
) -> Callable[[Callable[P, tuple[R, Any]]], Callable[P, R]]: ...


def op_custom_gradient(
    f: Callable[..., Any] | None = None, *, name: str | None = None, forward_mode: bool = False
) -> Callable[..., Any]:
    """Define a function together with the rule of its gradient, for every backend of Keras.

    ```python
    from keras import ops
    from multigrad import grad, op_custom_gradient

    @op_custom_gradient
    def log1pexp(x):
        e = ops.exp(x)
        def rule(upstream):
            return ops.multiply(upstream, 1.0 - 1.0 / ops.add(1.0, e))
        return ops.log(1.0 + e), rule

    print(grad(log1pexp)(100.0))  # 1.0, where plain differentiation gives NaN
    ```

    By the chain rule, the rule returns the vector-Jacobian product: for `y = f(x)` and a loss `L`, it is
    given the upstream gradient `dL/dy` and returns `dL/dx`. A rule that does not multiply by its upstream
    cuts the chain.

    Arguments:
        f: a function of any arguments that returns a pair `output, rule`. Tensors, NumPy arrays and Keras
            Variables among the arguments, alone or nested in tuples, lists and dicts, reach it as
            tensors; Python numbers and all other objects reach it as they are. Floating and complex
            tensors have a gradient. The output is a tensor or a nested structure; what is no tensor in
            it is passed through. `f` can be a function, method, lambda, partial or callable object, and
            can be defined anew in every call.
        name: how messages call the op; the function's own name if it is not given. A name of the form
            `package>name` registers the op with Keras, so that a model in which it is used can be saved,
            and loaded where an op of this name is defined.
        forward_mode: whether JAX's own forward mode (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) is to work
            on the op. The rule must then be linear in its upstream gradient. Elsewhere forward mode
            needs no permission, and this changes nothing.

    The rule is called by its signature:

    - `rule(U)`, when it has one positional parameter, whatever its name;
    - `rule(u1, ..., uN)`, when it has as many as the output has tensors, or `rule(*us)`;
    - `rule(*args, upstream=U)`, with the op's own positional arguments, when it has a parameter
      `upstream` behind others, as in `rule(*args, upstream=None)` or `rule(x, y, *, upstream)`.

    Each may have a further parameter `variables`. It is handed the trainable Keras Variables that `f` read
    without being given them, in the order of first reading, and returns the pair `gradients,
    gradients_of_variables`. While the rule runs, they have the values that they had in `f`.

    `U` is the upstream gradient in the structure of the output: zeros for a tensor that nobody used, and
    None for an output that has no gradient (integers, strings, None).

    The rule returns one of these, of which the first that fits is meant:

    - a tensor, when one argument is differentiable;
    - a tuple or list with one entry per argument, or per differentiable argument, each in the structure
      of its argument, or one per flattened tensor;
    - a dict from argument names to such entries.

    None stands for zero, and a function of no arguments for a gradient that is computed only where it is
    needed. A gradient is cast to the dtype of its argument, and summed over the axes along which
    broadcasting made it larger.

    Returns:
        A function with the name, documentation and parameters of `f`, which returns the output alone and
        is differentiated by the rule, to any order. Inside the rule, an input or output of the op is
        differentiated as such; a tensor that the function computed on the way is differentiated through
        the function, which PyTorch runs once more for it. A tensor that `f` closes over has no gradient
        through the op.

    Raises:
        TypeError: when `f` returns no such pair, when the rule's signature or its answer can be read in
            none of these ways, when `f` reads trainable variables and the rule takes none, or an argument
            is a sparse tensor.
        ValueError: when a gradient has a shape that is not its argument's, or another op is registered
            under the name.

    On a KerasTensor, such as `keras.Input` returns, the op is one node of a Functional model.

    References:
        The closure form is that of TensorFlow's `tf.custom_gradient`.
    """
    if f is None:
        return functools.partial(op_custom_gradient, name=name, forward_mode=forward_mode)
    if isinstance(f, (staticmethod, classmethod)):
        return type(f)(op_custom_gradient(f.__func__, name=name, forward_mode=forward_mode))
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
    define = functools.partial(_define, f, name or name_of(f), forward_mode)
    if name is None or ">" not in name:
        return define()
    return names.register(name, f, forward_mode, define)


def _define(f: Callable[..., Any], title: str, forward_mode: bool) -> Callable[..., Any]:
    """The op of `f`, which messages call `title`."""
    signature = signature_of(f)

    def op(*args: Any, **kwargs: Any) -> Any:
        binding = signature.full
        values: tuple[Any, ...] = args
        if binding is None or kwargs or len(args) != binding.count:
            try:
                values, binding = signature.bind(args, kwargs)
            except TypeError as error:
                raise TypeError(f"{title}: {error}") from error
        tensors: Sequence[Any] = values
        arguments = FLAT_LAYOUTS.get(tuple(map(type, values)))
        if arguments is None:
            try:
                tensors, arguments = split(values)
            except Symbolic:
                return symbolic.apply(_define(f, title, forward_mode), title, args, kwargs)
            except Refused as refused:
                raise refused.error(title, zip(binding.names(), values, strict=True)) from None
        call = Call(title, f, binding, arguments, forward_mode)
        outputs = _framework.apply(call, tensors)
        return outputs[0] if call.output is ONE else call.output.join(outputs)

    return functools.update_wrapper(_framework.library_code(op), f)


class Call:
    """One call of an op, as a backend sees it: flat tensors to flat tensors, and the way back.

    It holds no tensor of the call. Between `run` and `pull`, the rule is the backend's to keep.
    """

    __slots__ = ("arguments", "around", "binding", "f", "form", "forward_mode", "handed", "name",
                 "output", "specs", "variables")  # fmt: skip

    def __init__(
        self, name: str, f: Callable[..., Any], binding: Binding, arguments: Layout, forward_mode: bool
    ) -> None:
        self.name = name
        self.f = f
        self.binding = binding
        self.arguments = arguments
        self.forward_mode = forward_mode
        # What `run` finds out:
        self.output: Layout
        self.form: str
        self.specs: tuple[backend.Spec | None, ...]
        self.variables: Variables = NONE_READ
        self.handed = False  # whether the rule is handed the variables
        self.around: Any = None  # the scope around the call, in which Keras finds variables

    def run(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Callable[..., Any], Sequence[Any]]:
        """Run the function: its flat outputs, its rule, and the inputs of the op.

        The inputs are `tensors` itself, or, where the function read trainable variables, these and the
        values of those.
        """
        return self._run(self.f, tensors)

    def run_foreseen(
        self, tensors: Sequence[Any], f: Callable[..., Any] | None = None
    ) -> tuple[Sequence[Any], Callable[..., Any]]:
        """Run a function that reads no trainable variables: its flat outputs and its rule.

        `f` stands in for a function with another closure.
        """
        outputs, rule, inputs = self._run(f or self.f, tensors)
        if inputs is not tensors:
            raise self._unforeseen()
        return outputs, rule

    def _run(
        self, function: Callable[..., Any], tensors: Sequence[Any]
    ) -> tuple[Sequence[Any], Callable[..., Any], Sequence[Any]]:
        scope = Reads()
        with scope:
            values, returned = self._call(function, tensors)
        inputs = tensors
        if scope.variables:
            self.variables = scope.read()
            inputs = (*tensors, *scope.values)
        self.around = scope.original_scope
        outputs, rule = self._accept(returned, values, scope.values)
        self.specs = _framework.specs_of(inputs)
        return outputs, rule, inputs

    def run_again(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], Callable[..., Any]]:
        """The outputs and the rule once more, for a derivative of the rule's residuals.

        Variables have the values that are among `inputs`, and what the function assigns is lost.
        """
        count = len(inputs) - len(self.variables)
        with Pinned(self.variables, inputs[count:], self.around, keep=False):
            values, returned = self._call(self.f, inputs[:count])
        return self._accept(returned, values, inputs[count:])

    def _call(self, function: Callable[..., Any], tensors: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """The function's arguments, and what it returns for them."""
        values = tensors if self.arguments.flat else self.arguments.join(tensors)
        if self.binding.keywords:
            return values, self.binding.call(function, values)
        return values, function(*values)

    def _accept(
        self, returned: Any, arguments: Sequence[Any], values: Sequence[Any]
    ) -> tuple[Sequence[Any], Callable[..., Any]]:
        """The flat outputs and the rule in what the function returned for these arguments and variables."""
        if type(returned) not in (tuple, list) or len(returned) != 2 or not callable(returned[1]):
            raise self._no_pair(returned)
        output, rule = returned
        if _TENSORS[type(output)]:
            outputs: Sequence[Any] = (output,)
            self.output = ONE
        else:
            try:
                outputs, self.output = split(output)
            except Refused as refused:
                raise refused.error(self.name, [("the output", output)]) from None
        self.form, may_take = form_of(self.name, rule, self.binding, len(outputs))
        given = rule
        if self.form == HYBRID:
            rule = functools.partial(rule, *arguments[: own_arguments(self.name, rule, self.binding)])
        if self.variables or may_take:
            self.handed = takes_variables(self.name, given, self.variables.names())
        if self.handed or self.around is not None:
            rule = under_values_of(rule, self.variables, values, self.around, self.handed)
        return outputs, rule

    def has_objects(self) -> bool:
        """Whether an argument is an object through which tensors may be reached, such as `self`."""
        return self.arguments.has_objects()

    def may_read(self) -> bool:
        """Whether the function may read a variable, as far as can be said before it runs."""
        return may_reach(self.f) or any(map(may_reach, self.arguments.static_leaves()))

    def forget_function(self) -> None:
        """Let go of the function and of what it closes over: the call will not run again."""
        del self.f

    def pull(
        self, rule: Callable[..., Any], upstream: Sequence[Any], needed: Sequence[bool]
    ) -> Sequence[Any]:
        """Call the rule: the gradient of each input, None for zero or where not needed.

        Arguments:
            rule: what `run` returned, or the same around other tensors.
            upstream: the upstream gradient of each tensor in the output, None where it has none.
            needed: for each input, whether its gradient is of use to anybody.
        """
        if self.form == FLAT:
            answer = rule(*upstream)
        else:
            whole = upstream[0] if self.output is ONE else self.output.join_tensors_only(upstream)
            answer = rule(whole) if self.form == WHOLE else rule(upstream=whole)
        if self.handed:
            return self._read_both(answer, needed)
        return read(self.name, answer, self.arguments, self.binding, self.specs, needed)

    def _read_both(self, answer: Any, needed: Sequence[bool]) -> Sequence[Any]:
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
        count = len(self.specs) - len(self.variables)
        layout = flat_layout(len(self.variables))
        own = read(self.name, answer[0], self.arguments, self.binding, self.specs[:count], needed[:count])
        theirs = read(self.name, answer[1], layout, self.variables, self.specs[count:], needed[count:])
        return [*own, *theirs]

    def _unforeseen(self) -> TypeError:
        return TypeError(
            message(
                self.name,
                "the function read a trainable variable that could not be seen from outside",
                required="variables, or layers, that the function or one that it calls closes over or has "
                "as globals",
                got=", ".join(self.variables.names()),
                mend="pass the variables as arguments, or close over the layer that owns them",
            )
        )

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

"""`op_custom_gradient`: the decorator, and the op that it returns."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, get_args, get_origin, overload

from multigrad import backend
from multigrad.common.errors import describe, message
from multigrad.core.call import Call
from multigrad.core.conversions import numbers_to_tensors
from multigrad.core.leaves import Refused, Symbolic
from multigrad.core.signature import Arguments, Signature, name_of, signature_of
from multigrad.core.structure import FLAT_LAYOUTS, split
from multigrad.keras_graph import node, registry

_framework = backend.active
_TENSORS = _framework.TENSORS

P = ParamSpec("P")
R = TypeVar("R")


@overload
def op_custom_gradient(
    f: Callable[P, tuple[R, Any]],
    *,
    name: str | None = None,
    higher_order: bool = True,
) -> Callable[P, R]: ...


@overload
def op_custom_gradient(
    f: None = None,
    *,
    name: str | None = None,
    higher_order: bool = True,
) -> Callable[[Callable[P, tuple[R, Any]]], Callable[P, R]]: ...


def op_custom_gradient(
    f: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    higher_order: bool = True,
) -> Callable[..., Any]:
    """Define a function with a custom gradient, for every backend of Keras.

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

    The rule computes a vector-Jacobian product: for `y = f(x)` and a loss `L`, it gets the upstream gradient
    `dL/dy` and returns `dL/dx`. A rule that ignores its upstream gradient breaks the chain rule.

    Arguments:
        f: a function of any arguments that returns a pair `output, rule`. It gets tensors, NumPy arrays and
            Keras Variables as tensors, also when they are nested in tuples, lists and dicts. It gets all
            other objects unchanged. A Python float or complex number is a constant beside a tensor or an
            object with attributes, such as `self`, and if it is passed by name. In a call without these, as
            in `f(2.0, 3.0)`, such numbers become tensors of Keras's floatx. Floating and complex tensors are
            differentiable. The output is a tensor or a nested structure, in which other objects are returned
            unchanged. `f` can be a function, method, lambda, partial or callable object, and can be defined
            again in every call.
        name: the name of the op in messages. The default is the name of the function. A name of the form
            `package>name` registers the op with Keras, so that a model that uses it can be saved, and loaded
            where an op with this name is defined.
        higher_order: whether the gradient can be differentiated again. If it can and the rule uses an
            intermediate result of the function, PyTorch keeps the inputs of the op in memory. If it cannot,
            PyTorch keeps only the residuals, and a second derivative raises an error. The other frameworks
            ignore this option.

    The signature of the rule decides how it is called:

    - `rule(U)`, if it has one positional parameter of any name, or `upstream` as its only keyword-only
      parameter;
    - `rule(u1, ..., uN)`, if it has one positional parameter per tensor in the output, or is `rule(*us)`;
    - `rule(*args, upstream=U)`, with the op's own positional arguments, if it has other parameters before
      `upstream`, as in `rule(*args, upstream=None)` or `rule(x, y, *, upstream)`. It closes over arguments
      that were passed by keyword.

    Each form may have a further parameter `variables`: a list of the trainable Keras Variables that `f` read
    and did not get as arguments, in the order of first use. Such a rule returns the pair
    `gradients, gradients_of_variables`. While the rule runs, the variables have the values that they had in
    `f`, and a layer that it calls is in training mode if the layer that called the op was.

    `U` is the upstream gradient in the structure of the output. It has zeros for a tensor that was not used,
    and None for an output without a gradient (integers, strings, None).

    Flattened tensors are in the order of `keras.tree.flatten`: a dict is sorted by its keys, an
    `OrderedDict` is not.

    The rule returns one of the following. If several fit, the first applies.

    - A tensor, if one argument is differentiable.
    - A tuple or list with one entry per argument or per differentiable argument, each in the structure of its
      argument, or with one entry per flattened tensor.
    - A dict from argument names to such entries. The entry for `*args` is a tuple.

    An entry of None is a zero gradient. A rule that returns None itself raises an error, because it probably
    forgot `return`. In the pair of a rule with `variables`, None as the first item is zero for all arguments,
    and the second item has one entry for each variable.

    A function of no arguments is a gradient that is computed only if it is needed. Eager TensorFlow computes
    all gradients, because its tapes ask for them; `tf.function` prunes those that are not used. The entry of
    an argument without a gradient is None or 0, or integer tensors for an integer argument. Gradients of
    Python floats and complex numbers are discarded, if the numbers are not tensors of the call. A result
    raises an error if an entry could belong to such a number or to a tensor. A gradient is cast to the dtype
    of its argument, and summed over the axes that broadcasting enlarged. On PyTorch, it is moved to the
    device of its argument.

    Returns:
        A function with the name, documentation and parameters of `f`. It returns only the output, and the
        rule is its gradient at any order. In a derivative of the gradient, inputs and outputs of the op that
        the rule uses are differentiated directly. Intermediate results of the function are differentiated
        through the function, which PyTorch and JAX run again for this purpose. The gradient of a tensor that
        `f` closes over raises an error.

    Raises:
        TypeError: if `f` does not return such a pair; if the signature of the rule is not supported; if the
            result is None, or fits none of these forms, or two with different meanings; if the rule has a
            default for an argument that it is not passed; if `f` reads trainable variables and the rule does
            not take them; if an argument is a sparse tensor.
        ValueError: if a gradient has a different shape than its argument, or another op is registered under
            the name.

    With a KerasTensor, such as the result of `keras.Input`, the op is one node of a Functional model.

    References:
        The closure form follows TensorFlow's `tf.custom_gradient`.
    """
    if f is None:
        return functools.partial(op_custom_gradient, name=name, higher_order=higher_order)
    if isinstance(f, (staticmethod, classmethod)):
        return type(f)(op_custom_gradient(f.__func__, name=name, higher_order=higher_order))
    if isinstance(f, type) or not callable(f):
        raise TypeError(
            message(
                "op_custom_gradient",
                "the argument is not a function",
                required="a function that returns `output, rule`",
                got=describe(f),
                fix="write @op_custom_gradient above the function, or above a method of the class",
            )
        )
    if name is not None and not isinstance(name, str):
        raise TypeError(
            message(
                "op_custom_gradient",
                "the name is not a string",
                argument="'name'",
                required="a string, or None",
                got=describe(name),
                fix='write @op_custom_gradient(name="...")',
            )
        )
    define = functools.partial(_define, f, name or name_of(f), higher_order)
    if name is None or ">" not in name:
        return registry.refuse_config(define(), name or name_of(f))
    return registry.register(name, f, higher_order, define)


@_framework.library_code
def _define(f: Callable[..., Any], name: str, higher_order: bool) -> Callable[..., Any]:
    """Return the op of `f`. Messages use `name`."""
    signature = signature_of(f)
    full = signature.full
    positional = None if full is None else Arguments(name, full, FLAT_LAYOUTS[full.count])
    count = -1 if full is None else full.count

    def op(*args: Any, **kwargs: Any) -> Any:
        # The common case: one tensor per parameter, passed by position.
        if positional is not None and len(args) == count and not kwargs:
            for value in args:
                if not _TENSORS[type(value)]:
                    break
            else:
                call = Call(f, positional, higher_order)
                outputs = apply(call, args)
                return call.layout.join(outputs)
        try:
            tensors, arguments = _split_arguments(name, signature, args, kwargs)
        except Symbolic:
            return node.apply(_define(f, name, higher_order), name, args, kwargs)
        call = Call(f, arguments, higher_order)
        outputs = apply(call, tensors)
        return call.layout.join(outputs)

    defined: Any = _framework.update_wrapper(op, f)
    pair = getattr(f, "__annotations__", {}).get("return")
    if get_origin(pair) is tuple:  # f returns (output, rule); `help` shows only the output
        output = get_args(pair)[0]
        defined.__annotations__ = {**f.__annotations__, "return": output}
        defined.__signature__ = inspect.signature(f).replace(return_annotation=output)
    return defined


def _split_arguments(
    name: str, signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Arguments]:
    """Return the tensors in the arguments of a call, and the arguments without them."""
    try:
        values, binding = signature.bind(args, kwargs)
    except TypeError as error:
        raise signature.binding_error(name, args, kwargs, error) from error
    try:
        tensors, layout = split(values)
        if not tensors:
            numbers = numbers_to_tensors(args, kwargs)
            if numbers is not args:
                values, binding = signature.bind(numbers, kwargs)
                tensors, layout = split(values)
    except Symbolic:
        raise
    except Refused as refused:
        raise refused.error(name, zip(binding.names(), values, strict=True)) from None
    return tensors, Arguments(name, binding, layout)


apply: Callable[[Call, Sequence[Any]], Sequence[Any]] = _framework.apply
"""Runs a call. It is the backend's function, which an open trace replaces (`tracing/recording.py`), so that
tracing has no overhead while no trace is open."""

"""`op_custom_gradient`: the decorator, and what an op does when it is called."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from multigrad import backend
from multigrad.backend.base import Options
from multigrad.core.call import Call, Pullback
from multigrad.core.errors import describe, message
from multigrad.core.signature import Signature, name_of, signature_of
from multigrad.core.structure import FLAT_LAYOUTS, Refused, Symbolic, split
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
        higher_order: whether there are to be derivatives of the gradient. For those, PyTorch keeps the inputs
            of an op alive where its rule uses something that was computed from them. Without, it keeps what
            the rule uses alone, and a second derivative is an error. Elsewhere this changes nothing.

    The rule is called by its signature:

    - `rule(U)`, when it has one positional parameter, whatever its name, or `upstream` by keyword alone;
    - `rule(u1, ..., uN)`, when it has as many as the output has tensors, or `rule(*us)`;
    - `rule(*args, upstream=U)`, with the op's own positional arguments, when it has a parameter
      `upstream` behind others, as in `rule(*args, upstream=None)` or `rule(x, y, *, upstream)`. What the op
      was passed by keyword alone it closes over.

    Each may have a further parameter `variables`. It is handed the trainable Keras Variables that `f` read
    without being given them, in the order of first reading, and returns the pair `gradients,
    gradients_of_variables`. While the rule runs, they have the values that they had in `f`, and a layer that
    it calls is in training if the layer is that called the op.

    `U` is the upstream gradient in the structure of the output: zeros for a tensor that nobody used, and
    None for an output that has no gradient (integers, strings, None).

    Flattened tensors are in the order of `keras.tree.flatten`, here and below: by the sorted keys of a dict,
    and in the own order of an `OrderedDict`.

    The rule returns one of these, of which the first that fits is meant:

    - a tensor, when one argument is differentiable;
    - a tuple or list with one entry per argument, or per differentiable argument, each in the structure
      of its argument, or one per flattened tensor;
    - a dict from argument names to such entries, with a tuple for what came in by `*args`.

    None stands for zero, and a function of no arguments for a gradient that is computed only where it is
    needed. TensorFlow's tapes ask for every gradient, so eager TensorFlow computes them all; `tf.function`
    prunes those that nobody uses. What has no gradient has None or zero; a Python float or complex number may
    have one, which nobody asks for. An answer that could be meant for such a number, or for a tensor, is an
    error. A gradient is cast to the dtype of its argument, and summed over the axes along which broadcasting
    made it larger.

    Returns:
        A function with the name, documentation and parameters of `f`, which returns the output alone and
        is differentiated by the rule, to any order. Inside the rule, an input or output of the op is
        differentiated as such; a tensor that the function computed on the way is differentiated through
        the function, which PyTorch and JAX run once more for it. A tensor that `f` closes over has no
        gradient through the op.

    Raises:
        TypeError: when `f` returns no such pair, when the rule's signature or its answer can be read in
            none of these ways, or in two that differ, when the rule has a default for an argument that it is
            not handed, when `f` reads trainable variables and the rule takes none, or an argument is a
            sparse tensor.
        ValueError: when a gradient has a shape that is not its argument's, or another op is registered
            under the name.

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
                fix="write @op_custom_gradient above the function",
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
                fix='write @op_custom_gradient(name="...")',
            )
        )
    define = functools.partial(_define, f, name or name_of(f), options)
    if name is None or ">" not in name:
        return registry.refuse_config(define(), name or name_of(f))
    return registry.register(name, f, options, define)


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
            return node.apply(_define(f, title, options), title, args, kwargs)
        return apply(Call(f, back, options), tensors)

    return functools.update_wrapper(_framework.library_code(op), f)


def _prepare(
    title: str, signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Pullback]:
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


apply: Callable[[Call, Sequence[Any]], Any] = _framework.apply
"""Runs a call: the backend's own function, which an open trace replaces (`tracing/recording.py`). So a trace
costs nothing while none is open."""

"""The names that the text of a random program uses, on the active backend. See `random_programs.py`.

Each transform takes a function of tensors with one output. `rules_in_numpy.py` defines the same names in
NumPy.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
from keras import ops, tree
from rules_in_numpy import weights_of
from support import BACKEND, array, compiled

import multigrad
from multigrad import jvp, op_custom_gradient, value_and_grad, vjp
from multigrad import ops as shelf

Function = Callable[..., Any]
Ints = Sequence[int]

COMPILER = {"backend": "aot_eager"} if BACKEND == "torch" else {}  # Inductor takes 10 s


def jit(f: Function) -> Function:
    return multigrad.jit(f, **COMPILER)


def plain_jit(f: Function) -> Function:
    """Return a function that the framework compiles. On JAX, the values of variables are constants."""
    if BACKEND != "torch":
        return compiled(f)
    import torch

    return torch.compile(f, **COMPILER)


def checkpoint(f: Function) -> Function:
    if BACKEND == "jax":
        import jax

        return jax.checkpoint(f)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.recompute_grad(f)
    import torch.utils.checkpoint

    return lambda *args: torch.utils.checkpoint.checkpoint(f, *args, use_reentrant=False)


def vmap(f: Function) -> Function:
    """Return the sum of the function at `x` and at `0.5 * x`. Other arguments are not mapped."""

    def mapped(x: Any, *others: Any) -> Any:
        rows, axes = ops.stack([x, 0.5 * x]), (0, *[None] * len(others))
        if BACKEND == "tensorflow":
            return ops.sum(ops.map(lambda row: f(row, *others), rows), 0)
        if BACKEND == "jax":
            from jax import vmap as of_framework
        else:
            from torch import vmap as of_framework
        return ops.sum(of_framework(f, axes)(rows, *others), 0)

    return mapped


def scan(f: Function) -> Function:
    """Return the function of `x`, applied twice."""
    return lambda x, *others: ops.scan(lambda x, _: (f(x, *others), None), x, length=2)[0]


def loop(f: Function) -> Function:
    """Return the function of `x`, applied twice."""
    return lambda x, *others: ops.fori_loop(0, 2, lambda i, x: f(x, *others), x)


def cond(f: Function) -> Function:
    return lambda x, *others: ops.cond(ops.sum(x) < 1e9, lambda: f(x, *others), lambda: x * 0.0)


def slope(f: Function) -> Function:
    """Return the gradient of the sum of a function with respect to its first argument."""
    return multigrad.grad(lambda *xs: ops.sum(f(*xs)))


def value_of(variable: keras.Variable) -> Any:
    """Return the value of a variable: on JAX and PyTorch, the object that the variable holds."""
    if BACKEND == "tensorflow":
        return variable.value.read_value()
    return variable.value


def fixed(x: Any) -> Any:
    return shelf.fixed_point(lambda z, x: 0.3 * ops.cos(z) + x, ops.zeros_like(x), x)


def host_sin(x: Any) -> Any:
    return shelf.host_call(np.sin, x, output=x)


def numpy_sin(x: Any) -> Any:
    """Return the sine, or raise an error where a framework differentiates or compiles it."""
    return array(np.sin(x.numpy() if hasattr(x, "numpy") else np.asarray(x)), dtype=x.dtype)


def tangent_of(position: int, x: Any) -> Any:
    """Return the tangent along which the derivative is the sum of the gradient times `weights_of`."""
    weights, shape = weights_of(position), tuple(x.shape)
    weights = np.broadcast_to(weights, np.broadcast_shapes(shape, weights.shape))
    weights = weights.sum(tuple(range(weights.ndim - len(shape))))
    ones = tuple(i for i, size in enumerate(shape) if size == 1)
    return array(weights.sum(ones, keepdims=True), dtype=x.dtype)


def by_grad(f: Function, argnums: Ints, variables: Any, xs: Sequence[Any]) -> tuple[Any, Any]:
    value, found = value_and_grad(f, argnums or None, variables=variables or None)(*xs)
    of_inputs, of_variables = found if argnums and variables else (found, []) if argnums else ([], found)
    for i, gradient in zip(argnums, of_inputs, strict=True):
        tree.assert_same_structure(gradient, xs[i])
        for a, b in zip(tree.flatten(gradient), tree.flatten(xs[i]), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), f"a gradient {a} of the input {b}"
    return value, [*tree.flatten(list(of_inputs)), *of_variables]


def of_chosen(f: Function, argnums: Ints, xs: Sequence[Any]) -> Function:
    """Return the function of the inputs that it is differentiated with respect to."""

    def function(*chosen: Any) -> Any:
        every = [*xs]
        for i, x in zip(argnums, chosen, strict=True):
            every[i] = x
        return f(*every)

    return function


def by_vjp(f: Function, argnums: Ints, variables: Any, xs: Sequence[Any]) -> tuple[Any, Any]:
    value, pullback = vjp(of_chosen(f, argnums, xs), *[xs[i] for i in argnums])
    return value, tree.flatten(list(pullback(ops.ones_like(value))))


def by_jvp(f: Function, argnums: Ints, variables: Any, xs: Sequence[Any]) -> tuple[Any, Any]:
    chosen = [xs[i] for i in argnums]
    along = [tangent_of(i, x) for i, x in enumerate(tree.flatten(chosen))]
    value, tangent = jvp(of_chosen(f, argnums, xs), chosen, tree.pack_sequence_as(chosen, along))
    return value, [tangent]


def by_stateless(f: Function, argnums: Ints, variables: Any, xs: Sequence[Any]) -> tuple[Any, Any]:
    """Return the derivatives by the framework, with respect to values that variables have in a scope.

    The backward pass runs outside of the scope, where the variables have other values.
    """
    from ways import own  # it has no ways of backends without gradients

    chosen = [xs[i] for i in argnums]
    before = [ops.copy(variable.value) for variable in variables]
    for variable in variables:
        variable.assign(variable * -3.0 + 7.0)

    def function(*leaves: Any) -> Any:
        inputs, values = tree.pack_sequence_as([chosen, before], [*leaves])
        with keras.StatelessScope(state_mapping=[*zip(variables, values, strict=True)]):
            value = of_chosen(f, argnums, xs)(*inputs)
        # PyTorch refuses a leaf that the value does not depend on.
        return value + 0.0 * sum(ops.sum(ops.cast(leaf, "float32")) for leaf in leaves)

    leaves = [ops.copy(leaf) for leaf in tree.flatten([chosen, before])]
    value, found = function(*leaves), own.WAYS[own.EAGER[0]](function)(*leaves)
    for variable, value_before in zip(variables, before, strict=True):
        variable.assign(value_before)
    return value, [*found]


def by_way(name: str) -> Function:
    """Return the function that differentiates by a way of `ways.py`, with respect to inputs alone."""
    from ways import EVERY_WAY, own

    def differentiate(f: Function, argnums: Ints, variables: Any, xs: Sequence[Any]) -> tuple[Any, Any]:
        chosen = [xs[i] for i in argnums]

        def function(*leaves: Any) -> Any:
            value = of_chosen(f, argnums, xs)(*tree.pack_sequence_as(chosen, [*leaves]))
            return value + 0.0 * sum(map(ops.sum, leaves))  # PyTorch refuses an unused leaf

        leaves = tree.flatten(chosen)
        if name in own.LACKING_OF_ONE_ARRAY:
            leaves = list(map(ops.copy, leaves))
        return function(*leaves), [*EVERY_WAY[name](function)(*leaves)]

    return differentiate


MODES = {"grad": by_grad, "vjp": by_vjp, "jvp": by_jvp, "stateless": by_stateless}


def way_of(mode: str) -> Function:
    return MODES.get(mode) or by_way(mode)


def derivatives(
    loss: Function,
    inputs: Sequence[Any],
    argnums: Ints,
    variables: Sequence[keras.Variable],
    modes: Sequence[str],
    compiled: bool,
) -> list[np.ndarray]:
    """Return the value of a loss, and its derivatives, one order for each mode.

    They are the gradients and, in forward mode, the derivative along `weights_of`. The next order is that of
    the weighted sum of the gradients.
    """

    def summed(f: Function, mode: str) -> Function:
        """Return the function whose derivative is the next order."""

        def function(*xs: Any) -> Any:
            _, found = way_of(mode)(f, argnums, variables, xs)
            if mode == "jvp":
                return found[0]
            return sum(
                [ops.sum(ops.cast(g, "float32") * array(weights_of(i))) for i, g in enumerate(found)], 0.0
            )

        return function

    def results(*xs: Any) -> list[Any]:
        f, every = loss, []
        for mode in modes:
            value, found = way_of(mode)(f, argnums, variables, xs)
            every += found if every else [value, *found]
            f = summed(f, mode)
        return every

    run = jit(results) if compiled else results
    return [ops.convert_to_numpy(ops.cast(result, "float32")) for result in run(*inputs)]


NAMES: dict[str, Any] = {
    "array": array,
    "integers": lambda *values: array(*values, dtype="int32"),
    "Variable": lambda *values: keras.Variable(array(*values)),
    "value_of": value_of,
    "Layer": keras.layers.Layer,
    "op_custom_gradient": op_custom_gradient,
    "derivatives": derivatives,
    "ops": ops,
    "shelf": shelf,
    "fixed": fixed,
    "host_sin": host_sin,
    "numpy_sin": numpy_sin,
    "jit": jit,
    "plain_jit": plain_jit,
    "remat": keras.remat,
    "checkpoint": checkpoint,
    "vmap": vmap,
    "scan": scan,
    "loop": loop,
    "cond": cond,
    "slope": slope,
    "Holder": SimpleNamespace,
}

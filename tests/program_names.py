"""The names that the text of a random program uses, on the active backend. See `random_programs.py`.

Each transform takes a function of tensors with one output. `dual_numbers.py` defines the same names in NumPy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from dual_numbers import weights_of
from keras import ops
from support import BACKEND, array

import multigrad
from multigrad import op_custom_gradient, value_and_grad

Function = Callable[..., Any]

COMPILER = {"backend": "aot_eager"} if BACKEND == "torch" else {}  # Inductor takes 10 s


def jit(f: Function) -> Function:
    return multigrad.jit(f, **COMPILER)


def plain_jit(f: Function) -> Function:
    """Return a function that the framework compiles. On JAX, the values of variables are constants."""
    if BACKEND == "jax":
        import jax

        return jax.jit(f)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(f)
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
        rows = ops.stack([x, 0.5 * x])
        if BACKEND == "jax":
            import jax

            return ops.sum(jax.vmap(f, (0, *[None] * len(others)))(rows, *others), 0)
        if BACKEND == "tensorflow":
            return ops.sum(ops.map(lambda row: f(row, *others), rows), 0)
        import torch

        return ops.sum(torch.vmap(f, (0, *[None] * len(others)))(rows, *others), 0)

    return mapped


def scan(f: Function) -> Function:
    """Return the function of `x`, applied twice."""
    return lambda x, *others: ops.scan(lambda x, _: (f(x, *others), None), x, length=2)[0]


def loop(f: Function) -> Function:
    """Return the function of `x`, applied twice."""
    return lambda x, *others: ops.fori_loop(0, 2, lambda i, x: f(x, *others), x)


def cond(f: Function) -> Function:
    return lambda x, *others: ops.cond(ops.sum(x) < 1e9, lambda: f(x, *others), lambda: x * 0.0)


def value_of(variable: keras.Variable) -> Any:
    """Return the value of a variable: on JAX and PyTorch, the object that the variable holds."""
    if BACKEND == "tensorflow":
        return variable.value.read_value()
    return variable.value


def derivatives(
    loss: Function,
    inputs: Sequence[Any],
    argnums: Sequence[int],
    variables: Sequence[keras.Variable],
    order: int,
    compiled: bool,
) -> list[np.ndarray]:
    """Return the value of a loss, its gradients and, for order 2, those of the gradients' weighted sum."""

    def of(f: Function) -> Function:
        """Return a function of the value of `f` and the list of its gradients."""

        def value_and_list(*xs: Any) -> tuple[Any, list[Any]]:
            if not argnums or not variables:
                value, gradients = value_and_grad(f, argnums or None, variables=variables or None)(*xs)
                return value, [*gradients]
            value, (of_inputs, of_variables) = value_and_grad(f, argnums, variables=variables)(*xs)
            return value, [*of_inputs, *of_variables]

        return value_and_list

    def sum_of_gradients(*xs: Any) -> Any:
        _, gradients = of(loss)(*xs)
        parts = [ops.sum(g * array(weights_of(i))) for i, g in enumerate(gradients)]
        return sum(parts[1:], parts[0])

    def results(*xs: Any) -> list[Any]:
        value, first = of(loss)(*xs)
        return [value, *first, *(of(sum_of_gradients)(*xs)[1] if order == 2 else [])]

    run = jit(results) if compiled else results
    return [ops.convert_to_numpy(result) for result in run(*inputs)]


NAMES: dict[str, Any] = {
    "array": array,
    "Variable": lambda *values: keras.Variable(array(*values)),
    "value_of": value_of,
    "Layer": keras.layers.Layer,
    "op_custom_gradient": op_custom_gradient,
    "derivatives": derivatives,
    "ops": ops,
    "jit": jit,
    "plain_jit": plain_jit,
    "remat": keras.remat,
    "checkpoint": checkpoint,
    "vmap": vmap,
    "scan": scan,
    "loop": loop,
    "cond": cond,
}

"""TensorFlow: `tf.custom_gradient`."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras import tree


def bind(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """The native op of `forward(*tensors) -> outputs, residuals` and `backward(residuals, *upstream)`."""

    @tf.custom_gradient
    def native(*tensors: Any) -> Any:
        outputs, residuals = forward(*tensors)
        return outputs, lambda *upstream: backward(residuals, *upstream)

    return native


ANEW = True
"""Whether an op by hand is defined anew in a layer's call."""


def tensor(array: Any) -> tf.Tensor:
    return tf.constant(array)


def constant(array: Any) -> tf.Tensor:
    """A tensor that nobody differentiates by."""
    return tf.constant(array)


def runner(f: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
    """A run of `f(*args)`, forward and backward."""
    leaves = tree.flatten(list(args))

    def run() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            outputs = f(*args)
        return tape.gradient(outputs, leaves)

    return run


def compiled(f: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
    """The same, compiled."""
    whole = tf.function(_both(f), autograph=False)

    def run() -> Any:
        return whole(args)

    return run


def by_xla(
    f: Callable[..., Any], batch: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]
) -> Callable[..., Any]:
    """`f(*batch, *weights)` as Keras compiles a step of `fit` on a GPU: by XLA, for a batch of any size."""
    specs = [tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype) for tensor in batch]
    specs += [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in weights]
    return tf.function(f, input_signature=specs, autograph=False, jit_compile=True)


def _both(f: Callable[..., Any]) -> Callable[[Any], Any]:
    def both(args: Any) -> Any:
        return runner(f, args)()

    return both


def trace(f: Callable[..., Any], args: Sequence[Any]) -> None:
    """Make the program of a run anew."""
    tf.function(_both(f), autograph=False).get_concrete_function(args)


def wait(result: Any) -> None:
    """Until the numbers are there."""


def forward(f: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What a forward pass leaves for the backward pass, and keeps alive."""
    with tf.GradientTape() as tape:
        tape.watch(tree.flatten(list(args)))
        outputs = f(*args)
    return tape, outputs


def derivative(f: Callable[..., Any], order: int) -> Callable[[Any], Any]:
    """The derivative of this order of an elementwise function, forward pass and all."""

    def at(x: Any, order: int) -> Any:
        if order == 0:
            return f(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = at(x, order - 1)
        return tape.gradient(y, x)

    return lambda x: at(x, order)

"""TensorFlow: `tf.custom_gradient`."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras import tree

VERSION = f"TensorFlow {tf.__version__}"


def bind(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op.

    `forward(*tensors)` returns outputs and residuals. `backward(residuals, *upstream)` returns gradients.
    """

    @tf.custom_gradient
    def native(*tensors: Any) -> Any:
        outputs, residuals = forward(*tensors)
        return outputs, lambda *upstream: backward(residuals, *upstream)

    return native


DEFINES_IN_EACH_CALL = True
"""Whether TensorFlow code usually defines an op in a layer's call."""


def tensor(array: Any) -> tf.Tensor:
    return tf.constant(array)


def constant(array: Any) -> tf.Tensor:
    """Return a tensor that is a constant in derivatives."""
    return tf.constant(array)


def runner(f: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
    """Return a function that runs `f(*args)` forward and backward."""
    leaves = tree.flatten(list(args))

    def run() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            outputs = f(*args)
        return tape.gradient(outputs, leaves)

    return run


def compiled(f: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
    """Return a function that runs `f(*args)` forward and backward in a `tf.function`."""
    both = tf.function(_forward_and_backward(f), autograph=False)

    def run() -> Any:
        return both(args)

    return run


def by_xla(
    f: Callable[..., Any], batch: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]
) -> Callable[..., Any]:
    """Return `f(*batch, *weights)` compiled by XLA for any batch size, as Keras compiles `fit` on a GPU."""
    specs = [tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype) for tensor in batch]
    specs += [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in weights]
    return tf.function(f, input_signature=specs, autograph=False, jit_compile=True)


def _forward_and_backward(f: Callable[..., Any]) -> Callable[[Any], Any]:
    def both(args: Any) -> Any:
        return runner(f, args)()

    return both


def trace(f: Callable[..., Any], args: Sequence[Any]) -> None:
    """Trace the forward and backward pass again."""
    tf.function(_forward_and_backward(f), autograph=False).get_concrete_function(args)


def wait(result: Any) -> None:
    """Wait until a result is computed."""


def forward(f: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run the forward pass, and return what keeps its residuals alive."""
    with tf.GradientTape() as tape:
        tape.watch(tree.flatten(list(args)))
        outputs = f(*args)
    return tape, outputs


def derivative(f: Callable[..., Any], order: int) -> Callable[[Any], Any]:
    """Return the derivative of an elementwise function, of this order, including its forward pass."""

    def at(x: Any, order: int) -> Any:
        if order == 0:
            return f(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = at(x, order - 1)
        return tape.gradient(y, x)

    return lambda x: at(x, order)


def accelerator() -> str | None:
    """Return the name of the accelerator, None without one."""
    devices = tf.config.list_physical_devices("GPU")
    return tf.config.experimental.get_device_details(devices[0])["device_name"] if devices else None


def allocated() -> int | None:
    """Return the bytes of the tensors on the accelerator, None without one."""
    if not tf.config.list_physical_devices("GPU"):
        return None
    return tf.config.experimental.get_memory_info("GPU:0")["current"]


class _GpuMemory:
    def start(self) -> int:
        tf.config.experimental.reset_memory_stats("GPU:0")
        return allocated()

    def peak(self) -> int:
        return tf.config.experimental.get_memory_info("GPU:0")["peak"]


def gpu_memory() -> _GpuMemory | None:
    """Return the memory of the GPU, None without a GPU."""
    return _GpuMemory() if tf.config.list_physical_devices("GPU") else None


bind_mapped = bind_both_modes = bind  # forward mode transposes the rule


def for_weights(model: Any, loss: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function of `x` with the value of `loss(call, grad, x)` and its gradients by the weights."""

    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(model, grad, x)
        return value, tape.gradient(value, [weight.value for weight in model.trainable_variables])

    return run


def grad(f: Callable[..., Any]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.gradient(y, x)

    return run


def jacobian(f: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return the Jacobian by a loop, which is faster in eager code than `tf.vectorized_map`."""

    def run(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = f(x)
        return tape.jacobian(y, x, experimental_use_pfor=not tf.executing_eagerly())

    return run


def hessian(f: Callable[..., Any]) -> Callable[[Any], Any]:
    return jacobian(grad(f))


def vmap_grad(f: Callable[..., Any]) -> Callable[[Any], Any]:
    gradient = grad(f)
    return lambda x: tf.vectorized_map(gradient, x)


def jvp(f: Callable[..., Any], tangent: Any) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(x, tangent) as accumulator:
            y = f(x)
        return y, accumulator.jvp(y)

    return run


def hvp(f: Callable[..., Any], tangent: Any) -> Callable[[Any], Any]:
    gradient = grad(f)

    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            slope = gradient(x)
        return tape.gradient(slope, x, tangent)

    return run


def compiled_function(f: Callable[..., Any]) -> Callable[[Any], Any]:
    return tf.function(f, autograph=False)

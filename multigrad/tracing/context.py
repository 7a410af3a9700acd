"""`trace_gradients`."""

import contextlib
from collections.abc import Iterator

import keras

from multigrad import backend
from multigrad.common.errors import message
from multigrad.tracing.recording import OPEN_TRACES, hooking_layers, recording, setting
from multigrad.tracing.trace import Trace, TracedLayers


@contextlib.contextmanager
def trace_gradients(*layers: keras.Layer, exploding: float = 1e4) -> Iterator[Trace]:
    """Record the values and gradients of every op, and of every layer of a model, in a context.

    ```python
    from multigrad import grad, op_custom_gradient, trace_gradients

    @op_custom_gradient
    def square(x):
        return x ** 2, lambda upstream: upstream * 2.0 * x

    with trace_gradients() as trace:
        grad(lambda x: square(square(square(x))))(2.0)
    print(trace)
    # call        x   output   upstream   current   downstream
    # 3 square   16      256          1        32           32
    # 2 square    4       16         32         8          256
    # 1 square    2        4        256         4         1024
    ```

    With a model, it records each layer within it as well: its inputs, its output, and the gradient that
    arrives at the output. Layers are named by their path in the model. The text and the figure begin with the
    first NaN or Inf in the forward pass and in the backward pass.

    ```python
    import keras
    import numpy as np
    from multigrad import trace_gradients

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="first"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with trace_gradients(model) as trace:
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    print([call.op for call in trace.calls])  # ['first', 'dense', 'sequential']
    ```

    The column `current` is the derivative of the op, `downstream / upstream`, if both are scalars. Warnings
    about NaN, Inf, zero or exploding gradients follow the table.

    - The trace records calls that are made in the context and in its thread. It records gradients of these
      calls that are computed while the context is active, in any thread. Each run of a rule is one step, so a
      second derivative adds steps.
    - Compiled functions (`jax.jit`, `tf.function`, `torch.compile`, and `fit`) run uncompiled in the context,
      even if they were compiled before. They are slower. Results may differ by rounding, and in NaN: on
      TensorFlow, the gradient of `where(x > 0, sqrt(x), 0)` at 0 is NaN only with `jit_compile=True`.
      TensorFlow and PyTorch disable compilation for all threads. TensorFlow warns that functions in `tf.data`
      stay compiled.
    - Traces can be nested. Each of them records the calls.
    - The model is not changed. In the context, outputs of layers pass an identity, whose rule records the
      gradient. A layer that is called several times, such as a shared layer or the cell of an RNN, has a row
      for each call. Layers have no entry in the columns `current` and `downstream`.
    - Calls without values are not recorded: calls with symbolic tensors, exported functions, and functions
      that TensorFlow vectorizes (`tf.vectorized_map`, `tape.jacobian`).
    - Under `jax.vmap` each example is a call; under `torch.func.vmap` the batch is one call.
    - The forward mode of the frameworks adds no steps for ops. `multigrad.jvp` and, for layers, the forward
      mode of the frameworks run rules in order to transpose them, so they add steps with an upstream gradient
      of ones.
    - The trace copies all values to host memory and keeps them. Ops have no overhead outside of the context.

    Arguments:
        layers: models or layers. Nested layers are recorded, too.
        exploding: flag a gradient as exploding if its largest absolute value is larger by this factor than
            the upstream gradient of the step or of the first step.

    Returns:
        A context manager that returns a `Trace`. Its `calls` and `steps` contain NumPy arrays.
        `print(trace)` shows a table, `trace.to_dict()` returns plain data, and `trace.plot()` draws a figure.

    Raises:
        RuntimeError: if it is called in a function that is being compiled.
        TypeError: if an argument is not a layer.

    Exceptions in the context propagate. The trace keeps what it recorded before.
    """
    if backend.active.is_compiling():
        problem = "a trace cannot be opened in a function that is being compiled, because it has no values"
        required, got = "code that runs eagerly", "a function under jax.jit, tf.function or torch.compile"
        fix = "open the trace around the call of the compiled function"
        raise RuntimeError(message("trace_gradients", problem, required=required, got=got, fix=fix))
    trace = Trace(exploding, TracedLayers(layers) if layers else None)
    hooks = hooking_layers if layers else contextlib.nullcontext()
    traces = (*OPEN_TRACES.get(), trace)
    try:
        with setting(OPEN_TRACES, traces), backend.active.without_compilation(), recording, hooks:
            yield trace
    finally:
        trace.open = False

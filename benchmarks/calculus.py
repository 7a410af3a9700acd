"""Gradients, Jacobians, Hessians, maps and products, compared with the functions of the framework.

`python -m benchmarks.calculus` prints a table for the active backend: times relative to the framework's own
functions, in processor time. Each is measured on plain code and with an op in each layer, where the framework
has a hand-written rule.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

import multigrad

from .measure import time_in_turns
from .native import active

Activation = Callable[[Any], Any]
Function = Callable[[Any], Any]


class Case(NamedTuple):
    """The same function of a tensor in two implementations, and the tensor."""

    native: Function
    multigrad: Function
    x: Any


@multigrad.op_custom_gradient
def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent of `x`. The rule uses the output."""
    y = ops.tanh(x)
    return y, lambda upstream: upstream * (1.0 - y * y)


def _native_tanh(bind: Callable[..., Activation]) -> Activation:
    def forward(x: Any) -> tuple[Any, tuple[Any]]:
        y = ops.tanh(x)
        return y, (y,)

    return bind(forward, lambda residuals, upstream: upstream * (1.0 - residuals[0] * residuals[0]))


def _values(*shape: int) -> Any:
    values = np.random.default_rng(sum(shape)).uniform(-1.0, 1.0, shape)
    return ops.convert_to_tensor(values.astype("float32"))


def _network(inputs: int, layers: int, activation: Activation) -> keras.Model:
    initializer = keras.initializers.RandomNormal(stddev=0.3, seed=1)
    hidden = [keras.layers.Dense(8, activation, kernel_initializer=initializer) for _ in range(layers - 1)]
    last = keras.layers.Dense(1, kernel_initializer=initializer)
    return keras.Sequential([keras.Input((inputs,)), *hidden, last])


def _loss(call: Function, grad: Any, x: Any) -> Any:
    return ops.mean((call(x) - 1.0) ** 2)


def _wgan_loss(call: Function, grad: Any, x: Any) -> Any:
    """Return the loss of a critic with a gradient penalty."""
    slope = grad(lambda x: ops.sum(call(x)))(x)
    norm = ops.sqrt(ops.sum(slope**2, axis=1) + 1e-12)
    return ops.mean(call(x**2) - call(x)) + 10.0 * ops.mean((norm - 1.0) ** 2)


def _for_weights(layers: int, inputs: int, own: Activation, native: Activation) -> Case:
    network, twin = _network(inputs, layers, own), _network(inputs, layers, native)
    weights = network.trainable_variables
    gradients = multigrad.value_and_grad(lambda x: _loss(network, None, x), variables=weights)
    return Case(active.for_weights(twin, _loss), gradients, _values(32, inputs))


def _wgan_step(inputs: int, own: Activation, native: Activation) -> Case:
    network, twin = _network(inputs, 3, own), _network(inputs, 3, native)
    weights = network.trainable_variables
    gradients = multigrad.value_and_grad(lambda x: _wgan_loss(network, multigrad.grad, x), variables=weights)
    steps = [
        _step(active.for_weights(twin, _wgan_loss), twin.trainable_variables),
        _step(gradients, weights),
    ]
    return Case(*steps, _values(32, inputs))


def _step(gradients: Function, weights: list[keras.Variable]) -> Function:
    optimizer = keras.optimizers.Adam(0.001)
    optimizer.build(weights)

    def step(x: Any) -> Any:
        value, slopes = gradients(x)
        optimizer.apply(slopes, weights)
        return value

    return step


def cases(with_op: bool, inputs: int = 8) -> Mapping[str, Case]:
    """Return the cases by name, for functions of `inputs` numbers, with an op or plain code in each layer."""
    own = native = mapped = forward = ops.tanh
    if with_op:
        own, native = tanh, _native_tanh(active.bind)
        mapped, forward = _native_tanh(active.bind_mapped), _native_tanh(active.bind_both_modes)
    matrices = [_values(8, inputs), _values(8, 8), _values(3, 8)]
    x, rows = _values(inputs), _values(32, inputs)
    v = ops.flip(x)

    def outputs(activation: Activation) -> Function:
        def function(x: Any) -> Any:
            for matrix in matrices:
                x = activation(ops.matmul(matrix, x))
            return x

        return function

    def scalar(activation: Activation) -> Function:
        function = outputs(activation)
        return lambda x: ops.sum(function(x) ** 2)

    f, g = outputs(own), scalar(own)
    return {
        "value_and_grad, 6 weights": _for_weights(3, inputs, own, native),
        "value_and_grad, 100 weights": _for_weights(50, inputs, own, native),
        "grad": Case(active.grad(scalar(native)), multigrad.grad(g), x),
        "WGAN-GP step": _wgan_step(inputs, own, native),
        "jacobian": Case(active.jacobian(outputs(mapped)), multigrad.jacobian(f), x),
        "hessian": Case(active.hessian(scalar(mapped)), multigrad.hessian(g), x),
        "vmap(grad)": Case(active.vmap_grad(scalar(mapped)), multigrad.vmap(multigrad.grad(g)), rows),
        "jvp": Case(active.jvp(outputs(forward), v), lambda x: multigrad.jvp(f, (x,), (v,)), x),
        "vjp of grad": Case(active.hvp(scalar(native), v), lambda x: _vjp(multigrad.grad(g), x, v), x),
        "jvp of grad": Case(
            active.hvp(scalar(native), v), lambda x: multigrad.jvp(multigrad.grad(g), (x,), (v,))[1], x
        ),
    }


def _vjp(f: Function, x: Any, v: Any) -> Any:
    return multigrad.vjp(f, x)[1](v)[0]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calculus", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="the number of timings of each implementation")
    parser.add_argument("--inputs", type=int, default=8, help="the number of inputs of the functions")
    parser.add_argument("--only", default="", help="measure only the cases whose name contains this text")
    parser.add_argument("--compiled", action="store_true", help="compile the functions of tensors")
    options = parser.parse_args()
    print(f"| {active.VERSION} | plain | with ops |\n|---|---|---|")
    plain, with_op = cases(with_op=False, inputs=options.inputs), cases(with_op=True, inputs=options.inputs)
    for name in plain:
        # `jax.jit` would treat weights as constants.
        if options.only in name and not (options.compiled and ("weights" in name or "WGAN" in name)):
            cells = [_cell(found[name], options) for found in (plain, with_op)]
            print(f"| {name} | {cells[0]} | {cells[1]} |")
            sys.stdout.flush()


def _cell(case: Case, options: argparse.Namespace) -> str:
    functions = {"native": case.native, "multigrad": case.multigrad}
    if options.compiled:
        functions = {name: active.compiled_function(f) for name, f in functions.items()}
    runs = {name: lambda f=f: f(case.x) for name, f in functions.items()}
    timings = time_in_turns(runs, options.rounds)
    native, own = timings["native"], timings["multigrad"]
    return f"{own.processor:.2f} ({own.median / 1e3:.2f} ms, native {native.median / 1e3:.2f} ms)"


if __name__ == "__main__":
    main()

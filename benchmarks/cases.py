"""The functions that are measured, each with up to four implementations.

`native` is a pair of hand-written functions, forward and backward, which `native/` binds. `multigrad` and
`keras` are functions with a rule, in the form that each library accepts. All of them call the same ops in the
same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

import multigrad

from .native import active


@dataclass
class Case:
    """A function with its implementations by name, and its arguments."""

    name: str
    args: Sequence[Any]
    implementations: dict[str, Callable[..., Any]]


def _random(*shape: int) -> Any:
    return active.tensor(np.random.default_rng(0).normal(size=shape).astype("float32"))


def _hybrid(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule in the form that `keras.ops.custom_gradient` accepts on every backend."""

    def grad(*args: Any, upstream: Any = None) -> Any:
        if upstream is None:
            (upstream,) = args
        return rule(upstream)

    return grad


# ----------------------------------------------------------------------------------------- one addition


def _add(x: Any) -> Any:
    return x + 1.0, lambda upstream: upstream


def _add_keras(x: Any) -> Any:
    return x + 1.0, _hybrid(lambda upstream: upstream)


def addition() -> Case:
    """Return an op that adds one number, so that nearly all of its time is overhead."""
    native = active.bind(lambda x: (x + 1.0, ()), lambda residuals, upstream: upstream)
    return Case(
        "one addition",
        [_random(3)],
        {
            "native": native,
            "multigrad": multigrad.op_custom_gradient(_add),
            "keras": ops.custom_gradient(_add_keras),
            "plain": lambda x: x + 1.0,
        },
    )


# --------------------------------------------------------------------------------------------- log1pexp


def log1pexp_with_rule(x: Any) -> Any:
    e = ops.exp(x)

    def rule(upstream: Any) -> Any:
        return ops.multiply(upstream, 1.0 - 1.0 / ops.add(1.0, e))

    return ops.log(1.0 + e), rule


def _log1pexp_keras(x: Any) -> Any:
    e = ops.exp(x)

    def rule(*args: Any, upstream: Any = None) -> Any:
        if upstream is None:
            (upstream,) = args
        return ops.multiply(upstream, 1.0 - 1.0 / ops.add(1.0, e))

    return ops.log(1.0 + e), rule


def _log1pexp_forward(x: Any) -> Any:
    e = ops.exp(x)
    return ops.log(1.0 + e), (e,)


def _log1pexp_backward(residuals: Any, upstream: Any) -> Any:
    (e,) = residuals
    return ops.multiply(upstream, 1.0 - 1.0 / ops.add(1.0, e))


def _log1pexp_plain(x: Any) -> Any:
    return ops.log(1.0 + ops.exp(x))


def log1pexp() -> Case:
    """Return the example of the documentation, on three elements."""
    return Case(
        "log1pexp",
        [_random(3)],
        {
            "native": active.bind(_log1pexp_forward, _log1pexp_backward),
            "multigrad": multigrad.op_custom_gradient(log1pexp_with_rule),
            "keras": ops.custom_gradient(_log1pexp_keras),
            "plain": _log1pexp_plain,
        },
    )


def defined_in_each_call() -> Case:
    """Return log1pexp defined anew in each call, as a layer's `call` may do."""
    module_level = active.bind(_log1pexp_forward, _log1pexp_backward)

    def native(x: Any) -> Any:
        if active.DEFINES_IN_EACH_CALL:
            return active.bind(_log1pexp_forward, _log1pexp_backward)(x)
        return module_level(x)

    def multigrad_op(x: Any) -> Any:
        return multigrad.op_custom_gradient(log1pexp_with_rule)(x)

    def keras_op(x: Any) -> Any:
        return ops.custom_gradient(_log1pexp_keras)(x)

    implementations = {
        "native": native,
        "multigrad": multigrad_op,
        "keras": keras_op,
        "plain": _log1pexp_plain,
    }
    return Case("defined in each call", [_random(3)], implementations)


def repeated(f: Callable[[Any], Any], count: int) -> Callable[[Any], Any]:
    """Return a function that applies `f` repeatedly."""

    def chain(x: Any) -> Any:
        for _ in range(count):
            x = f(x)
        return x

    return chain


def chain(length: int) -> Case:
    """Return log1pexp applied repeatedly."""
    implementations = {name: repeated(f, length) for name, f in log1pexp().implementations.items()}
    return Case(f"chain of {length}", [_random(3)], implementations)


# ----------------------------------------------------------------------------------------------- matmul


def _matmul(x: Any, w: Any) -> Any:
    def rule(upstream: Any) -> Any:
        return ops.matmul(upstream, ops.transpose(w)), ops.matmul(ops.transpose(x), upstream)

    return ops.matmul(x, w), rule


def _matmul_keras(x: Any, w: Any) -> Any:
    def rule(*args: Any, upstream: Any = None) -> Any:
        if upstream is None:
            (upstream,) = args
        return ops.matmul(upstream, ops.transpose(w)), ops.matmul(ops.transpose(x), upstream)

    return ops.matmul(x, w), rule


def _matmul_backward(residuals: Any, upstream: Any) -> Any:
    x, w = residuals
    return ops.matmul(upstream, ops.transpose(w)), ops.matmul(ops.transpose(x), upstream)


def matmul() -> Case:
    """Return a product of two 64x64 matrices."""
    return Case(
        "matmul 64x64",
        [_random(64, 64), _random(64, 64)],
        {
            "native": active.bind(lambda x, w: (ops.matmul(x, w), (x, w)), _matmul_backward),
            "multigrad": multigrad.op_custom_gradient(_matmul),
            "keras": ops.custom_gradient(_matmul_keras),
            "plain": ops.matmul,
        },
    )


def _matmul_lazy(x: Any, w: Any) -> Any:
    def rule(upstream: Any) -> Any:
        return lambda: ops.matmul(upstream, ops.transpose(w)), lambda: ops.matmul(ops.transpose(x), upstream)

    return ops.matmul(x, w), rule


def frozen_weight() -> Case:
    """Return a matrix product with a frozen weight. multigrad's rule returns functions as gradients, and does
    not compute the one of the weight.
    """
    x, w = _random(512, 512), active.constant(np.ones((512, 512), "float32"))
    native = active.bind(lambda x, w: (ops.matmul(x, w), (x, w)), _matmul_backward)
    lazy = multigrad.op_custom_gradient(_matmul_lazy)
    return Case(
        "matmul 512x512, frozen weight",
        [x],
        {
            "native": lambda x: native(x, w),
            "multigrad": lambda x: lazy(x, w),
            "plain": lambda x: ops.matmul(x, w),
        },
    )


# -------------------------------------------------------------------- two outputs, and a nested structure


def _sums(tensors: Sequence[Any]) -> tuple[Any, Any]:
    total = squares = 0.0
    for tensor in tensors:
        total = total + tensor
        squares = squares + tensor * tensor
    return total, squares


def _nested(x: Any) -> Any:
    def rule(upstream: Any) -> Any:
        total, squares = upstream
        return {key: total + 2.0 * squares * tensor for key, tensor in x.items()}

    return _sums(list(x.values())), rule


def nested(leaves: int = 20) -> Case:
    """Return an op from a dict of tensors to two tensors. Its native version takes them as arguments."""
    x = {f"w{i}": _random(3) for i in range(leaves)}

    def backward(residuals: Any, total: Any, squares: Any) -> Any:
        return tuple([total + 2.0 * squares * tensor for tensor in residuals])

    flat = active.bind(lambda *tensors: (_sums(tensors), tensors), backward)
    return Case(
        f"{leaves} tensors, 2 outputs",
        [x],
        {
            "native": lambda x: flat(*x.values()),
            "multigrad": multigrad.op_custom_gradient(_nested),
            "plain": lambda x: _sums(list(x.values())),
        },
    )


# ------------------------------------------------------------------------------------------- layer norm


def _normalized(x: Any) -> tuple[Any, Any]:
    centred = x - ops.mean(x, axis=-1, keepdims=True)
    scale = ops.rsqrt(ops.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)
    return centred * scale, scale


def _normalized_backward(y: Any, scale: Any, upstream: Any) -> Any:
    projection = ops.mean(upstream * y, axis=-1, keepdims=True)
    return scale * (upstream - ops.mean(upstream, axis=-1, keepdims=True) - y * projection)


def _layer_norm(x: Any) -> Any:
    y, scale = _normalized(x)
    return y, lambda upstream: _normalized_backward(y, scale, upstream)


def _layer_norm_keras(x: Any) -> Any:
    y, scale = _normalized(x)
    return y, _hybrid(lambda upstream: _normalized_backward(y, scale, upstream))


def _layer_norm_forward(x: Any) -> Any:
    y, scale = _normalized(x)
    return y, (y, scale)


def layer_norm(rows: int = 256, columns: int = 1024) -> Case:
    """Return layer normalization (Ba et al., 2016, arXiv:1607.06450) without gain and bias."""
    return Case(
        f"layer norm {rows}x{columns}",
        [_random(rows, columns)],
        {
            "native": active.bind(
                _layer_norm_forward, lambda r, upstream: _normalized_backward(*r, upstream)
            ),
            "multigrad": multigrad.op_custom_gradient(_layer_norm),
            "keras": ops.custom_gradient(_layer_norm_keras),
            "plain": lambda x: _normalized(x)[0],
        },
    )


# ------------------------------------------------------------------------------------- methods of a layer


class Softplus(keras.layers.Layer):
    """log1pexp with a slope, an attribute that the rule reads from `self`."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.built = True

    @multigrad.op_custom_gradient
    def with_rule(self, x: Any) -> Any:
        e = ops.exp(self.slope * x)

        def rule(upstream: Any) -> Any:
            return ops.multiply(upstream, self.slope * (1.0 - 1.0 / ops.add(1.0, e)))

        return ops.log(1.0 + e), rule


def method() -> Case:
    """Return a method of a Keras layer. Its native version gets the slope as a number."""
    slope = 2.0

    def forward(x: Any) -> Any:
        e = ops.exp(slope * x)
        return ops.log(1.0 + e), (e,)

    def backward(residuals: Any, upstream: Any) -> Any:
        (e,) = residuals
        return ops.multiply(upstream, slope * (1.0 - 1.0 / ops.add(1.0, e)))

    return Case(
        "method that reads self",
        [_random(3)],
        {
            "native": active.bind(forward, backward),
            "multigrad": Softplus(slope).with_rule,
            "plain": lambda x: ops.log(1.0 + ops.exp(slope * x)),
        },
    )


class Scale(keras.layers.Layer):
    """The layer of the README, whose op reads its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")
        self.built = True

    @multigrad.op_custom_gradient
    def scaled(self, x: Any) -> Any:
        def rule(upstream: Any, variables: Any) -> Any:
            return upstream * self.factor, [ops.sum(upstream * x)]

        return x * self.factor, rule


def weight() -> Case:
    """Return a method that reads the weight of its layer. Its native version gets the weight as an argument.

    Both rules compute the gradient of the weight.
    """
    layer = Scale()
    factor = active.tensor(np.ones((), "float32"))

    def backward(residuals: Any, upstream: Any) -> Any:
        x, factor = residuals
        return upstream * factor, ops.sum(upstream * x)

    native = active.bind(lambda x, factor: (x * factor, (x, factor)), backward)
    return Case(
        "layer that reads its weight",
        [_random(3)],
        {
            "native": lambda x: native(x, factor),
            "multigrad": layer.scaled,
            "plain": lambda x: x * factor,
        },
    )


def all_cases() -> list[Case]:
    """Return all cases."""
    chains = [chain(10), chain(100), chain(1000)]
    return [
        addition(),
        log1pexp(),
        matmul(),
        frozen_weight(),
        nested(),
        layer_norm(),
        defined_in_each_call(),
        method(),
        weight(),
        *chains,
    ]

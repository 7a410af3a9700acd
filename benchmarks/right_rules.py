"""Families of functions with right rules, at random arguments, for `gradient_checks` and its tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from multigrad import op_custom_gradient

Shape = tuple[int, ...]

SHAPES: tuple[Shape, ...] = ((1,), (3,), (2, 3), (4, 5), (2, 3, 7), (100,))
"""The shapes of the arguments: from one to a hundred elements."""

ROWS: tuple[Shape, ...] = ((2,), (5,), (3, 4), (2, 3, 7), (1, 100))
"""The shapes for functions along the last axis. Along an axis of one element, many are constant."""


@dataclass(frozen=True)
class Family:
    """A function that returns its output and its rule, and the shapes of its arguments.

    Arguments:
        function: a function of arrays that returns `(output, rule)`.
        shapes: for each choice of shapes, the shape of each argument.
        positive: the indices of arguments that are at least 0.05.
        largest: the magnitude of the very large elements. A step from them is small for the function.
    """

    function: Callable[..., Any]
    shapes: tuple[tuple[Shape, ...], ...]
    positive: tuple[int, ...] = ()
    largest: float = 1e8

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__.replace("_", " ")

    def draw(self, random: np.random.Generator, dtype: str, scale: float) -> list[np.ndarray]:
        """Return random arguments of this dtype and scale."""
        shapes = self.shapes[random.integers(len(self.shapes))]
        arrays = [random.normal(size=shape) * scale for shape in shapes]
        return [
            np.asarray(np.abs(array) + 0.05 if i in self.positive else array, dtype)
            for i, array in enumerate(arrays)
        ]

    def with_special(
        self, random: np.random.Generator, arrays: Sequence[np.ndarray], has_large: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return arrays in which 0, 1, -1, very large numbers and ties replace elements, and their places.

        Two elements are tied, in one array or in two. A small array has some of these. Without `has_large`,
        none is very large.
        """
        arrays = [array.copy() for array in arrays]
        places = [np.zeros(array.shape, bool) for array in arrays]
        large = [self.largest, -self.largest] if has_large else []
        for i, (array, place) in enumerate(zip(arrays, places, strict=True)):
            specials = [1.0, *large[:1]] if i in self.positive else [0.0, 1.0, -1.0, *large]
            order = random.permutation(array.size)
            has_tie = array.size > 2 or random.choice([True, False])
            tied, others = np.split(order[: len(specials) + 2], [2 if has_tie else 0])
            if (
                i
                and i not in self.positive
                and array.shape == arrays[0].shape
                and random.choice([True, False])
            ):
                array.flat[tied] = arrays[0].flat[tied]
            else:
                array.flat[tied] = array.flat[tied[-1:]]
            array.flat[others] = random.permutation(specials)[: len(others)]
            place.flat[[*tied, *others]] = True
        return arrays, places

    def op(
        self, change: Callable[[list[Any], Sequence[Any]], list[Any]] = lambda gradients, inputs: gradients
    ) -> Callable[..., Any]:
        """Return the op. `change` maps the right gradients and the inputs to the gradients of the rule."""

        def with_rule(*inputs: Any) -> Any:
            output, rule = self.function(*inputs)

            def changed(upstream: Any) -> Any:
                gradients = rule(upstream)
                return tuple(change(list(gradients) if isinstance(gradients, tuple) else [gradients], inputs))

            return output, changed

        return op_custom_gradient(with_rule)


def log1pexp(x: Any) -> Any:
    e = ops.exp(-ops.abs(x))
    return ops.maximum(x, 0.0) + ops.log1p(e), lambda u: u * ops.sigmoid(x)


def sigmoid(x: Any) -> Any:
    e = ops.exp(-x)
    return 1.0 / (1.0 + e), lambda u: u * e / (1.0 + e) ** 2


def tanh(x: Any) -> Any:
    y = ops.tanh(x)
    return y, lambda u: u * (1.0 - y * y)


def relu_squared(x: Any) -> Any:
    positive = ops.relu(x)
    return positive * positive, lambda u: 2.0 * u * positive


def relu(x: Any) -> Any:
    return ops.relu(x), lambda u: ops.where(x > 0, u, ops.zeros_like(u))


def sinc(x: Any) -> Any:
    is_zero = ops.equal(x, 0.0)
    safe = ops.where(is_zero, 1.0, x)
    y = ops.where(is_zero, 1.0, ops.sin(safe) / safe)
    # The other branch has the second derivative at zero.
    return y, lambda u: u * ops.where(is_zero, -x / 3.0, (ops.cos(safe) - ops.sin(safe) / safe) / safe)


def logarithm(x: Any) -> Any:
    return ops.log(x), lambda u: u / x


def power(x: Any) -> Any:
    return x**2.5, lambda u: u * 2.5 * x**1.5


def softmax(x: Any) -> Any:
    y = ops.softmax(x, axis=-1)
    return y, lambda u: y * (u - ops.sum(u * y, axis=-1, keepdims=True))


def log_softmax(x: Any) -> Any:
    y = ops.log_softmax(x, axis=-1)
    return y, lambda u: u - ops.exp(y) * ops.sum(u, axis=-1, keepdims=True)


def logsumexp(x: Any) -> Any:
    y = ops.logsumexp(x, axis=-1, keepdims=True)
    return y, lambda u: u * ops.exp(x - y)


def layer_norm(x: Any) -> Any:
    centered = x - ops.mean(x, axis=-1, keepdims=True)
    deviation = ops.sqrt(ops.mean(centered * centered, axis=-1, keepdims=True) + 1e-3)
    y = centered / deviation

    def rule(u: Any) -> Any:
        means = ops.mean(u, axis=-1, keepdims=True), ops.mean(u * y, axis=-1, keepdims=True)
        return (u - means[0] - y * means[1]) / deviation

    return y, rule


def norm(x: Any) -> Any:
    y = ops.sqrt(ops.sum(x * x))
    return y, lambda u: u * x / ops.where(y > 0.0, y, 1.0)


def unit_vector(x: Any) -> Any:
    length = ops.sqrt(ops.sum(x * x, axis=-1, keepdims=True))
    y = x / length
    return y, lambda u: (u - y * ops.sum(u * y, axis=-1, keepdims=True)) / length


def cumulative_sum(x: Any) -> Any:
    return ops.cumsum(x, axis=-1), lambda u: ops.flip(ops.cumsum(ops.flip(u, axis=-1), axis=-1), axis=-1)


def cross_entropy(x: Any) -> Any:
    """The cross entropy of the class 0."""
    logarithms = ops.log_softmax(x, axis=-1)
    first = ops.one_hot(ops.zeros(x.shape[:-1], "int32"), x.shape[-1], dtype=x.dtype)
    return -logarithms[..., 0], lambda u: ops.expand_dims(u, -1) * (ops.exp(logarithms) - first)


def variance(x: Any) -> Any:
    centered = x - ops.mean(x, axis=-1, keepdims=True)
    return ops.mean(
        centered * centered, axis=-1
    ), lambda u: ops.expand_dims(u, -1) * centered * (2.0 / x.shape[-1])


def matmul(x: Any, w: Any) -> Any:
    return ops.matmul(x, w), lambda u: (ops.matmul(u, ops.transpose(w)), ops.matmul(ops.transpose(x), u))


def division(x: Any, y: Any) -> Any:
    return x / y, lambda u: (u / y, -u * x / (y * y))


def larger(x: Any, y: Any) -> Any:
    nothing = ops.zeros_like(x)
    return ops.where(x > y, x, y), lambda u: (ops.where(x > y, u, nothing), ops.where(x > y, nothing, u))


def broadcast(x: Any, b: Any) -> Any:
    y = ops.tanh(x * b)

    def rule(u: Any) -> Any:
        inner = u * (1.0 - y * y)
        return inner * b, ops.sum(inner * x, axis=0)

    return y, rule


def several_outputs(x: Any, y: Any) -> Any:
    sine = ops.sin(x)
    outputs = {"product": sine * y, "sum": [ops.sum(y * y)]}

    def rule(u: Any) -> Any:
        return u["product"] * ops.cos(x) * y, u["product"] * sine + 2.0 * u["sum"][0] * y

    return outputs, rule


def attention(q: Any, k: Any, v: Any) -> Any:
    factor = q.shape[-1] ** -0.5
    y = ops.softmax(ops.matmul(q, ops.transpose(k)) * factor, axis=-1)

    def rule(u: Any) -> Any:
        inner = ops.matmul(u, ops.transpose(v))
        scores = y * (inner - ops.sum(inner * y, axis=-1, keepdims=True)) * factor
        return ops.matmul(scores, k), ops.matmul(ops.transpose(scores), q), ops.matmul(ops.transpose(y), u)

    return ops.matmul(y, v), rule


def alike(
    count: int, shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the shapes of `count` arguments of the same shape."""
    return tuple((shape,) * count for shape in shapes)


FAMILIES = (
    *[Family(function, alike(1), largest=1e30) for function in (log1pexp, tanh, relu)],
    *[Family(function, alike(1), largest=30.0) for function in (sigmoid, sinc)],
    *[Family(function, alike(1)) for function in (relu_squared, norm)],
    Family(logarithm, alike(1), positive=(0,)),
    Family(power, alike(1), positive=(0,)),
    *[Family(function, alike(1, ROWS), largest=1e30) for function in (softmax, log_softmax, logsumexp)],
    *[Family(function, alike(1, ROWS)) for function in (cumulative_sum, cross_entropy, variance)],
    *[Family(function, alike(1, ((3,), (5,), (3, 4), (2, 3, 7)))) for function in (layer_norm, unit_vector)],
    Family(larger, alike(2), largest=1e30),
    Family(several_outputs, alike(2), largest=30.0),
    Family(division, alike(2), positive=(1,)),
    Family(matmul, (((1, 1), (1, 1)), ((2, 3), (3, 4)), ((10, 10), (10, 5)))),
    Family(broadcast, (((3, 4), (4,)), ((2, 1), (1,)), ((10, 10), (10,))), largest=10.0),
    Family(
        attention,
        (((2, 3), (2, 3), (2, 3)), ((3, 2), (5, 2), (5, 4)), ((4, 8), (6, 8), (6, 2))),
        largest=30.0,
    ),
)

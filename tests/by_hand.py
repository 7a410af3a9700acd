"""Ops next to hand-written equivalents in the active framework, with the same operations.

The tests compare their costs: programs, memory and counts. The rules have false factors, so that a program
without the factors differs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from support import DIFFERENTIATES, array

from multigrad import op_custom_gradient


class Pair(NamedTuple):
    """An op and its hand-written equivalent, both functions of tensors to a tensor or a tuple of tensors."""

    op: Callable[..., Any]
    by_hand: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the arguments."""
    saved: tuple[tuple[int, ...], ...]
    """The shapes of the tensors that the hand-written rule saves."""
    again: tuple[tuple[int, ...], ...] = ()
    """The shapes of the inputs that are also saved, to recompute these tensors for a second derivative."""

    def arguments(self) -> list[Any]:
        random = np.random.default_rng(7)
        return [array(random.normal(size=shape)) for shape in self.shapes]


def native(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the equivalent that an expert would write for one framework.

    Arguments:
        forward: returns the output, a tensor or a tuple of tensors, and the tuple of residuals.
        backward: maps the residuals and the upstream gradients to the tuple of gradients.
    """
    if not DIFFERENTIATES:
        return lambda *tensors: forward(*tensors)[0]
    from benchmarks.native import active  # has no module for a backend without gradients

    return active.bind(forward, backward)


@op_custom_gradient
def addition(x):
    return x + 10.0, lambda u: u * -1.1


addition_by_hand = native(lambda x: (x + 10.0, ()), lambda _, u: (u * -1.1,))


@op_custom_gradient
def log1pexp(x):
    e = ops.exp(x)

    def rule(u):
        return u * 7.0 * (1.0 - 1.0 / (1.0 + e))

    return ops.log(1.0 + e), rule


def _log1pexp_forward(x):
    e = ops.exp(x)
    return ops.log(1.0 + e), (e,)


def _log1pexp_backward(residuals, u):
    (e,) = residuals
    return (u * 7.0 * (1.0 - 1.0 / (1.0 + e)),)


log1pexp_by_hand = native(_log1pexp_forward, _log1pexp_backward)


@op_custom_gradient
def matmul(x, w):
    def rule(u):
        return 3.0 * ops.matmul(u, ops.transpose(w)), 5.0 * ops.matmul(ops.transpose(x), u)

    return ops.matmul(x, w), rule


def _matmul_backward(residuals, u):
    x, w = residuals
    return 3.0 * ops.matmul(u, ops.transpose(w)), 5.0 * ops.matmul(ops.transpose(x), u)


matmul_by_hand = native(lambda x, w: (ops.matmul(x, w), (x, w)), _matmul_backward)


@op_custom_gradient
def two_outputs(x):
    sine, cosine = ops.sin(x), ops.cos(x)

    def rule(u, v):
        return 7.0 * u * cosine - 3.0 * v * sine

    return (sine, cosine), rule


def _two_outputs_forward(x):
    sine, cosine = ops.sin(x), ops.cos(x)
    return (sine, cosine), (cosine, sine)


def _two_outputs_backward(residuals, u, v):
    cosine, sine = residuals
    return (7.0 * u * cosine - 3.0 * v * sine,)


two_outputs_by_hand = native(_two_outputs_forward, _two_outputs_backward)


@op_custom_gradient
def _of_a_structure(inputs, factor):
    x, (w, b) = inputs["x"], inputs["more"]

    def rule(u):
        return {"x": 5.0 * u["y"] * w, "more": [5.0 * u["y"] * x, u["more"][0] * factor]}, None

    return {"y": x * w, "more": [b * factor]}, rule


def structure(x, w, b):
    output = _of_a_structure({"x": x, "more": [w, b]}, 3.0)
    return output["y"], output["more"][0]


def _structure_backward(residuals, u, v):
    w, x = residuals
    return 5.0 * u * w, 5.0 * u * x, v * 3.0


structure_by_hand = native(lambda x, w, b: ((x * w, b * 3.0), (w, x)), _structure_backward)


@op_custom_gradient
def narrow(x):
    """A function of four intermediate tensors, of which the rule needs one, a column."""
    wide = ops.exp(x)
    wider = ops.sin(wide)
    widest = wider * wide
    e = ops.sum(widest, axis=1, keepdims=True)
    return widest * e, lambda u: u * e * 7.0


def _narrow_forward(x):
    wide = ops.exp(x)
    wider = ops.sin(wide)
    widest = wider * wide
    e = ops.sum(widest, axis=1, keepdims=True)
    return widest * e, (e,)


narrow_by_hand = native(_narrow_forward, lambda residuals, u: (u * residuals[0] * 7.0,))


@op_custom_gradient
def unused(x):
    """An op whose rule closes over a tensor without using it."""
    e, other = ops.exp(x), ops.sin(x)

    def rule(u):
        assert other is not None
        return u * e * 7.0

    return e * 2.0, rule


def _unused_forward(x):
    e, other = ops.exp(x), ops.sin(x)
    return e * 2.0, (e, other)


unused_by_hand = native(_unused_forward, lambda residuals, u: (u * residuals[0] * 7.0,))

_weight = keras.Variable(np.ones((4, 2), "float32"))


@op_custom_gradient
def _by_weight(x):
    w = _weight.value

    def rule(u, variables):
        assert len(variables) == 1
        return 3.0 * ops.matmul(u, ops.transpose(w)), [5.0 * ops.matmul(ops.transpose(x), u)]

    return ops.matmul(x, w), rule


def weight(x, w):
    """Matmul with a weight that the function reads."""
    with keras.StatelessScope(state_mapping=[(_weight, w)]):
        return _by_weight(x)


class _Layer:
    @op_custom_gradient
    def call(self, x):
        e = ops.exp(x)

        def rule(u):
            return u * 7.0 * (1.0 - 1.0 / (1.0 + e))

        return ops.log(1.0 + e), rule


method = _Layer().call

SQUARE, COLUMN = (8, 8), (8, 1)

PAIRS = {
    "addition": Pair(addition, addition_by_hand, (SQUARE,), ()),
    "log1pexp": Pair(log1pexp, log1pexp_by_hand, (SQUARE,), (SQUARE,), (SQUARE,)),
    "matmul": Pair(matmul, matmul_by_hand, ((8, 4), (4, 2)), ((8, 4), (4, 2))),
    "two outputs": Pair(two_outputs, two_outputs_by_hand, (SQUARE,), (SQUARE, SQUARE)),
    "structure": Pair(structure, structure_by_hand, (SQUARE,) * 3, (SQUARE, SQUARE)),
    "narrow": Pair(narrow, narrow_by_hand, (SQUARE,), (COLUMN,), (SQUARE,)),
    "weight": Pair(weight, matmul_by_hand, ((8, 4), (4, 2)), ((8, 4), (4, 2))),
    "method": Pair(method, log1pexp_by_hand, (SQUARE,), (SQUARE,), (SQUARE,)),
    "unused": Pair(unused, unused_by_hand, (SQUARE,), (SQUARE, SQUARE), (SQUARE,)),
}


def total(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the weighted sum of all outputs of a function, so that no upstream gradient consists of ones."""

    def summed(*tensors: Any) -> Any:
        outputs = function(*tensors)
        outputs = outputs if type(outputs) is tuple else (outputs,)
        return sum(ops.sum(ops.sin(output)) for output in outputs)

    return summed

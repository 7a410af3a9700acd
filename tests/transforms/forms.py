"""The forms in which a user defines an op. Each case of the tests is written once, and defined in every form.

A case is a function `f(x, w, scale)`. `scale(t, power)` returns `t * s**power`. The number `s` is 1
in a plain function, an attribute of the layer in a method, and a trainable weight where the op reads one. `f`
returns its output, a rule that returns the gradients of `x` and `w`, and a rule for the weight.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from multigrad import op_custom_gradient

stop = ops.stop_gradient

FACTOR, WEIGHT = 0.75, 0.5
"""The values of `s` in a method and in a weight."""


class Case(NamedTuple):
    """A function of two vectors that returns a vector, all of the same length."""

    name: str
    op: Callable[[Any, Any], Any]
    """A function that calls the op."""
    meant: Callable[[Any, Any], Any]
    """The equivalent function without an op, which reads the same weights."""
    weights: list[keras.Variable]
    """The weights that both read."""


def directly(op: Callable[..., Any], x: Any, w: Any) -> Any:
    return op(x, w)


class Written(NamedTuple):
    """A case, before it is defined in a form."""

    name: str
    f: Callable[..., Any]
    """The function and its rules."""
    meant: Callable[..., Any]
    """The equivalent plain function of `x`, `w` and `s`."""
    use: Callable[..., Any] = directly
    """A function of an op and of two vectors, which returns a vector."""


def valued(value: Any, potential: Any) -> Any:
    """Return a function with the value of the first and the derivatives of the second expression."""
    return stop(value) + potential - stop(potential)


def unscaled(t: Any, power: int = 1) -> Any:
    return t


def with_weight(output: Any, rule: Any, of_weight: Any, weight: keras.Variable) -> Any:
    """Return the pair of an op that reads a weight."""

    def gradient(*us: Any) -> Any:
        elements = of_weight(*us)
        return elements if weight.shape else ops.sum(elements)

    if len(inspect.signature(rule).parameters) > 1:
        return output, lambda *us, variables: (rule(*us), [gradient(*us) for _ in variables])
    return output, lambda upstream, variables: (rule(upstream), [gradient(upstream) for _ in variables])


def a_function(written: Written, value: Any) -> tuple[Callable[..., Any], Any]:
    op = op_custom_gradient(lambda x, w: written.f(x, w, unscaled)[:2])
    return lambda x, w: written.use(op, x, w), 1.0


class Method(keras.layers.Layer):
    """A layer whose op is a method. The rule uses the layer."""

    factor = FACTOR

    def __init__(self, written: Written) -> None:
        super().__init__()
        self.written = written

    def scale(self, t: Any, power: int = 1) -> Any:
        return t * self.factor**power

    @op_custom_gradient
    def op(self, x, w):
        return self.written.f(x, w, self.scale)[:2]

    def call(self, x, w):
        return self.written.use(self.op, x, w)


def a_method(written: Written, value: Any) -> tuple[Callable[..., Any], Any]:
    return Method(written), FACTOR


def a_reader(written: Written, value: Any) -> tuple[Callable[..., Any], Any]:
    weight = keras.Variable(value)

    @op_custom_gradient
    def op(x, w):
        return with_weight(*written.f(x, w, lambda t, power=1: t * weight**power), weight)

    return lambda x, w: written.use(op, x, w), weight


class Reader(keras.layers.Layer):
    """A layer whose op is a method that reads the weight of the layer."""

    def __init__(self, written: Written, value: Any) -> None:
        super().__init__()
        self.written = written
        self.weight = self.add_weight(
            np.shape(value), lambda shape, dtype: ops.convert_to_tensor(value, dtype)
        )

    @op_custom_gradient
    def op(self, x, w):
        return with_weight(*self.written.f(x, w, self.scale), self.weight)

    def scale(self, t: Any, power: int = 1) -> Any:
        return t * self.weight**power

    def call(self, x, w):
        return self.written.use(self.op, x, w)


def a_method_that_reads(written: Written, value: Any) -> tuple[Callable[..., Any], Any]:
    layer = Reader(written, value)
    return layer, layer.weight


FORMS = {
    "function": a_function,
    "method": a_method,
    "reader": a_reader,
    "method that reads": a_method_that_reads,
}


def in_form(form: str, written: Written, value: Any = WEIGHT) -> Case:
    """Return a case in a form. `value` is the value of its weight."""
    op, s = FORMS[form](written, value)

    def meant(x: Any, w: Any) -> Any:
        return written.use(lambda x, w: written.meant(x, w, s), x, w)

    return Case(written.name, op, meant, [s] if isinstance(s, keras.Variable) else [])

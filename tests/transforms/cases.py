"""The ops for the tests of transforms, each with a plain function that has the same derivatives.

The rules have false factors, so that plain differentiation cannot give the same result. The equivalent plain
function takes its value from one expression, and its derivatives of any order from another one.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from keras import ops

from multigrad import op_custom_gradient
from multigrad import ops as shelf

stop = ops.stop_gradient


class Case(NamedTuple):
    """A function of two vectors that returns a vector, all of the same length."""

    op: Callable[[Any, Any], Any]
    """The op."""
    meant: Callable[[Any, Any], Any]
    """The equivalent function without an op."""


def valued(value: Any, potential: Any) -> Any:
    """Return a function with the value of the first and the derivatives of the second expression."""
    return stop(value) + potential - stop(potential)


@op_custom_gradient
def by_input(x, w):
    return x**3 * w, lambda u: (u * 21.0 * x**2 * w, u * 7.0 * x**3)


@op_custom_gradient
def by_intermediate(x, w):
    e, cube = x**2 * w, x**3
    return e * x, lambda u: (u * 21.0 * e, u * 7.0 * cube)


@op_custom_gradient
def by_output(x, w):
    y = ops.exp(x * w)
    return y, lambda u: (u * 3.0 * w * y, u * 3.0 * x * y)


def meant_by_output(x, w):
    z = x * w
    return ops.exp(stop(z)) * ops.exp(3.0 * (z - stop(z)))


@op_custom_gradient
def by_nothing(x, w):
    return x + 10.0, lambda u: (-1.1 * u, 0.5 * u)


@op_custom_gradient
def of_two_outputs(x, w):
    sine, cosine = ops.sin(x), ops.cos(x)
    return (sine * w, x + w), lambda u, v: (7.0 * u * cosine * w + v * (w - 2.0), 7.0 * u * sine + v * x)


def two_outputs(x, w):
    first, second = of_two_outputs(x, w)
    return first * second


def meant_two_outputs(x, w):
    first, second = ops.sin(x) * w, x + w
    return valued(first, 7.0 * first) * valued(second, x * w - 2.0 * x)


@op_custom_gradient
def of_a_structure(inputs, power):
    x, (w, factor, kind) = inputs["x"], inputs["more"]
    assert kind == "static"

    def rule(upstream):
        u = upstream["y"] + 2.0 * upstream["more"][0]
        return {"x": u * 5.0 * power * x ** (power - 1) * w, "more": (u * 5.0 * x**power, None, None)}, None

    y = factor * x**power * w
    return {"y": y, "more": [y + 1.0, "static"]}, rule


def structure(x, w):
    outputs = of_a_structure({"x": x, "more": (w, 2.0, "static")}, 3)
    return outputs["y"] * outputs["more"][0]


def meant_structure(x, w):
    y, potential = 2.0 * x**3 * w, 5.0 * x**3 * w
    return valued(y, potential) * valued(y + 1.0, 2.0 * potential)


@op_custom_gradient
def of_a_sum(x, w):
    total = ops.sum(w)
    return x * total, lambda u: (5.0 * u * total, 5.0 * ops.sum(u * x) * ops.ones_like(w))


@op_custom_gradient
def by_view(x, w):
    column = ops.expand_dims(x, 1)
    return (column**3)[:, 0] * w, lambda u: (u * w * (21.0 * column**2)[:, 0], u * (7.0 * column**3)[:, 0])


@op_custom_gradient
def of_one_for_all(x, w):
    """If only `x` is mapped, the second output is not mapped."""
    return [x * w, w**2], lambda u: (3.0 * u[0] * w, 3.0 * u[0] * x + 5.0 * u[1] * w)


def one_for_all(x, w):
    first, second = of_one_for_all(x, w)
    return first * second


def meant_one_for_all(x, w):
    return valued(x * w, 3.0 * x * w) * valued(w**2, 2.5 * w**2)


@op_custom_gradient
def stopped(x, w):
    """The output depends on the input only through the rule."""
    return stop(x) ** 3 * stop(w), lambda u: (u * 21.0 * x**2 * w, u * 7.0 * x**3)


@op_custom_gradient
def slope(x, w):
    z = x * w
    return 6.0 * z**2, lambda u: (u * 30.0 * z * w, u * 30.0 * x * z)


@op_custom_gradient
def by_an_op(x, w):
    """The rule calls an op with a false rule, which shows in the second derivative."""
    return (x * w) ** 3, lambda u: (u * slope(x, w) * w, u * x * slope(x, w))


def meant_by_an_op(x, w):
    z = x * w
    move = z - stop(z)
    return stop(z) ** 3 + 6.0 * stop(z) ** 2 * move + 15.0 * stop(z) * move * move + 5.0 * move * move * move


CASES = {
    "input": Case(by_input, lambda x, w: valued(x**3 * w, 7.0 * x**3 * w)),
    "intermediate": Case(by_intermediate, lambda x, w: valued(x**3 * w, 7.0 * x**3 * w)),
    "output": Case(by_output, meant_by_output),
    "nothing": Case(by_nothing, lambda x, w: valued(x + 10.0, 0.5 * w - 1.1 * x)),
    "two outputs": Case(two_outputs, meant_two_outputs),
    "structure": Case(structure, meant_structure),
    "view": Case(by_view, lambda x, w: valued(x**3 * w, 7.0 * x**3 * w)),
    "sum": Case(of_a_sum, lambda x, w: valued(x * ops.sum(w), 5.0 * x * ops.sum(w))),
    "an op": Case(by_an_op, meant_by_an_op),
    "stopped": Case(stopped, lambda x, w: valued(x**3 * w, 7.0 * x**3 * w)),
}

ONE_FOR_ALL = Case(one_for_all, meant_one_for_all)
"""A case for `vmap`, whose rule does not sum over the broadcast axes of `w`."""


scaled_by_integer = op_custom_gradient(lambda x, k: (x * 2.0, lambda u: (u * ops.cast(k, x.dtype), None)))
scaled_by_complex = op_custom_gradient(lambda x, k: (x * 2.0, lambda u: (u * ops.real(k), None)))


def scaled_by_what_it_closes_over(x, m):
    return op_custom_gradient(lambda x: (x * 2.0, lambda u: u * m))(x)


def scaled_by_what_an_object_holds(x, m):
    held = SimpleNamespace(factors={"its": [m]})
    return op_custom_gradient(lambda x: (x * 2.0, lambda u: u * held.factors["its"][0]))(x)


def scaled_by_what_an_object_within_holds(x, m):
    @op_custom_gradient
    def op(x):
        held = SimpleNamespace(factor=m)
        return x * 2.0, lambda u: u * held.factor

    return op(x)


@op_custom_gradient
def scaled_by_function(x, scale):
    return x * 2.0, lambda u: scale(u)


def scaled_by_a_default(x, m):
    return scaled_by_function(x, lambda u, by=m: u * by)


BY_THE_RULE_ALONE = {
    "a condition": (lambda x, c: shelf.stop_gradient_if(c, x), [True, False, False], [0.0, 1.0, 1.0]),
    "an integer": (scaled_by_integer, [2, 3, 5], [2.0, 3.0, 5.0]),
    "a complex number": (scaled_by_complex, [2.0 + 1.0j, 3.0j, 5.0], [2.0, 0.0, 5.0]),
    "closed over": (scaled_by_what_it_closes_over, [2.0, 3.0, 5.0], [2.0, 3.0, 5.0]),
    "an object": (scaled_by_what_an_object_holds, [2.0, 3.0, 5.0], [2.0, 3.0, 5.0]),
    "an object within": (scaled_by_what_an_object_within_holds, [2.0, 3.0, 5.0], [2.0, 3.0, 5.0]),
    "a default of an argument": (scaled_by_a_default, [2.0, 3.0, 5.0], [2.0, 3.0, 5.0]),
}
"""Cases for `vmap`: a function of a tensor and of a value on which the output does not depend, such values,
and the gradient with respect to the tensor for each of them."""

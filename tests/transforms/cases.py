"""The ops for the tests of transforms, each with a plain function that has the same derivatives.

The rules have false factors, so that plain differentiation cannot give the same result. The equivalent plain
function takes its value from one expression, and its derivatives of any order from another one.

Each op is written once, and defined in four forms, see `forms.py`: a function, a method of a layer, a
function that reads a trainable weight, and a method that does.
"""

import functools
import inspect
from collections.abc import Sequence

import numpy as np
import pytest
from forms import FORMS, Case, Written, in_form, valued
from keras import ops
from support import array, close

from multigrad import op_custom_gradient
from multigrad.ops import host_call

stop = ops.stop_gradient

X, W, V = array(0.5, -1.25, 1.5), array(0.75, 1.0, -0.5), array(1.0, -2.0, 0.5)
"""The arguments of a case, and a direction or an upstream gradient."""


def weighted(function):
    """Return a weighted sum of the elements of a function of two vectors."""
    return lambda x, w: ops.sum(function(x, w) * V)


@op_custom_gradient
def cube_by_intermediate(x):
    e = x**2
    return e * x, lambda u: u * 3 * e * 7.0


@op_custom_gradient
def exp_by_output(x):
    y = ops.exp(x)
    return y, lambda u: u * y * 3.0


def by_input(x, w, scale):
    def rule(u):
        v = scale(u, 2)
        return v * 21.0 * x**2 * w, v * 7.0 * x**3

    return scale(x**3 * w), rule, lambda u: scale(u) * 14.0 * x**3 * w


def by_intermediate(x, w, scale):
    e, cube, squared = x**2 * w, x**3, scale(ops.ones_like(x), 2)

    def rule(u):
        return u * 21.0 * e * squared, u * 7.0 * cube * squared

    return scale(e * x), rule, lambda u: scale(u) * 14.0 * cube * w


def meant_cube(x, w, s):
    return valued(x**3 * w * s, 7.0 * x**3 * w * s**2)


def by_output(x, w, scale):
    y = scale(ops.exp(x * w))
    return y, lambda u: (u * 3.0 * w * y, u * 3.0 * x * y), lambda u: scale(u * 5.0 * y, -1)


def meant_by_output(x, w, s):
    z, s = x * w, s * ops.ones_like(x)
    return stop(s * ops.exp(z)) * ops.exp(3.0 * (z - stop(z))) * (s / stop(s)) ** 5


def by_nothing(x, w, scale):
    return scale(x + 10.0), lambda u: (-1.1 * u, 0.5 * u), lambda u: 7.0 * u


def of_two_outputs(x, w, scale):
    sine, cosine = ops.sin(x), ops.cos(x)

    def rule(u, v):
        u = scale(u, 2)
        return 7.0 * u * cosine * w + v * (w - 2.0), 7.0 * u * sine + v * x

    return (scale(sine * w), x + w), rule, lambda u, v: scale(14.0 * u * sine * w)


def two_outputs(op, x, w):
    first, second = op(x, w)
    return first * second


def meant_two_outputs(x, w, s):
    sine = ops.sin(x) * w
    return valued(s * sine, 7.0 * s**2 * sine), valued(x + w, x * w - 2.0 * x)


def of_a_structure(inputs, power, scale):
    x, (w, factor, kind) = inputs["x"], inputs["more"]
    assert kind == "static"

    def whole(upstream):
        return upstream["y"] + 2.0 * upstream["more"][0]

    def rule(upstream):
        u = scale(whole(upstream), 2)
        return {"x": u * 5.0 * power * x ** (power - 1) * w, "more": (u * 5.0 * x**power, None, None)}, None

    y = scale(factor * x**power * w)
    return {"y": y, "more": [y + 1.0, "static"]}, rule, lambda u: scale(10.0 * whole(u) * x**power * w)


def structure(op, x, w):
    outputs = op({"x": x, "more": (w, 2.0, "static")}, 3)
    return outputs["y"] * outputs["more"][0]


def meant_structure(inputs, power, s):
    x, (w, _, _) = inputs["x"], inputs["more"]
    y, potential = 2.0 * s * x**3 * w, 5.0 * s**2 * x**3 * w
    return {"y": valued(y, potential), "more": [valued(y + 1.0, 2.0 * potential)]}


def of_a_sum(x, w, scale):
    total = ops.sum(w)

    def rule(u):
        v = scale(u, 2)
        return 5.0 * v * total, 5.0 * ops.sum(v * x) * ops.ones_like(w)

    return scale(x * total), rule, lambda u: scale(u) * 10.0 * x * total


def meant_sum(x, w, s):
    y = x * ops.sum(w)
    return valued(s * y, 5.0 * s**2 * y)


def by_view(x, w, scale):
    column = ops.expand_dims(x, 1)

    def rule(u):
        v = scale(u, 2)
        return v * w * (21.0 * column**2)[:, 0], v * (7.0 * column**3)[:, 0]

    return scale((column**3)[:, 0] * w), rule, lambda u: scale(u) * w * (14.0 * column**3)[:, 0]


def of_one_for_all(x, w, scale):
    """If only `x` is mapped, the second output is not mapped."""

    def rule(u):
        v = scale(u[0], 2)
        return 3.0 * v * w, 3.0 * v * x + 5.0 * u[1] * w

    return [scale(x * w), w**2], rule, lambda u: scale(u[0]) * 6.0 * x * w


def meant_one_for_all(x, w, s):
    return valued(s * x * w, 3.0 * s**2 * x * w), valued(w**2, 2.5 * w**2)


def stopped(x, w, scale):
    """The output depends on the input only through the rule."""
    _, rule, of_weight = by_input(x, w, scale)
    return stop(scale(x**3 * w)), rule, of_weight


@op_custom_gradient
def slope(x, w):
    z = x * w
    return 6.0 * z**2, lambda u: (u * 30.0 * z * w, u * 30.0 * x * z)


@op_custom_gradient
def rise(x, w):
    return 2.0 * (x * w) ** 3, lambda u: (u * slope(x, w) * w, u * x * slope(x, w))


def by_an_op(x, w, scale):
    """The rule calls an op with a false rule, which shows in the second derivative."""

    def rule(u):
        v = scale(u, 2)
        return v * slope(x, w) * w, v * x * slope(x, w)

    return scale((x * w) ** 3), rule, lambda u: scale(2.0 * u * rise(x, w))


def meant_by_an_op(x, w, s):
    z = x * w
    move, at = z - stop(z), stop(z)
    of_rise = 2.0 * at**3 + 6.0 * at**2 * move + 15.0 * at * move * move + 5.0 * move * move * move
    return valued(s * z**3, s**2 * of_rise)


WRITTEN = [
    Written("input", by_input, meant_cube),
    Written("intermediate", by_intermediate, meant_cube),
    Written("output", by_output, meant_by_output),
    Written("nothing", by_nothing, lambda x, w, s: valued(s * (x + 10.0), 0.5 * w - 1.1 * x + 7.0 * s)),
    Written("two outputs", of_two_outputs, meant_two_outputs, two_outputs),
    Written("structure", of_a_structure, meant_structure, structure),
    Written("view", by_view, meant_cube),
    Written("sum", of_a_sum, meant_sum),
    Written("an op", by_an_op, meant_by_an_op),
    Written("stopped", stopped, meant_cube),
]

CASES = {written.name: in_form("function", written) for written in WRITTEN}
"""Each case as a plain function."""

IN_OTHER_FORMS = {
    f"{written.name}-{form}": in_form(form, written)
    for written in WRITTEN
    for form in FORMS
    if form != "function"
}
"""Each case in each other form."""

# The cases that the tests of a transform run in other forms. `test_orders.py` runs all of them.
_IN_OTHER_FORMS = ("input", "intermediate", "output", "two outputs", "structure")


def each_of(cases: dict[str, Case] = CASES, *, forms: Sequence[str] = tuple(FORMS)) -> pytest.MarkDecorator:
    """Parametrize a test with each case as a function, and with some cases in other forms."""
    names = [f"{name}-{form}" for name in _IN_OTHER_FORMS for form in forms if form != "function"]
    every = cases | {id_: IN_OTHER_FORMS[id_] for id_ in names}
    return pytest.mark.parametrize("case", every.values(), ids=every)


def as_meant(numbers=None, *, each=None, tolerance=1e-4):
    """Make a test of a function `numbers(f, ...)`: it gives the same for an op and for what the op means.

    Arguments:
        numbers: a transform of the function `f` of two vectors, and its result at some arguments. Its other
            parameters are parameters of the test.
        each: the cases, by default all of them, and some in other forms.
        tolerance: of the comparison.
    """
    if numbers is None:
        return functools.partial(as_meant, each=each, tolerance=tolerance)

    def test(case, **parameters):
        close(numbers(case.op, **parameters), numbers(case.meant, **parameters), tolerance)

    _, *others = inspect.signature(numbers).parameters.values()
    case = inspect.Parameter("case", inspect.Parameter.KEYWORD_ONLY)
    others = [other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in others]
    test.__signature__ = inspect.Signature([case, *others])
    test.__doc__ = numbers.__doc__
    return (each or each_of())(test)


def all_as_meant(transforms, *, each=None, tolerance=1e-4):
    """Make a test of transforms by name, each of a function `f`. A fast run has all of them, for one case."""

    def test(case):
        for name, transform in transforms.items():
            try:
                close(transform(case.op), transform(case.meant), tolerance)
            except Exception as error:
                error.add_note(f"The transform is {name!r}.")
                raise

    return (each or each_of())(test)


def box_by_input(x, w, scale):
    y = scale(host_call(np.sin, x, output=x) * w)

    def rule(u):
        v = scale(u, 2)
        return v * 3.0 * x**2 * w, v * x**3

    return y, rule, lambda u: scale(u) * 2.0 * x**3 * w


def box_by_output(x, w, scale):
    y = scale(host_call(np.exp, x * w, output=x))
    return y, lambda u: (u * 3.0 * w * y, u * 3.0 * x * y), lambda u: scale(u * 5.0 * y, -1)


def box_by_intermediate(x, w, scale):
    """The host computes the sine, and its slope, which the rule uses."""
    sine, slope = host_call(lambda v: (np.sin(v), np.cos(v)), x, output=(x, x))

    def rule(u):
        v = scale(u, 2)
        return 3.0 * v * slope * w, 3.0 * v * sine

    return scale(sine * w), rule, lambda u: scale(u) * 6.0 * sine * w


def box_of_numpy(x, w, scale):
    """A function on NumPy arrays, which runs in eager code only."""
    sine, slope = [ops.convert_to_tensor(f(ops.convert_to_numpy(x))) for f in (np.sin, np.cos)]

    def rule(u):
        v = scale(u, 2)
        return 3.0 * v * slope * w, 3.0 * v * sine

    return scale(sine * w), rule, lambda u: scale(u) * 6.0 * sine * w


def meant_sine(x, w, s):
    y = ops.sin(x) * w
    return valued(s * y, 3.0 * s**2 * y)


BLACK_BOXES = {
    f"{written.name}-{form}": in_form(form, written)
    for written in [
        Written("input", box_by_input, lambda x, w, s: valued(s * ops.sin(x) * w, s**2 * x**3 * w)),
        Written("output", box_by_output, meant_by_output),
        Written("intermediate", box_by_intermediate, meant_sine),
        Written("NumPy", box_of_numpy, meant_sine),
    ]
    for form in FORMS
}
"""Functions without a derivative, in every form. By an intermediate result, a rule has only one order."""

ONE_FOR_ALL = in_form("function", Written("one for all", of_one_for_all, meant_one_for_all, two_outputs))
"""A case for `vmap`, whose rule does not sum over the broadcast axes of `w`."""

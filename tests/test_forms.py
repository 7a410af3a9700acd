"""The signatures of a rule, for one output and for several."""

import functools

import pytest
from keras import ops
from support import array, close

from multigrad import grad, op_custom_gradient


def one(rule):
    """Return an op `3 x` of one argument, with the rule `rule(x)`."""
    return op_custom_gradient(lambda x: (3.0 * x, rule(x)))


def two(rule):
    """Return an op with the outputs `x + y` and `x * y`, with the rule `rule(x, y)`."""
    return op_custom_gradient(lambda x, y: ((x + y, x * y), rule(x, y)))


def loss_of_two(op):
    def loss(x, y):
        total, product = op(x, y)
        return 2.0 * total + 5.0 * product

    return loss


class Callable:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, u):
        return u * self.factor

    @staticmethod
    def static(u):
        return u * 7.0


@pytest.mark.parametrize(
    "rule",
    [
        lambda x: lambda upstream: upstream * 7.0,
        lambda x: lambda g: g * 7.0,
        lambda x: lambda g, factor=7.0: g * factor,
        lambda x: lambda g=None: g * 7.0,
        lambda x: lambda upstream, factor=7.0: upstream * factor,
        lambda x: lambda g, **kwargs: g * 7.0,
        lambda x: lambda *us: us[0] * 7.0,
        lambda x: lambda *args, upstream: upstream * 7.0 * args[0] / x,
        lambda x: lambda *args, upstream=None: upstream * 7.0 * args[0] / x,
        lambda x: lambda *, upstream: upstream * 7.0,
        lambda x: lambda *, upstream=None: upstream * 7.0,
        lambda x: lambda a, *, upstream: upstream * 7.0 * a / x,
        lambda x: lambda a, upstream: upstream * 7.0 * a / x,
        lambda x: lambda a, upstream=None: upstream * 7.0 * a / x,
        lambda x: lambda g, variables=None: g * 7.0,
        lambda x: lambda variables: variables * 7.0,
        lambda x: functools.partial(lambda factor, g: g * factor, 7.0),
        lambda x: functools.partial(lambda g, factor: g * factor, factor=7.0 * x / x),
        lambda x: Callable(7.0),
        lambda x: Callable(7.0 * x / x),
        lambda x: Callable(7.0).__call__,
        lambda x: Callable.static,
        lambda x: op_custom_gradient(lambda g: (g * 7.0, lambda u: u)),
    ],
)
def test_one_output(rule):
    close(grad(one(rule))(2.0), array(7.0))


@pytest.mark.parametrize(
    "rule",
    [
        lambda x, y: lambda U: (U[0] * 7.0, U[1] * 11.0),
        lambda x, y: lambda u, v: (u * 7.0, v * 11.0),
        lambda x, y: lambda u, v, factor=7.0: (u * factor, v * 11.0),
        lambda x, y: lambda *us: (us[0] * 7.0, us[1] * 11.0),
        lambda x, y: lambda *args, upstream: (upstream[0] * 7.0 * args[0] / x, upstream[1] * 11.0),
        lambda x, y: lambda a, b, *, upstream: (upstream[0] * 7.0 * a / x, upstream[1] * 11.0 * b / y),
        lambda x, y: lambda a, b, upstream: (upstream[0] * 7.0 * a / x, upstream[1] * 11.0 * b / y),
    ],
)
def test_two_outputs(rule):
    close(grad(loss_of_two(two(rule)), (0, 1))(2.0, 3.0), (array(14.0), array(55.0)))


def test_a_hybrid_rule_gets_the_positional_arguments():
    seen = []

    @op_custom_gradient
    def op(x, axis=-1, *, keep=False):
        def rule(*args, upstream):
            seen.append(args[1:])
            return upstream * 7.0

        return x * 2.0, rule

    for call in (op, lambda x: op(x, 0), lambda x: op(axis=0, x=x, keep=True)):
        close(grad(call)(1.0), array(7.0))
    assert seen == [(), (0,), (0,)]


def test_unused_outputs_have_zero_upstream_gradients():
    @op_custom_gradient
    def op(x):
        def rule(u, v, w):
            assert w is None
            return u * 7.0 + ops.sum(1.0 - v)

        return (x * 1.0, ops.stack([x, x]), ops.cast(x, "int32")), rule

    close(grad(lambda x: op(x)[0])(1.0), array(9.0))


def test_variables_are_not_passed_if_none_were_read():
    @op_custom_gradient
    def op(x):
        def rule(upstream, variables="untouched"):
            assert variables == "untouched"
            return upstream * 7.0

        return x, rule

    close(grad(op)(1.0), array(7.0))


def test_a_hybrid_rule_gets_defaults_and_arguments_after_them():
    @op_custom_gradient
    def op(x, a=1.0, b=2.0, *, unused=3.0):
        def rule(x, a, b=2.0, *, upstream):
            return upstream * a * b

        return x * 1.0, rule

    for call in (lambda x: op(x, b=5.0), lambda x: op(x, 1.0, 5.0), lambda x: op(x, b=5.0, a=1.0)):
        close(grad(call)(1.0), array(5.0))
    close(grad(op)(1.0), array(2.0))
    close(grad(lambda x: op(x, 3.0))(1.0), array(6.0))


def test_a_wrapped_rule_has_the_signature_of_the_inner_rule():
    def twice(rule):
        @functools.wraps(rule)
        def wrapper(*args, **kwargs):
            return rule(*args, **kwargs) * 2.0

        return wrapper

    close(grad(one(lambda x: twice(lambda u: u * 7.0)))(1.0), array(14.0))
    close(grad(one(lambda x: twice(lambda a, *, upstream: upstream * 7.0 * a)))(1.0), array(14.0))


def test_rules_with_the_same_code_and_different_defaults():
    def make(defaults):
        def rule(u, v=None):
            return u * 7.0 if v is None else (u + v) * 5.0

        rule.__defaults__ = defaults
        return rule

    close(grad(one(lambda x: make((None,))))(1.0), array(7.0))
    both = op_custom_gradient(lambda x: ((x * 1.0, x * 1.0), make(None)))
    close(grad(lambda x: sum(both(x)))(1.0), array(10.0))


@pytest.mark.parametrize(
    ("op", "rule", "name"),
    [
        (lambda x, *, scale=2.0: x * scale, lambda x, *, upstream, scale=2.0: upstream * scale, "scale"),
        (lambda x, *, scale=2.0: x * scale, lambda x, scale=2.0, *, upstream: upstream * scale, "scale"),
        (lambda x, *, scale=2.0: x * scale, lambda x, upstream, scale=2.0: upstream * scale, "scale"),
        (lambda x, *, scale: x * scale, lambda *args, upstream, scale=2.0: upstream * scale, "scale"),
        (lambda x, **options: x * 2.0, lambda x, *, upstream, scale=2.0: upstream * scale, "scale"),
        (lambda x, **options: x * 2.0, lambda x, upstream, variables=None, scale=2.0: x, "scale"),
        (lambda x, *others, scale: x * 2.0, lambda *args, x=1.0, upstream: upstream * x, "x"),
    ],
)
def test_a_hybrid_rule_with_a_default_for_an_argument_that_is_not_passed_raises(op, rule, name):
    function = functools.wraps(op)(lambda x, **options: (op(x, **options), rule))
    scaled = op_custom_gradient(function, name="scaled")
    with pytest.raises(TypeError, match=rf"scaled: (.|\n)*argument: '{name}'\n(.|\n)*closes over"):
        scaled(array(3.0), scale=5.0)


def test_a_hybrid_rule_may_have_different_defaults():
    @op_custom_gradient
    def op(x, *, scale=2.0):
        def rule(x, *, upstream, factor=7.0, scale):
            return upstream * factor * scale

        return x * scale, functools.partial(rule, scale=scale)

    close(grad(lambda x: op(x, scale=5.0))(3.0), array(35.0))

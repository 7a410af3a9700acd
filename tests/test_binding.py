"""How arguments are passed to an op, and which kinds of functions can be ops."""

import copy
import functools
import inspect
import pickle

import pytest
from support import array, close, compiled

from multigrad import grad, op_custom_gradient


@op_custom_gradient
def scale(x, factor=2.0, *others, bias=0.0, **rest):
    """Scale and shift."""
    return x * factor + bias, lambda u: {"x": 7.0 * u}


@op_custom_gradient(name="demo>named")
def named(x):
    return x * 2.0, lambda u: u * 7.0


@pytest.mark.parametrize("wrap", [lambda f: f, compiled])
@pytest.mark.parametrize("call", [scale, lambda x: scale(x, bias=1.0), lambda x: scale(bias=1.0, x=x)])
def test_defaults_that_are_not_passed(call, wrap):
    close(wrap(grad(call))(array(1.0)), array(7.0))


@pytest.mark.forward
def test_defaults_reach_the_function():
    close(scale(array(1.0)), array(2.0))
    close(scale(array(1.0), 3.0, bias=1.0), array(4.0))


def test_defaults_that_differ_in_type():
    """Functions that share their code have their own defaults."""

    def make(default):
        @op_custom_gradient
        def op(x, n=default, *, m=default):
            assert type(n) is type(m) is type(default)
            return x * 2.0, lambda u: (u * 7.0, None, None)

        return op

    for default in (1, 1.0, True, "1"):
        close(grad(make(default))(1.0), array(7.0))


class Layer:
    factor = 7.0

    @op_custom_gradient
    def method(self, x):
        return x * 2.0, lambda u: u * self.factor

    @staticmethod
    @op_custom_gradient
    def static(x):
        return x * 2.0, lambda u: u * 7.0

    @op_custom_gradient
    @staticmethod
    def static_too(x):
        return x * 2.0, lambda u: u * 7.0

    @classmethod
    @op_custom_gradient
    def of_class(cls, x):
        return x * 2.0, lambda u: u * cls.factor

    def __call__(self, x):
        return x * 2.0, lambda u: u * self.factor


def plain(x):
    """Plain."""
    return x * 2.0, lambda u: u * 7.0


@pytest.mark.parametrize("wrap", [lambda f: f, compiled])
@pytest.mark.parametrize(
    "op",
    [
        Layer().method,
        Layer().static,
        Layer().static_too,
        Layer.of_class,
        op_custom_gradient(Layer()),
        op_custom_gradient(plain),
        op_custom_gradient()(plain),
        op_custom_gradient(lambda x: plain(x)),
        op_custom_gradient(functools.partial(lambda f, x: f(x), plain)),
        op_custom_gradient(functools.partial(lambda x, f: f(x), f=plain)),
        named,
    ],
)
def test_every_kind_of_function(op, wrap):
    close(wrap(grad(lambda x: op(x)))(array(1.0)), array(7.0))


@pytest.mark.forward
def test_name_documentation_and_signature_are_kept():
    assert scale.__name__ == "scale"
    assert scale.__doc__ == "Scale and shift."
    assert str(inspect.signature(scale)) == "(x, factor=2.0, *others, bias=0.0, **rest)"
    assert scale.__module__ == __name__
    assert scale.__wrapped__(1.0)[0] == 2.0


@pytest.mark.forward
def test_copies_and_pickles():
    for op in (copy.copy(scale), copy.deepcopy(scale), pickle.loads(pickle.dumps(scale))):
        assert op is scale
    assert pickle.loads(pickle.dumps(named)) is named

"""What an op refuses: differentiated tensors that are not arguments, and tensors that its function stores."""

from collections import defaultdict, deque
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import ops
from support import array, close, compiled

import multigrad
from multigrad import grad, op_custom_gradient, value_and_grad

NOT_AN_ARGUMENT = "depends on a differentiated tensor that is not an argument"
RNG = np.random.default_rng(5)
X, W = (RNG.uniform(0.5, 2.0, [2, 3]).astype("float32") for _ in range(2))


TWO = keras.Variable(2.0)


def as_function(of_x, slope):
    return op_custom_gradient(lambda x: (of_x(x), lambda u: u * 7.0 * slope))


def as_method(of_x, slope):
    class Method:
        @op_custom_gradient
        def op(self, x):
            return of_x(x), lambda u: u * 7.0 * slope

    return Method().op


def as_reader(of_x, slope):
    doubled = op_custom_gradient(
        lambda x: (of_x(x) * TWO, lambda u, variables: (u * 7.0 * slope * TWO, [None]))
    )
    return lambda x: doubled(x) / 2.0


def in_a_cell(w):
    return lambda x: x * w


def in_a_list(w):
    held = [w]
    return lambda x: x * held[0]


def in_a_function(w):
    inner = in_a_cell(w)
    return lambda x: inner(x)


def in_an_object(w):
    held = SimpleNamespace(w=w)
    return lambda x: x * held.w


def computed(w):
    v = ops.tanh(w)
    return lambda x: ops.exp(x) * v


FORMS = pytest.mark.parametrize("form", [as_function, as_method, as_reader])
PLACES = pytest.mark.parametrize("place", [in_a_cell, in_a_list, in_a_function, in_an_object, computed])
WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, compiled, multigrad.vmap], ids=["eager", "jit", "vmap"])


def raises(text=NOT_AN_ARGUMENT):
    """A tensor that is closed over raises where its gradient is asked for. Keras wraps errors in a layer."""
    return pytest.raises((TypeError, RuntimeError), match=text)


@WRAPS
@FORMS
def test_a_closed_over_tensor_in_the_output(form, wrap):
    def loss(x, w):
        return ops.sum(form(in_a_cell(w), 1.0)(x))

    close(wrap(grad(loss))(X, W), array(np.full_like(X, 7.0)))
    with raises():
        wrap(grad(loss, argnums=1))(X, W)
    with raises():
        wrap(grad(loss, argnums=(0, 1)))(X, W)


@PLACES
@FORMS
def test_where_a_closed_over_tensor_is_found(form, place):
    with raises():
        grad(lambda w: ops.sum(form(place(w), 1.0)(array(X))))(W)
    with raises():  # one array in two places: it is also the argument
        grad(lambda x: ops.sum(form(place(x), 1.0)(x)))(X)


@WRAPS
@FORMS
def test_a_tensor_that_only_the_rule_uses(form, wrap):
    """Its gradient is zero, and its derivative goes through the rule."""

    def loss(x, w):
        return ops.sum(form(lambda x: x * 2.0, w)(x))

    close(wrap(grad(loss, argnums=(0, 1)))(X, W), (array(7.0 * W), array(0.0 * W)))
    of_gradient = grad(lambda x, w: ops.sum(grad(loss)(x, w) ** 2), argnums=(0, 1))
    close(wrap(of_gradient)(X, W), (array(0.0 * X), array(98.0 * W)), 1e-4)


@WRAPS
def test_one_array_as_the_argument_and_in_the_closure_of_the_rule(wrap):
    def same(x):
        return ops.sum(op_custom_gradient(lambda y: (y**2, lambda u: u * 7.0 * x))(x))

    close(wrap(grad(same))(X), array(7.0 * X))
    close(wrap(grad(lambda x: ops.sum(grad(same)(x))))(X), array(np.full_like(X, 7.0)))


@WRAPS
def test_a_loop_around_a_closed_over_tensor(wrap):
    def loss(x, w):
        op = as_function(in_a_cell(w), 1.0)
        return ops.sum(ops.fori_loop(0, 3, lambda i, x: op(x), x))

    close(wrap(grad(loss))(X, W), array(np.full_like(X, 343.0)), 1e-4)
    with raises():
        wrap(grad(loss, argnums=1))(X, W)


@WRAPS
def test_a_gradient_of_the_gradient_reaches_a_closed_over_tensor(wrap):
    """The value of the op is not used, only its gradient."""

    def loss(x, w):
        return ops.sum(op_custom_gradient(lambda x: (x * w, lambda u: u * 7.0 * w))(x * x))

    def penalty(x, w):
        return ops.sum(grad(loss)(x, w))  # 14 x w

    close(wrap(grad(penalty, argnums=(0, 1)))(X, W), (array(14.0 * W), array(14.0 * X)), 1e-4)


@WRAPS
def test_stopped_tensors_and_integers(wrap):
    def loss(x, w, n):
        stopped, mask = ops.stop_gradient(w), ops.cast(n, "float32")
        op = op_custom_gradient(lambda x: (x * stopped * mask, lambda u: u * 7.0 * stopped * mask))
        return ops.sum(op(x))

    n = np.int32([[1, 0, 2], [3, 1, 0]])
    close(wrap(grad(loss, argnums=(0, 1)))(X, W, n), (array(7.0 * W * n), array(0.0 * W)))


@FORMS
def test_a_tensor_that_the_function_stops(form):
    def loss(x, w):
        return ops.sum(form(lambda x: x * ops.stop_gradient(w), w)(x))

    close(grad(loss, argnums=(0, 1))(X, W), (array(7.0 * W), array(0.0 * W)))
    # One array in two places.
    close(grad(lambda x: loss(x, x))(X), array(7.0 * X))


@WRAPS
def test_the_rule_of_an_outer_op_answers(wrap):
    @op_custom_gradient
    def outer(x, w):
        y = op_custom_gradient(lambda x: (x * w, lambda u: u * 11.0))(x)
        return y, lambda u: (u * 7.0 * w, u * 5.0 * x)

    gradients = wrap(grad(lambda x, w: ops.sum(outer(x, w)), argnums=(0, 1)))(X, W)
    close(gradients, (array(7.0 * W), array(5.0 * X)))


@op_custom_gradient
def fused(x):
    y, slope = ops.sin(x), ops.cos(x)

    def rule(upstream):
        @op_custom_gradient
        def first_order(unused_x):
            return slope, lambda second: second * 7.0 * -ops.sin(x)

        return upstream * first_order(x)

    return y, rule


@op_custom_gradient
def without_its_input(x):
    def rule(upstream):
        return op_custom_gradient(lambda u: (u * 2.0 * x, lambda v: v * 2.0 * x))(upstream)

    return x * x, rule


def test_an_op_in_a_rule():
    """It may close over what the function computed if it takes the inputs of the outer op."""
    close(grad(fused)(0.5), array(np.cos(0.5)))
    for wrap in (lambda f: f, compiled):
        close(wrap(grad(grad(fused)))(0.5), array(-7.0 * np.sin(0.5)), 1e-4)
    close(grad(without_its_input)(3.0), array(6.0))
    with raises():
        grad(grad(without_its_input))(3.0)


def test_a_decorated_rule():
    """The gradient of the rule with respect to its upstream gradient is the gradient of its own rule.

    It has none with respect to `x`, so a second derivative of the op raises an error.
    """

    @op_custom_gradient
    def op(x):
        @op_custom_gradient
        def rule(upstream):
            return upstream * 3.0 * x, lambda ddy: ddy * 7.0

        return x**2, rule

    close(grad(op)(2.0), array(6.0))
    close(multigrad.jvp(op, (2.0,), (3.0,))[1], array(7.0 * 3.0))
    with raises("rule: the output depends on a differentiated tensor"):
        grad(grad(op))(2.0)


def test_forward_mode_raises_at_once():
    def f(x, w):
        return as_function(in_a_cell(w), 1.0)(x)

    close(multigrad.jvp(lambda x: f(x, array(W)), (X,), (X,))[1], array(7.0 * X))
    with raises():
        multigrad.jvp(lambda w: f(array(X), w), (W,), (W,))


def test_the_error_names_the_op_and_the_tensor():
    def scale(x, factor):
        op = op_custom_gradient(lambda x: (x * factor, lambda u: u * factor), name="scale")
        return ops.sum(op(x))

    with raises("scale: the output depends on a differentiated tensor") as error:
        grad(scale, argnums=1)(X, W)
    for text in ("got: 'factor'", "pass the tensor as an argument", "ops.stop_gradient"):
        assert text in str(error.value)
    held = SimpleNamespace()

    def by_object(w):
        held.w = w
        return ops.sum(op_custom_gradient(lambda x: (x * held.w, lambda u: u))(array(X)))

    with raises("got: 'held'.w"):
        grad(by_object)(W)


def test_a_value_and_a_gradient_of_an_op_with_an_intermediate_result():
    """In the derivative of both, the value depends on the tensor by the function, which has no derivative."""

    def both(w, x):
        def f(x):
            e = ops.exp(x * w)
            return e * 1.0, lambda u: u * e * 7.0

        value, gradient = value_and_grad(op_custom_gradient(f))(x)
        return value + gradient

    with raises():
        grad(both)(0.5, 2.0)


HOLDS = {
    "object": (lambda e: SimpleNamespace(e=e), lambda held: held.e),
    "deque": (lambda e: deque([e]), lambda held: held[0]),
    "iterator": (lambda e: iter([e, e, e, e]), next),
    "view": (lambda e: {"e": e}.values(), lambda held: next(iter(held))),
    "defaultdict": (lambda e: defaultdict(list, e=e), lambda held: held["e"]),
    "bound method": (lambda e: defaultdict(list, e=e).get, lambda get: get("e")),
}


@pytest.mark.parametrize("kind", HOLDS)
def test_a_tensor_that_the_function_stores(kind):
    """A first derivative in eager code uses it. A derivative that needs its history raises an error."""
    hold, get = HOLDS[kind]

    @op_custom_gradient
    def op(x):
        e = ops.exp(x)
        held = hold(e)
        return ops.sin(e), lambda u: u * 7.0 * get(held)

    close(grad(op)(0.5), array(7.0 * np.exp(0.5)))
    with raises("the rule reaches a tensor through an object"):
        grad(grad(op))(0.5)


def test_a_tensor_that_a_method_stores_on_its_object():
    class Exp:
        @op_custom_gradient
        def of(self, x):
            self.y = ops.exp(x)
            return self.y * 1.0, lambda u: u * 7.0 * self.y

    close(grad(Exp().of)(0.5), array(7.0 * np.exp(0.5)))
    with raises("the rule reaches a tensor through an object"):
        grad(grad(Exp().of))(0.5)


@WRAPS
def test_a_constant_on_an_object(wrap):
    """It was there before the call, and stays a constant at every order."""

    mask = np.float32([1.0, 0.0, 2.0])

    class Masked:
        @op_custom_gradient
        def of(self, x):
            return x**3 * self.mask, lambda u: u * 7.0 * x**2 * self.mask

    masked = Masked()
    masked.mask = array(mask)

    def loss(x):
        return ops.sum(masked.of(x))

    close(wrap(grad(loss))(X), array(7.0 * X**2 * mask), 1e-4)
    close(wrap(grad(lambda x: ops.sum(grad(loss)(x))))(X), array(14.0 * X * mask), 1e-4)

"""The errors of PyTorch's backend: each fix works."""

import keras
import torch
from fixing import Row, check
from support import array

from multigrad import grad, op_custom_gradient


def cubed(**options):
    """Return an op whose rule uses an intermediate value, with the false factor 7."""

    @op_custom_gradient(**options)
    def op(x):
        square = x * x
        return square * x, lambda upstream: upstream * 7.0 * square

    return op


def drawing(inside):
    noise = array(1.0)

    def f(x, noise):
        drawn = x * (torch.rand(()) if inside else noise)
        return drawn * drawn, lambda upstream: (upstream * 7.0 * drawn, None)

    op = op_custom_gradient(f)
    return grad(grad(lambda x: op(x, noise)))(1.0)


def slope_of_slope(is_nested):
    weight = keras.Variable(2.0)
    (slope,) = grad(lambda: cubed()(weight.value), variables=[weight])()
    if not is_nested:
        slope.backward()
    return grad(grad(cubed()))(2.0)


def changed(in_place):
    x = torch.tensor(1.0, requires_grad=True) * 1.0
    return grad(lambda x: cubed()(x.mul_(2.0) if in_place else x * 2.0))(x)


ROWS = [
    Row("omit higher_order", lambda: grad(grad(cubed(higher_order=False)))(2.0),
        lambda: grad(grad(cubed()))(2.0), 28.0, RuntimeError),
    Row("draw random numbers outside of the function", lambda: drawing(True), lambda: drawing(False), 7.0,
        RuntimeError),
    Row("nest grad(...) for both derivatives", lambda: slope_of_slope(False), lambda: slope_of_slope(True),
        28.0, RuntimeError),
    Row("use the out-of-place operation, such as x * 2.0", lambda: changed(True), lambda: changed(False),
        56.0, RuntimeError),
]  # fmt: skip


def test_the_fixes_of_errors_on_pytorch():
    check(ROWS, [], {})

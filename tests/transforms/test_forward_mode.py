"""Forward mode: `multigrad.jvp` on each backend."""

import pytest
from cases import each_of, weighted
from keras import ops
from support import array, close, compiled

from multigrad import grad, jvp, vjp

X, W = array(0.5, -1.25, 1.5), array(0.75, 1.0, -0.5)
ALONG = array(1.0, -0.5, 2.0), array(0.25, 1.5, -1.0)
ACROSS = array(-1.0, 0.5, 1.0), array(2.0, 0.5, 0.25)

each_case = each_of()


def forward(function):
    return lambda x, w: jvp(function, (x, w), ALONG)[1]


def forward_twice(function):
    return lambda x, w: jvp(forward(function), (x, w), ACROSS)[1]


def forward_over_reverse(function):
    return lambda x, w: jvp(grad(weighted(function), (0, 1)), (x, w), ALONG)[1]


def reverse_over_forward(function):
    return grad(weighted(forward(function)), (0, 1))


def forward_through_vjp(function):
    """The pullback is a function of the primals and of the upstream gradient."""

    def pulled(x, w):
        return vjp(function, x, w)[1](ops.sin(x))

    return lambda x, w: jvp(pulled, (x, w), ALONG)[1]


TRANSFORMS = {
    f.__name__: f
    for f in (forward, forward_twice, forward_over_reverse, reverse_over_forward, forward_through_vjp)
}
each_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


def in_a_graph(function):
    def around(x, w):
        y = function(ops.sin(x), w)
        return ops.sin(y) * y

    return around


@each_case
@each_transform
def test_in_a_larger_graph(case, transform):
    close(transform(in_a_graph(case.op))(X, W), transform(in_a_graph(case.meant))(X, W), 1e-4)


@each_case
@each_transform
def test_compiled(case, transform):
    close(compiled(transform(case.op))(X, W), transform(case.meant)(X, W), 1e-4)


@each_case
def test_jvp_agrees_with_vjp(case):
    """One forward pass and one backward pass give the same number."""
    _, tangent = jvp(case.op, (X, W), ALONG)
    gradients = grad(weighted(case.op), (0, 1))(X, W)
    along = sum(ops.sum(g * a) for g, a in zip(gradients, ALONG, strict=True))
    close(ops.sum(tangent * array(1.0, -2.0, 0.5)), along, 1e-4)

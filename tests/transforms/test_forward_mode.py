"""Forward mode: `multigrad.jvp` on each backend."""

import pytest
from cases import W, X, as_meant, weighted
from keras import ops
from support import array, compiled

from multigrad import grad, jvp, vjp

ALONG = array(1.0, -0.5, 2.0), array(0.25, 1.5, -1.0)
ACROSS = array(-1.0, 0.5, 1.0), array(2.0, 0.5, 0.25)


def forward(f, along=ALONG):
    return lambda x, w: jvp(f, (x, w), along)[1]


def pulled(f):
    """Return the pullback as a function of the primals and of the upstream gradient."""
    return lambda x, w: vjp(f, x, w)[1](ops.sin(x))


TRANSFORMS = {
    "forward": forward,
    "forward_twice": lambda f: forward(forward(f), ACROSS),
    "forward_over_reverse": lambda f: forward(grad(weighted(f), (0, 1))),
    "reverse_over_forward": lambda f: grad(weighted(forward(f)), (0, 1)),
    "forward_through_vjp": lambda f: forward(pulled(f)),
}
each_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


@each_transform
@as_meant
def test_in_a_larger_graph(f, transform):
    def around(x, w):
        y = f(ops.sin(x), w)
        return ops.sin(y) * y

    return transform(around)(X, W)


@each_transform
@as_meant
def test_compiled(f, transform):
    return compiled(transform(f))(X, W)

"""The forward mode of each framework: it transposes rules."""

from types import SimpleNamespace

import numpy as np
import pytest
from cases import BLACK_BOXES, W, as_meant
from forms import FORMS, Written, in_form, valued
from keras import ops
from support import array, close, native_jvp

from multigrad import grad, jvp, op_custom_gradient, trace_gradients
from multigrad.ops import host_call

X, ALONG = array(0.5, 1.0, 2.5), array(1.0, -1.0, 3.0)


def test_projections_are_linear():
    """The gradients of softmax at an upstream gradient of ones are rounding errors."""

    @op_custom_gradient
    def softmax(x):
        y = ops.softmax(x)
        return y, lambda u: 7.0 * y * (u - ops.sum(u * y))

    y = ops.softmax(X)
    close(native_jvp(softmax, X, ALONG), 7.0 * y * (ALONG - ops.sum(ALONG * y)), 1e-4)


def test_an_additional_integer_output():
    @op_custom_gradient
    def op(x):
        return (x * 2.0, ops.cast(x, "int32")), lambda u: 7.0 * u[0]

    close(native_jvp(lambda x: op(x)[0], X, ALONG), 7.0 * ALONG)


def by_multigrad(function, x, along):
    return jvp(function, (x,), (along,))[1]


def test_a_trace_has_calls_only():
    op = op_custom_gradient(lambda x: (x * 2.0, lambda u: u * 7.0), name="op")
    with trace_gradients() as trace:
        close(native_jvp(op, X, ALONG), 7.0 * ALONG)
    close(trace.calls[0].outputs["output"], 2.0 * X)
    assert (len(trace.calls), trace.steps) == (1, [])


each_mode = pytest.mark.parametrize("forward", [native_jvp, by_multigrad])


def cube(x):
    return ops.sum(x**3)


def by_a_gradient(x, w, scale):
    """The rule computes a gradient of a function that uses the layer or the weight."""
    return scale(x * 2.0), lambda u: (7.0 * u * grad(lambda x: scale(cube(x), 2))(x), None), lambda u: u


GRADIENT = Written("gradient", by_a_gradient, lambda x, w, s: valued(2.0 * s * x, 7.0 * s**2 * x**3))
# On PyTorch, an op that reads a weight runs with tangents, which a result of the host lacks.
CASES = {
    name: case
    for name, case in BLACK_BOXES.items()
    if case.name != "NumPy" and not (case.name == "intermediate" and case.weights)
}
CASES |= {f"gradient-{form}": in_form(form, GRADIENT) for form in FORMS}


@each_mode
@as_meant(each=pytest.mark.parametrize("case", CASES.values(), ids=CASES))
def test_host_code_and_rules_that_compute_a_gradient(f, forward):
    return forward(lambda x: f(x, W), X, ALONG)


def test_a_rule_that_computes_a_gradient_and_uses_an_object_with_a_tensor():
    held = SimpleNamespace(factor=7.0 * ops.ones(3))
    op = op_custom_gradient(lambda x: (x * 2.0, lambda u: u * held.factor * grad(cube)(x)))
    for forward in (native_jvp, by_multigrad):
        close(forward(op, X, ALONG), 21.0 * X**2 * ALONG, 1e-4)


@each_mode
def test_a_derivative_of_a_result_of_host_code_raises(forward):
    op = BLACK_BOXES["intermediate-function"].op
    with pytest.raises((TypeError, NotImplementedError), match=r"no derivative|a derivative of forward"):
        forward(grad(lambda x: ops.sum(op(x, W) ** 2)), X, ALONG)


@each_mode
def test_a_rule_that_calls_host_code_raises(forward):
    @op_custom_gradient
    def negative(x):
        return x * 2.0, lambda u: host_call(np.negative, u, output=u)

    close(grad(lambda x: ops.sum(negative(x)))(X), -ops.ones(3))
    with pytest.raises(TypeError, match="host_call of 'negative' in negative: the call has no derivative"):
        forward(negative, X, ALONG)

"""`jacobian` and `hessian`, against the gradients of the single elements."""

import keras
import numpy as np
import pytest
from cases import CASES, each_of, weighted
from keras import ops
from support import array, close, compiled

from multigrad import grad, hessian, jacobian, op_custom_gradient

X, W = array(0.5, -1.25, 1.5), array(0.75, 1.0, -0.5)
EACH = each_of()
# For functions that a framework traces in every call.
SOME = pytest.mark.parametrize(
    "case", [CASES["intermediate"], CASES["output"]], ids=["intermediate", "output"]
)
WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])


def by_rows(function, argnums):
    """Return the Jacobian of a function that returns a vector of three, from the gradient of each element."""

    def rows(x, w):
        gradients = [grad(lambda *args, i=i: function(*args)[i], argnums)(x, w) for i in range(3)]
        return tuple(ops.stack(parts) for parts in zip(*gradients, strict=True))

    return rows


@EACH
@WRAPS
def test_a_vector_with_respect_to_two_vectors(case, wrap):
    close(wrap(jacobian(case.op, (0, 1)))(X, W), by_rows(case.meant, (0, 1))(X, W), 1e-4)


@SOME
@WRAPS
def test_second_derivatives(case, wrap):
    """Compares the derivative of a gradient, the derivative of a Jacobian, and `hessian`."""
    wanted = hessian(weighted(case.meant), (0, 1))(X, W)
    close(wrap(hessian(weighted(case.op), (0, 1)))(X, W), wanted, 1e-4)
    close(wrap(jacobian(grad(weighted(case.op), (0, 1)), (0, 1)))(X, W), wanted, 1e-4)
    for i in range(2):
        of_gradient = by_rows(lambda x, w, i=i: grad(weighted(case.meant), i)(x, w), (0, 1))(X, W)
        close(wanted[i], of_gradient, 1e-4)
    close(wrap(hessian(case.op))(X, W), jacobian(by_rows(case.meant, (0,)))(X, W)[0], 1e-4)


def test_structures():
    @op_custom_gradient
    def op(parameters, scale):
        a, b = parameters["b"], parameters["a"]  # not in alphabetical order

        def rule(u):
            return {"parameters": {"b": 7.0 * u["y"], "a": 3.0 * u["more"][0] * scale * ops.ones_like(b)}}

        return {"y": a * 2.0, "more": [ops.sum(b * scale), ops.cast(a, "int32"), "text"]}, rule

    parameters = {"b": array(1.0, 2.0), "a": array([[1.0], [2.0], [3.0]])}
    got = jacobian(op)(parameters, 2.0)
    close(got["y"], {"b": 7.0 * ops.eye(2), "a": ops.zeros((2, 3, 1))})
    of_sum, of_integers, of_text = got["more"]
    close(of_sum, {"b": ops.zeros(2), "a": ops.full((3, 1), 6.0)})
    assert of_integers is None
    assert of_text is None


@pytest.mark.parametrize("argnums", [1, -1, (1,), (0, 1), [1, 0]], ids=str)
def test_argnums(argnums):
    got = jacobian(lambda x, w: x * w, argnums)(X, W)
    of_x, of_w = ops.diag(W), ops.diag(X)
    wanted = {1: of_w, -1: of_w, (1,): (of_w,), (0, 1): (of_x, of_w), (1, 0): (of_w, of_x)}
    close(got, wanted[tuple(argnums) if isinstance(argnums, list) else argnums])


def test_aux_and_outputs_without_a_gradient():
    def function(x):
        return x**2, {"z": ops.sum(x), "a": "text"}

    jac, aux = jacobian(function, has_aux=True)(X)
    close(jac, ops.diag(2.0 * X))
    close(aux["z"], ops.sum(X))
    assert aux["a"] == "text"
    hess, aux = hessian(lambda x: (ops.sum(x**3), {"z": x, "a": x + 1.0}), has_aux=True)(X)
    close(hess, ops.diag(6.0 * X))
    close(aux, {"z": X, "a": X + 1.0})


def test_variables():
    slope, count = keras.Variable(W), keras.Variable(0.0, trainable=False)

    @op_custom_gradient
    def op(x):
        y = x * slope
        return y, lambda u, variables: (7.0 * u * slope, [3.0 * u * x])

    def function(x):
        count.assign_add(1.0)
        return op(x) ** 2

    (of_slope,) = jacobian(function, variables=[slope])(X)
    close(of_slope, ops.diag(6.0 * X * W * X))
    of_x, (of_slope,) = jacobian(function, 0, variables=[slope])(X)
    close((of_x, of_slope), (ops.diag(14.0 * X * W * W), ops.diag(6.0 * X * W * X)))
    close(count.value, 2.0)
    ((twice,),) = hessian(lambda x: ops.sum(function(x)), variables=[slope])(X)
    close(twice, ops.diag(18.0 * X * X))


def test_the_function_runs_once_and_the_rule_for_each_output():
    runs = []

    @op_custom_gradient
    def op(x):
        runs.append("function")
        return x * 2.0, lambda u: runs.append("rule") or u * 7.0

    close(jacobian(op)(ops.ones(50)), 7.0 * ops.eye(50))
    assert runs.count("function") == 1
    assert runs.count("rule") < 5  # fewer than one per element of fifty


def test_scalars_and_numbers():
    close(jacobian(lambda x: x**3)(2.0), array(12.0))
    close(hessian(lambda x: x**3)(2.0), array(12.0))
    close(jacobian(lambda x: x**3)(np.float32([1.0, 2.0])), ops.diag(array(3.0, 12.0)))


def test_dtypes_are_those_of_the_arguments():
    x, y = ops.cast(X, "float16"), ops.cast(W, "float32")
    blocks = hessian(lambda x, y: ops.sum(ops.cast(x, "float32") ** 2 * y), (0, 1))(x, y)
    assert [[keras.backend.standardize_dtype(b.dtype) for b in row] for row in blocks] == [
        ["float16", "float32"]
    ] * 2
    close(ops.cast(blocks[0][0], "float32"), ops.diag(2.0 * y), 1e-2)
    close(blocks[0][1], ops.diag(2.0 * X), 1e-2)
    got = jacobian(lambda x: x**2)(array(1.0, 2.0, dtype="bfloat16"))
    assert keras.backend.standardize_dtype(got.dtype) == "bfloat16"
    close(ops.cast(got, "float32"), ops.diag(array(2.0, 4.0)))


def test_a_complex_output_raises():
    with pytest.raises(TypeError, match="real arguments and outputs"):
        jacobian(lambda x: ops.cast(x, "complex64"))(X)

"""grad and value_and_grad."""

import keras
import numpy as np
import pytest
from keras import ops
from support import array, close, compiled, numpy

from multigrad import grad, op_custom_gradient, value_and_grad

ONES = np.ones(2, "float32")


def test_a_value_and_its_gradient():
    value, gradient = value_and_grad(lambda x: ops.sum(x**3))(array(1.0, 2.0))
    close((value, gradient), (array(9.0), array(3.0, 12.0)))


def test_argnums():
    def f(x, y, z):
        return ops.sum(x * y**2 * z)

    one = array(1.0)
    close(grad(f, 1)(one, one, one), array(2.0))
    close(grad(f, -1)(one, one, one), array(1.0))
    close(grad(f, (1,))(one, one, one), (array(2.0),))
    close(grad(f, [2, 1])(one, one, one), (array(1.0), array(2.0)))


def test_structures_keywords_and_aux():
    def f(tree, *, power):
        return ops.sum(tree["a"] ** power) + ops.sum(tree["b"][0]), {"shape": tree["a"]}

    (value, aux), gradient = value_and_grad(f, has_aux=True)({"a": 2 * ONES, "b": [ONES]}, power=3)
    close(value, array(18.0))
    close(aux, {"shape": array(2.0, 2.0)})
    close(gradient, {"a": 12 * ONES, "b": [ONES]})
    gradient, aux = grad(f, has_aux=True)({"a": 2 * ONES, "b": [ONES]}, power=2)
    close(gradient, {"a": 4 * ONES, "b": [ONES]})


def test_python_numbers_arrays_and_variables():
    close(grad(lambda x: x**2)(3.0), array(6.0))
    close(grad(lambda x: x**2)(np.float32(3.0)), array(6.0))
    close(grad(lambda x: ops.sum(x**2))(np.float32([3.0])), array([6.0]))
    close(grad(lambda x: ops.sum(x**2))(keras.Variable(np.float32([3.0]))), array([6.0]))


def test_what_is_not_used_has_a_zero_gradient():
    close(grad(lambda x, y: ops.sum(x), (0, 1))(ONES, ONES), (ONES, 0 * ONES))
    close(grad(lambda x: ops.sum(array(1.0, 2.0)))(ONES), 0 * ONES)


def test_they_nest():
    f = lambda x: x**4  # noqa: E731
    close(grad(grad(grad(f)))(2.0), array(48.0))
    close(grad(lambda x: grad(lambda y: x * y**2)(x) * x)(3.0), array(54.0))
    # The same tensor inside and outside is two variables.
    close(grad(lambda x: grad(lambda y: x * y)(x))(3.0), array(1.0))


def test_compiled():
    close(compiled(grad(lambda x: ops.sum(x**3)))(array(1.0, 2.0)), array(3.0, 12.0))


@pytest.mark.parametrize("shape", [(2,), (1,), (2, 2)])
def test_no_scalar(shape):
    with pytest.raises(TypeError, match=r"no real scalar") as error:
        grad(lambda x: x * 2.0)(np.ones(shape, "float32"))
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("argument", [3, array([1, 2], dtype="int32"), "text", True, [1.0, 2]])
def test_nothing_to_differentiate(argument):
    with pytest.raises(TypeError, match="floating or complex"):
        grad(lambda x: ops.sum(x))(argument)


def test_argnums_out_of_range():
    with pytest.raises(TypeError, match="argnums 2"):
        grad(lambda x, y: x * y, 2)(1.0, 2.0)


def test_no_pair_with_aux():
    with pytest.raises(TypeError, match="has_aux"):
        grad(lambda x: x, has_aux=True)(1.0)


def test_a_gradient_inside_a_rule():
    """Re-entrant: the rule runs another gradient, of an op."""
    inner = op_custom_gradient(lambda x: (x**2, lambda u: u * 5.0 * x))

    @op_custom_gradient
    def op(x):
        return x**2, lambda u: u * grad(inner)(x)

    close(grad(op)(3.0), array(15.0))
    close(grad(grad(op))(3.0), array(5.0))
    assert float(numpy(op(array(3.0)))) == 9.0

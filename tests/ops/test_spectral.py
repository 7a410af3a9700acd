"""`spectral_function`, `safe_eigh` and `safe_svd` at distinct and at equal eigenvalues."""

import functools

import keras
import numpy as np
import pytest
from keras import ops
from support import array, close, numpy

import multigrad
from multigrad import backend, grad
from multigrad.ops import safe_eigh, safe_svd, spectral_function

DISTINCT = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.25], [0.0, 0.25, 4.0]])
REPEATED = np.diag([1.0, 1.0, 4.0])
IDENTITY = 2.0 * np.eye(3)
BLOCK = np.array([[2.0, 1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 1.0, 2.0]])  # eigenvalues 1, 1 and 4
MATRICES = {"distinct": DISTINCT, "repeated": REPEATED, "identity": IDENTITY, "block": BLOCK}
WEIGHTS = np.array([[3.0, -1.0, 2.0], [0.5, 2.0, -2.0], [1.0, 4.0, -1.0]])
ALONG = np.array([[1.0, 0.5, -1.0], [0.0, -0.5, 2.0], [0.25, 1.0, 0.5]])

FUNCTIONS = {
    "sqrt": (ops.sqrt, np.sqrt),
    "log": (ops.log, np.log),
    "exp": (ops.exp, np.exp),
    "power": (lambda x: ops.power(x, -0.5), lambda x: x**-0.5),
}


def reference(a, function):
    values, vectors = np.linalg.eigh(0.5 * (a + np.swapaxes(a, -1, -2).conj()))
    return (vectors * function(values)[..., None, :]) @ np.swapaxes(vectors, -1, -2).conj()


def differences(f, a):
    """Return the gradient of `f`, by central differences in float64."""
    found = np.zeros_like(a)
    for index in np.ndindex(a.shape):
        step = np.zeros_like(a)
        step[index] = 1e-4
        found[index] = (f(a + step) - f(a - step)) / 2e-4
    return found


@pytest.mark.parametrize("wrap", [lambda f: f, pytest.param(multigrad.jit, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_spectral_function(matrix, name, wrap):
    fn, function = FUNCTIONS[name]
    a = MATRICES[matrix]
    np.testing.assert_allclose(
        numpy(spectral_function(array(a), fn)), reference(a, function), atol=1e-4, rtol=1e-5
    )
    gradient = wrap(grad(lambda a: ops.sum(array(WEIGHTS) * spectral_function(a, fn))))(array(a))
    wanted = differences(lambda a: np.sum(WEIGHTS * reference(a, function)), a)
    np.testing.assert_allclose(numpy(gradient), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.slow_on("jax")
@pytest.mark.parametrize("matrix", MATRICES)
def test_the_second_derivative_of_a_spectral_function(matrix):
    a = MATRICES[matrix]
    first = grad(lambda a: ops.sum(array(WEIGHTS) * spectral_function(a, ops.sqrt)))
    second = grad(lambda a: ops.sum(array(ALONG) * first(a)))(array(a))

    def along(a):
        step = 1e-3 * ALONG
        return np.sum(WEIGHTS * (reference(a + step, np.sqrt) - reference(a - step, np.sqrt))) / 2e-3

    np.testing.assert_allclose(numpy(second), differences(along, a), rtol=2e-3, atol=2e-3)


@pytest.mark.slow_on("jax")
def test_batches_and_hermitian_matrices():
    a = np.stack([DISTINCT, REPEATED])
    found = grad(lambda a: ops.sum(array(WEIGHTS) * spectral_function(a, ops.exp)))(array(a))
    for got, each in zip(numpy(found), a, strict=True):
        wanted = differences(lambda a: np.sum(WEIGHTS * reference(a, np.exp)), each)
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)
    z = np.complex64([[2.0, 0.5 - 1.0j], [0.5 + 1.0j, 3.0]])
    weights = np.complex64([[1.0, 2.0 + 1.0j], [0.5j, -1.0]])

    def loss(z):
        return ops.sum(ops.real(ops.multiply(ops.convert_to_tensor(weights), spectral_function(z, ops.exp))))

    found = numpy(grad(loss)(ops.convert_to_tensor(z)))
    real = differences(
        lambda x: np.sum((weights * reference(x + 1j * z.imag, np.exp)).real), z.real.astype(float)
    )
    imag = differences(
        lambda y: np.sum((weights * reference(z.real + 1j * y, np.exp)).real), z.imag.astype(float)
    )
    np.testing.assert_allclose(found, real + 1j * imag, rtol=1e-3, atol=1e-3)


def projector(decompose):
    def loss(a):
        vectors = decompose(a)[1][:, :2]
        return ops.sum(array(WEIGHTS) * (vectors @ ops.transpose(vectors)))

    return loss


def projector_reference(a):
    vectors = np.linalg.eigh(0.5 * (a + a.T))[1][:, :2]
    return np.sum(WEIGHTS * (vectors @ vectors.T))


@pytest.mark.parametrize("matrix", ["distinct", "repeated", "block"])
def test_safe_eigh_is_exact_for_projectors(matrix):
    a = MATRICES[matrix]
    found = grad(projector(safe_eigh))(array(a))
    np.testing.assert_allclose(numpy(found), differences(projector_reference, a), rtol=1e-3, atol=1e-3)


def test_the_eigenvalues_of_safe_eigh():
    values, vectors = safe_eigh(array(BLOCK))
    np.testing.assert_allclose(numpy(values), [1.0, 1.0, 4.0], rtol=1e-5)
    np.testing.assert_allclose(numpy(vectors * values[None, :] @ ops.transpose(vectors)), BLOCK, atol=1e-5)
    found = grad(lambda a: ops.sum(ops.square(safe_eigh(a)[0])))(array(BLOCK))
    np.testing.assert_allclose(numpy(found), 2.0 * BLOCK, rtol=1e-4)


@pytest.mark.parametrize("shape", [(3, 3), (3, 2), (2, 3)])
def test_safe_svd_equals_differences_at_distinct_values(shape):
    a = (DISTINCT + 0.5 * ALONG)[: shape[0], : shape[1]]
    weights = WEIGHTS[: shape[0], : shape[1]]

    def combined(u, s, vt, xp):
        return xp.sum((u[:, :1] @ vt[:1] + 0.5 * s[1] * (u[:, :1] @ vt[:1])) * weights_of[xp])

    weights_of = {ops: array(weights), np: weights}
    found = grad(lambda a: combined(*safe_svd(a), ops))(array(a))
    wanted = differences(lambda a: combined(*np.linalg.svd(a, full_matrices=False), np), a)
    np.testing.assert_allclose(numpy(found), wanted, rtol=1e-3, atol=1e-3)


def test_safe_svd_is_finite_at_equal_values():
    found = grad(lambda a: ops.sum(ops.square(safe_svd(a)[1])))(array(IDENTITY))
    np.testing.assert_allclose(numpy(found), 2.0 * IDENTITY, rtol=1e-5)
    assert np.isfinite(numpy(grad(lambda a: ops.sum(safe_svd(a)[0]))(array(np.zeros((2, 2)))))).all()


@pytest.mark.parametrize("function", ["sqrt", "log", "power"])
def test_eigenvalues_of_different_sizes(function):
    """Small eigenvalues that differ by a factor are not treated as equal."""
    a = np.diag([1e-5, 2e-3, 3e-3, 1.0]).astype("float32")
    fn, of_numpy = FUNCTIONS[function]
    weights = np.arange(16.0).reshape(4, 4)
    values, vectors = np.diag(a).astype("float64"), np.eye(4)
    quotients = (of_numpy(values)[:, None] - of_numpy(values)) / (values[:, None] - values + np.eye(4))
    step = 1e-6 * values
    slopes = (of_numpy(values + step) - of_numpy(values - step)) / (2.0 * step)
    wanted = vectors @ ((quotients + np.diag(slopes)) * 0.5 * (weights + weights.T)) @ vectors.T
    found = grad(lambda a: ops.sum(array(weights) * spectral_function(a, fn)))(array(a))
    np.testing.assert_allclose(numpy(found), wanted, rtol=1e-4)


@pytest.mark.slow_on("jax")
def test_a_third_derivative_is_an_error():
    def derivative(f):
        return lambda a: ops.sum(array(ALONG) * grad(f)(a))

    second = derivative(derivative(lambda a: ops.sum(array(WEIGHTS) * spectral_function(a, ops.sqrt))))
    with pytest.raises(RuntimeError, match="no third derivative"):
        grad(second)(array(DISTINCT))


class Power:
    def __init__(self, exponent):
        self.exponent = exponent

    def __call__(self, x):
        return ops.power(x, self.exponent)


HOLDERS = {
    "closure": lambda exponent: lambda x: ops.power(x, exponent),
    "container": lambda exponent: (lambda exponents: lambda x: ops.power(x, exponents[0]))([exponent]),
    "default": lambda exponent: lambda x, y=exponent: ops.power(x, y),
    "partial": lambda exponent: functools.partial(ops.power, x2=exponent),
    "attribute": Power,
    "method": lambda exponent: Power(exponent).__call__,
}


@pytest.mark.parametrize("function", HOLDERS.values(), ids=HOLDERS)
def test_a_function_that_holds_a_tensor_is_refused(function):
    with pytest.raises(TypeError, match="holds a tensor"):
        spectral_function(array(DISTINCT), function(array(0.5)))
    spectral_function(array(DISTINCT), function(np.float32(0.5)))


def test_a_function_that_reads_a_variable_is_refused():
    exponent = keras.Variable(0.5, name="exponent")
    for read in (lambda: exponent, lambda: exponent.value):
        with pytest.raises(
            TypeError, match=r"reads the trainable variable 'exponent'(.|\n)*further argument"
        ):
            grad(lambda a: ops.sum(spectral_function(a, lambda x: ops.power(x, read()))))(array(DISTINCT))
    by_argument = grad(
        lambda: spectral_function(array([[4.0]]), ops.power, exponent)[0, 0], variables=[exponent]
    )
    close(by_argument(), [array(2.0 * np.log(4.0))])


def test_other_dtypes_are_refused():
    for op in (safe_eigh, safe_svd, lambda a: spectral_function(a, ops.exp)):
        with pytest.raises(TypeError, match="'a'"):
            op(ops.convert_to_tensor(np.eye(2, dtype="int32")))
    with pytest.raises(TypeError, match="safe_eigh of the product"):
        safe_svd(ops.convert_to_tensor(np.eye(2, dtype="complex64")))


def power_of(a, t):
    return ops.sum(array(WEIGHTS) * spectral_function(a, ops.power, t))


def power_reference(a, t):
    return np.sum(WEIGHTS * reference(a, lambda x: x**t))


@pytest.mark.parametrize("matrix", ["distinct", "repeated"])
def test_a_scalar_argument(matrix):
    a, t, h = MATRICES[matrix], 0.5, 1e-4
    found = grad(power_of, argnums=1)(array(a), array(t))
    wanted = (power_reference(a, t + h) - power_reference(a, t - h)) / (2.0 * h)
    np.testing.assert_allclose(float(found), wanted, rtol=1e-4)

    def slope(a, t):
        of_a, of_t = grad(power_of, argnums=(0, 1))(a, t)
        return ops.sum(array(ALONG) * of_a) + 2.0 * of_t

    def along(a, t):
        step = h * ALONG
        return (power_reference(a + step, t + 2.0 * h) - power_reference(a - step, t - 2.0 * h)) / (2.0 * h)

    of_a, of_t = grad(slope, argnums=(0, 1))(array(a), array(t))
    np.testing.assert_allclose(numpy(of_a), differences(lambda a: along(a, t), a), rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(float(of_t), (along(a, t + h) - along(a, t - h)) / (2.0 * h), rtol=2e-3)


def test_a_scalar_argument_of_a_hermitian_matrix():
    z = np.complex64([[2.0, 0.5 - 1.0j], [0.5 + 1.0j, 3.0]])
    weights = np.complex64([[1.0, 2.0 + 1.0j], [0.5j, -1.0]])

    def loss(t):
        power = spectral_function(ops.convert_to_tensor(z), ops.power, t)
        return ops.sum(ops.real(ops.multiply(ops.convert_to_tensor(weights), power)))

    wanted = np.sum((weights * reference(z, lambda x: np.log(x) * np.sqrt(x))).real)
    np.testing.assert_allclose(float(grad(loss)(array(0.5))), wanted, rtol=1e-4)


def test_float64():
    with backend.active.wide():
        a = ops.convert_to_tensor(DISTINCT, "float64")
        found = spectral_function(a, ops.exp)
        gradient = grad(lambda a: ops.sum(spectral_function(a, ops.exp)))(a)
    np.testing.assert_allclose(numpy(found), reference(DISTINCT, np.exp), rtol=1e-13)
    wanted = differences(lambda a: np.sum(reference(a, np.exp)), DISTINCT)
    np.testing.assert_allclose(numpy(gradient), wanted, rtol=1e-7)


@pytest.mark.parametrize(
    "op",
    [lambda a: spectral_function(a, ops.exp), lambda a: safe_eigh(a)[1], lambda a: safe_svd(a)[0]],
    ids=["spectral_function", "safe_eigh", "safe_svd"],
)
def test_no_matrices(op):
    a = array(np.zeros((0, 3, 3)))
    assert tuple(grad(lambda a: ops.sum(op(a) ** 2))(a).shape) == (0, 3, 3)


def test_a_matrix_without_rows():
    a = array(np.zeros((0, 3)))
    assert [tuple(part.shape) for part in safe_svd(a)] == [(0, 0), (0,), (0, 3)]
    assert tuple(grad(lambda a: ops.sum(safe_svd(a)[2] ** 2))(a).shape) == (0, 3)

"""Equations that are solved with products alone, against closed forms in NumPy."""

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, array, close, compiled, compiled_with_variables, numpy

from multigrad import grad, op_custom_gradient, vmap
from multigrad.ops import fixed_point, implicit_argmin, implicit_root, linear_solve

RANDOM = np.random.default_rng(0)
SIZE = 6
GENERAL = np.eye(SIZE) * 2.0 + 0.3 * RANDOM.standard_normal((SIZE, SIZE))
DEFINITE = GENERAL @ GENERAL.T + np.eye(SIZE)
MATRICES = {"dense": GENERAL, "gmres": GENERAL, "cg": DEFINITE}
B = RANDOM.standard_normal(SIZE)
METHODS = pytest.mark.parametrize("method", MATRICES)
BY_PRODUCTS = pytest.mark.parametrize("method", ["gmres", "cg"])
# Eager code of JAX and TensorFlow takes seconds, because each step is compiled or run.
WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])


def matvec(x, a):
    return ops.matmul(a, x)


@op_custom_gradient
def seven_fold(x):
    """The gradient is false, so that plain automatic differentiation cannot imitate it."""
    return x * 1.0, lambda upstream: upstream * 7.0


# ------------------------------------------------------------------------------- linear equations


@pytest.mark.forward
@BY_PRODUCTS
@WRAPS
def test_a_solution(method, wrap):
    a = MATRICES[method]
    solve = wrap(lambda b, a: linear_solve(matvec, b, a, solver=method))
    close(solve(array(B), array(a)), array(np.linalg.solve(a, B)), 1e-4)


BATCHES = {
    "dense": np.stack([GENERAL, DEFINITE, 2.0 * np.eye(SIZE)]),
    "gmres": np.stack([GENERAL, DEFINITE, 2.0 * np.eye(SIZE)]),
    "cg": np.stack([DEFINITE, np.diag(np.arange(1.0, 7.0)), 2.0 * np.eye(SIZE)]),
}


def products(x, a):
    return ops.matmul(a, x[:, :, None])[:, :, 0]


@pytest.mark.slow_on("jax")
@METHODS
@pytest.mark.parametrize("batched", [False, True], ids=["one", "batch"])
@WRAPS
def test_the_gradient_of_a_linear_equation(method, batched, wrap):
    product, a = (products, BATCHES[method]) if batched else (matvec, MATRICES[method])
    b = RANDOM.standard_normal(a.shape[:-1])

    def loss(a, b):
        return ops.sum(linear_solve(product, seven_fold(b), a, solver=method, batched=batched) ** 2)

    of_a, of_b = wrap(grad(loss, argnums=(0, 1)))(array(a), array(b))
    x = np.linalg.solve(a, b[..., None])
    w = np.linalg.solve(np.swapaxes(a, -1, -2), 2.0 * x)
    close((of_a, of_b), (array(-w * np.swapaxes(x, -1, -2)), array(7.0 * w[..., 0])), 1e-3)


@pytest.mark.slow_on("jax")
def test_one_array_in_two_places():
    """The gradient of each position is its own, although the arguments are one object."""
    x = array([1.0, 2.0, 4.0])

    def by_products(b, a):
        return ops.sum(linear_solve(lambda z, a: a * z, seven_fold(b), a, solver="cg"))

    def by_matrix(b, a):
        return ops.sum(implicit_root(lambda z, b, a: a * z - seven_fold(b), x, b, a))

    for function in (by_products, by_matrix):
        close(grad(function, (0, 1))(x, x), (7.0 / x, -1.0 / x), 1e-4)
        close(grad(lambda x: function(x, x))(x), 6.0 / x, 1e-4)


@pytest.mark.slow_on("jax")
@METHODS
def test_the_second_derivative_of_a_linear_equation(method):
    a, direction = MATRICES[method], np.arange(1.0, SIZE + 1.0)

    def slope(b):
        return ops.sum(grad(lambda b: ops.sum(linear_solve(matvec, b, array(a), solver=method) ** 2))(b) * v)

    v = array(direction)
    inverse = np.linalg.inv(a)
    close(grad(slope)(array(B)), array(2.0 * inverse.T @ inverse @ direction), 1e-3)


@pytest.mark.forward
def test_a_structure_of_tensors_and_a_rotation():
    """The residual of a rotation by 90 degrees does not decrease in the first step."""
    turned = linear_solve(
        lambda x: {"a": x["b"], "b": -x["a"]}, {"a": array(1.0), "b": array(2.0)}, solver="gmres"
    )
    close(turned, {"a": array(-2.0), "b": array(1.0)})


@pytest.mark.forward
@BY_PRODUCTS
@WRAPS
def test_a_right_side_of_zero(method, wrap):
    close(
        wrap(lambda b: linear_solve(lambda x: 2.0 * x, b, solver=method))(array([0.0, 0.0])),
        array([0.0, 0.0]),
    )


@pytest.mark.forward
@BY_PRODUCTS
def test_large_and_small_numbers(method):
    for size in (1e-30, 1e30):
        b = array(np.array([1.0, 2.0]) * size)
        close(linear_solve(lambda x: 2.0 * x, b, solver=method) / size, array([0.5, 1.0]))


# ------------------------------------------------------------------------------- roots


def cubic(z, a):
    return z**3 + z - a


@BY_PRODUCTS
@WRAPS
def test_the_gradient_of_a_root(method, wrap):
    def loss(a):
        return ops.sum(implicit_root(cubic, ops.ones_like(a), seven_fold(a), linear_solver=method))

    z = np.linspace(0.5, 1.5, 5)
    close(wrap(grad(loss))(array(z**3 + z)), array(7.0 / (3.0 * z**2 + 1.0)), 1e-3)


def diffusion(z, source):
    """A chain of 20,000 unknowns, each with its neighbors."""
    along = 2.0 * z - ops.pad(z[1:], (0, 1)) - ops.pad(z[:-1], (1, 0))
    return z + 0.5 * along + 0.1 * z**3 - source


@pytest.mark.slow
@WRAPS
def test_a_large_equation(wrap):
    """A dense matrix would take 1.6 GB."""
    count = 20_000
    z = np.sin(np.arange(count) * 0.01)
    along = 2.0 * z - np.append(z[1:], 0.0) - np.append(0.0, z[:-1])
    source = array(z + 0.5 * along + 0.1 * z**3)
    value = implicit_root(diffusion, ops.zeros((count,)), source)
    close(value, array(z), 1e-4)
    got = numpy(wrap(grad(lambda s: ops.sum(implicit_root(diffusion, ops.zeros((count,)), s))))(source))
    # J is symmetric, and J @ got is the upstream gradient of ones.
    along = 2.0 * got - np.append(got[1:], 0.0) - np.append(0.0, got[:-1])
    close(array(got + 0.5 * along + 0.3 * z**2 * got), ops.ones((count,)), 1e-3)


# ------------------------------------------------------------------------------- minima


X = RANDOM.standard_normal((20, 3))
Y = RANDOM.standard_normal(20)


def ridge(t, weights):
    errors = ops.matmul(array(X), t) - array(Y)
    return ops.sum(weights * errors**2) + 0.5 * ops.sum(t**2)


def ridge_by_hand(weights):
    matrix = X.T @ (weights[:, None] * X) + 0.5 * np.eye(3)
    t = np.linalg.solve(matrix, X.T @ (weights * Y))
    w = np.linalg.solve(matrix, 2.0 * t)
    return t, -(X @ w) * (X @ t - Y)  # the gradient of sum(t**2)


@pytest.mark.slow_on("tensorflow")
@pytest.mark.parametrize("method", [None, "gmres", "cg"])
@WRAPS
def test_ridge_regression_by_the_weights_of_the_data(method, wrap):
    weights = np.linspace(0.5, 1.0, 20)
    t, gradient = ridge_by_hand(weights)

    def smallest(weights):
        return implicit_argmin(ridge, ops.zeros(3), weights, linear_solver=method)

    close(wrap(smallest)(array(weights)), array(t), 1e-3)
    close(wrap(grad(lambda w: ops.sum(smallest(w) ** 2)))(array(weights)), array(gradient), 1e-3)


def test_the_second_derivative_of_a_minimum_by_a_tensor_that_the_function_closes_over():
    """The minimum of x**4 / 4 - a * x is the cube root of `a`."""

    def smallest(a):
        return implicit_argmin(lambda x: ops.sum(0.25 * x**4 - seven_fold(a) * x), ops.ones(()))

    close(grad(smallest)(array(8.0)), array(7.0 / 12.0), 1e-3)
    # The derivative of 7 / 3 * a**(-2/3), again with the false factor.
    close(grad(grad(smallest))(array(8.0)), array(-7.0 * 7.0 * 2.0 / 9.0 * 8.0 ** (-5.0 / 3.0)), 1e-2)


@pytest.mark.slow_on("jax")
def test_a_minimum_from_an_optimizer():
    """The steps of the optimizer are not differentiated."""
    weights = np.linspace(0.5, 1.0, 20)
    calls = []

    def optimizer(f, t, weights):
        calls.append(float(f(t, weights)))
        return ridge_by_hand(numpy(weights).astype("float64"))[0]

    def loss(w):
        return ops.sum(implicit_argmin(ridge, ops.zeros(3), w, solver=optimizer) ** 2)

    close(grad(loss)(array(weights)), array(ridge_by_hand(weights)[1]), 1e-3)
    assert len(calls) == 1
    with pytest.raises(RuntimeError, match="the result of the solver is not a minimum"):
        implicit_argmin(ridge, ops.ones(3), array(weights), solver=lambda f, t, weights: t)


@pytest.mark.parametrize("method", ["dense", "gmres"])
def test_an_error_names_the_unknown_of_a_minimum(method):
    with pytest.raises(RuntimeError, match=r"implicit_argmin: x did not converge(.|\n)*after 1 iterations"):
        implicit_argmin(lambda x: x**4 + x, 1.0, linear_solver=method, max_iterations=1)


# ------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("method", ["dense", "gmres"])
def test_the_second_derivative_of_a_batch(method):
    a, x = array([[1.0, 2.0], [4.0, 8.0]]), array([[1.0, 2.0], [3.0, 4.0]])

    def slope(a):
        return grad(lambda a: ops.sum(linear_solve(lambda z, a: a * z, x, a, solver=method, batched=True)))(a)

    close(compiled(grad(lambda a: ops.sum(slope(a) * 7.0)))(a), 14.0 * x / a**3, 1e-3)


class Steady(keras.layers.Layer):
    """Solves `z + w * tanh(flip(z)) = x` for each example."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def build(self, shape):
        self.w = self.add_weight(shape=(), initializer=keras.initializers.Constant(0.5))

    def residual(self, z, x):
        return {
            "u": z["u"] + self.w * ops.tanh(z["v"]) - x[:, 0],
            "v": z["v"] + self.w * ops.tanh(z["u"]) - x[:, 1],
        }

    def call(self, x):
        start = {"u": ops.zeros_like(x[:, 0]), "v": ops.zeros_like(x[:, 0])}
        z = implicit_root(self.residual, start, x, batched=True, **self.options)
        return ops.stack([z["u"], 7.0 * z["v"]], axis=1)


@pytest.mark.slow_on("jax")
@pytest.mark.parametrize("method", ["dense", "gmres"])
@pytest.mark.parametrize(
    "wrap", [pytest.param(lambda f: f, id="eager"), pytest.param(compiled_with_variables, id="compiled")]
)
def test_a_batch_of_roots_in_a_layer(method, wrap):
    """Each example has the gradients that it has alone. So has the weight."""
    layer, x = Steady(linear_solver=method), array([[1.0, 2.0], [0.5, -3.0], [0.0, 0.0]])
    layer.build(x.shape)
    z = numpy(layer(x)) / [1.0, 7.0]
    close(array(z + 0.5 * np.tanh(z[:, ::-1])), x)
    slope = 0.5 * (1.0 - np.tanh(z) ** 2)
    w = np.stack([np.linalg.solve(np.array([[1.0, s[0]], [s[1], 1.0]]), [1.0, 7.0]) for s in slope])
    of_x, (of_w,) = wrap(lambda x: grad(lambda x: ops.sum(layer(x)), 0, variables=[layer.w])(x))(x)
    close((of_x, of_w), (array(w), array(-np.sum(w * np.tanh(z[:, ::-1])))), 1e-3)


@pytest.mark.slow_on("jax")
@WRAPS
def test_a_batch_of_minima(wrap):
    """The minimum of x**4 / 4 - a * x is the cube root of `a`."""

    def smallest(a):
        loss = lambda x, a: ops.sum(0.25 * x**4 - seven_fold(a) * x, axis=1)  # noqa: E731
        return ops.sum(implicit_argmin(loss, ops.ones_like(a), a, batched=True))

    z = np.array([[1.0, 2.0], [3.0, 0.5]])
    close(wrap(grad(smallest))(array(z**3)), array(7.0 / (3.0 * z**2)), 1e-3)


@pytest.mark.forward
def test_an_example_does_not_depend_on_the_others():
    """Without `batched`, the small example stops as soon as its steps are small for the large one."""

    def solve(a, rate, batched):
        halved = lambda z, a, rate: rate * z + a  # noqa: E731
        return fixed_point(halved, ops.zeros_like(a), a, rate, tolerance=1e-3, batched=batched)

    a, rate = array([[1e6], [1.0]]), array([[0.1], [0.9]])
    together = solve(a, rate, True)
    close(together[1:], solve(a[1:], rate[1:], False))
    close(together, array([[1e6 / 0.9], [10.0]]), 0.02)
    assert float(solve(a, rate, False)[1, 0]) < 9.0


SINGULAR = np.array(
    [[[2.0, 1.0], [1.0, 3.0]], [[1.0, 2.0], [2.0, 4.0]], [[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.5], [0.5, 2.0]]]
)
RIGHT = np.array([[1.0, 2.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])


def of_batch(solve):
    return lambda a, b: solve(a, b, True)


def of_map(solve):
    return vmap(lambda a, b: solve(a[None], b[None], False)[0])


@METHODS
@pytest.mark.parametrize("mapped", [of_batch, of_map], ids=["batched", "vmap"])
@pytest.mark.parametrize("is_root", [False, True], ids=["linear", "root"])
def test_a_singular_example_is_nan(method, mapped, is_root):
    def solve(a, b, batched):
        options = {"on_failure": "nan", "batched": batched}
        if is_root:
            residual = lambda z, a, b: products(z, a) - b  # noqa: E731
            return implicit_root(residual, ops.zeros_like(b), a, b, linear_solver=method, **options)
        return linear_solve(products, b, a, solver=method, **options)

    def total(a, b):
        return ops.sum(mapped(solve)(a, b))

    wanted, gradient = np.full((4, 2), np.nan), np.full((4, 2), np.nan)
    for index in (0, 3):
        wanted[index] = np.linalg.solve(SINGULAR[index], RIGHT[index])
        gradient[index] = np.linalg.solve(SINGULAR[index], [1.0, 1.0])
    a, b = array(SINGULAR), array(RIGHT)
    close(compiled(mapped(solve))(a, b), array(wanted), 1e-4)
    if mapped is of_batch:
        close(compiled(grad(total, 1))(a, b), array(gradient), 1e-4)


@pytest.mark.slow_on("jax")
@METHODS
def test_an_error_names_the_example(method):
    with pytest.raises(RuntimeError, match=r"linear_solve: (.|\n)*, in example 1 of 4\n"):
        linear_solve(products, array(RIGHT), array(SINGULAR), solver=method, batched=True)


@pytest.mark.slow_on("jax")
def test_the_memory_of_a_batch_is_linear():
    """One dense matrix of all examples would take 40 GB."""
    a = ops.reshape(ops.arange(1.0, 100_001.0), (50_000, 2))
    root = implicit_root(lambda z, a: z**3 - a, a ** (1.0 / 3.0), a**2, linear_solver="dense", batched=True)
    close(root, a ** (2.0 / 3.0), 1e-3)


@pytest.mark.forward
def test_a_batch_needs_an_axis():
    for z0 in (1.0, [array([1.0]), array([1.0, 2.0])], [array([1.0]), array(1.0)]):
        with pytest.raises(ValueError, match=r"fixed_point: z0 cannot be used(.|\n)*the batch"):
            fixed_point(lambda z: z, z0, batched=True)


@pytest.mark.slow_on("jax")
def test_a_batch_without_examples():
    x = ops.zeros((0, 2))
    assert grad(lambda x: ops.sum(Steady()(x)))(x).shape == (0, 2)


# ------------------------------------------------------------------------------- failures


@pytest.mark.forward
@BY_PRODUCTS
def test_an_equation_without_a_solution(method):
    with pytest.raises(RuntimeError, match=r"linear_solve: x did not converge(.|\n)*residual of norm"):
        linear_solve(lambda x: x * 0.0, array([1.0, 2.0]), solver=method)
    nan = linear_solve(lambda x: x * 0.0, array([1.0, 2.0]), solver=method, on_failure="nan")
    assert np.isnan(numpy(nan)).all()
    if BACKEND in ("jax", "tensorflow"):  # the others run a solver uncompiled, and raise
        solve = compiled(lambda b: linear_solve(lambda x: x * 0.0, b, solver=method))
        assert np.isnan(numpy(solve(array([1.0])))).all()


@pytest.mark.forward
def test_the_residual_is_that_of_the_solution():
    """Conjugate gradients for a matrix that is not symmetric: the residual of the recursion may be small."""
    a = array(np.array([[1.0, 5.0, 0.0], [0.0, 1.0, 5.0], [0.0, 0.0, 1.0]]))
    with pytest.raises(RuntimeError, match="did not converge"):
        linear_solve(matvec, array([1.0, 1.0, 1.0]), a, solver="cg", max_iterations=20)


@pytest.mark.parametrize(
    ("function", "b", "method", "said"),
    [
        (lambda x: x + x**3, [10.0], "gmres", "linear_solve: the function is not linear"),
        (lambda x: x + x**3, [10.0], "dense", "linear_solve: the matrix of the equation for x is singular"),
        (lambda x: ops.flip(x) + x, [1.0, 2.0], "dense", "linear_solve: the matrix of the equation for x is"),
    ],
)
def test_an_equation_that_cannot_be_solved(function, b, method, said):
    with pytest.raises(RuntimeError, match=said):
        linear_solve(function, array(b), solver=method)
    close(linear_solve(function, array(b) * 0.0, solver="gmres"), array(b) * 0.0)  # is a solution


def test_a_minimum_with_a_singular_hessian():
    """The error says so. The other error, of a fixed point, is about contractions."""
    with pytest.raises(RuntimeError, match=r"implicit_argmin: x did not converge, because (.|\n)*singular"):
        implicit_argmin(lambda x: ops.sum(x[0] + x[1]) ** 2 + x[0], array([1.0, 2.0]))


@pytest.mark.parametrize("b", [[3.0, 1.0], [0.6, 0.8], [0.0, 0.0]])
@pytest.mark.parametrize("method", ["dense", "gmres", "cg"])
def test_an_affine_function_is_not_linear(method, b):
    for f in (lambda x: x + 1.0, lambda x: 2.0 * x + 1e-3):
        with pytest.raises(RuntimeError, match=r"linear_solve: the function is not linear\n.*0 for x = 0"):
            linear_solve(f, array(b), solver=method)
    shift = array([[0.0], [1.0]])
    with pytest.raises(RuntimeError, match=r"the function is not linear\n(.|\n)*example 1 of 2"):
        linear_solve(lambda x: x + shift, array([b, b]), solver=method, batched=True)
    close(linear_solve(lambda x: 2.0 * x, array(b), solver=method), array(b) / 2.0)


def test_a_matrix_that_is_ill_conditioned():
    """The solution is as exact as the dtype and the matrix allow."""
    a = np.diag([1.0, 0.1, 1e-4]) @ (np.eye(3) + 0.3 * np.ones((3, 3)))
    x = linear_solve(matvec, array(a @ [1.0, 2.0, 3.0]), array(a))
    close(x, array([1.0, 2.0, 3.0]), 1e-3)

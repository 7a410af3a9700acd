"""Solutions of equations: gradients against unrolled code and closed forms, and the cost."""

import math
import types

import keras
import numpy as np
import pytest
from counts import saved
from keras import ops
from support import BACKEND, array, close, compiled, compiled_with_variables, numpy

from multigrad import grad, jvp, vmap
from multigrad.ops import fixed_point, host_call, implicit_root
from multigrad.testing import check_gradients

RANDOM = np.random.default_rng(0)
A = 0.3 * RANDOM.standard_normal((3, 3))
B = RANDOM.standard_normal((3, 1))
WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])


def linear(a, b):
    return fixed_point(lambda z, a, b: a @ z + b, ops.zeros_like(b), a, b)


def curved(z, a, b):
    return 0.5 * ops.cos(z) * a + b


def solved(a, b):
    return fixed_point(curved, ops.ones_like(a), a, b)


def unrolled(a, b):
    z = ops.ones_like(a)
    for _ in range(40):
        z = curved(z, a, b)
    return z


def root_of_a_matrix(a, b):
    return implicit_root(lambda z: (a + 2.0 * ops.eye(3, dtype=a.dtype)) @ z - b, ops.zeros_like(b))


def heron(z, a):
    """Return the next step of Heron's method for the square root."""
    return 0.5 * (z + a / z)


@WRAPS
def test_the_gradient_in_closed_form(wrap):
    of_a, of_b = wrap(grad(lambda a, b: ops.sum(linear(a, b) * 7.0), argnums=(0, 1)))(array(A), array(B))
    z = np.linalg.solve(np.eye(3) - A, B)
    close(wrap(linear)(array(A), array(B)), array(z))
    w = np.linalg.solve(np.eye(3) - A.T, np.full((3, 1), 7.0))
    close((of_a, of_b), (array(w @ z.T), array(w)), 1e-4)


@WRAPS
@pytest.mark.parametrize("order", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_equal_unrolled_code(order, wrap):
    def derivative(f):
        for number in range(order):
            f = grad(f, argnums=number % 2)
        return f

    close(
        wrap(derivative(solved))(array(1.2), array(0.3)), derivative(unrolled)(array(1.2), array(0.3)), 1e-4
    )


@pytest.mark.slow_on("jax")
@pytest.mark.parametrize(
    "extent",
    [
        pytest.param({"max_elements": 1, "compiled": False}, id="one element"),
        # Dynamo (PyTorch 2.13) warns about caches of Keras, and warnings are errors in tests.
        pytest.param({"order": 2, "compiled": BACKEND != "torch"}, id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("function", [linear, root_of_a_matrix])
def test_differences(function, extent):
    """The solution is in float64. On PyTorch, Keras (3.15) computes the sizes of steps in float32."""
    assert check_gradients(function, A, B, **extent).largest < 1e-7


def test_the_derivatives_of_a_square_root():
    root = lambda a: fixed_point(heron, 1.0, a)  # noqa: E731
    close(jvp(root, (4.0,), (8.0,)), (array(2.0), array(2.0)), 1e-5)
    close(jvp(grad(root), (4.0,), (8.0,)), (array(0.25), array(-0.25)), 1e-4)
    for wanted in (2.0, 1.0 / 4.0, -1.0 / 32.0, 3.0 / 256.0):
        close(root(array(4.0)), array(wanted), 1e-4)
        root = grad(root)


def test_structures():
    def f(z, more):
        u, (v,) = z["u"], z["v"]
        return {"u": 0.2 * v * more["a"] + 1.0, "v": [0.3 * u + more["b"][0]]}

    def total(more):
        z = fixed_point(f, {"u": ops.zeros(()), "v": [ops.zeros(())]}, more)
        return 2.0 * z["u"] + 3.0 * z["v"][0]

    more = {"a": array(1.5), "b": (array(0.7), 4, "static")}

    def closed(a, b):
        u = (0.2 * a * b + 1.0) / (1.0 - 0.06 * a)
        return 2.0 * u + 3.0 * (0.3 * u + b)

    got = grad(lambda a, b: total({"a": a, "b": (b, 4, "static")}), argnums=(0, 1))(1.5, 0.7)
    close(got, grad(closed, argnums=(0, 1))(1.5, 0.7))
    close(total(more), closed(array(1.5), array(0.7)))


def test_the_initial_guess_has_no_gradient():
    close(grad(lambda z: fixed_point(heron, z, array(4.0)))(3.0), array(0.0))


@pytest.mark.slow_on("tensorflow")
@WRAPS
def test_closed_over_tensors_have_gradients(wrap):
    def inside(a, b):
        return fixed_point(lambda z: curved(z, a, b), 1.0)

    for f in (grad(inside, (0, 1)), grad(grad(inside), 1)):
        wanted = grad(unrolled, (0, 1)) if f(1.2, 0.3).__class__ is tuple else grad(grad(unrolled), 1)
        close(wrap(f)(array(1.2), array(0.3)), wanted(array(1.2), array(0.3)), 1e-4)


@pytest.mark.parametrize(
    "wrap", [pytest.param(lambda f: f, id="eager"), pytest.param(compiled_with_variables, id="compiled")]
)
def test_variables_have_gradients(wrap):
    layer = keras.layers.Dense(3, activation="tanh", kernel_initializer=keras.initializers.Orthogonal(0.5))
    layer.build((2, 3))
    x = array([[1.0, 2.0, -1.0], [0.5, 0.0, 1.0]])

    def equilibrium(x):
        return ops.sum(fixed_point(lambda z, x: layer(z) + x, ops.zeros_like(x), x) ** 2)

    def plain(x):
        z = ops.zeros_like(x)
        for _ in range(30):
            z = layer(z) + x
        return ops.sum(z**2)

    def penalty(f):
        return lambda x: 0.01 * ops.sum(grad(f)(x) ** 2)

    for change in (lambda f: f, penalty):
        got, wanted = [grad(change(f), 0, variables=layer.trainable_variables) for f in (equilibrium, plain)]
        close(wrap(lambda x: got(x))(x), wanted(x), 1e-3)


@pytest.mark.slow_on("tensorflow")
@WRAPS
def test_tensors_reached_through_an_object_have_a_first_derivative(wrap):
    def behind(b, a):
        held = types.SimpleNamespace(b=b)
        return fixed_point(lambda z, a: curved(z, a, held.b), 1.0, a)

    if BACKEND == "jax":
        import jax

        errors = TypeError, jax.errors.UnexpectedTracerError
        with pytest.raises(errors, match=r"reaches a tensor through an object|unexpected tracer"):
            wrap(grad(behind))(array(0.3), array(1.2))
        return
    close(wrap(grad(behind))(array(0.3), array(1.2)), grad(unrolled, 1)(array(1.2), array(0.3)), 1e-4)
    with pytest.raises(Exception, match="second derivative would be incomplete"):
        wrap(grad(grad(behind)))(array(0.3), array(1.2))


def test_a_function_with_a_custom_gradient():
    def descent(z, a):
        return z - 0.2 * grad(lambda z: (z - a) ** 2 * (1.0 + z**2))(z)

    close(grad(lambda a: fixed_point(descent, 0.5, a))(1.0), array(1.0), 1e-4)


def test_small_upstream_gradients():
    close(
        1e12 * grad(lambda a: 1e-12 * solved(a, array(0.3)))(1.2),
        grad(unrolled)(array(1.2), array(0.3)),
        1e-4,
    )


# ------------------------------------------------------------------------------------ what does not converge


@pytest.mark.parametrize(
    "f", [lambda z, a: 2.0 * z + a + 1.0, lambda z, a: 2.0 * z + a], ids=["z", "adjoint"]
)
def test_no_convergence(f):
    """The second function has the fixed point 0, which is found only from 0 itself, and no adjoint."""
    solve = lambda a: fixed_point(f, 0.0, a, max_iterations=10)  # noqa: E731
    with pytest.raises(
        RuntimeError, match=r"fixed_point: (z|w, the solution of the adjoint equation,) did not"
    ):
        grad(solve)(0.0)
    if BACKEND != "torch":  # `compiled` runs it uncompiled there
        assert np.isnan(numpy(compiled(grad(solve))(array(0.0))))


# ------------------------------------------------------------------------------------ costs


def kept(function, x):
    """Return the sizes of the tensors that are kept for the backward pass."""
    if BACKEND == "torch":
        return [tensor.numel() for tensor in saved(function, [x])]
    import jax

    return [leaf.size for leaf in jax.tree.leaves(jax.vjp(function, x)[1])]


def test_memory_is_independent_of_the_number_of_iterations():
    if BACKEND == "tensorflow":
        pytest.skip("the contents of a tape cannot be inspected")

    def of(tolerance):
        def f(a):
            return fixed_point(lambda z, a: 0.9 * ops.tanh(z) + a, ops.zeros_like(a), a, tolerance=tolerance)

        return kept(f, array(np.ones(5)))

    def unrolled(a):
        z = ops.zeros_like(a)
        for _ in range(20):
            z = 0.9 * ops.tanh(z) + a
        return z

    assert sum(of(0.1)) == sum(of(1e-6)) <= 15
    assert sum(kept(unrolled, array(np.ones(5)))) >= 90


# ------------------------------------------------------------------------------------ roots


def cubic(z, a):
    return z**3 - a


def bisection(f, z, *args):
    low, high = ops.zeros_like(z), ops.full_like(z, 10.0)
    for _ in range(40):
        middle = (low + high) / 2.0
        below = f(middle, *args) < 0.0
        low, high = ops.where(below, middle, low), ops.where(below, high, middle)
    return low


@pytest.mark.slow_on("tensorflow")
@WRAPS
@pytest.mark.parametrize("solver", [None, bisection])
def test_a_cube_root(solver, wrap):
    def f(a):
        return implicit_root(cubic, ops.ones_like(a), a, solver=solver)

    for derivative, wanted in ((f, 2.0), (grad(f), 1.0 / 12.0), (grad(grad(f)), -1.0 / 144.0)):
        close(wrap(derivative)(array(8.0)), array(wanted), 1e-4)


@pytest.mark.forward
def test_a_solver_without_a_root_raises():
    with pytest.raises(RuntimeError, match="the result of the solver is not a root"):
        implicit_root(cubic, 1.0, 8.0, solver=lambda f, z, a: z)
    if BACKEND in ("jax", "tensorflow"):
        f = compiled(lambda a: implicit_root(cubic, ops.ones_like(a), a, solver=lambda f, z, a: z))
        assert np.isnan(numpy(f(array(8.0))))


def test_a_solver_of_numpy_in_a_compiled_function():
    """It gets tensors without values there. The error says how to call it."""

    def root(a, solver):
        return implicit_root(cubic, ops.ones_like(a), a, solver=solver)

    def by_host_call(f, z0, a):
        return host_call(lambda z0, a: np.cbrt(a), z0, a, output=z0)

    close(compiled(grad(lambda a: root(a, by_host_call)))(array(8.0)), array(1.0 / 12.0))
    direct = lambda a: root(a, lambda f, z0, a: np.cbrt(float(a)))  # noqa: E731
    close(direct(array(8.0)), array(2.0))
    with pytest.raises(RuntimeError, match=r"implicit_root: the solver failed(.|\n)*host_call"):
        compiled(vmap(direct))(array([8.0, 1.0]))


class Root(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def call(self, a):
        return implicit_root(lambda z, a: z**3 + z - a, ops.zeros_like(a), a, **self.options)


@pytest.mark.slow_on("jax", "tensorflow")
@pytest.mark.parametrize("options", [{}, {"batched": True}], ids=["one equation", "batched"])
def test_training_with_a_smaller_last_batch(options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), Root(**options)])
    model.compile("sgd", "mse")
    x = np.ones((10, 3), "float32")
    (loss,) = model.fit(x, x[:, :2], batch_size=8, verbose=0).history["loss"]
    assert np.isfinite(loss)
    z = numpy(model(array(x[:1])))
    close(array(z**3 + z), model.layers[0](array(x[:1])), 1e-4)


# ------------------------------------------------------------------------------------ optimal transport


@pytest.mark.slow_on("tensorflow")
@pytest.mark.parametrize("start", [1e-6, 1e8])
def test_a_distant_initial_guess_does_not_lose_precision(start):
    """From 1e-6 the first step of the square root goes to 1e6. Each further step halves the distance."""

    def heron(a):
        return fixed_point(lambda z, a: 0.5 * (z + a / z), start, a)

    def newton(a):
        return implicit_root(lambda z, a: z * z - a, start, a)

    for root in (heron, newton):
        close(root(2.0), array(math.sqrt(2.0)), 1e-5)
        close(grad(root)(2.0), array(0.5 / math.sqrt(2.0)), 1e-5)


def test_a_solver_may_return_numbers():
    """Numbers, as other libraries return them, are cast. Other objects raise an error about the solver."""

    def root(a, found):
        return implicit_root(lambda z, a: z**3 + z - a, 0.5, a, solver=lambda f, z, a: found)

    for found in (1.0, 1, np.float64(1.0), np.ones(())):
        close(grad(lambda a, found=found: root(a, found))(2.0), array(0.25))
    for found, kind in ((None, TypeError), ("1", TypeError), ([1.0], TypeError), (np.ones(2), ValueError)):
        with pytest.raises(
            kind, match=r"implicit_root: the result of the solver has another (.|\n)*'solver'(.|\n)*fix"
        ):
            root(2.0, found)


@pytest.mark.forward
def test_numbers_of_a_solver_are_cast_to_the_dtype_of_z0():
    start = array(1.0, dtype="float16"), array(1.0)

    def residual(z, a):
        return z[0] - ops.cast(a, "float16"), z[1] - a

    low, wide = implicit_root(residual, start, array(2.0), solver=lambda f, z, a: (np.float64(2.0), 2.0))
    assert [keras.backend.standardize_dtype(x.dtype) for x in (low, wide)] == ["float16", "float32"]

"""The ops of `multigrad.ops.fixed`, on every backend, compared with Keras's values and with formulas."""

import itertools
import math
import types
from operator import attrgetter

import keras
import numpy as np
import pytest
from audit.cases import passing, weights, whole
from audit.measure import audit_cases
from audit.table import cases_of
from support import BACKEND, array, close, numpy

import multigrad
from multigrad import grad
from multigrad.ops.fixed import EVERY, FAULTS

INF = math.inf
FIXED = types.SimpleNamespace(**vars(keras.ops))
"""`keras.ops` with every fixed op, also where the op of the backend has no fault."""
FIXED.image = types.SimpleNamespace(**vars(keras.ops.image))
for path, fixed in EVERY.items():
    setattr(FIXED.image if path.startswith("image.") else FIXED, path.rpartition(".")[2], fixed)

MATRIX = np.array([[0.0, 0.0], [0.0, -2.0]])
W = weights(2)

# Options that the table of the audit does not have.
OPTIONS = [
    whole("arctan2", "tiny", [9e-40, 0.0], [1.6e-39, 9e-40], first=0.0, orders=(1,)),  # too large for float32
    whole("elu", "alpha", [-1.0], call=passing("elu", alpha=2.0)),
    whole("celu", "alpha", [-1.0, 1.0], call=passing("celu", alpha=2.0)),
    whole("logsumexp", "axis", [[0.0, -INF], [-INF, -INF]], call=passing("logsumexp", axis=1),
          choice=[[W[0], 0.0], [0.5 * W[1], 0.5 * W[1]]], orders=(1,)),
    whole("norm", "ord 1", [0.0, -2.0], call=passing("norm", ord=1), choice=[0.0, -W[0]]),
    whole("norm", "ord 3", [0.0, -2.0], call=passing("norm", ord=3), first=[0.0, -W[0]], second=0.0),
    whole("norm", "axis 0", MATRIX, call=passing("norm", ord=3, axis=0), choice=[[0.0, 0.0], [0.0, -W[1]]]),
    whole("norm", "axes", MATRIX, call=passing("norm", ord=3, axis=(0,)), choice=[[0.0, 0.0], [0.0, -W[1]]]),
    whole("cumprod", "axis 0", [[2.0, 0.0], [0.0, 3.0]], call=passing("cumprod", axis=0)),
    whole("prod", "axes", [[2.0, 0.0], [0.0, 0.0]], call=passing("prod", axis=(1,))),
    whole("layer_normalization", "constant", [[1.0, 1.0]], [2.0, 4.0], [5.0, 6.0],
          call=passing("layer_normalization", epsilon=1e-2)),
    whole("det", "4 x 4", np.diag([2.0, 3.0, 5.0, 0.0])),
    whole("det", "5 x 5",  # the last row is the sum of the others
          [[1, 2, 0, -1, 1], [0, 1, 1, 2, 0], [1, 0, 1, 0, 2], [2, 1, 0, 1, 0], [4, 4, 2, 2, 3]]),
]  # fmt: skip
CASES = {op: [] for op in EVERY}
for of_op in [*cases_of(keras.ops, "keras.ops"), *OPTIONS]:
    if of_op.op in EVERY:
        CASES[of_op.op].append(of_op)
# The page of the audit gives the reason for each.
NOT_FIXED = ("abs", "absolute", "bincount") if BACKEND == "jax" else ()
each_op = pytest.mark.parametrize("op", [op for op in EVERY if op not in NOT_FIXED])


def functions_of(op, cases=None):
    """Yield a scalar function for each case of an op, or the first ones, and its arguments."""
    for case in CASES[op][:cases]:
        if case.dtype == "float32":

            def total(*tensors, case=case):
                outputs = keras.tree.flatten(case.call(FIXED, *tensors))
                return 3.0 * sum(keras.ops.sum(keras.ops.real(output)) for output in outputs)

            yield total, [array(arg) for arg in case.args]


def gradients_of(function):
    return lambda *tensors: grad(function, argnums=tuple(range(len(tensors))))(*tensors)


@each_op
def test_the_audit_finds_no_fault(op):
    """At all points of the audit, of first and second order, against formulas and differences."""
    rows = audit_cases(CASES[op], FIXED)
    assert rows
    assert [row for row in rows if row.verdict not in ("right", "convention")] == []


@pytest.mark.slow_on("torch")
@each_op
def test_compiled_derivatives(op):
    for function, tensors in functions_of(op, 1):
        wanted = gradients_of(function)(*tensors)
        for a, b in zip(multigrad.jit(gradients_of(function))(*tensors), wanted, strict=True):
            np.testing.assert_allclose(numpy(a), numpy(b), rtol=2e-5, atol=6e-5)


@each_op
@pytest.mark.parametrize(
    "wrap", [lambda f: f, pytest.param(multigrad.jit, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_forward_mode(op, wrap):
    """The derivative along a direction is the product of the gradient and the direction."""
    for function, tensors in functions_of(op, 1 if wrap is multigrad.jit else None):
        gradients = [numpy(g) for g in gradients_of(function)(*tensors)]
        if not all(np.isfinite(g).all() for g in gradients):
            continue
        along = [np.cos(1.0 + np.arange(g.size)).reshape(g.shape) for g in gradients]
        pushed = wrap(lambda ts, vs, f=function: multigrad.jvp(f, ts, vs)[1])
        got = pushed(tuple(tensors), tuple(map(array, along)))
        wanted = sum(np.sum(g * v) for g, v in zip(gradients, along, strict=True))
        np.testing.assert_allclose(numpy(got), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # to float16
@pytest.mark.parametrize("op", [op for op in EVERY if op != "bincount"])
def test_values_dtypes_and_shapes_are_those_of_keras(op):
    for case, dtype in itertools.product(CASES[op], ("float32", "float16") if op != "det" else ("float32",)):
        tensors = [array(arg, dtype=dtype) for arg in case.args]
        found, wanted = [keras.tree.flatten(case.call(module, *tensors)) for module in (FIXED, keras.ops)]
        for a, b in zip(found, wanted, strict=True):
            assert (a.dtype, tuple(a.shape)) == (b.dtype, tuple(b.shape))
            np.testing.assert_array_equal(numpy(a), numpy(b))


def test_broadcasting_and_python_numbers():
    x, y = array([[1.0], [2.0]]), array([1.0, 3.0])
    found = grad(lambda x, y: keras.ops.sum(EVERY["maximum"](x, y)), argnums=(0, 1))(x, y)
    close(found, (array([[0.5], [1.0]]), array([0.5, 2.0])))
    close(grad(lambda y: keras.ops.sum(EVERY["hypot"](y, 4.0)))(array([3.0])), array([0.6]))
    close(grad(lambda y: keras.ops.sum(EVERY["power"](y, 3)))(array([2.0])), array([12.0]))
    close(grad(lambda y: keras.ops.sum(EVERY["power"](2.0, y)))(array([3.0])), array([8.0 * math.log(2.0)]))


@pytest.mark.slow_on("jax")
@pytest.mark.parametrize("scales", [[1e-3, 1e-1, 1.0, 1e2, 1e3], [1e3, 1.0, 1e-3, 1e-1, 1e2]])
def test_det_of_rows_of_different_sizes(scales):
    x = np.random.default_rng(0).normal(size=(100, 5)) * scales
    covariance = np.cov(x.T)
    got = numpy(grad(lambda c: keras.ops.log(EVERY["det"](c)))(array(covariance)))
    np.testing.assert_allclose(np.diag(got), np.diag(np.linalg.inv(covariance)), rtol=1e-4)
    x = np.random.default_rng(1).normal(size=(5, 5)) * np.array(scales)[:, None]
    got, cofactors = numpy(grad(EVERY["det"])(array(x))), np.linalg.det(x) * np.linalg.inv(x).T
    size = np.max(np.abs(cofactors), axis=-1, keepdims=True)
    np.testing.assert_allclose(got / size, cofactors / size, atol=1e-5)
    assert grad(lambda x: keras.ops.sum(EVERY["det"](x)))(array(np.ones((0, 4, 4)))).shape == (0, 4, 4)


def test_clip_without_a_bound():
    if BACKEND in FAULTS["clip"]:  # Keras's op needs both bounds on the other backends
        gradient = grad(lambda x: keras.ops.sum(multigrad.ops.clip(x, None, 0.0)))
        close(gradient(array([0.5, -3.0])), array([0.0, 1.0]))
    else:
        assert multigrad.ops.clip is keras.ops.clip


def test_an_integer_argument_has_no_gradient():
    whole = keras.ops.convert_to_tensor([1, 2])
    close(grad(lambda x: keras.ops.sum(EVERY["maximum"](x, whole)))(array([1.0, 3.0])), array([0.5, 1.0]))


@pytest.mark.parametrize("op", ["abs", "angle", "norm", "power"])
def test_complex_numbers(op):
    """Keras's op computes them, except that the angle is an `arctan2`."""
    z = keras.ops.view_as_complex(array([[3.0, 4.0], [1.0, -2.0]]))
    arguments = (z, 2.0) if op == "power" else (z,)
    found, wanted = EVERY[op](*arguments), attrgetter(op)(keras.ops)(*arguments)
    np.testing.assert_allclose(numpy(found), numpy(wanted), rtol=1e-6)


SAVED = ["hypot", "std", "abs", "norm", "leaky_relu", "layer_normalization", "normalize", "cumprod"]


@pytest.mark.parametrize("op", SAVED)
def test_a_saved_model_keeps_the_gradient(op, tmp_path):
    x = keras.Input((3,))
    keras.Model(x, _call(op, x)).save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    zeros = array(np.zeros((2, 3)))
    wanted = grad(lambda x: keras.ops.sum(_call(op, x)))(zeros)
    got = grad(lambda x: keras.ops.sum(loaded(x)))(zeros)
    close(got, wanted)
    assert np.isfinite(numpy(got)).all()


def _call(op, x):
    arguments = (x, 2.0 * x) if op == "hypot" else (x,)
    return EVERY[op](*arguments, axis=-1) if op in ("std", "norm", "cumprod") else EVERY[op](*arguments)


def test_a_list_of_tensors_is_refused():
    with pytest.raises(TypeError, match="'x1'"):
        EVERY["hypot"]([array(1.0), array(2.0)], array([1.0, 1.0]))


@pytest.mark.parametrize("keepdims", [False, True])
def test_the_norm_of_all_elements_of_a_tensor_of_rank_3(keepdims):
    """On TensorFlow, `keras.ops.norm` raises an error."""
    x = array([[[3.0, 0.0]], [[0.0, 4.0]]])
    value, slope = multigrad.value_and_grad(
        lambda x: keras.ops.sum(multigrad.ops.norm(x, keepdims=keepdims))
    )(x)
    close((value, slope), (array(5.0), array([[[0.6, 0.0]], [[0.0, 0.8]]])))
    assert tuple(multigrad.ops.norm(x, keepdims=keepdims).shape) == ((1, 1, 1) if keepdims else ())
    assert multigrad.ops.norm(keras.Input((2, 3))).shape == ()

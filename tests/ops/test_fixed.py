"""The ops of `multigrad.ops.fixed`, on every backend, compared with Keras's values and with formulas."""

import itertools
import math
from operator import attrgetter

import keras
import numpy as np
import pytest
from audit.measure import audit_cases
from audit.table import cases_of
from support import BACKEND, array, close, numpy

import multigrad
from multigrad import grad
from multigrad.ops.fixed import EVERY, FAULTS

INF = math.inf


def case(op, *args, first, second=None, **options):
    """Return a test of an op: the gradients of the sum of its output, and their derivatives along ones."""
    return pytest.param(op, args, options, first, second, id=f"{op} {str(args)[1:40]}")


ROOT = math.sqrt(0.5)
PI = math.pi
ZEROS = np.zeros((3, 3)).tolist()
SINGULAR = np.array([[1, 2, 0, -1, 1], [0, 1, 1, 2, 0], [1, 0, 1, 0, 2], [2, 1, 0, 1, 0], [4, 4, 2, 2, 3]])


def cofactors(a):
    """Return the matrix of cofactors, by its definition."""
    minors = [[np.delete(np.delete(a, i, 0), j, 1) for j in range(len(a))] for i in range(len(a))]
    return np.linalg.det(minors) * (-1.0) ** np.add.outer(range(len(a)), range(len(a)))


CASES = [
    case("fabs", [0.0, -2.0], first=[[0.0, -1.0]]),
    case("hypot", [3e30], [4e30], first=[[0.6], [0.8]]),
    case("arctan2", [1.0, 1e-30], [INF, 1e-30], first=[[0.0, 5e29], [0.0, -5e29]]),
    case("arctan2", [9e-40, 0.0], [1.6e-39, 9e-40], first=[[0.0, 0.0], [0.0, 0.0]]),  # too large for float32
    case("clip", [-1.0, 0.0, 1.0, 3.0], first=[[1.0, 1.0, 1.0, 0.0]], x_min=-1.0, x_max=1.0),
    case("clip", [0.5, 3.0], [2.0, 2.0], [1.0, 1.0], first=[[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]),
    case("elu", [-1.0], first=[[2.0 * math.exp(-1.0)]], alpha=2.0),
    case("celu", [0.0, -1.0, 1.0], first=[[1.0, math.exp(-0.5), 1.0]], alpha=2.0),
    case("std", [2.0, 2.0, 2.0], first=[[0.0, 0.0, 0.0]], second=[[0.0, 0.0, 0.0]]),
    case("std", [[1.0, 1.0], [1.0, 3.0]], first=[[[0.0, 0.0], [-0.5, 0.5]]], axis=-1),
    case("logsumexp", [-INF, -INF], first=[[0.5, 0.5]]),
    case("logsumexp", [[0.0, -INF], [-INF, -INF]], first=[[[1.0, 0.0], [0.5, 0.5]]], axis=1),
    case("norm", [0.0, 0.0], first=[[0.0, 0.0]], second=[[0.0, 0.0]]),
    case("norm", [[0.0, 0.0], [3.0, 4.0]], first=[[[0.0, 0.0], [0.6, 0.8]]], axis=-1),
    case("norm", [0.0, -2.0], first=[[0.0, -1.0]], ord=1),
    case("norm", [0.0, -2.0], first=[[0.0, -1.0]], second=[[0.0, 0.0]], ord=3),
    case("norm", [[0.0, 0.0], [0.0, -2.0]], first=[[[0.0, 0.0], [0.0, -1.0]]], ord=3, axis=0),
    case("norm", [[0.0, 0.0], [0.0, -2.0]], first=[[[0.0, 0.0], [0.0, -1.0]]], ord=3, axis=(0,)),
    case("normalize", [[0.0, 0.0]], first=[[[1e7, 1e7]]]),
    case("normalize", [[3.0, 4.0]], first=[[[(1.0 - 0.6 * 1.4) / 5.0, (1.0 - 0.8 * 1.4) / 5.0]]]),
    case("cumprod", [2.0, 0.0, 3.0], first=[[1.0, 8.0, 0.0]], second=[[4.0, 1.0 + 3.0 + 2.0, 2.0]]),
    case("cumprod", [[2.0, 0.0], [0.0, 3.0]], first=[[[1.0, 4.0], [2.0, 0.0]]], axis=0),
    case("prod", [2.0, 0.0, 3.0], first=[[0.0, 6.0, 0.0]], second=[[3.0, 5.0, 2.0]]),
    case("prod", [[2.0, 0.0], [0.0, 0.0]], first=[[[0.0, 2.0], [0.0, 0.0]]], axis=(1,)),
    case("moments", [1.0, 5.0], first=[[0.5 - 2.0, 0.5 + 2.0]], second=[[0.0, 0.0]], axes=[0]),
    case("layer_normalization", [[1.0, 1.0]], [2.0, 4.0], [5.0, 6.0],
         first=[[[-1.0 / math.sqrt(1e-2), 1.0 / math.sqrt(1e-2)]], [0.0, 0.0], [1.0, 1.0]], epsilon=1e-2),
    case("vander", [0.0, 2.0], first=[[1.0, 5.0]], second=[[2.0, 2.0]], N=3),
    case("det", [[1.0, 2.0], [2.0, 4.0]], first=[[[4.0, -2.0], [-2.0, 1.0]]],
         second=[[[1.0, -1.0], [-1.0, 1.0]]]),
    case("det", ZEROS, first=[ZEROS], second=[ZEROS]),
    case("det", [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 0.0, 1.0]], first=[[
        [4.0, 4.0, -4.0], [-2.0, -2.0, 2.0], [0.0, 0.0, 0.0],
    ]]),
    case("det", np.diag([2.0, 3.0, 5.0, 0.0]).tolist(), first=[np.diag([0.0, 0.0, 0.0, 30.0])], second=[[
        [15.0, 0.0, 0.0, -15.0], [0.0, 10.0, 0.0, -10.0], [0.0, 0.0, 6.0, -6.0], [-15.0, -10.0, -6.0, 31.0],
    ]]),
    case("det", SINGULAR.tolist(), first=[cofactors(SINGULAR)]),  # the last row is the sum of the others
]  # fmt: skip
if BACKEND in FAULTS["bincount"]:  # Keras's op on JAX needs an array of concrete integers
    CASES.append(case("bincount", (0, 1, 1), [1.0, 2.0, 3.0], first=[None, [1.0, 1.0, 1.0]], minlength=2))


each_case = pytest.mark.parametrize(("op", "args", "options", "first", "second"), CASES)


def total(op, args, options, factor=1.0):
    """Return a factor times the sum of the outputs, as a function of floating arguments, and these."""
    floating = [i for i, first in enumerate(args) if not isinstance(first, tuple)]

    def function(*tensors):
        values = list(args)
        for index, tensor in zip(floating, tensors, strict=True):
            values[index] = tensor
        outputs = keras.tree.flatten(EVERY[op](*values, **options))
        return factor * sum(keras.ops.sum(output) for output in outputs)

    return function, [array(args[i]) for i in floating]


def check_first_derivatives(op, args, options, first, wrap):
    function, tensors = total(op, args, options, factor=3.0)  # so that the upstream gradient is not 1
    gradients = wrap(grad(function, argnums=tuple(range(len(tensors)))))(*tensors)
    wanted = [value for value in first if value is not None]
    for got, value in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(numpy(got), 3.0 * np.array(value), rtol=2e-5, atol=6e-5)


@each_case
def test_derivatives(op, args, options, first, second):
    check_first_derivatives(op, args, options, first, lambda f: f)
    if second is not None:
        function, tensors = total(op, args, options)
        argnums = tuple(range(len(tensors)))

        def slope(*tensors):
            return sum(keras.ops.sum(part) for part in grad(function, argnums=argnums)(*tensors))

        for got, value in zip(grad(slope, argnums=argnums)(*tensors), second, strict=True):
            np.testing.assert_allclose(numpy(got), value, rtol=1e-4, atol=1e-4)


@pytest.mark.slow_on("torch")
@each_case
def test_compiled_derivatives(op, args, options, first, second):
    check_first_derivatives(op, args, options, first, multigrad.jit)


def check_forward_mode(op, args, options, wrap):
    """Compare the derivative along a direction with the product of the gradient and the direction."""
    function, tensors = total(op, args, options)
    count = len(tensors)
    directions = [
        array(np.cos(1.0 + np.arange(tensor.size)).reshape(tensor.shape)) for tensor in map(numpy, tensors)
    ]
    along = wrap(lambda *ts: multigrad.jvp(function, ts[:count], ts[count:])[1])(*tensors, *directions)
    gradients = grad(function, argnums=tuple(range(count)))(*tensors)
    pairs = zip(gradients, directions, strict=True)
    wanted = sum(np.sum(numpy(gradient) * numpy(direction)) for gradient, direction in pairs)
    np.testing.assert_allclose(numpy(along), wanted, rtol=2e-5, atol=2e-5)


@each_case
def test_forward_mode(op, args, options, first, second):
    check_forward_mode(op, args, options, lambda f: f)


@pytest.mark.slow_on("torch")
@each_case
def test_compiled_forward_mode(op, args, options, first, second):
    check_forward_mode(op, args, options, multigrad.jit)


AUDITED = [case for case in cases_of(multigrad.ops, "multigrad.ops") if case.op in EVERY]


# The page of the audit gives the reason for each.
NOT_FIXED = ("abs", "absolute", "bincount") if BACKEND == "jax" else ()


@pytest.mark.parametrize("op", [op for op in EVERY if op not in NOT_FIXED])
def test_the_audit_finds_no_fault(op):
    """At all points of the audit, of first and second order, against formulas and differences."""
    rows = audit_cases([case for case in AUDITED if case.op == op], multigrad.ops)
    assert rows
    assert [row for row in rows if row.verdict not in ("right", "convention")] == []


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # to float16
@pytest.mark.parametrize("op", [op for op in EVERY if op != "bincount"])
def test_values_dtypes_and_shapes_are_those_of_keras(op):
    cases = [case for case in AUDITED if case.op == op]
    for case, dtype in itertools.product(cases, ("float32", "float16") if op != "det" else ("float32",)):
        tensors = [array(arg, dtype=dtype) for arg in case.args]
        found, wanted = [
            keras.tree.flatten(case.call(module, *tensors)) for module in (multigrad.ops, keras.ops)
        ]
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

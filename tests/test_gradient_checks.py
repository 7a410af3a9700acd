"""check_gradients: the precision that it finds, the causes that it names, and random rules."""

import numpy as np
import pytest
from keras import ops

from benchmarks.gradient_checks import CHANGES, draw, rejected
from benchmarks.right_rules import FAMILIES
from multigrad import backend, jit, op_custom_gradient
from multigrad import ops as shelf
from multigrad.testing import check_gradients
from multigrad.testing.precision import detect_precision

# As in test_testing.py.
pytestmark = pytest.mark.slow_on("jax", "tensorflow")

X = np.array([[0.3, -0.7], [1.2, 0.9]])
W = np.array([[0.5, 2.0], [-1.5, 0.8]])
BATCH = np.arange(1.0, 13.0).reshape(4, 3)
BIAS = np.array([1.0, 2.0, 3.0])


def passes(*args, **options):
    return check_gradients(*args, **{"compiled": False, **options})


def message_of(*args, **options):
    with pytest.raises(AssertionError) as error:
        passes(*args, **options)
    return str(error.value)


# -------------------------------------------------------------------------------- narrow intermediate results


def narrowed(x, dtype="float32"):
    return ops.cast(ops.cast(x, dtype), x.dtype)


def in_a_branch(x):
    return ops.cond(ops.sum(x) > -9.0, lambda: narrowed(x), lambda: x)


def in_a_loop(x):
    return ops.fori_loop(0, 3, lambda i, y: narrowed(y) * 1.5, x)


def on_the_host(x):
    return shelf.host_call(lambda a: a.astype("float32").astype("float64"), x, output=x)


def with_a_branch_on_a_value(x):
    return narrowed(x) if float(ops.sum(x)) > 0.0 else -x


NARROW = {
    "a cast": (narrowed, "float32"),
    "half precision": (lambda x: narrowed(x, "float16"), "float16"),
    "bfloat16": (lambda x: narrowed(narrowed(x), "bfloat16"), "bfloat16"),
    "complex": (lambda x: ops.real(ops.cast(ops.cast(x, "complex128"), "complex64")), "float32"),
    "compiled": (jit(lambda x: narrowed(x) * 2.0), "float32"),
    "a branch": (in_a_branch, "float32"),
    "a loop": (in_a_loop, "float32"),
    "an output": (lambda x: ops.cast(x, "float32"), "float32"),
    "nothing": (lambda x: ops.exp(x) * ops.cast(x > 0.0, x.dtype), "float64"),
    "a constant": (lambda x: x * ops.cast(np.float32(0.1), x.dtype), "float64"),
    "wider": (lambda x: ops.cast(x, "complex128"), "float64"),
    "an integer": (lambda x: x * ops.cast(ops.cast(x, "int32"), x.dtype), "float64"),
    "exact numbers": (
        lambda x: x * ops.cast(ops.cast(x > 0.0, "float32") + ops.cast(x < 9.0, "float32"), x.dtype),
        "float64",
    ),
}


@pytest.mark.parametrize("name", NARROW)
def test_the_precision_of_a_function(name):
    """The precision does not depend on values: float32 represents these values exactly."""
    function, precision = NARROW[name]
    with backend.active.wide():
        for array in (X, np.ones((2, 2)), np.zeros((2, 2))):
            x = ops.convert_to_tensor(array, dtype="float64")
            found, reason = detect_precision(lambda *tensors: [function(*tensors)], [x], "f")
            assert found == precision
            assert bool(reason) == (precision != "float64")


def test_a_rule_that_narrows():
    """The tolerances are those of float32, although the function computes in float64."""
    op = op_custom_gradient(lambda x: (ops.exp(x), lambda u: u * narrowed(ops.exp(x))))
    assert passes(op, X).precision == "float32"
    wide = op_custom_gradient(lambda x: (ops.exp(x), lambda u: u * ops.exp(x)))
    assert passes(wide, X).precision == "float64"


@pytest.mark.parametrize("function", [on_the_host, with_a_branch_on_a_value])
def test_a_narrow_operation_that_the_framework_does_not_show(function):
    """The tolerances contain the measured rounding errors: a right rule passes, a very wrong one does not."""
    for factor in (1.0, 1.5):

        @op_custom_gradient
        def square(x, factor=factor):
            return function(x) ** 2, lambda u: u * 2.0 * x * factor

        if factor == 1.0:
            passes(square, X + 1.0)
        else:
            assert "differs from the central differences" in message_of(square, X + 1.0)


@pytest.mark.parametrize("seed", [2, 7])
def test_second_derivatives_whose_terms_cancel(seed):
    """Where one probability is almost 1, the gradient of softmax is the rounding error of its terms."""

    @op_custom_gradient
    def softmax(x):
        y = ops.softmax(x, axis=-1)
        return y, lambda u: y * (u - ops.sum(u * y, axis=-1, keepdims=True))

    x = np.random.default_rng(seed).normal(size=(3, 5)).astype("float32") * 10
    assert passes(softmax, x, order=2, max_elements=6).zeros < 12
    passes(op_custom_gradient(lambda x: ((y := ops.tanh(x)), lambda u: u * (1.0 - y * y))), 15.0 + X, order=2)


# -------------------------------------------------------------------------------------------- probable causes


def op(function, rule):
    """Return an op. The rule is also passed the arguments."""
    return op_custom_gradient(lambda *inputs: (function(*inputs), lambda u: rule(u, *inputs)))


def summed_over_rows(u):
    return ops.broadcast_to(ops.sum(u, axis=0, keepdims=True), u.shape)


OF_ONE_ROW = "a sum over the batch is missing: the gradient of 'inputs'[1] is that of one row"
CAUSES = {
    "upstream": (lambda x: x**2, lambda u, x: 2.0 * x, (X,), "the rule ignores `upstream`"),
    "twice": (lambda x: x**2, lambda u, x: 4.0 * u * x, (X,), "is 2 times the right one"),
    "the sign": (lambda x: x**2, lambda u, x: -2.0 * u * x, (X,), "is -1 times the right one"),
    "a percent": (lambda x: x**2, lambda u, x: 2.02 * u * x, (X,), "is 1.01 times the right one"),
    "zero": (lambda x: x**2, lambda u, x: 0.0 * u * x, (X,), "is zero everywhere"),
    "a scalar": (lambda x: x**2, lambda u, x: 6.0 * u * x, (1.5,), "is 3 times the right one"),
    "a third": (lambda x: x**3, lambda u, x: u * x**2, (1.5,), "is 0.3333 times the right one"),
    "a mean": (lambda x: ops.mean(x), lambda u, x: u + 0.0 * x, (BIAS,), "a sum over 3 elements is extra"),
    "exchanged": (
        lambda x, y: x / y,
        lambda u, x, y: (-u * x / y**2, u / y),
        (X, W),
        "the gradients of 'inputs'[1] and 'inputs'[0] are exchanged",
    ),
    "another's": (lambda x, y: x / y, lambda u, x, y: (u / y, u / y), (X, W), "is that of 'inputs'[0]"),
    "transpose": (
        ops.exp,
        lambda u, x: ops.transpose(u * ops.exp(x)),
        (X,),
        "is the transpose of the right one",
    ),
    "a missing sum": (
        lambda x, b: x * b,
        lambda u, x, b: (u * b, ops.mean(u * x, axis=0)),
        (BATCH, BIAS),
        "a sum over 4 elements is missing",
    ),
    "one row": (ops.multiply, lambda u, x, b: (u * b, (u * x)[0]), (BATCH, BIAS), OF_ONE_ROW),
    "one of two rows": (ops.multiply, lambda u, x, b: (u * b, (u * x)[0]), (BATCH[:2], BIAS), OF_ONE_ROW),
    "the last row": (ops.multiply, lambda u, x, b: (u * b, (u * x)[-1]), (BATCH, BIAS), OF_ONE_ROW),
    "an extra sum": (
        lambda x: 2.0 * x,
        lambda u, x: 2.0 * summed_over_rows(u),
        (BATCH[:2],),
        "a sum is extra: the gradient of 'inputs'[0] is summed over its axis 0",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_probable_cause(name):
    function, rule, args, cause = CAUSES[name]
    lines = message_of(op(function, rule), *args).splitlines()
    (probably,) = [line for line in lines if line.startswith("  probably: ")]
    assert cause in probably
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("function", "rule", "args"),
    [
        (ops.exp, lambda u, x: u * x, (X,)),
        (lambda x: x * ops.exp(x), lambda u, x: u * ops.exp(x), (0.3,)),
        (lambda x, y: x * y, lambda u, x, y: (u * y, u * (x + y)), (X, W)),
        (ops.exp, lambda u, x: u * ops.exp(x) * np.nan, (X,)),
        (lambda x: x**2, lambda u, x: ops.clip(u, -1.0, 1.0) * x, (X,)),
    ],
    ids=["another function", "one element", "two arguments", "NaN", "a clip"],
)
def test_no_cause_is_named_if_none_is_known(function, rule, args):
    assert "probably" not in message_of(op(function, rule), *args)


@pytest.mark.parametrize("arguments", [([1, 2],), ((1, [2, "a"]), None), (3, "text")])
def test_integers_are_refused_before_the_function_runs(arguments):
    calls = []
    with pytest.raises(TypeError, match="no argument is differentiable") as error:
        passes(lambda x, y=None: calls.append(x), *arguments)
    assert "argument: 'x'" in str(error.value)
    assert "np.array" in str(error.value)
    assert not calls


# ----------------------------------------------------------------------------------------------- random rules

FAST = {"compiled": False, "max_elements": 3}


def seeds_of_families():
    """Return the first seed of each family."""
    first = {}
    seed = 0
    while len(first) < len(FAMILIES):
        first.setdefault(draw(seed, False).family.name, seed)
        seed += 1
    return list(first.values())


@pytest.mark.parametrize("seed", seeds_of_families())
def test_a_right_rule_of_each_family_passes(seed):
    assert rejected("special, right", seed, **FAST) == ""


@pytest.mark.parametrize("kind", [kind for kind in CHANGES if not kind.endswith("right")])
@pytest.mark.parametrize("seed", [101, 102, 103, 104, 105])
def test_a_wrong_rule_is_found(kind, seed):
    assert rejected(kind, seed, compiled=False, max_elements=4 if kind == "second derivative" else 100)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "own"), [("right", False), ("right", True), ("special, right", False)])
@pytest.mark.parametrize("first", range(0, 120, 20))
def test_right_rules_pass(kind, first, own):
    said = {seed: rejected(kind, seed, own, **FAST) for seed in range(first, first + 20)}
    assert not {seed: text for seed, text in said.items() if text}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one argument", "special element"])
def test_wrong_rules_are_found(kind):
    """At least 99 of 100 whose error is larger than the rounding error of the differences."""
    missed = [seed for seed in range(200) if not rejected(kind, seed, compiled=False)]
    visible = [seed for seed in missed if rejected(kind, seed, is_large=True, compiled=False)]
    assert len(visible) <= 2

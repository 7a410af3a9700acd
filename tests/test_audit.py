"""The audit of `keras.ops`: its verdicts, and the stored results."""

import importlib

import keras
import numpy as np
import pytest
from audit import page
from audit.__main__ import main
from audit.cases import Known, elementwise, whole
from audit.measure import audit_case, audit_cases
from audit.table import all_cases, cases_of
from keras import ops
from support import BACKEND

from multigrad import op_custom_gradient
from multigrad.common.frameworks import DIFFERENTIATING
from multigrad.ops.fixed import FAULTS

# docs/gradients-of-keras-ops.md gives the reason for each.
NOT_FIXED = {"eigh", "svd", "i0", "lu_factor", "ctc_loss", "dot_product_attention", "segment_prod"}
NOT_FIXED |= {"vectorize", "while_loop", "eig", "bincount"}


def with_rule(op, rule):
    """Return an op of Keras with a false rule, as a function of a module."""
    return staticmethod(op_custom_gradient(lambda x: (op(x), lambda upstream: rule(x, upstream))))


def fail(x, upstream):
    raise RuntimeError("no gradient")


class Wrong:
    """A module with false gradients."""

    square = with_rule(ops.square, lambda x, u: 3.0 * u * x)
    exp = with_rule(ops.exp, lambda x, u: u * float("nan") * x)
    sin = with_rule(ops.sin, fail)
    relu = with_rule(ops.relu, lambda x, u: 0.5 * u * (ops.sign(x) + 1.0))
    relu6 = with_rule(ops.relu6, lambda x, u: u * ops.cast(x >= 0.0, x.dtype))
    abs = with_rule(ops.abs, lambda x, u: u * (ops.sign(x) + ops.cast(ops.equal(x, 0.0), x.dtype) * 1.5))


def verdicts(op, *points, **options):
    cases = elementwise(op, *points, half=None, **options)[:1]
    return [row.verdict for case in cases for row in audit_case(case, Wrong) if row.order == 1]


def test_a_false_gradient_gets_its_verdict():
    assert verdicts("square", 0.0, 1.0) == ["right", "wrong"]  # 3 x is right at zero
    assert verdicts("exp", 1.0) == ["NaN"]
    assert verdicts("sin", 1.0) == ["error"]
    known = {0.0: Known(choice=0.0)}
    assert verdicts("relu", 1.0, known=known) == ["right", "other convention"]
    assert verdicts("relu", 1.0, known={0.0: Known(choice=0.5)}) == ["right", "convention"]
    # The gradient 1 is one of the two slopes at the tie, and 1.5 is steeper than both.
    assert verdicts("relu6", 1.0, known=known) == ["right", "other convention"]
    assert verdicts("abs", 1.0, known=known) == ["right", "wrong"]


def test_float64_is_restored():
    before = keras.backend.result_type("float64", "float32"), keras.config.floatx()
    audit_case(whole("square", "x", np.array([1.0])), keras.ops)
    assert (keras.backend.result_type("float64", "float32"), keras.config.floatx()) == before


# The names of Keras (3.15) that are not in the table, because they have no derivative.
MISSING = {
    "the gradient is the one that its user defines": "custom_gradient",
    "the result does not depend on a floating tensor": """
        arange bartlett blackman convert_to_numpy dtype empty empty_like eye hamming hanning identity
        is_tensor kaiser ndim ones ones_like shape size tri zeros zeros_like
    """,
    "the result is an integer or a boolean": """
        all allclose any argmax argmin argpartition argsort count_nonzero ctc_decode digitize equal greater
        greater_equal histogram in_top_k isclose isfinite isin isinf isnan isneginf isposinf isreal less
        less_equal logical_and logical_not logical_or logical_xor matrix_rank nanargmax nanargmin nonzero
        not_equal searchsorted signbit
    """,
    "the arguments are integers": """
        bitwise_and bitwise_invert bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
        gcd lcm left_shift multi_hot one_hot right_shift unravel_index
    """,
    "the result depends on the bits of a number, or on which numbers are equal": "nextafter unique view",
    "a module, whose functions have the same names here": "linalg nn numpy",
    "a module, whose functions are in the table as image.resize and so on": "image",
    "the displacements are random": "image.elastic_transform",
    "a function of names": "deserialize get serialize",
    "a class, which calls the function": """
        BinaryCrossentropy BinaryFocalCrossentropy CTC CategoricalCrossentropy CategoricalFocalCrossentropy
        CategoricalGeneralizedCrossEntropy CategoricalHinge Circle CosineSimilarity Dice Hinge Huber
        KLDivergence LogCosh Loss MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError
        MeanSquaredLogarithmicError Poisson SparseCategoricalCrossentropy SquaredHinge Tversky
    """,
}


def public(module, prefix=""):
    return {prefix + name for name in dir(module) if not name.startswith("_")}


@pytest.mark.parametrize("name", ["keras.ops", "keras.losses", "keras.activations"])
def test_every_op_is_in_the_table_or_in_the_list(name):
    cases = all_cases(name)
    table = {case.op for case in cases}
    missing = {name for names in MISSING.values() for name in names.split()}
    found = public(importlib.import_module(name))
    if name == "keras.ops":
        found |= public(keras.ops.image, "image.")
    assert not table & missing
    assert found - table - missing == set()
    keys = [(case.op, point, order) for case in cases for point in case.points for order in case.orders]
    assert len(keys) == len(set(keys))


@pytest.mark.slow
@pytest.mark.parametrize("module", page.MODULES)
def test_the_rows_are_the_stored_ones(module):
    imported = importlib.import_module(module)
    rows = audit_cases(cases_of(imported, module), imported)
    versions, count, stored = page.load(module, BACKEND)
    assert page.changes(stored, rows) == {}, versions
    assert len(page.changes(stored[1:], rows)) == min(1, len(stored))
    assert len(rows) == count


@pytest.mark.package
@pytest.mark.parametrize("backend", DIFFERENTIATING)
def test_what_multigrad_returns(backend):
    """In the stored results, only the named ops have faults, and no op is replaced without a reason."""
    ours = page.load("multigrad.ops", backend)[2]
    notable = {row.op for row in ours if row.verdict not in ("right", "convention")}
    assert notable <= NOT_FIXED | ({"abs", "absolute"} if backend == "jax" else set())
    theirs = {
        row.op for row in page.load("keras.ops", backend)[2] if row.verdict not in ("right", "convention")
    }
    assert theirs - NOT_FIXED - {"abs", "absolute"} <= {op for op in FAULTS if backend in FAULTS[op]}
    assert {op for op in FAULTS if backend in FAULTS[op]} <= theirs


@pytest.mark.package
def test_the_tables_contain_the_stored_results():
    _, _, generated = page.PAGE.read_text(encoding="utf-8").partition(page.MARKER)
    assert generated == "\n" + page.table()


def test_the_rows_of_an_op_are_printed(capsys):
    main(["sparsemax"])
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert {row[0] for row in rows} == {"keras.ops", "multigrad.ops", "keras.activations"}
    assert {row[1] for row in rows} == {"sparsemax"}
    assert ["keras.ops", "sparsemax", "regular", "1", "right"] in [row[:5] for row in rows]

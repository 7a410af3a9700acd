"""The audit of `keras.ops`: its verdicts, its command, and the stored results."""

import importlib
import json

import keras
import numpy as np
import pytest
import stored_audits
from keras import ops
from support import BACKEND

import multigrad
from multigrad.cli.main import main
from multigrad.frameworks import DIFFERENTIATING
from multigrad.ops.fixed import FAULTS
from multigrad.testing import audit_gradients
from multigrad.testing.audit.arrays import array_cases
from multigrad.testing.audit.cases import Known, elementwise, whole
from multigrad.testing.audit.elementwise import elementwise_cases
from multigrad.testing.audit.measure import audit_case, audit_cases
from multigrad.testing.audit.report import Audit
from multigrad.testing.audit.rows import FAULTS as FAULTY
from multigrad.testing.audit.rows import Row

NOT_FIXED = {"eigh", "svd", "i0", "lu_factor"}


class Wrong:
    """A module with false gradients."""

    @staticmethod
    @multigrad.op_custom_gradient
    def square(x):
        return ops.square(x), lambda upstream: 3.0 * upstream * x

    @staticmethod
    @multigrad.op_custom_gradient
    def exp(x):
        return ops.exp(x), lambda upstream: upstream * float("nan") * x

    @staticmethod
    @multigrad.op_custom_gradient
    def sin(x):
        def rule(upstream):
            raise RuntimeError("no gradient")

        return ops.sin(x), rule

    @staticmethod
    @multigrad.op_custom_gradient
    def relu(x):
        return ops.relu(x), lambda upstream: 0.5 * upstream * (ops.sign(x) + 1.0)


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


def test_a_false_second_derivative_is_wrong():
    case = whole("square", "x", np.array([1.0, 2.0]))
    assert [row.verdict for row in audit_case(case, Wrong)] == ["wrong", "wrong"]


def test_float64_is_restored():
    before = keras.backend.result_type("float64", "float32"), keras.config.floatx()
    audit_case(whole("square", "x", np.array([1.0])), keras.ops)
    assert (keras.backend.result_type("float64", "float32"), keras.config.floatx()) == before


# The differentiable ops of Keras (3.15) that are not in the table.
MISSING = {
    "structure": """
        append array_split depth_to_space diagflat dsplit dstack expand_dims extract_sequences
        fliplr flipud fold get_item hsplit hstack meshgrid moveaxis ravel rearrange rot90 select
        space_to_depth swapaxes unfold unstack vsplit vstack unravel_index
    """,
    "transforms": """
        fft2 ifft2 irfft istft stft view_as_complex imag eig
    """,
    "too slow or without a float64 value": """
        adaptive_average_pool adaptive_max_pool corrcoef ctc_loss dot_product_attention segment_min
        segment_prod separable_conv
    """,
    "functions of functions": """
        associative_scan cond custom_gradient fori_loop jvp map scan switch vectorize vectorized_map
        while_loop stop_gradient
    """,
    "creation": """
        arange array bartlett blackman convert_to_numpy convert_to_tensor empty empty_like eye full
        full_like geomspace hamming hanning identity kaiser linspace logspace ones ones_like tri
        zeros zeros_like
    """,
    "integers and booleans": """
        all allclose any argmax argmin argpartition argsort bincount bitwise_and bitwise_invert
        bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor count_nonzero
        ctc_decode digitize dtype equal floor_divide gcd greater greater_equal heaviside histogram
        in_top_k is_tensor isclose isfinite isin isinf isnan isneginf isposinf isreal lcm left_shift
        less less_equal logical_and logical_not logical_or logical_xor matrix_rank multi_hot
        nanargmax nanargmin ndim nextafter nonzero not_equal one_hot right_shift saturate_cast
        searchsorted shape signbit size unique view ldexp
    """,
    "modules": """
        image linalg nn numpy
    """,
}


def test_every_op_is_in_the_table_or_in_the_list():
    table = {case.op for case in (*elementwise_cases(), *array_cases())}
    missing = {name for names in MISSING.values() for name in names.split()}
    public = {name for name in dir(keras.ops) if not name.startswith("_")}
    assert not table & missing
    assert public - table - missing == set()


@pytest.mark.slow
@pytest.mark.parametrize("module", stored_audits.MODULES)
def test_the_rows_are_the_stored_ones(module):
    cases = [case for case in (*elementwise_cases(), *array_cases()) if hasattr(keras.ops, case.op)]
    rows = audit_cases(cases, importlib.import_module(module))
    versions, count, stored = stored_audits.load(module, BACKEND)
    assert stored_audits.changes(stored, rows) == {}, versions
    assert len(rows) == count


def test_a_changed_row_is_named():
    stored = [Row("hypot", "0, 0", 1, "NaN", "nan", "0"), Row("abs", "0", 1, "convention", "0", "0")]
    found = [Row("hypot", "0, 0", 1, "right", "0", "0"), *stored[1:], Row("sin", "0", 2, "wrong", "1", "0")]
    assert stored_audits.changes(stored, stored) == {}
    assert stored_audits.changes(stored, found) == {
        ("hypot", "0, 0", 1): ("NaN", "right"),
        ("sin", "0", 2): ("right", "wrong"),
    }


@pytest.mark.package
@pytest.mark.parametrize("backend", DIFFERENTIATING)
def test_what_multigrad_returns(backend):
    """In the stored results, only the named ops have faults, and no op is replaced without a reason."""
    ours = stored_audits.load("multigrad.ops", backend)[2]
    notable = {row.op for row in ours if row.verdict not in ("right", "convention")}
    assert notable <= NOT_FIXED | ({"abs", "absolute"} if backend == "jax" else set())
    theirs = {
        row.op
        for row in stored_audits.load("keras.ops", backend)[2]
        if row.verdict not in ("right", "convention")
    }
    assert theirs - NOT_FIXED - {"abs", "absolute"} <= {op for op in FAULTS if backend in FAULTS[op]}
    assert {op for op in FAULTS if backend in FAULTS[op]} <= theirs


@pytest.mark.package
def test_the_page_contains_the_stored_results():
    _, _, generated = stored_audits.PAGE.read_text(encoding="utf-8").partition(stored_audits.MARKER)
    assert generated == "\n" + stored_audits.table()


@pytest.mark.slow
def test_the_command(capsys):
    assert main(["audit", "--op", "square", "--backend", BACKEND, "--format", "json"]) == 0
    audit = Audit.from_json(capsys.readouterr().out)
    assert {row.verdict for row in audit.rows[BACKEND]} == {"right"}
    assert audit.versions[BACKEND]["keras"] == keras.__version__


def test_the_command_refuses_an_unknown_op(capsys):
    assert main(["audit", "--op", "nothing"]) == 2
    assert "'nothing'" in capsys.readouterr().err


def test_the_tables():
    rows = [Row("hypot", "0 | 0", 1, "NaN", "nan", "0"), Row("sin", "0", 1, "right", "1", "1")]
    audit = Audit("keras.ops", {"jax": {}}, {"jax": rows})
    assert audit.faults == [("jax", rows[0])]
    assert "| `hypot` | 0 \\| 0 | 1 | jax | NaN | nan | 0 |" in audit.to_markdown()
    assert "hypot  0 | 0  1      jax      NaN" in audit.to_text()
    assert Audit.from_json(audit.to_json()) == audit
    assert json.loads(audit.to_json())["module"] == "keras.ops"
    assert set(FAULTY) == {"wrong", "NaN", "error"}


@pytest.mark.parametrize("options", [{"module": "numpy"}, {"ops": ["nothing"]}, {"backends": ["numpy"]}])
def test_invalid_arguments(options):
    with pytest.raises(ValueError, match="audit_gradients"):
        audit_gradients(**options)

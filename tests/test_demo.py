"""The experiments of the demo on the active backend, and the check of their results."""

import math
import subprocess
import sys

import experiments
import numpy as np
import pytest
from keras import ops
from report import SECTIONS, find_problems, print_table
from support import EXAMPLES

import multigrad

pytestmark = pytest.mark.package

ROWS = {row.key: row for rows in SECTIONS.values() for row in rows}

RIGHT = {
    "log1pexp.value": math.inf,
    "log1pexp.plain": math.nan,
    "log1pexp.rule": 1.0,
    "chain.value": 256.0,
    "chain.gradient": 1024.0,
    "chain.x": [16.0, 4.0, 2.0],
    "chain.upstream": [1.0, 32.0, 256.0],
    "chain.current": [32.0, 8.0, 4.0],
    "chain.downstream": [32.0, 256.0, 1024.0],
    "digits.accuracy": 0.95,
    "digits.levels": 8,
    "digits.moved": 0.1,
}

WRONG = [
    ("log1pexp.value", 100.0),
    ("log1pexp.plain", 1.0),
    ("log1pexp.rule", math.nan),
    ("log1pexp.rule", 1.0 - 1e-7),
    ("chain.value", 255.0),
    ("chain.gradient", -1024.0),
    ("chain.x", [2.0, 4.0, 16.0]),
    ("chain.upstream", [1.0, 32.0]),
    ("chain.current", []),
    ("chain.downstream", [32.0, 256.0, math.nan]),
    ("digits.accuracy", 0.949),
    ("digits.accuracy", math.nan),
    ("digits.levels", 9),
    ("digits.levels", 1),
    ("digits.moved", 0.0),
    ("digits.moved", math.nan),
]

# --------------------------------------------------------------------------------------- experiments


@pytest.mark.parametrize("experiment", [experiments.log1pexp_at_100, experiments.chain_of_squares])
def test_the_exact_experiments_measure_what_is_expected(experiment):
    measured = experiment()
    assert measured
    for key, value in measured.items():
        assert ROWS[key].is_right(value), (key, value)


@pytest.mark.parametrize(
    ("quantize", "inside"), [(experiments.quantize, 5.0), (lambda x, _: ops.round(7.0 * x) / 7.0, 0.0)]
)
def test_the_gradient_of_rounding(quantize, inside):
    x = np.array([-0.5, 0.1, 0.52, 0.9, 1.5], "float32")
    gradient = multigrad.grad(lambda x: ops.sum(5.0 * quantize(x, 3)))(x)
    np.testing.assert_array_equal(ops.convert_to_numpy(gradient), [0.0, inside, inside, inside, 0.0])


# ----------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_wrong_measurement_is_caught(key, value):
    assert RIGHT.keys() == ROWS.keys()
    assert find_problems({"jax": RIGHT, "torch": RIGHT}) == []
    (problem,) = find_problems({"jax": RIGHT, "torch": RIGHT | {key: value}})
    assert problem.startswith("torch: ")
    assert f"{ROWS[key].label.lstrip(' ×=')}: {ROWS[key].show(value)}" in problem
    assert problem.endswith(f"expected {ROWS[key].expected}")


def test_the_table_shows_measurements_and_marks_wrong_ones(capsys):
    print_table({"jax": RIGHT, "torch": RIGHT | {"chain.gradient": 7.0}})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["expected", "jax", "torch"]
    (gradient,) = [line for line in lines if line.startswith("  gradient  ")]
    assert gradient.split() == ["gradient", "1024", "1024", "7", "✗"]
    assert max(map(len, lines)) <= 100


def test_the_demo_fails_if_a_process_does():
    # The NumPy backend has no gradients, and imports JAX, which may be missing.
    command = [sys.executable, str(EXAMPLES / "demo"), "numpy"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "numpy: starting" in done.stdout
    assert "as expected" not in done.stdout

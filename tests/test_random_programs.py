"""Random programs on the active backend, compared with the reference in NumPy.

`random_programs.py` draws them, `dual_numbers.py` is the reference, and `failed_programs.py` keeps programs
that failed.
"""

import dual_numbers
import numpy as np
import program_names
import pytest
from failed_programs import FAILED
from random_programs import draw, run
from support import BACKEND, SECOND_OF_COMPILED

from multigrad import op_custom_gradient
from multigrad.core import call

TOLERANCE = 1e-4  # relative to the largest result

# PyTorch takes up to 20 s to compile a program. So it compiles few and small ones, in slow tests.
# Fast tests of compiled PyTorch are in `transforms/on_torch/test_torch_compile.py`.
COMPILES = BACKEND != "torch"
PER_TEST = 5
FAST = range(0, 100, PER_TEST)
FULL = range(100, 2100, PER_TEST)


def check(text: str, names=program_names.NAMES) -> None:
    """Run a program, and assert that its results are those of the reference."""
    wanted = run(text, dual_numbers.NAMES)
    got = run(text, names)
    size = max(1e-3, *[np.max(np.abs(result)) for result in wanted])
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.0, atol=TOLERANCE * size)


def check_all(texts: dict[str, str]) -> None:
    """Check programs. The error of the first that fails shows its name and its text."""
    for name, text in texts.items():
        try:
            check(text)
        except Exception as error:
            raise AssertionError(f"{name}: {error}\n\n{text}") from error


def drawn(first: int, count: int = PER_TEST) -> dict[str, str]:
    return {f"seed {seed}": draw(seed, BACKEND, compiled=COMPILES) for seed in range(first, first + count)}


@pytest.mark.parametrize("first", [*FAST, *[pytest.param(first, marks=pytest.mark.slow) for first in FULL]])
def test_a_random_program_has_the_derivatives_of_its_rules(first):
    check_all(drawn(first))


@pytest.mark.parametrize("name", FAILED)
def test_a_program_that_once_failed(name):
    check_all({name: FAILED[name]})


@pytest.mark.slow
@pytest.mark.skipif(COMPILES, reason="the other backends compile programs in the test above")
@pytest.mark.parametrize("seed", range(40))
def test_a_program_that_pytorch_compiles(seed):
    import torch

    torch._dynamo.reset()  # it stops compiling a function after eight versions of it
    text = draw_compiled(seed)
    try:
        check_all({f"seed {seed}": text})
    except AssertionError as error:
        if not any(text in str(error.__cause__) for text in SECOND_OF_COMPILED):
            raise


def draw_compiled(seed: int) -> str:
    """Return a small program that is compiled."""
    for attempt in range(1000):
        text = draw(1000 * seed + attempt, BACKEND, small=True)
        if "jit(" in text or "compiled=True" in text:
            return text
    raise AssertionError("no program is compiled")


@pytest.mark.skipif(BACKEND != "jax", reason="jax.checking_leaks")
@pytest.mark.parametrize("first", [0, *[pytest.param(n, marks=pytest.mark.slow) for n in range(5, 200, 5)]])
def test_a_random_program_leaks_no_tracer(first):
    import jax

    with jax.checking_leaks():
        check_all(drawn(first, 3))


# ------------------------------------------------------------------------------------------ planted faults


def failing(count: int, names=program_names.NAMES) -> list[str]:
    """Return the first of `count` small programs that fails, if one does."""
    for seed in range(count):
        text = draw(seed, BACKEND, small=True, compiled=False)
        try:
            check(text, names)
        except AssertionError:
            return [text]
    return []


def test_exchanged_gradients_are_found(monkeypatch):
    read = call.read

    def exchanged(*args):
        gradients = read(*args)
        return gradients[::-1] if len(gradients) == 2 and None not in [*gradients] else gradients

    monkeypatch.setattr(call, "read", exchanged)
    assert failing(20)


def test_a_lost_derivative_of_an_intermediate_is_found():
    def constant(f):
        """Return an op whose rule gets the intermediates of another run, which are constants."""

        def with_constants(*args):
            output, rule = f(*args)
            ops = program_names.NAMES["ops"]
            _, rule = f(*[ops.stop_gradient(a) if ops.is_tensor(a) else a for a in args])
            return output, rule

        return op_custom_gradient(with_constants)

    assert failing(20, {**program_names.NAMES, "op_custom_gradient": constant})


def test_the_first_of_two_equal_arrays_is_found(monkeypatch):
    """The fault differentiates with respect to the first input that holds an array, as with `id`."""
    differentiate = program_names.value_and_grad

    def first_of_equal(f, argnums=None, **kwargs):
        def gradient(*xs):
            second = argnums == [1] and xs[0] is xs[1]
            return differentiate(f, [0] if second else argnums, **kwargs)(*xs)

        return gradient

    monkeypatch.setattr(program_names, "value_and_grad", first_of_equal)
    assert failing(40)


def test_the_reference_rejects_a_rule_that_is_not_linear():
    text = FAILED["two inputs of a method are one array"].replace("2.0 * u0 * b", "2.0 * b")
    with pytest.raises(ValueError, match="not linear"):
        run(text, dual_numbers.NAMES)

"""Random programs on the active backend, compared with the reference in NumPy.

`random_programs.py` draws them, `rules_in_numpy.py` is the reference, and `failed_programs.py` keeps programs
that failed.
"""

import numpy as np
import program_names
import pytest
import rules_in_numpy
from failed_programs import FAILED
from random_programs import draw, forgetful, run, runnable
from support import BACKEND, SECOND_OF_COMPILED

from multigrad.core import rule

# Relative to the largest result. A gradient of a low precision is rounded to it.
TOLERANCE, LOW_TOLERANCE = 1e-4, 0.03

# PyTorch takes up to 20 s to compile a program. So it compiles few and small ones, in slow tests.
# Fast tests of compiled PyTorch are in `transforms/on_torch/test_torch_compile.py`.
COMPILES = BACKEND != "torch"
NOT_AN_ARGUMENT = "depends on a differentiated tensor that is not an argument"
BY_OBJECT = "the rule reaches a tensor through an object"
# TensorFlow (2.21): a gradient in a branch or a loop cannot use a concrete tensor of a module.
IN_A_BRANCH = "Tensor.graph is undefined", "not in internal_capture_to_output"
PER_TEST = 10
MANY = [pytest.param(first, marks=pytest.mark.slow) for first in range(30, 2000, PER_TEST)]


def check(text: str, names=program_names.NAMES) -> None:
    """Run a program, and assert that its results are those of the reference, or that both raise an error."""
    try:
        wanted = run(text, rules_in_numpy.NAMES)
    except rules_in_numpy.Refused:
        wanted = None
    try:
        got = run(text, names)
    except (TypeError, RuntimeError, AttributeError, ValueError) as error:
        # One of several outputs that depends on the tensor suffices on PyTorch and TensorFlow.
        may_refuse = wanted is None or (BACKEND != "jax" and "    y1 = " in text)
        # TensorFlow also refuses a tensor `t` in a program, in which a later use of the output is not known.
        may_refuse |= BACKEND == "tensorflow" and "    t = " in text
        if may_refuse and NOT_AN_ARGUMENT in str(error):
            return
        if BACKEND == "tensorflow" and any(known in str(error) for known in IN_A_BRANCH):
            return
        if BY_OBJECT in str(error) and ("held.t" in text or ".stored" in text):
            return
        raise
    assert wanted is not None, "an op closes over a differentiated tensor, and there is no error"
    size = max(1e-3, *[np.max(np.abs(result)) for result in wanted])
    if "float16" in text and size > np.finfo("float16").max:
        return
    tolerance = LOW_TOLERANCE if "float16" in text else TOLERANCE
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0.0, atol=tolerance * size)


def check_all(texts: dict[str, str]) -> None:
    """Check programs. The error of the first that fails shows its name, and a script that runs it."""
    for name, text in texts.items():
        try:
            check(text)
        except Exception as error:
            raise AssertionError(f"{name}: {error}\n\n{runnable(text, BACKEND)}") from error


def drawn(first: int, count: int = PER_TEST) -> dict[str, str]:
    return {f"seed {seed}": draw(seed, BACKEND, compiled=COMPILES) for seed in range(first, first + count)}


@pytest.mark.parametrize("first", [0, 10, 20, *MANY])
def test_a_random_program_has_the_derivatives_of_its_rules(first):
    check_all(drawn(first))


def check_forgetful(text: str) -> bool:
    """Assert that a program without the `return` of its rules raises an error, if it calls one."""
    if "    t = " in text:  # it may raise another error first
        return False
    try:
        run(forgetful(text), rules_in_numpy.NAMES)
    except TypeError:
        with pytest.raises(TypeError, match="returned None"):
            run(forgetful(text), program_names.NAMES)
        return True
    return False


@pytest.mark.parametrize("first", [0, *MANY[:20]])
def test_a_rule_that_returns_nothing_raises(first):
    texts = drawn(first).values()
    if BACKEND == "tensorflow":  # an error in `tf.map_fn` breaks checkpoints: see docs/limits.md
        texts = [text for text in texts if "vmap(" not in text or "jit(" not in text]
    assert any([check_forgetful(text) for text in texts])


@pytest.mark.parametrize("name", FAILED)
def test_a_program_that_once_failed(name):
    check_all({name: FAILED[name]})


@pytest.mark.slow
@pytest.mark.skipif(COMPILES, reason="the other backends compile programs in the test above")
@pytest.mark.parametrize("seed", range(40))
def test_a_program_that_pytorch_compiles(seed):
    import torch

    torch._dynamo.reset()  # Dynamo compiles at most eight versions of a function
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


@pytest.mark.skipif(BACKEND != "jax", reason="only JAX has `jax.checking_leaks`")
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 5))
def test_a_random_program_leaks_no_tracer(first):
    """A compiled program keeps the scope in which its variables had traced values: see docs/limits.md."""
    import jax

    for name, text in drawn(first, 3).items():
        try:
            with jax.checking_leaks():
                check_all({name: text})
        except AssertionError as error:
            if "outer_scope" not in str(error.__cause__):
                raise


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
    read = rule.read_answer

    def exchanged(*args):
        gradients = read(*args)
        return gradients[::-1] if len(gradients) == 2 and None not in [*gradients] else gradients

    monkeypatch.setattr(rule, "read_answer", exchanged)
    assert failing(20)


def test_the_reference_rejects_a_rule_that_is_not_linear():
    text = FAILED["two inputs of a method are one array"].replace("2.0 * u0 * b", "2.0 * b")
    with pytest.raises(ValueError, match="not linear"):
        run(text, rules_in_numpy.NAMES)

"""Two laws that gradients obey: the pullback is linear, and a compiled function is the same function."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from multigrad.testing.flat import Flat, directions, like, values, vjp
from multigrad.testing.precision import Tolerance
from multigrad.testing.table import Unlike, disagree, fail, number_text, places


@contextlib.contextmanager
def noted(note: str) -> Iterator[None]:
    """Add a note to an error of the function's own."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def check_linear(flat: Flat, rules: Tolerance) -> None:
    """See that the pullback is linear in its upstream gradient, wherever it is finite."""
    __tracebackhide__ = True
    outputs, pullback = vjp(flat, flat.inputs)
    left, right = (list(directions(outputs, seed)) for seed in (1, 2))
    # Far enough from one another to meet a clip or an offset, and no overflow in half precision.
    a, b = 3.0, -4e4 if rules.precision in ("float32", "float64") else -40.0
    both = [a * u + b * v for u, v in zip(left, right, strict=True)]
    of_left, of_right, of_both = (
        [values(gradient) for gradient in pullback(like(upstream, outputs))]
        for upstream in (left, right, both)
    )
    unlike, count = [], 0
    for name, u, v, got in zip(flat.input_names, of_left, of_right, of_both, strict=True):
        count += got.size
        with np.errstate(invalid="ignore", over="ignore"):
            wanted = a * u + b * v
            parts = np.abs(a * u) + np.abs(b * v)
        finite = np.isfinite(got) & np.isfinite(wanted)
        size = float(np.max(parts, where=finite, initial=0.0))
        bad = finite & disagree(got, wanted, rules.rounding, rules.rounding * size)
        unlike += [Unlike((name,), e, (got[e], wanted[e])) for e in places(bad)]
    if unlike:
        worst = max(unlike, key=Unlike.apart)
        fail(
            flat.name,
            "the rule is not linear in its upstream gradient",
            worst,
            f"{number_text(worst.numbers[1])}, which is {a:g} * pullback(u) {b:+g} * pullback(v)",
            f"{number_text(worst.numbers[0])}, which is pullback({a:g} * u {b:+g} * v)",
            "multiply the upstream gradient by what does not depend on it, and add nothing",
            ("argument", "element", "of the sum", "sum of both", "relative"),
            unlike,
            count,
        )


def check_compiled(flat: Flat, rules: Tolerance) -> None:
    """See that the outputs and gradients of the compiled function are those of the function."""
    __tracebackhide__ = True
    with noted("check_gradients compiled the function; it does not with compiled=False."):
        (eager, compiled) = (_all_of(flat, function) for function in (flat, flat.compiled()))
    unlike, count = [], 0
    for name, wanted in eager.items():
        got = compiled[name]
        count += got.size
        finite = np.isfinite(wanted)
        size = float(np.max(np.abs(wanted), where=finite, initial=0.0))
        bad = disagree(got, wanted, rules.rounding, rules.rounding * size)
        bad &= ~(np.isnan(got) & np.isnan(wanted)) & (got != wanted)
        unlike += [Unlike((name,), e, (got[e], wanted[e])) for e in places(bad)]
    if unlike:
        worst = max(unlike, key=Unlike.apart)
        fail(
            flat.name,
            "it is another function when it is compiled",
            worst,
            f"{number_text(worst.numbers[1])}, run as it is",
            f"{number_text(worst.numbers[0])}, compiled",
            "let it not depend on whether it is compiled, on Python's state, or on values it cannot see then",
            ("what", "element", "compiled", "as it is", "relative"),
            unlike,
            count,
        )


def _all_of(flat: Flat, function: Callable[..., Sequence[Any]]) -> dict[str, np.ndarray]:
    """The outputs and gradients of a function, by name."""
    outputs, pullback = vjp(function, flat.inputs)
    gradients = pullback(like(list(directions(outputs, seed=0)), outputs))
    found = dict(zip(flat.output_names, map(values, outputs), strict=True))
    own = zip(flat.input_names, map(values, gradients), strict=True)
    return found | {f"gradient of {name}": gradient for name, gradient in own}

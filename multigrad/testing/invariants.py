"""Laws that gradients obey, without a look at the function's differences.

A pullback is linear, it is that of its own call, and a compiled function is the same function.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from multigrad.testing.flat_function import Flat, directions, like, values, vjp
from multigrad.testing.mismatches import GRADIENT, Unlike, disagree, fail, number_text, places
from multigrad.testing.precision import Tolerance, size_of


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
    with np.errstate(invalid="ignore", over="ignore"):
        sums = [a * u + b * v for u, v in zip(of_left, of_right, strict=True)]
        parts = [np.abs(a * u) + np.abs(b * v) for u, v in zip(of_left, of_right, strict=True)]
        whole = [np.abs(w * values(output)) for w, output in zip(both, outputs, strict=True)]
    noise = rules.noise * size_of(*parts, *whole)
    for name, part, wanted, got in zip(flat.input_names, parts, sums, of_both, strict=True):
        count += got.size
        finite = np.isfinite(got) & np.isfinite(wanted)
        size = float(np.max(part, where=finite, initial=0.0))
        bad = finite & disagree(got, wanted, rules.rounding, rules.rounding * size + noise)
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


def check_own(flat: Flat, rules: Tolerance) -> None:
    """See that the pullback of a call is the same after another call: that its residuals are its own."""
    __tracebackhide__ = True
    outputs, pullback = vjp(flat, flat.inputs)
    upstream = like(list(directions(outputs, seed=1)), outputs)
    before = list(map(values, pullback(upstream)))
    _call_elsewhere(flat)
    after = list(map(values, pullback(upstream)))
    share = 10.0 * rules.noise  # what another order of sums, in other threads, may do
    unlike, count = [], 0
    for name, wanted, got in zip(flat.input_names, before, after, strict=True):
        count += got.size
        bad = disagree(got, wanted, share, share * size_of(*before)) & (
            np.isfinite(got) | np.isfinite(wanted)
        )
        unlike += [Unlike((name,), e, (got[e], wanted[e])) for e in places(bad & (got != wanted))]
    if unlike:
        worst = max(unlike, key=Unlike.apart)
        fail(
            flat.name,
            "the gradient of a call is another one once the function was called again",
            worst,
            f"{number_text(worst.numbers[1])}, as before the other call",
            number_text(worst.numbers[0]),
            "let the rule close over what its own call computed, and read nothing that another one changes",
            ("argument", "element", "after it", "before", "relative"),
            unlike,
            count,
        )


def _call_elsewhere(flat: Flat) -> None:
    """Call the function with other numbers: in another order, so that signs and the largest change, too."""
    near = [values(tensor) * _NEAR for tensor in flat.inputs]
    try:
        flat(*like([np.roll(array, 1) for array in near], flat.inputs))
    except Exception:  # noqa: BLE001 - a function may refuse numbers that its caller never gave, in any way
        flat(*like(near, flat.inputs))


_NEAR = 1.0 - 2.0**-12
"""Close enough for a function to take what it takes of its caller, and further than rounding."""


def check_compiled(flat: Flat, rules: Tolerance) -> None:
    """See that the outputs and gradients of the compiled function are those of the function."""
    __tracebackhide__ = True
    with noted("check_gradients compiled the function; it does not with compiled=False."):
        (eager, compiled) = (_all_of(flat, function) for function in (flat, flat.compiled()))
    unlike, count = [], 0
    largest = size_of(*eager.values())
    for name, wanted in eager.items():
        got = compiled[name]
        count += got.size
        noise = 0.0 if name in flat.output_names else rules.noise * largest
        bad = disagree(got, wanted, rules.rounding, rules.rounding * size_of(wanted) + noise)
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
    return found | {f"{GRADIENT}{name}": gradient for name, gradient in own}

"""Checks of a rule that need no differences.

A pullback is linear, it does not depend on other calls of the function, and the compiled function has the
same outputs and gradients as the eager function.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from multigrad.testing.checked_function import CheckedFunction
from multigrad.testing.differences import DEVIATIONS
from multigrad.testing.mismatches import (
    GRADIENT_PREFIX,
    Mismatch,
    find_mismatches,
    raise_mismatches,
    worst_of,
)
from multigrad.testing.precision import Tolerance, largest_magnitude
from multigrad.testing.tensors import flat_vjp, random_weights, to_numpy, to_tensors

_NEARBY = 1.0 - 2.0**-12
"""The factor between the arguments of two calls: beyond rounding, and within the domain of most functions."""


_CANCELLED = 4.0
"""The size of products with inputs that cancel in a gradient, relative to the largest gradient."""


@contextlib.contextmanager
def note_on_error(note: str) -> Iterator[None]:
    """Add a note to an exception that the user's function raises."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def check_linear(flat: CheckedFunction, tolerance: Tolerance, gradient_noise: Sequence[np.ndarray]) -> None:
    """Check that the pullback is linear in its upstream gradient, at elements where it is finite.

    `gradient_noise` is the standard deviation of the rounding error of each gradient.
    """
    __tracebackhide__ = True
    outputs, pullback = flat_vjp(flat, flat.inputs)
    u, v = (list(random_weights(outputs, seed)) for seed in (1, 2))
    # Large factors reveal a clip or an offset. Smaller ones do not overflow in half precision.
    a, b = 3.0, -4e4 if tolerance.precision in ("float32", "float64") else -40.0
    combined = [a * x + b * y for x, y in zip(u, v, strict=True)]
    pulled_u, pulled_v, pulled_combined = (
        [to_numpy(gradient) for gradient in pullback(to_tensors(upstream, outputs))]
        for upstream in (u, v, combined)
    )
    with np.errstate(invalid="ignore", over="ignore"):
        sums = [a * x + b * y for x, y in zip(pulled_u, pulled_v, strict=True)]
        terms = [np.abs(a * x) + np.abs(b * y) for x, y in zip(pulled_u, pulled_v, strict=True)]
        output_terms = [np.abs(w * to_numpy(y)) for w, y in zip(combined, outputs, strict=True)]
    noise = _CANCELLED * tolerance.noise * largest_magnitude(*terms, *output_terms)
    required, got, atol = {}, {}, {}
    rows = zip(flat.input_names, terms, sums, pulled_combined, gradient_noise, strict=True)
    for name, term, total, pulled, noise_of_pull in rows:
        is_finite = np.isfinite(pulled) & np.isfinite(total)
        required[name], got[name] = (np.where(is_finite, array, 0.0) for array in (total, pulled))
        size = float(np.max(term, where=is_finite, initial=0.0))
        deviation = 2.0 * (abs(a) + abs(b)) * noise_of_pull
        atol[name] = tolerance.rounding * size + noise + DEVIATIONS * deviation
    mismatches, count = _changes(required, got, tolerance.rounding, atol)
    if mismatches:
        raise_mismatches(
            flat.name,
            "the rule is not linear in its upstream gradient",
            f", which is {a:g} * pullback(u) {b:+g} * pullback(v)",
            f", which is pullback({a:g} * u {b:+g} * v)",
            "multiply the upstream gradient by factors that do not depend on it, and add nothing to it",
            ("argument", "element", "pullback of sum", "sum of pullbacks", "relative"),
            mismatches,
            count,
            _ignores_upstream(
                worst_of(mismatches).labels[0], flat.input_names, pulled_u, pulled_v, pulled_combined
            ),
        )


def _ignores_upstream(name: str, names: Sequence[str], *pulled: Sequence[np.ndarray]) -> str | None:
    """Return a cause if different upstream gradients give the same gradient: the rule ignores them."""
    first, *others = (gradients[names.index(name)] for gradients in pulled)
    is_same = all(np.array_equal(first, other) for other in others)
    return f"the rule ignores `upstream`: the gradient of {name} is the same for each" if is_same else None


def check_independent_calls(flat: CheckedFunction, tolerance: Tolerance) -> None:
    """Check that the pullback of a call does not change when the function is called again."""
    __tracebackhide__ = True
    outputs, pullback = flat_vjp(flat, flat.inputs)
    upstream = to_tensors(list(random_weights(outputs, seed=1)), outputs)
    before = dict(zip(flat.input_names, map(to_numpy, pullback(upstream)), strict=True))
    _call_with_other_arguments(flat)
    after = dict(zip(flat.input_names, map(to_numpy, pullback(upstream)), strict=True))
    limit = 10.0 * tolerance.noise  # threads may add in a different order
    atol = limit * largest_magnitude(*before.values())
    mismatches, count = _changes(before, after, limit, dict.fromkeys(before, atol))
    if mismatches:
        raise_mismatches(
            flat.name,
            "the gradient of a call changes when the function is called again",
            ", the gradient before the second call",
            " after it",
            "close over values that the call itself computed, and read no state that other calls change",
            ("argument", "element", "after", "before", "relative"),
            mismatches,
            count,
        )


def _call_with_other_arguments(flat: CheckedFunction) -> None:
    """Call the function with permuted arguments, so that signs and the position of the maximum change.

    If the function raises, call it with nearby arguments instead.
    """
    nearby = [to_numpy(tensor) * _NEARBY for tensor in flat.inputs]
    try:
        flat(*to_tensors([np.roll(array, 1) for array in nearby], flat.inputs))
    except Exception:  # noqa: BLE001 - a function may reject arguments with any exception
        flat(*to_tensors(nearby, flat.inputs))


def check_compiled(flat: CheckedFunction, tolerance: Tolerance, noise: Sequence[np.ndarray]) -> None:
    """Check that the compiled function has the outputs and gradients of the eager function.

    `noise` is the standard deviation of the rounding error of each output and of each gradient.
    """
    __tracebackhide__ = True
    with note_on_error("check_gradients compiled the function; pass compiled=False to skip that."):
        eager, compiled = (_outputs_and_gradients(flat, function) for function in (flat, flat.compile()))
    largest = largest_magnitude(*eager.values())
    atol = {}
    for (name, required), deviations in zip(eager.items(), noise, strict=True):
        cancelled = 0.0 if name in flat.output_names else tolerance.noise * largest
        atol[name] = tolerance.rounding * largest_magnitude(required) + cancelled + DEVIATIONS * deviations
    mismatches, count = _changes(eager, compiled, tolerance.rounding, atol)
    if mismatches:
        raise_mismatches(
            flat.name,
            "the compiled function differs from the eager function",
            " from the eager function",
            " from the compiled function",
            "do not branch on whether the function is compiled, on Python state, or on values of tensors",
            ("name", "element", "compiled", "eager", "relative"),
            mismatches,
            count,
        )


def _outputs_and_gradients(
    flat: CheckedFunction, function: Callable[..., Sequence[Any]]
) -> dict[str, np.ndarray]:
    """Return the outputs and gradients of `function` by name. It is `flat` or its compiled version."""
    outputs, pullback = flat_vjp(function, flat.inputs)
    gradients = pullback(to_tensors(list(random_weights(outputs, seed=0)), outputs))
    by_output = zip(flat.output_names, map(to_numpy, outputs), strict=True)
    by_input = zip(flat.input_names, map(to_numpy, gradients), strict=True)
    return dict(by_output) | {f"{GRADIENT_PREFIX}{name}": gradient for name, gradient in by_input}


def _changes(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray], rtol: float, atol: Mapping[str, Any]
) -> tuple[list[Mismatch], int]:
    """Return where arrays of the same names differ, and the number of their elements."""
    pairs = [find_mismatches((name,), after[name], before[name], rtol, atol[name]) for name in before]
    return [each for found in pairs for each in found], sum(array.size for array in before.values())

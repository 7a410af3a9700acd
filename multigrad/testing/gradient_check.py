"""`check_gradients`: compare the gradients of a function with its central differences."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import keras
import numpy as np

from multigrad import backend
from multigrad.common.errors import distinct_names, message, unusable
from multigrad.core.signature import name_of
from multigrad.ops.dtypes import EPSILON
from multigrad.testing.causes import Compared, probable_cause
from multigrad.testing.checked_function import CheckedFunction
from multigrad.testing.differences import (
    DEVIATIONS,
    CentralDifference,
    Estimate,
    Function,
    Rounding,
    estimate,
    estimate_linear,
    first_step,
    measure_noise,
    noise_of_sums,
)
from multigrad.testing.invariants import (
    check_compiled,
    check_independent_calls,
    check_linear,
    note_on_error,
)
from multigrad.testing.mismatches import (
    Mismatch,
    format_element,
    format_number,
    name_not_finite,
    raise_mismatches,
    relative_to,
    true_elements,
    worst_of,
)
from multigrad.testing.precision import Tolerance, detect_precision, largest_magnitude
from multigrad.testing.tensors import flat_vjp, random_weights, to_numpy, to_tensors

_INPUT_ROUNDING = 0.4
"""The share of the rounding error of an output that comes from the inputs: 2 of 5 roundings."""

_TIED = 2.0**0.5
"""The size of the errors of two equal elements, which are equal, relative to that of independent errors."""

_SECONDS = 5.0
"""The time after which a check shows its progress."""


@dataclass(frozen=True)
class CheckResult:
    """The result of a successful check. As text, it is one sentence."""

    precision: str = "float64"
    """The dtype that the tolerances are for: the least precise one, intermediate results included."""
    reason: str = ""
    """Why `precision` is not float64."""
    elements: int = 0
    """The number of derivatives that were compared with differences, over all orders. Each element of the
    inputs counts once for each output in order 1, and once for each input in each higher order."""
    total: int = 0
    """The number of derivatives that there are. It is larger than `elements` if the check sampled them."""
    largest: float = 0.0
    """The largest difference between a derivative and its estimate, relative to the largest derivative with
    respect to the same input. Derivatives that are zero up to rounding are ignored."""
    zeros: int = 0
    """The number of `elements` that differences cannot distinguish from zero. If it equals `elements`, a rule
    that returns zeros passes the check, too."""
    unchecked_elements: tuple[str, ...] = ()
    """The elements at which the function jumps, and has no derivative: any finite gradient passes there."""

    @property
    def unchecked(self) -> int:
        """The number of `unchecked_elements`."""
        return len(self.unchecked_elements)

    def __str__(self) -> str:
        sampled = f" of {self.total:,}" if self.total > self.elements else ""
        reason = f" because {self.reason}" if self.reason else ""
        text = f"{self.elements:,}{sampled} elements agree in {self.precision}{reason}: "
        text += f"largest={self.largest:.2g}, zeros={self.zeros}, unchecked={self.unchecked}"
        return f"{text}: {', '.join(self.unchecked_elements)}" if self.unchecked else text


def check_gradients(
    fn: Callable[..., Any],
    *args: Any,
    order: int = 1,
    rtol: float | None = None,
    atol: float | None = None,
    variables: Sequence[keras.Variable] | None = None,
    dtype: str | None = None,
    compiled: bool = True,
    max_elements: int = 100,
) -> CheckResult:
    """Compare the gradients of a function with its central differences.

    ```python
    import numpy as np
    from keras import ops
    import multigrad
    from multigrad.testing import check_gradients

    @multigrad.op_custom_gradient
    def log1pexp(x):
        return ops.log1p(ops.exp(x)), lambda upstream: upstream * ops.sigmoid(x)

    print(check_gradients(log1pexp, np.array([-1.0, 0.0, 2.0]), order=2).elements)  # 6
    ```

    The check has four parts, each with its own error message:

    - Linearity: `pullback(a * u + b * v)` equals `a * pullback(u) + b * pullback(v)`, as for every
      vector-Jacobian product.
    - Independent calls: the pullback of a call returns the same gradients after the function was called with
      other arguments.
    - Differences: each element of each input is moved in both directions. The change of each output, weighted
      by fixed pseudo-random numbers, must match its gradient. For the next order, the function is replaced by
      the gradient of all outputs with these weights. The weights become inputs, because differentiating a
      rule also differentiates it with respect to its upstream gradient.
    - Compilation: the function returns the same outputs and gradients under `jax.jit`, `tf.function` or
      `torch.compile` as in eager code. On PyTorch the compiler traces the forward and backward pass
      (`backend="aot_eager"`) and generates no code, and ops that read variables run uncompiled.

    Where the function has a kink, such as `relu` at zero, the gradient must lie between the derivatives on
    the two sides. Where it jumps, such as the gradient of `relu` at zero, it has no derivative: the result
    names the element as unchecked. The check fails for a rule that is intentionally not the derivative, such
    as a straight-through estimator.

    Arguments:
        fn: a function of tensors and nested structures of them, which returns a nested structure. It runs
            many times. Values that it assigns to variables are discarded, so every run sees the same random
            seeds.
        args: the arguments of `fn`. It is differentiated with respect to floating and complex arrays,
            tensors, Keras Variables and Python floats. Integers, strings and other static arguments are
            passed unchanged. For a static float, pass a lambda or a `functools.partial`.
        order: the highest order of derivatives. Lower orders are checked first.
        rtol, atol: a derivative `g` agrees with a difference `d` if `abs(g - d) <= atol + rtol * abs(d)`. By
            default, `rtol` is 1e-4 in float64 and float32, 0.05 in float16 and 0.2 in bfloat16. The default
            `atol` is the estimated rounding and truncation error of the difference, plus `4 * eps` times the
            largest gradient, in case the terms of a gradient cancel.
        variables: Keras Variables that `fn` is differentiated with respect to. The default is the trainable
            variables that it reads. Pass them if all arguments are integers or strings.
        dtype: the floating dtype to cast the arguments to before the first call; complex arguments are cast
            to the corresponding complex dtype. With "own" the arguments keep their dtypes. The default is
            "own" if there are variables, which always keep their dtypes, and float64 otherwise: the first
            call, with the dtypes of the arguments, finds the variables. JAX has float64 enabled while
            the check runs. If an operation of `fn` or of its gradient converts its operand to float32 or half
            precision, the tolerances for this dtype apply. Keras layers of float32 do, and some ops of Keras
            (3.15), such as `ops.sin` on JAX and `ops.matmul` on PyTorch. To find out, JAX and TensorFlow
            trace `fn` and its gradients once more, and PyTorch runs them once more. NumPy code, and on JAX
            and TensorFlow a function that branches on the values of tensors, cannot be traced: only the
            dtypes of their inputs and outputs count. The check measures their rounding errors, and adds them
            to `atol`.
        compiled: whether to check the compiled function, too. This takes longest on PyTorch, about a second.
        max_elements: the number of elements to move in each input. If an input is larger, a generator with a
            fixed seed selects them.

    Returns:
        An object with the `precision` that the tolerances are for, the `reason` if it is not float64, the
        number of `elements` compared of a `total`, the `largest` relative difference, the number of `zeros`,
        and the number of `unchecked` elements with their names, `unchecked_elements`. Zeros are elements that
        differences cannot distinguish from zero. For example, next to an output of 1e8 in float32, a
        derivative of 1 cannot be distinguished from zero. After five seconds, the check shows its progress if
        stderr is a terminal.

    Raises:
        AssertionError: if a part of the check fails. The message names the argument, the element and both
            numbers, and shows a table of the largest differences. If the wrong gradient is a multiple or the
            transpose of the right one, for example, a line `probably:` says so.
        TypeError: if nothing is differentiable, or if `order` or `max_elements` is not an integer.
        ValueError: if `order` or `max_elements` is less than 1.
        NotImplementedError: on the NumPy and OpenVINO backends.

    References:
        Press et al., Numerical Recipes, section 5.7. `multigrad/testing/differences.py` derives the step of
        the differences and the tolerances.
    """
    __tracebackhide__ = True
    _require_positive(fn, "order", order, "1, or a higher order of derivatives", "omit it for the gradient")
    _require_positive(
        fn, "max_elements", max_elements, "1, or a larger number of elements", "omit it for 100"
    )
    progress = _Progress()
    with backend.active.wide():
        with note_on_error(f"check_gradients used the dtype {dtype or 'float64'!r}; see its `dtype`."):
            flat = CheckedFunction(fn, args, variables, dtype)
        result = CheckResult()
        derivative = _Derivative(flat, flat.inputs, flat.input_names, flat.output_names)
        precision = detect_precision(derivative.function, derivative.inputs, "the function")
        noise: Sequence[np.ndarray] | None = None
        for nth in range(1, order + 1):
            next_derivative = derivative.differentiate()
            name = f"the {_name_derivative(nth)}"
            next_precision = detect_precision(next_derivative.function, next_derivative.inputs, name)
            lowest, reason = max(precision, next_precision, key=lambda found: EPSILON[found[0]])
            if EPSILON[lowest] > EPSILON[result.precision]:
                result = replace(result, precision=lowest, reason=reason)
            tolerance = Tolerance(lowest, rtol, atol)
            noise = noise or measure_noise(derivative.function, derivative.inputs, tolerance)
            next_noise = measure_noise(next_derivative.function, next_derivative.inputs, tolerance)
            if nth == 1:
                _require_finite(flat)
                check_linear(flat, tolerance, next_noise)
                check_independent_calls(flat, tolerance)
            result = _check_differences(
                flat, derivative, nth, tolerance, (noise, next_noise), max_elements, result, progress
            )
            if nth == 1 and compiled:
                progress.show(f"{flat.name}: compilation")
                check_compiled(flat, tolerance, [*noise, *next_noise])
            derivative, precision, noise = next_derivative, next_precision, next_noise
        progress.show("")
        return result


class _Progress:
    """The line that shows the state of a check after five seconds, if stderr is a terminal."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def show(self, state: str) -> None:
        if sys.stderr.isatty() and time.monotonic() - self._start > _SECONDS:
            print(f"\033[K{state}", end="\r", file=sys.stderr, flush=True)


def _name_derivative(nth: int) -> str:
    return "gradient" if nth == 1 else f"derivative of order {nth}"


def _require_positive(fn: Callable[..., Any], argument: str, number: Any, required: str, fix: str) -> None:
    is_integer = isinstance(number, (int, np.integer))
    if not is_integer or number < 1:
        error = ValueError if is_integer else TypeError
        raise unusable(error, name_of(fn), argument, required=required, got=number, fix=fix)


def _require_finite(flat: CheckedFunction) -> None:
    """Raise if an output is not finite, because it has no differences."""
    __tracebackhide__ = True
    for name, output in zip(flat.output_names, map(to_numpy, flat(*flat.inputs)), strict=True):
        for element in true_elements(~np.isfinite(output)):
            problem = f"the function is {name_not_finite([output[element]])} at these arguments"
            argument, got = name + format_element(element), format_number(output[element])
            required, fix = "finite outputs", "check the function at arguments where it is finite"
            raise AssertionError(
                message(flat.name, problem, argument=argument, required=required, got=got, fix=fix)
            )


@dataclass(frozen=True)
class _Derivative:
    """The function, or a derivative of it, and the inputs at which it is checked."""

    function: Function
    inputs: Sequence[Any]
    """The inputs of the function, followed by the upstream gradients of its derivatives."""
    input_names: Sequence[str]
    output_names: Sequence[str]
    terms: float = 0.0
    """The size of terms that may cancel in the outputs: the largest norm of the outputs of lower orders."""

    def differentiate(self) -> "_Derivative":
        """Return the gradient of all outputs, as a function of the inputs and of the upstream gradients."""
        outputs, input_count = self.function(*self.inputs), len(self.inputs)

        def gradient(*inputs: Any) -> list[Any]:
            _, pullback = flat_vjp(self.function, inputs[:input_count])
            return list(pullback(inputs[input_count:]))

        upstream = to_tensors(list(random_weights(outputs, seed=0)), outputs)
        names = [*self.input_names, *[f"upstream of {name}" for name in self.output_names]]
        terms = max(self.terms, _TIED * _term_size(outputs, map(to_numpy, upstream)))
        return _Derivative(
            gradient, [*self.inputs, *upstream], distinct_names(names), self.input_names, terms
        )


def _check_differences(
    flat: CheckedFunction,
    derivative: _Derivative,
    nth: int,
    tolerance: Tolerance,
    noise: tuple[Sequence[np.ndarray], Sequence[np.ndarray]],
    max_elements: int,
    result: CheckResult,
    progress: _Progress,
) -> CheckResult:
    """Compare the gradients of `derivative` with its differences, and add the comparison to `result`.

    `noise` is the noise of the outputs of `derivative`, and of its gradients.
    """
    __tracebackhide__ = True
    inputs = derivative.inputs
    outputs, pullback = flat_vjp(derivative.function, inputs)
    weights = list(random_weights(outputs, seed=0))
    gradients = [_gradient_of_output(pullback, outputs, weights, k) for k in range(len(outputs))]
    rounding = Rounding(tolerance, noise_of_sums(noise[0], weights), derivative.terms)
    term_sizes = [_term_size(inputs, gradient) for gradient in gradients]
    everything: dict[tuple[str, ...], Compared] = {}
    for i, (name, tensor) in enumerate(zip(derivative.input_names, inputs, strict=True)):
        is_upstream = i >= len(flat.inputs)
        shape = tuple(tensor.shape)
        chosen = _choose_elements(shape, max_elements)
        estimate_one = estimate_linear if is_upstream else estimate
        differences, estimates = [], []
        for element in chosen:
            where = f"{name}{format_element(element)} of shape {shape}"
            progress.show(f"{flat.name}: {_name_derivative(nth)}, {where}")
            differences.append(CentralDifference(derivative.function, inputs, i, element, weights, rounding))
            estimates.append(estimate_one(differences[-1]))
        steps = np.array([first_step(tolerance, abs(to_numpy(tensor)[element])) for element in chosen])
        for k, output in enumerate(derivative.output_names):
            by_rule = np.array([gradients[k][i][element] for element in chosen])
            by_difference = np.array([each.derivatives[k] for each in estimates])
            errors = np.array([each.errors[k] for each in estimates])
            errors += DEVIATIONS * np.array([noise[1][i][element] for element in chosen])
            if not is_upstream:
                errors += _INPUT_ROUNDING * tolerance.error(term_sizes[k], steps)
            atol = np.broadcast_to(tolerance.atol(errors, largest_magnitude(*gradients[k])), len(chosen))
            compared = Compared(name, shape, chosen, by_rule, by_difference, atol)
            if not is_upstream:
                compared, jumps = _at_kinks(compared, tolerance.rtol, differences, estimates, k)
                # Derivatives of upstream gradients, or with respect to them, repeat those of lower orders.
                if nth == 1 or k < len(flat.inputs):
                    result = _count(result, compared, jumps, "" if nth == 1 else f" in order {nth}")
            everything[output, name] = compared
    mismatches = [
        Mismatch(labels, element, (by_rule, by_difference))
        for labels, each in everything.items()
        for element, by_rule, by_difference, is_wrong in zip(
            each.elements, each.rule, each.differences, each.is_wrong(tolerance.rtol), strict=True
        )
        if is_wrong
    ]
    if mismatches:
        labels = worst_of(mismatches).labels
        cause = probable_cause(flat, labels, everything, weights, rounding) if nth == 1 else None
        count = sum(len(each.elements) for each in everything.values())
        _raise_differences(flat, mismatches, count, nth, tolerance.precision, cause)
    return result


def _at_kinks(
    compared: Compared,
    rtol: float,
    differences: Sequence[CentralDifference],
    estimates: Sequence[Estimate],
    k: int,
) -> tuple[Compared, list[tuple[int, ...]]]:
    """Return the comparison with the one-sided derivatives of output `k`, and the elements where it jumps.

    Only elements where the gradient differs from the central difference need this.
    """
    numbers, jumps = compared.differences.copy(), []
    errors = compared.errors + rtol * np.abs(numbers)
    is_finite = np.isfinite(compared.rule) & np.isfinite(numbers)
    for n in map(int, np.flatnonzero(compared.is_wrong(rtol) & is_finite)):
        nearest = differences[n].nearest_derivative(k, estimates[n], compared.rule[n], errors[n])
        if nearest is None:
            jumps.append(compared.elements[n])
        numbers[n] = compared.rule[n] if nearest is None else nearest
    return replace(compared, differences=numbers), jumps


def _count(
    result: CheckResult, compared: Compared, jumps: Sequence[tuple[int, ...]], order: str
) -> CheckResult:
    """Return the result with the elements of one argument."""
    names = [f"{compared.name}{format_element(element)}{order}" for element in jumps]
    size = largest_magnitude(compared.differences)
    with np.errstate(invalid="ignore"):  # inf - inf
        difference = largest_magnitude(compared.rule - compared.differences)
    is_clear = size > np.max(compared.errors, initial=0.0)
    return replace(
        result,
        elements=result.elements + len(compared.elements),
        total=result.total + int(np.prod(compared.shape)),
        largest=max(result.largest, relative_to(difference, size) if is_clear else 0.0),
        zeros=result.zeros + int(np.sum(np.abs(compared.differences) <= compared.errors)),
        unchecked_elements=tuple(dict.fromkeys([*result.unchecked_elements, *names])),
    )


def _gradient_of_output(
    pullback: Callable[..., Any], outputs: Sequence[Any], weights: Sequence[np.ndarray], k: int
) -> list[np.ndarray]:
    """Return the gradient of the weighted sum of one output with respect to each input."""
    upstream = [weight * (i == k) for i, weight in enumerate(weights)]
    return [to_numpy(gradient) for gradient in pullback(to_tensors(upstream, outputs))]


def _term_size(inputs: Sequence[Any], gradients: Iterable[np.ndarray]) -> float:
    """Return the norm of products, such as the terms that the inputs contribute to an output."""
    with np.errstate(all="ignore"):
        terms = np.concatenate(
            [np.abs(to_numpy(x) * g).ravel() for x, g in zip(inputs, gradients, strict=True)]
        )
        return float(np.linalg.norm(terms[np.isfinite(terms)]))


def _choose_elements(shape: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Return the indices of at most `count` elements."""
    elements = list(np.ndindex(shape))
    if len(elements) <= count:
        return elements
    chosen = np.random.default_rng(0).choice(len(elements), count, replace=False)
    return [elements[i] for i in sorted(chosen)]


def _raise_differences(
    flat: CheckedFunction, mismatches: list[Mismatch], count: int, nth: int, precision: str, cause: str | None
) -> NoReturn:
    __tracebackhide__ = True
    worst = worst_of(mismatches)
    by_rule, by_difference = worst.numbers
    of_output = f" of {worst.labels[0]}" if len(flat.output_names) > 1 or nth > 1 else ""
    problem = f"the {_name_derivative(nth)}{of_output} differs from the central differences"
    fix = "correct the rule, or pass rtol and atol for a steep function. "
    fix += "A straight-through estimator fails by design"
    if name_not_finite([by_difference]):
        problem = f"the central differences{of_output} are {name_not_finite([by_difference])}"
        fix = "check the function at arguments around which it is finite"
    if name_not_finite([by_rule]):
        problem = f"the {_name_derivative(nth)}{of_output} is {name_not_finite([by_rule])}"
    raise_mismatches(
        flat.name,
        problem,
        f" from central differences in {precision}",
        " from the rule",
        fix,
        ("output", "argument", "element", "rule", "differences", "relative"),
        mismatches,
        count,
        cause,
    )

"""`check_gradients`: compare the gradients of a function with its central differences."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import keras
import numpy as np

from multigrad import backend
from multigrad.core.errors import distinct_names, message, unusable
from multigrad.core.signature import name_of
from multigrad.testing.causes import Compared, probable_cause
from multigrad.testing.checked_function import CheckedFunction
from multigrad.testing.differences import (
    DEVIATIONS,
    CentralDifference,
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
    disagree,
    format_element,
    format_number,
    name_not_finite,
    raise_mismatches,
    relative_to,
    true_elements,
)
from multigrad.testing.precision import (
    EPSILON,
    Tolerance,
    detect_precision,
    largest_magnitude,
)
from multigrad.testing.tensors import flat_vjp, random_weights, to_numpy, to_tensors

_INPUT_ROUNDING = 0.4
"""The share of the rounding error of an output that comes from the inputs: 2 of 5 roundings."""


@dataclass(frozen=True)
class CheckResult:
    """The result of a successful check."""

    precision: str
    """The dtype that the tolerances are for: the least precise one, intermediate results included."""
    elements: int
    """The number of derivatives that were compared with differences, over all orders."""
    largest: float
    """The largest difference between a derivative and its estimate, relative to the largest derivative with
    respect to the same input. Derivatives that are zero up to rounding are ignored."""
    zeros: int
    """The number of `elements` that differences cannot distinguish from zero. If it equals `elements`, a rule
    that returns zeros passes the check, too."""


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

    The check fails for a function that is not differentiable at the arguments, such as `relu` at zero. It
    also fails for a rule that is intentionally not the derivative, such as a straight-through estimator.

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
        dtype: the floating dtype to cast the arguments to; complex arguments are cast to the corresponding
            complex dtype. With "own" the arguments keep their dtypes. The default is "own" if there are
            variables, which always keep their dtypes, and float64 otherwise. JAX has float64 enabled while
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
        An object with the `precision` that the tolerances are for, the number of `elements` compared, the
        `largest` relative difference, and the number of `zeros`: elements that differences cannot distinguish
        from zero. For example, next to an output of 1e8 in float32, a derivative of 1 cannot be
        distinguished from zero.

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
    with backend.active.wide():
        with note_on_error("check_gradients called the function with float64 arguments; see its `dtype`."):
            flat = CheckedFunction(fn, args, variables, dtype)
        result = CheckResult("float64", 0, 0.0, 0)
        derivative = _Derivative(flat, flat.inputs, flat.input_names, flat.output_names)
        precision = detect_precision(derivative.function, derivative.inputs)
        noise: Sequence[np.ndarray] | None = None
        for nth in range(1, order + 1):
            next_derivative = derivative.differentiate()
            next_precision = detect_precision(next_derivative.function, next_derivative.inputs)
            lower_precision = max(precision, next_precision, key=EPSILON.__getitem__)
            tolerance = Tolerance(lower_precision, rtol, atol)
            noise = noise or measure_noise(derivative.function, derivative.inputs, tolerance)
            next_noise = measure_noise(next_derivative.function, next_derivative.inputs, tolerance)
            if nth == 1:
                _require_finite(flat)
                check_linear(flat, tolerance, next_noise)
                check_independent_calls(flat, tolerance)
            result = _check_differences(
                flat, derivative, nth, tolerance, (noise, next_noise), max_elements, result
            )
            if nth == 1 and compiled:
                check_compiled(flat, tolerance, [*noise, *next_noise])
            derivative, precision, noise = next_derivative, next_precision, next_noise
        return result


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
            raise AssertionError(
                message(
                    flat.name,
                    f"the function is {name_not_finite([output[element]])} at these arguments",
                    argument=name + format_element(element),
                    required="finite outputs",
                    got=format_number(output[element]),
                    fix="check the function at arguments where it is finite",
                )
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
        terms = max(self.terms, _term_size(outputs, map(to_numpy, upstream)))
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
    comparison = _Comparison(tolerance, result.elements, result.largest, result.zeros)
    for i, (name, tensor) in enumerate(zip(derivative.input_names, inputs, strict=True)):
        is_upstream = i >= len(flat.inputs)
        chosen = _choose_elements(tuple(tensor.shape), max_elements)
        estimate_one = estimate_linear if is_upstream else estimate
        estimates = [
            estimate_one(CentralDifference(derivative.function, inputs, i, element, weights, rounding))
            for element in chosen
        ]
        steps = np.array([first_step(tolerance, abs(to_numpy(tensor)[element])) for element in chosen])
        for k, output in enumerate(derivative.output_names):
            by_rule = np.array([gradients[k][i][element] for element in chosen])
            by_difference = np.array([derivatives[k] for derivatives, _ in estimates])
            errors = np.array([errors[k] for _, errors in estimates])
            errors += DEVIATIONS * np.array([noise[1][i][element] for element in chosen])
            if not is_upstream:
                errors += _INPUT_ROUNDING * tolerance.error(term_sizes[k], steps)
            atol = tolerance.atol(errors, largest_magnitude(*gradients[k]))
            # Derivatives of upstream gradients, or with respect to them, repeat derivatives of lower orders.
            is_counted = not is_upstream and (nth == 1 or k < len(flat.inputs))
            compared = Compared(name, tuple(tensor.shape), chosen, by_rule, by_difference, np.asarray(atol))
            comparison.add(output, compared, is_counted)
    if comparison.mismatches:
        cause = None
        if nth == 1:
            labels = comparison.worst().labels
            cause = probable_cause(flat, labels, comparison.compared, weights, rounding)
        _raise_differences(flat, comparison, nth, cause)
    precision = max(result.precision, tolerance.precision, key=EPSILON.__getitem__)
    return CheckResult(precision, comparison.elements, comparison.largest, comparison.zeros)


@dataclass
class _Comparison:
    """The mismatches between derivatives and differences, and the numbers of a `CheckResult`."""

    tolerance: Tolerance
    elements: int
    largest: float
    zeros: int
    count: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    compared: dict[tuple[str, ...], Compared] = field(default_factory=dict)
    """The gradients by the names of the output and of the argument."""

    def add(self, output: str, compared: Compared, is_counted: bool) -> None:
        """Compare the derivatives of one output with respect to elements of one argument."""
        labels = (output, compared.name)
        by_rule, by_difference, atol = compared.rule, compared.differences, compared.errors
        is_wrong = disagree(by_rule, by_difference, self.tolerance.rtol, atol) | ~np.isfinite(by_difference)
        self.mismatches += [
            Mismatch(labels, element, tuple(numbers))
            for element, *numbers, wrong in zip(
                compared.elements, by_rule, by_difference, is_wrong, strict=True
            )
            if wrong
        ]
        self.compared[labels] = compared
        self.count += len(compared.elements)
        if is_counted:
            self.elements += len(compared.elements)
            self.zeros += int(np.sum(np.abs(by_difference) <= atol))
        size = largest_magnitude(by_difference)
        if size > np.max(atol, initial=0.0) and not is_wrong.any():
            difference = np.abs(by_rule - by_difference).max()
            self.largest = max(self.largest, relative_to(difference, size))

    def worst(self) -> Mismatch:
        """Return the mismatch with the largest relative difference."""
        return max(self.mismatches, key=Mismatch.relative_difference)


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
    flat: CheckedFunction, comparison: _Comparison, nth: int, cause: str | None
) -> NoReturn:
    __tracebackhide__ = True
    mismatches, worst = comparison.mismatches, comparison.worst()
    got, required = worst.numbers
    of_output = f" of {worst.labels[0]}" if len(flat.output_names) > 1 or nth > 1 else ""
    derivative = "gradient" if nth == 1 else f"derivative of order {nth}"
    problem = f"the {derivative}{of_output} differs from the central differences"
    fix = "correct the rule, or pass rtol and atol if the function is too steep for differences"
    if name_not_finite([required]):
        problem = f"the central differences{of_output} are {name_not_finite([required])}"
        fix = "check the function at arguments around which it is finite"
    if name_not_finite([got]):
        problem = f"the {derivative}{of_output} is {name_not_finite([got])}"
    raise_mismatches(
        flat.name,
        problem,
        worst,
        f"{format_number(required)} from central differences in {comparison.tolerance.precision}",
        f"{format_number(got)} from the rule",
        fix,
        ("output", "argument", "element", "rule", "differences", "relative"),
        mismatches,
        comparison.count,
        cause,
    )

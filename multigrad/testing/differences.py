"""`check_gradients`: a rule against the differences of its function."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import keras
import numpy as np
from keras import ops

from multigrad import backend
from multigrad.calculus import vjp
from multigrad.errors import message
from multigrad.testing.flat import Flat, directions, resolution, values
from multigrad.testing.table import Unlike, disagree, in_words, number_text, relative, table

_Function = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Checked:
    """What a check compared, all of which agreed."""

    dtype: str
    """The dtype with the fewest digits among the inputs and outputs, on which tolerances depend."""
    elements: int
    """How many derivatives were compared with differences, those of all orders together."""
    largest: float
    """The largest difference of one, relative to the largest derivative of its argument."""


def check_gradients(
    fn: Callable[..., Any],
    *args: Any,
    order: int = 1,
    rtol: float | None = None,
    atol: float | None = None,
    variables: Sequence[keras.Variable] | None = None,
    dtype: str | None = "float64",
    compiled: bool = True,
    max_elements: int = 100,
) -> Checked:
    """Compare the gradients of a function with its central differences.

    ```python
    from keras import ops
    import multigrad
    from multigrad.testing import check_gradients

    @multigrad.op_custom_gradient
    def log1pexp(x):
        return ops.log1p(ops.exp(x)), lambda upstream: upstream * ops.sigmoid(x)

    print(check_gradients(log1pexp, np.array([-1.0, 0.0, 2.0]), order=2).elements)  # 6
    ```

    Three checks, each of which has a message of its own:

    - Linearity: `pullback(a * u + b * v)` is `a * pullback(u) + b * pullback(v)`, as of every
      vector-Jacobian product.
    - Differences: each element of each input is moved both ways, and each output, its elements weighted by
      fixed pseudo-random numbers, must change as its gradient says. For the next order, the gradient of all
      outputs so weighted takes the place of the function.
    - Compiled: the outputs and gradients of the function under `jax.jit`, `tf.function` or `torch.compile`
      are those of the function run as it is. On PyTorch, `torch.compile` traces the forward and the
      backward pass (`backend="aot_eager"`), and generates no code.

    A function that is not differentiable at the arguments, such as `relu` at zero, fails, and so does a rule
    that is no derivative on purpose, such as a straight-through estimator.

    Arguments:
        fn: a function of tensors and nested structures of them, which returns any such structure. It is run
            many times; what it assigns to variables is lost, so each run sees the same seeds.
        args: its arguments. It is differentiated by floating and complex arrays, tensors, Keras Variables
            and Python floats; integers, strings and other static ones are passed as they are. For a
            static float, pass a lambda or `functools.partial`.
        order: the highest order of derivatives; the lower ones are checked first.
        rtol, atol: a derivative `g` agrees with a difference `d` where `abs(g - d) <= atol + rtol * abs(d)`.
            They depend on the precision where they are not given: with `e = 5 * eps ** (2/3)`, `rtol` is the
            larger of `1e-4` and `e`, and `atol` is `e` times the size of the output, which is the
            rounding error of a difference. That is 2e-10 in float64, 1e-4 in float32, 0.05 in float16
            and 0.2 in bfloat16.
        variables: Keras Variables by which it is differentiated too; if not given, the trainable ones that
            it reads.
        dtype: the dtype to which all floating inputs are cast, complex ones to its complex counterpart.
            None lets each keep its own. JAX has float64 for as long as the check runs. A function whose
            outputs have fewer digits, such as a layer of float32, is judged by theirs.
        compiled: whether the function is compiled, too. It takes the longest on PyTorch, about a second.
        max_elements: how many elements of an input are moved; of a larger one so many, which a generator
            with a fixed seed chooses.

    Returns:
        What was compared: the `dtype` that decided on tolerances, the number of `elements` compared, and the
        `largest` difference, relative to the gradient.

    Raises:
        AssertionError: where they disagree. It names the argument, the element and both values, and has a
            table of the worst.
        TypeError: where there is nothing to differentiate.
        NotImplementedError: on the NumPy and OpenVINO backends.

    References:
        A central difference has an error of `O(h**2)` and one of rounding of `O(eps / h)`. Their sum is the
        least for a step `h` of about `eps ** (1/3)`, here times the larger of 1 and the element
        (Press et al., Numerical Recipes, section 5.7).
    """
    __tracebackhide__ = True
    with backend.active.wide():
        with _noted(f"check_gradients called the function with dtype={dtype!r}; see its argument `dtype`."):
            flat = Flat(fn, args, variables, dtype)
            outputs = flat(*flat.inputs)
        lowest = max([*flat.inputs, *outputs], key=resolution)
        rules = _Tolerance(resolution(lowest), rtol, atol)
        found = Checked(keras.backend.standardize_dtype(lowest.dtype), 0, 0.0)
        _check_linear(flat, rules)
        function: _Function = flat
        names = flat.output_names
        for nth in range(1, order + 1):
            found = _check_differences(flat, function, names, nth, rules, max_elements, found)
            if nth == 1 and compiled:
                _check_compiled(flat, rules)
            function, names = _gradient_of(function, flat.inputs), flat.input_names
        return found


class _Tolerance:
    """How far numbers may be apart, and how far an element is moved, in a precision."""

    def __init__(self, eps: float, rtol: float | None, atol: float | None) -> None:
        self.rounding = 5.0 * eps ** (2 / 3)
        self.step = eps ** (1 / 3)
        self.rtol = max(1e-4, self.rounding) if rtol is None else rtol
        self._atol = atol

    def atol(self, size: float) -> float:
        """The absolute tolerance for differences of an output of this size."""
        return self.rounding * size if self._atol is None else self._atol


@contextlib.contextmanager
def _noted(note: str) -> Iterator[None]:
    """Add a note to an error of the function's own."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def _like(numbers: Sequence[np.ndarray], tensors: Sequence[Any]) -> list[Any]:
    """Arrays as tensors, in the dtypes of others."""
    return [
        ops.convert_to_tensor(array, dtype=keras.backend.standardize_dtype(tensor.dtype))
        for array, tensor in zip(numbers, tensors, strict=True)
    ]


def _gradient_of(function: _Function, inputs: Sequence[Any]) -> _Function:
    """The gradient of all outputs together, weighted by fixed numbers."""
    outputs = function(*inputs)
    weights = _like(list(directions(outputs, seed=0)), outputs)

    def gradient(*inputs: Any) -> list[Any]:
        _, pullback = vjp(function, *inputs)
        return list(pullback(weights))

    return gradient


# --------------------------------------------------------------------------------------- differences


def _check_differences(
    flat: Flat,
    function: _Function,
    names: Sequence[str],
    nth: int,
    rules: _Tolerance,
    max_elements: int,
    found: Checked,
) -> Checked:
    """See that the derivatives of `function`, whose outputs have these names, are its differences."""
    __tracebackhide__ = True
    outputs, pullback = vjp(function, *flat.inputs)
    weights = list(directions(outputs, seed=0))
    sizes = [_size(weight, values(output)) for weight, output in zip(weights, outputs, strict=True)]
    gradients = [_one_gradient(pullback, outputs, weights, place) for place in range(len(outputs))]
    count, largest, unlike = found.elements, found.largest, []
    for i, (name, tensor) in enumerate(zip(flat.input_names, flat.inputs, strict=True)):
        elements = _chosen(tuple(tensor.shape), max_elements)
        differences = [_difference(function, flat.inputs, i, e, weights, rules.step) for e in elements]
        for k, output in enumerate(names):
            ruled = np.array([gradients[k][i][element] for element in elements])
            measured = np.array([difference[k] for difference in differences])
            bad = disagree(ruled, measured, rules.rtol, rules.atol(sizes[k]))
            pairs = zip(elements, ruled, measured, strict=True)
            unlike += [
                Unlike((output, name), element, (got, wanted))
                for (element, got, wanted), wrong in zip(pairs, bad, strict=True)
                if wrong
            ]
            count += len(elements)
            if len(elements) and not bad.any():
                largest = max(largest, relative(np.abs(ruled - measured).max(), np.abs(measured).max()))
    if unlike:
        _fail_differences(flat, unlike, nth, count - found.elements, found.dtype)
    return Checked(found.dtype, count, largest)


def _size(weight: np.ndarray, output: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        return float(np.linalg.norm(weight * output))


def _one_gradient(
    pullback: Callable[..., Any], outputs: Sequence[Any], weights: Sequence[np.ndarray], place: int
) -> list[np.ndarray]:
    """The gradient of the output at this place alone, weighted."""
    upstream: list[Any] = [None] * len(outputs)
    upstream[place : place + 1] = _like(weights[place : place + 1], outputs[place : place + 1])
    return [values(gradient) for gradient in pullback(upstream)]


def _chosen(shape: tuple[int, ...], most: int) -> list[tuple[int, ...]]:
    """The elements that are moved."""
    every = list(np.ndindex(shape))
    if len(every) <= most:
        return every
    places = np.random.default_rng(0).choice(len(every), most, replace=False)
    return [every[place] for place in sorted(places)]


def _difference(
    function: _Function,
    inputs: Sequence[Any],
    i: int,
    element: tuple[int, ...],
    weights: Sequence[np.ndarray],
    step: float,
) -> list[Any]:
    """How each weighted output changes with one element of an input: a number in the plane if it is complex."""
    whole = values(inputs[i])
    length = step * max(1.0, abs(whole[element]))
    parts = []
    for direction in (1.0, 1j) if np.iscomplexobj(whole) else (1.0,):
        (high, up), (low, down) = (
            _moved(function, inputs, i, element, sign * length * direction) for sign in (1.0, -1.0)
        )
        moved = abs(high - low)  # what rounding left of the step
        with np.errstate(invalid="ignore", over="ignore"):
            parts.append([
                direction * np.sum(np.real(np.conj(w) * (a - b))) / moved
                for w, a, b in zip(weights, up, down, strict=True)
            ])
    return [sum(own) for own in zip(*parts, strict=True)]


def _moved(
    function: _Function, inputs: Sequence[Any], i: int, element: tuple[int, ...], by: complex
) -> tuple[Any, list[np.ndarray]]:
    """An element where it was moved to, and the outputs there."""
    there = list(inputs)
    whole = values(inputs[i])
    whole[element] += by
    there[i : i + 1] = _like([whole], inputs[i : i + 1])
    return values(there[i])[element], [values(output) for output in function(*there)]


def _fail_differences(flat: Flat, unlike: list[Unlike], nth: int, count: int, dtype: str) -> NoReturn:
    __tracebackhide__ = True
    worst = max(unlike, key=Unlike.apart)
    got, wanted = worst.numbers
    of = f" of {worst.place[0]}" if len(flat.output_names) > 1 or nth > 1 else ""
    kind = "gradient" if nth == 1 else f"derivative of order {nth}"
    problem = f"the {kind}{of} is not that of the function"
    mend = "correct the rule; or pass rtol and atol, where the function is too steep for differences"
    if in_words([wanted]):
        problem = f"the differences{of} are {in_words([wanted])}"
        mend = "check it at arguments around which the function is finite"
    if in_words([got]):
        problem = f"the {kind}{of} is {in_words([got])}"
    _fail(
        flat,
        problem,
        worst,
        f"{number_text(wanted)}, by central differences in {dtype}",
        f"{number_text(got)}, by the rule",
        mend,
        ("output", "argument", "element", "rule", "differences", "relative"),
        unlike,
        count,
    )


def _fail(
    flat: Flat,
    problem: str,
    worst: Unlike,
    required: str,
    got: str,
    mend: str,
    headings: Sequence[str],
    unlike: list[Unlike],
    count: int,
) -> NoReturn:
    __tracebackhide__ = True
    said = message(flat.name, problem, argument=worst.where(), required=required, got=got, mend=mend)
    raise AssertionError(f"{said}\n{len(unlike)} of {count} disagree:\n{table(headings, unlike)}")


# ---------------------------------------------------------------------------- linearity and compilers


def _check_linear(flat: Flat, rules: _Tolerance) -> None:
    """See that the pullback is linear in its upstream gradient, wherever it is finite."""
    __tracebackhide__ = True
    outputs, pullback = vjp(flat, *flat.inputs)
    left, right = (list(directions(outputs, seed)) for seed in (1, 2))
    a, b = 3.0, -40.0  # far enough from one another to meet a clip or an offset
    both = [a * u + b * v for u, v in zip(left, right, strict=True)]
    of_left, of_right, of_both = (
        [values(gradient) for gradient in pullback(_like(upstream, outputs))] for upstream in (left, right, both)
    )
    unlike, count = [], 0
    for name, u, v, got in zip(flat.input_names, of_left, of_right, of_both, strict=True):
        count += got.size
        with np.errstate(invalid="ignore"):
            wanted = a * u + b * v
            parts = np.abs(a * u) + np.abs(b * v)
        finite = np.isfinite(got) & np.isfinite(wanted)
        size = float(np.max(parts, where=finite, initial=0.0))
        bad = finite & disagree(got, wanted, rules.rounding, rules.rounding * size)
        unlike += [Unlike((name,), e, (got[e], wanted[e])) for e in _places(bad)]
    if unlike:
        worst = max(unlike, key=Unlike.apart)
        _fail(
            flat,
            "the rule is not linear in its upstream gradient",
            worst,
            f"{number_text(worst.numbers[1])}, which is {a:g} * pullback(u) {b:+g} * pullback(v)",
            f"{number_text(worst.numbers[0])}, which is pullback({a:g} * u {b:+g} * v)",
            "multiply the upstream gradient by what does not depend on it, and add nothing",
            ("argument", "element", "of the sum", "sum of both", "relative"),
            unlike,
            count,
        )


def _places(where: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(int(i) for i in place) for place in np.argwhere(where)]


def _check_compiled(flat: Flat, rules: _Tolerance) -> None:
    """See that the outputs and gradients of the compiled function are those of the function."""
    __tracebackhide__ = True
    with _noted("check_gradients compiled the function; it does not with compiled=False."):
        (eager, compiled) = (_all_of(flat, function) for function in (flat, flat.compiled()))
    unlike, count = [], 0
    for name, wanted in eager.items():
        got = compiled[name]
        count += got.size
        finite = np.isfinite(wanted)
        size = float(np.max(np.abs(wanted), where=finite, initial=0.0))
        bad = disagree(got, wanted, rules.rounding, rules.rounding * size)
        bad &= ~(np.isnan(got) & np.isnan(wanted)) & (got != wanted)
        unlike += [Unlike((name,), e, (got[e], wanted[e])) for e in _places(bad)]
    if unlike:
        worst = max(unlike, key=Unlike.apart)
        _fail(
            flat,
            "it is another function when it is compiled",
            worst,
            f"{number_text(worst.numbers[1])}, run as it is",
            f"{number_text(worst.numbers[0])}, compiled",
            "let it not depend on whether it is compiled, on Python's state, or on values it cannot see then",
            ("what", "element", "compiled", "as it is", "relative"),
            unlike,
            count,
        )


def _all_of(flat: Flat, function: _Function) -> dict[str, np.ndarray]:
    """The outputs and gradients of a function, by name."""
    outputs, pullback = vjp(function, *flat.inputs)
    gradients = pullback(_like(list(directions(outputs, seed=0)), outputs))
    found = dict(zip(flat.output_names, map(values, outputs), strict=True))
    own = zip(flat.input_names, map(values, gradients), strict=True)
    return found | {f"gradient of {name}": gradient for name, gradient in own}

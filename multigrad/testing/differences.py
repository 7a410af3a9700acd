"""`check_gradients`: a rule against the differences of its function."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import keras
import numpy as np

from multigrad import backend
from multigrad.binding import name_of
from multigrad.errors import distinct_names, message, unusable
from multigrad.testing.flat import RESOLUTIONS, Flat, directions, like, precision_of, values, vjp
from multigrad.testing.laws import check_compiled, check_linear, check_own, noted
from multigrad.testing.precision import Tolerance, precision, size_of
from multigrad.testing.table import (
    Unlike,
    disagree,
    element_text,
    fail,
    in_words,
    number_text,
    places,
    relative,
)

_Function = Callable[..., Sequence[Any]]

_Weighted = tuple[list[Any], list[float]]
"""For each weighted output a difference, and its error."""

_Central = Callable[[float], tuple[list[Any], list[float], list[float]]]
"""What `_central` has for one element of one input, by the length of the step."""


@dataclass(frozen=True)
class Checked:
    """What a check compared, all of which agreed."""

    precision: str
    """The dtype that decided on tolerances: that of the fewest digits, of those on the way too."""
    elements: int
    """How many derivatives were compared with differences, those of all orders together."""
    largest: float
    """How far one was off at most, relative to the largest of its argument, if that is more than rounding."""
    zeros: int
    """How many of the `elements` are zero for all that differences can tell: with all of them, a rule that
    answers zeros would have passed, too."""


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
) -> Checked:
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

    Four checks, each of which has a message of its own:

    - Linearity: `pullback(a * u + b * v)` is `a * pullback(u) + b * pullback(v)`, as of every
      vector-Jacobian product.
    - Residuals: the pullback of a call is the same after the function was called with other numbers. A rule
      that reads what its function left in a global or on an object fails here on TensorFlow and PyTorch. It
      passes on JAX, where the rule is traced when the op is called: run the check on another backend, too.
    - Differences: each element of each input is moved both ways, and each output, its elements weighted by
      fixed pseudo-random numbers, must change as its gradient says. For the next order, the gradient of all
      outputs so weighted takes the place of the function, and the numbers, its upstream gradient, are inputs
      of it: what differentiates a rule does so by these, too.
    - Compiled: the outputs and gradients of the function under `jax.jit`, `tf.function` or `torch.compile`
      are those of the function run as it is. On PyTorch, `torch.compile` traces the forward and the
      backward pass (`backend="aot_eager"`), and generates no code; an op that reads variables runs
      uncompiled there.

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
            They depend on the precision where they are not given: `rtol` is the larger of `1e-4` and
            `5 * eps ** (2/3)`, which is 2e-10 in float64, 1e-4 in float32, 0.05 in float16 and 0.2 in
            bfloat16; and `atol` is `5 * eps / h` times the size of the output where it was moved to, and
            `2 * eps / h` times that of the inputs by their gradients, which is the rounding error of a
            difference of the step `h` (the longer one of those below, for the inputs); and `4 * eps` times
            the largest gradient, which is what may be left of one that is zero.
        variables: Keras Variables by which it is differentiated too; if not given, the trainable ones that
            it reads.
        dtype: the floating dtype to which the arguments are cast, complex ones to its complex counterpart. If
            not given, it is float64, which JAX has for as long as the check runs; or "own", their own, where
            the function is differentiated by variables, which always keep theirs. What loses digits on the
            way is judged by those that are left: a layer of float32 does, and so do some of Keras's ops on
            JAX and PyTorch (3.15), where Keras prefers float32, such as `ops.sin` on JAX. For a function that
            goes through half precision on its way, name it here.
        compiled: whether the function is compiled, too. It takes the longest on PyTorch, about a second.
        max_elements: how many elements of an input are moved; of a larger one so many, which a generator
            with a fixed seed chooses.

    Returns:
        What was compared: the `precision` that decided on tolerances, the number of `elements` compared, the
        `largest` relative difference, and how many of the elements are `zeros` for all that differences can
        tell. Next to an output of 1e8 in float32, that is every derivative of 1, whatever the rule says.

    Raises:
        AssertionError: where they disagree. It names the argument, the element and both values, and has a
            table of the worst.
        TypeError: where there is nothing to differentiate, or an order that is no integer.
        ValueError: for an order below 1, or no elements.
        NotImplementedError: on the NumPy and OpenVINO backends.

    References:
        A central difference has an error of `O(h**2)` and one of rounding of `O(eps / h)`. Their sum is the
        least for a step `h` of about `eps ** (1/3)`, here times the larger of 1 and the element. A second one
        of twice the step takes the first error to `O(h**4)` (Richardson's extrapolation; Press et al.,
        Numerical Recipes, section 5.7). Where the two are far apart, an element below 1 is moved by a share
        of its own, and one above 1 by as much as 1 is.

        The values `f` of a function that rounds `k` times are each off by up to `k * eps / 2 * f`, so a
        difference, `(f(x + h) - f(x - h)) / (2 * h)`, by `k * eps / 2 * f / h`, and `(4 * near - far) / 3` by
        1.5 times that: 5 is for `k` of 6. What rounding does to the elements of an output is independent, so
        the size of it is their root of a sum of squares; so is that of what inputs bring to an output and
        cancels in it, as in `x - mean(x)`. The rounding of an argument that is moved does nothing: what is
        divided by is the way from the one rounded number to the other.
    """
    __tracebackhide__ = True
    counts: list[tuple[str, Any, str, str]] = [
        ("order", order, "1, or a higher order of derivatives", "leave it out for the gradient"),
        ("max_elements", max_elements, "1, or a larger number of elements", "leave it out for 100"),
    ]
    for argument, number, required, mend in counts:
        whole = isinstance(number, (int, np.integer))
        if not whole or number < 1:
            kind = ValueError if whole else TypeError
            raise unusable(kind, name_of(fn), argument, required=required, got=number, mend=mend)
    with backend.active.wide():
        with noted("check_gradients calls it with floats in float64, unless it is told another `dtype`."):
            flat = Flat(fn, args, variables, dtype)
        found = Checked("float64", 0, 0.0, 0)
        derivative = _Derivative(flat, flat.inputs, flat.input_names, flat.output_names)
        own = precision(derivative.function, derivative.inputs)
        for nth in range(1, order + 1):
            following = derivative.following()
            next_own = precision(following.function, following.inputs)
            rules = Tolerance(max(own, next_own, key=RESOLUTIONS.__getitem__), rtol, atol)
            if nth == 1:
                _require_finite(flat)
                check_linear(flat, rules)
                check_own(flat, rules)
            found = _check_differences(flat, derivative, nth, rules, max_elements, found)
            if nth == 1 and compiled:
                check_compiled(flat, rules)
            derivative, own = following, next_own
        return found


def _require_finite(flat: Flat) -> None:
    """See that there is something to take differences of."""
    __tracebackhide__ = True
    for name, output in zip(flat.output_names, map(values, flat(*flat.inputs)), strict=True):
        for place in places(~np.isfinite(output)):
            raise AssertionError(
                message(
                    flat.name,
                    f"the function is {in_words([output[place]])} at these arguments",
                    argument=name + element_text(place),
                    required="finite outputs, of which there are differences",
                    got=number_text(output[place]),
                    mend="check it at arguments at which the function is finite",
                )
            )


@dataclass(frozen=True)
class _Derivative:
    """A function, or a derivative of it, and the place at which it is looked at."""

    function: _Function
    inputs: Sequence[Any]
    """Those of the function, and then the upstream gradients of its derivatives."""
    input_names: Sequence[str]
    output_names: Sequence[str]

    def following(self) -> "_Derivative":
        """The gradient of all outputs together, weighted by fixed numbers, by all inputs.

        The numbers are inputs of it: what differentiates a rule does so by its upstream gradient, too.
        """
        outputs, count = self.function(*self.inputs), len(self.inputs)

        def gradient(*inputs: Any) -> list[Any]:
            _, pullback = vjp(self.function, inputs[:count])
            return list(pullback(inputs[count:]))

        upstream = like(list(directions(outputs, seed=0)), outputs)
        names = [*self.input_names, *[f"upstream of {name}" for name in self.output_names]]
        return _Derivative(gradient, [*self.inputs, *upstream], distinct_names(names), self.input_names)


def _check_differences(
    flat: Flat, derivative: _Derivative, nth: int, rules: Tolerance, max_elements: int, found: Checked
) -> Checked:
    """See that the derivatives of `derivative` are its differences."""
    __tracebackhide__ = True
    function, inputs, names = derivative.function, derivative.inputs, derivative.output_names
    outputs, pullback = vjp(function, inputs)
    weights = list(directions(outputs, seed=0))
    gradients = [_one_gradient(pullback, outputs, weights, place) for place in range(len(outputs))]
    on_the_way = [_size_on_the_way(inputs, gradient) for gradient in gradients]
    compared, elements, zeros, largest, unlike = 0, found.elements, found.zeros, found.largest, []
    for i, (name, tensor) in enumerate(zip(derivative.input_names, inputs, strict=True)):
        is_upstream = i >= len(flat.inputs)
        around = _with_zero(inputs, i) if is_upstream else inputs
        numbers, digits = values(tensor), precision_of([tensor])
        chosen = _chosen(numbers.shape, max_elements)
        steps = np.array([_step(rules, abs(numbers[element])) for element in chosen])
        differences = []
        for element in chosen:
            central = functools.partial(_central, function, around, i, element, weights)
            differences.append(
                _linear_difference(central, rules)
                if is_upstream
                else _difference(central, numbers[element], digits, rules)
            )
        for k, output in enumerate(names):
            ruled = np.array([gradients[k][i][element] for element in chosen])
            measured = np.array([weighted[k] for weighted, _ in differences])
            errors = np.array([errors[k] for _, errors in differences])
            if not is_upstream:
                errors += _SHARE * rules.error(on_the_way[k], steps)
            atol = rules.atol(errors, size_of(*gradients[k]))
            bad = disagree(ruled, measured, rules.rtol, atol) | ~np.isfinite(measured)
            pairs = zip(chosen, ruled, measured, strict=True)
            unlike += [
                Unlike((output, name), element, (got, wanted))
                for (element, got, wanted), wrong in zip(pairs, bad, strict=True)
                if wrong
            ]
            compared += len(chosen)
            if not is_upstream and (nth == 1 or k < len(flat.inputs)):  # by and of no upstream
                elements += len(chosen)
                zeros += int(np.sum(np.abs(measured) <= atol))
            if size_of(measured) > np.max(atol, initial=0.0) and not bad.any():  # and is no zero
                largest = max(largest, relative(np.abs(ruled - measured).max(), size_of(measured)))
    if unlike:
        _fail_differences(flat, unlike, nth, compared, rules.precision)
    decided = max(found.precision, rules.precision, key=RESOLUTIONS.__getitem__)
    return Checked(decided, elements, largest, zeros)


def _size(weight: np.ndarray, up: np.ndarray, down: np.ndarray, where: Any = True) -> float:
    """The larger of two outputs, weighted."""
    with np.errstate(all="ignore"):
        sizes = np.abs(weight) * np.maximum(np.abs(up), np.abs(down))
        return float(np.linalg.norm(np.where(where, sizes, 0.0)))


def _size_on_the_way(inputs: Sequence[Any], gradients: Sequence[np.ndarray]) -> float:
    """The size of what the arguments bring to an output, which may cancel in it."""
    with np.errstate(all="ignore"):
        parts = [np.abs(values(x) * g).ravel() for x, g in zip(inputs, gradients, strict=True)]
    whole = np.concatenate(parts)
    return float(np.linalg.norm(whole[np.isfinite(whole)]))


_SHARE = 0.4
"""How much of that counts: 2 of the 5 roundings of an output."""


def _one_gradient(
    pullback: Callable[..., Any], outputs: Sequence[Any], weights: Sequence[np.ndarray], place: int
) -> list[np.ndarray]:
    """The gradient of the output at this place alone, weighted."""
    own = [weight * (i == place) for i, weight in enumerate(weights)]
    return [values(gradient) for gradient in pullback(like(own, outputs))]


def _chosen(shape: tuple[int, ...], most: int) -> list[tuple[int, ...]]:
    """The elements that are moved."""
    every = list(np.ndindex(shape))
    if len(every) <= most:
        return every
    places = np.random.default_rng(0).choice(len(every), most, replace=False)
    return [every[place] for place in sorted(places)]


def _difference(central: _Central, number: float, precision: str, rules: Tolerance) -> _Weighted:
    """How each weighted output changes with an element of an input, extrapolated to a step of zero.

    And what rounding may have done to it. The element is this `number`, in an input of this `precision`.
    """
    own = abs(number)
    differences, errors, steady = _extrapolated(central, rules, _step(rules, own))
    # The step may be too long, for `log` close to zero, and for `cos` far from it.
    shorter = rules.step * min(1.0, own)
    if steady or own in (0.0, 1.0) or shorter < _SHORTEST * own * RESOLUTIONS[precision]:
        return differences, errors
    return _extrapolated(central, rules, shorter)[:2]


def _linear_difference(central: _Central, rules: Tolerance) -> _Weighted:
    """How each weighted output, linear in an input, changes with an element: what it is of that alone.

    The input of which `central` moves an element is zero.
    """
    differences, sizes, _ = central(1.0)
    return differences, [rules.rounding * size for size in sizes]


def _step(rules: Tolerance, size: float) -> float:
    """How far an element of this size is moved first."""
    return rules.step * max(1.0, size)


def _with_zero(inputs: Sequence[Any], i: int) -> list[Any]:
    """The inputs, with zeros in the place of one."""
    return [*inputs[:i], *like([0.0 * values(inputs[i])], inputs[i : i + 1]), *inputs[i + 1 :]]


def _extrapolated(central: _Central, rules: Tolerance, length: float) -> tuple[list[Any], list[float], bool]:
    """The difference by a step of this length, its error, and whether one of twice the length is close."""
    near, sizes, _ = central(length)
    if rules.step > _FAR:
        return near, [rules.error(size, length) for size in sizes], True
    far, larger, moved = central(2.0 * length)
    errors = [rules.error(max(pair), length) for pair in zip(sizes, larger, strict=True)]
    steady = not any(
        disagree(np.asarray(a), np.asarray(b), _STEADY, rules.error(size, length)).any()
        for a, b, size in zip(near, far, moved, strict=True)
    )
    with np.errstate(invalid="ignore", over="ignore"):
        return [(4.0 * a - b) / 3.0 for a, b in zip(near, far, strict=True)], errors, steady


_FAR = 0.05
"""A relative step, in half precision, of which the double may be out of a function's domain."""

_SHORTEST = 100.0
"""How many times the distance to the next number a step is at least, so that it ends where it should."""

_STEADY = 0.02
"""How far differences of two steps may be apart for their extrapolation to be one of `rtol`."""


def _central(
    function: _Function,
    inputs: Sequence[Any],
    i: int,
    element: tuple[int, ...],
    weights: Sequence[np.ndarray],
    length: float,
) -> tuple[list[Any], list[float], list[float]]:
    """The central difference of this length, by both parts of a complex element.

    And the outputs' sizes: of all that may have rounding errors, and of what moved.
    """
    parts, sizes, moved_sizes = [], [], []
    for direction in (1.0, 1j) if np.iscomplexobj(values(inputs[i])) else (1.0,):
        (high, up), (low, down) = (
            _moved(function, inputs, i, element, sign * length * direction) for sign in (1.0, -1.0)
        )
        moved = abs(high - low)  # what rounding left of the step
        ends = list(zip(weights, up, down, strict=True))
        sizes.append([_size(w, a, b) for w, a, b in ends])
        moved_sizes.append([_size(w, a, b, a != b) for w, a, b in ends])
        with np.errstate(invalid="ignore", over="ignore"):
            parts.append(
                [
                    direction * np.sum(np.real(np.conj(w) * (a - b))) / moved
                    for w, a, b in zip(weights, up, down, strict=True)
                ]
            )
    largest, largest_moved = ([max(own) for own in zip(*f, strict=True)] for f in (sizes, moved_sizes))
    return [sum(own) for own in zip(*parts, strict=True)], largest, largest_moved


def _moved(
    function: _Function, inputs: Sequence[Any], i: int, element: tuple[int, ...], by: complex
) -> tuple[Any, list[np.ndarray]]:
    """An element where it was moved to, and the outputs there."""
    there = list(inputs)
    whole = values(inputs[i])
    whole[element] += by
    there[i : i + 1] = like([whole], inputs[i : i + 1])
    return values(there[i])[element], [values(output) for output in function(*there)]


def _fail_differences(flat: Flat, unlike: list[Unlike], nth: int, count: int, precision: str) -> NoReturn:
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
    fail(
        flat.name,
        problem,
        worst,
        f"{number_text(wanted)}, by central differences in {precision}",
        f"{number_text(got)}, by the rule",
        mend,
        ("output", "argument", "element", "rule", "differences", "relative"),
        unlike,
        count,
    )

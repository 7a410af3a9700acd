"""Audit the ops of a module on the active backend."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from audit.cases import Case, weights
from audit.rows import Row
from audit.truth import Truth, direction, first_derivative, second_derivative, value_calls
from multigrad import backend, grad
from multigrad.common.frameworks import look_up

_TOLERANCE = {("float32", 1): 1e-3, ("float32", 2): 1e-2, ("float16", 1): 2e-2}


def audit_cases(cases: Sequence[Case], module: ModuleType) -> list[Row]:
    """Return the rows of the cases, for the ops of `module` on the active backend."""
    return [row for case in cases for row in audit_case(case, module)]


def audit_case(case: Case, module: ModuleType) -> list[Row]:
    """Return the rows of one case: one for each point and order."""
    rows: list[Row] = []
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A framework may warn of an argument that Keras passes.
        try:
            truths = _truths(case, module)
        except Exception as error:  # noqa: BLE001  the backend cannot compute the value
            return [Row(case.op, point, 1, "error", _error_text(error), "") for point in case.points]
        for order in case.orders:
            try:
                got: Any = _derivative(case, module, order)
            except Exception as error:  # noqa: BLE001  any error of a framework is a row of the table
                got = _error_text(error)
            rows += _judge(case, order, got, truths[order])
    return rows


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:100]}"


def _truths(case: Case, module: ModuleType) -> dict[int, Truth]:
    """Return the truth of each order, from the values of Keras's op, which a fixed op returns too."""
    keras_module = module if module.__name__.startswith("keras") else ops
    with _float64():
        values = _values(case, keras_module)
        first = first_derivative(case, values)
        if 2 not in case.orders:
            return {1: first}
        return {1: first, 2: second_derivative(case, values, first)}


@contextlib.contextmanager
def _float64() -> Iterator[None]:
    """Compute in float64, also where Keras casts to float32 on JAX and PyTorch."""
    # Keras (3.12 to 3.15) narrows the 64-bit result of a type promotion by this table. It is empty here,
    # because values in float32 are too coarse for differences.
    floatx, table = keras.config.floatx(), look_up("keras.src.backend.common.dtypes.BIT64_TO_BIT32_DTYPE")
    narrow = dict(table)
    with backend.active.wide():
        keras.config.set_floatx("float64")
        table.clear()
        try:
            yield
        finally:
            table.update(narrow)
            keras.config.set_floatx(floatx)


def _values(case: Case, module: ModuleType) -> Callable[..., np.ndarray]:
    def outputs_of(*tensors: Any) -> list[Any]:
        outputs = tree.flatten(case.call(module, *tensors))
        return outputs[:1] if case.elementwise or case.width else outputs

    run = _quickest(outputs_of, value_calls(case))

    def values(*args: np.ndarray) -> np.ndarray:
        if case.formula:
            return np.array([_weighted_sum(0, case.formula(*args))], "float64")
        arrays = [np.full(case.width, arg) for arg in args] if case.width else args
        tensors = [ops.convert_to_tensor(arg, "float64") for arg in arrays]
        outputs = run(*tensors)
        if case.elementwise:
            return np.asarray(ops.convert_to_numpy(outputs[0]), "float64")
        if case.width:
            return np.asarray(_weights(0, ()) * ops.convert_to_numpy(outputs[0])[:1], "float64")
        values = map(ops.convert_to_numpy, outputs)
        return np.array([sum(_weighted_sum(i, value) for i, value in enumerate(values))], "float64")

    return values


def _quickest(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Return the function, compiled if this takes less time in this number of calls with one shape."""
    # Eagerly, JAX compiles each operation for each shape. TensorFlow traces in the time of about 30 calls.
    is_compiled = {"jax": True, "tensorflow": calls > 30, "torch": False}[keras.backend.backend()]
    return backend.active.compile_function(function) if is_compiled else function


def _weighted_sum(index: int, output: Any) -> Any:
    """Return the weighted sum of an output, in NumPy."""
    if not np.issubdtype(output.dtype, np.inexact):
        return 0.0
    factors = _weights(index, output.shape)
    if np.iscomplexobj(output):
        return np.sum(factors * output.real + factors[::-1] * output.imag)
    return np.sum(factors * output)


def _weights(index: int, shape: Sequence[int]) -> np.ndarray:
    return weights(math.prod(shape), index).reshape(shape)


def _loss(case: Case, module: ModuleType) -> Callable[..., Any]:
    def loss(*tensors: Any) -> Any:
        outputs = tree.flatten(case.call(module, *tensors))
        if case.elementwise:
            return ops.sum(outputs[0])
        return sum(filter(lambda term: term is not None, map(_term, range(len(outputs)), outputs)))

    return loss


def _term(index: int, output: Any) -> Any:
    """Return the weighted sum of an output, differentiably."""
    dtype = keras.backend.standardize_dtype(output.dtype)
    factors = _weights(index, output.shape)
    if dtype.startswith("complex"):
        real, imag = (ops.convert_to_tensor(w, "float32") for w in (factors, factors[::-1]))
        return ops.sum(real * ops.real(output)) + ops.sum(imag * ops.imag(output))
    if not keras.backend.is_float_dtype(dtype):
        return None
    return ops.sum(ops.convert_to_tensor(factors, dtype) * output)


def _derivative(case: Case, module: ModuleType, order: int) -> np.ndarray:
    """Return the derivative with respect to each element, in the form of `Truth`."""
    tensors = [ops.convert_to_tensor(arg, case.dtype) for arg in case.args]
    argnums = tuple(range(len(tensors)))
    derivative = grad(_loss(case, module), argnums=argnums)
    if order == 2:
        along = [ops.convert_to_tensor(part, case.dtype) for part in direction(case)]
        first = derivative

        def slope(*tensors: Any) -> Any:
            return sum(ops.sum(g * v) for g, v in zip(first(*tensors), along, strict=True))

        derivative = grad(slope, argnums=argnums)

    def gradients(*tensors: Any) -> list[Any]:
        # The sum is not a ZeroTensor of PyTorch (2.13), which does not convert to NumPy.
        return [g + ops.zeros_like(g) for g in derivative(*tensors)]

    run = _quickest(gradients, 1)
    found = [np.asarray(ops.convert_to_numpy(g), "float64") for g in run(*tensors)]
    return np.stack(found) if case.elementwise else np.concatenate([f.ravel() for f in found])[:, None]


def _judge(case: Case, order: int, got: Any, truth: Truth) -> list[Row]:
    """Return the rows of one order."""
    rows = []
    for index, point in enumerate(case.points):
        if order == 2 and case.elementwise and any(np.isinf(arg[index]) for arg in case.args):
            continue  # The values next to infinity are infinite, or all equal.
        column = Truth(*(part[:, index] for part in truth))
        if order == 2 and np.isnan(truth.value[:, index]).any():
            continue  # There is no second derivative, for example because the first one is infinite.
        found = got if isinstance(got, str) else got[:, index]
        verdict = _verdict(found, column, _TOLERANCE[case.dtype, order])
        rows.append(
            Row(
                case.op,
                point,
                order,
                verdict,
                found if isinstance(found, str) else _text(found),
                _text(column.value),
            )
        )
    return rows


def _verdict(got: Any, truth: Truth, tolerance: float) -> str:
    value, low, high, is_choice = truth
    if isinstance(got, str):
        return "error"
    unknown = np.isnan(value)
    if np.isnan(got).any() or (np.isinf(got) & ~np.isinf(value) & ~unknown).any():
        return "NaN" if not _rounds_to_infinity(got, value) else "right"
    finite = value[np.isfinite(value)]
    atol = tolerance * np.max(np.abs(finite), initial=1e-3)

    def equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a == b) | (np.abs(a - b) <= atol + tolerance * np.abs(b))

    inside = (got >= low - atol) & (got <= high + atol)
    if not (equal(got, value) | unknown | (is_choice & inside)).all():
        return "wrong"
    if not is_choice.any():
        return "right"
    return "convention" if equal(got, value)[is_choice].all() else "other convention"


def _rounds_to_infinity(got: np.ndarray, value: np.ndarray) -> bool:
    return bool((~np.isnan(got) & (np.isfinite(got) | (np.abs(value) > 3.4e38))).all())


def _text(numbers: np.ndarray) -> str:
    """Return at most six numbers as a text."""
    shown = ", ".join(f"{number + 0.0:.4g}" for number in numbers[:6])
    return f"{shown}, ..." if len(numbers) > 6 else shown

"""The solvers of `fixed_point` and `implicit_root`: they solve equations without gradients."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import numpy as np
from keras import ops

from multigrad import backend
from multigrad.calculus.derivatives import jacobian
from multigrad.core.errors import message, unusable
from multigrad.ops.arguments import is_integer, is_number
from multigrad.ops.dtypes import dtype_of

Tensors = Sequence[Any]
Map = Callable[[Tensors], Tensors]

_ADJOINT = "w, the solution of the adjoint equation,"
"""The name of the adjoint in messages."""


class Solver(Protocol):
    """Solves an equation. `name` is the name of the op in messages."""

    name: str

    def adjoint(self) -> "Solver":
        """Return the solver of the adjoint equation."""
        ...

    def solve(self, equation: Map, z: Tensors) -> Tensors:
        """Return the solution of an equation, starting from `z`."""
        ...


class FixedPointIteration:
    """Finds a fixed point by applying the map repeatedly."""

    def __init__(self, name: str, tolerance: float | None, max_iterations: int, unknown: str = "z") -> None:
        self.name, self.tolerance, self.max_iterations = name, tolerance, max_iterations
        self.unknown = unknown

    def adjoint(self) -> "FixedPointIteration":
        return FixedPointIteration(self.name, self.tolerance, self.max_iterations, _ADJOINT)

    def solve(self, equation: Map, z: Tensors) -> Tensors:
        return _iterate(self, equation, z)


class Newton:
    """Finds a root by Newton's method. A linear equation needs only one Jacobian."""

    def __init__(self, name: str, tolerance: float | None, max_iterations: int, linear: bool = False) -> None:
        self.name, self.tolerance, self.max_iterations, self.linear = name, tolerance, max_iterations, linear
        self.unknown = _ADJOINT if linear else "z"

    def adjoint(self) -> "Newton":
        return Newton(self.name, self.tolerance, self.max_iterations, linear=True)

    def solve(self, equation: Map, z: Tensors) -> Tensors:
        for x in z:
            if None in tuple(x.shape):
                fix = "fix the batch size, as in keras.Input(..., batch_size=8)"
                required = "a static shape, for a dense Jacobian"
                raise unusable(ValueError, self.name, "z0", required=required, got=x, fix=fix)
        constant = _matrix(equation, z) if self.linear else None

        def step(z: Tensors) -> Tensors:
            matrix = _matrix(equation, z) if constant is None else constant
            value = ops.concatenate([ops.reshape(x, (-1, 1)) for x in equation(z)])
            moves = ops.cast(ops.solve(matrix, ops.cast(value, matrix.dtype)), value.dtype)
            ends = np.cumsum([math.prod(x.shape) for x in z]).tolist()
            parts = [moves[end - math.prod(x.shape) : end] for x, end in zip(z, ends, strict=True)]
            return [x - ops.cast(ops.reshape(p, x.shape), x.dtype) for x, p in zip(z, parts, strict=True)]

        return _iterate(self, step, z)


def _matrix(equation: Map, z: Tensors) -> Any:
    """Return the Jacobian of an equation: a row per element of its value, a column per element of `z`.

    It is in float32 for half precision, in which no backend solves linear systems.
    """
    blocks = jacobian(lambda *z: list(equation(z)), range(len(z)))(*z)
    sizes = [math.prod(x.shape) for x in z]
    rows = [
        ops.concatenate([ops.reshape(x, (m, n)) for x, n in zip(row, sizes, strict=True)], axis=1)
        for row, m in zip(blocks, sizes, strict=True)
    ]
    matrix = ops.concatenate(rows, axis=0)
    return ops.cast(matrix, "float32") if "16" in dtype_of(matrix) else matrix


class UserSolver:
    """Finds a root by the solver of a user, and checks it."""

    def __init__(self, newton: Newton, call: Callable[[], Tensors]) -> None:
        self.name, self.newton, self.call = newton.name, newton, call

    def adjoint(self) -> Newton:
        return Newton(self.newton.name, None, self.newton.max_iterations, linear=True)

    def solve(self, equation: Map, z: Tensors) -> Tensors:
        solved = [ops.stop_gradient(x) for x in self.call()]
        if _is_shape_inference():
            return solved
        tolerance = self.newton.tolerance or _eps(z) ** 0.5
        scales = [ops.maximum(_max_abs(x), 1.0) for x in equation(z)]
        residuals = [_max_abs(x) / scale for x, scale in zip(equation(solved), scales, strict=True)]
        largest = ops.max(ops.stack(residuals))
        value = _concrete(largest)
        if value is None:
            return [ops.where(largest <= tolerance, x, ops.full_like(x, float("nan"))) for x in solved]
        if not value <= tolerance:
            raise RuntimeError(
                message(
                    self.newton.name,
                    "the result of the solver is not a root",
                    argument="'solver'",
                    required=f"f(z) of at most {tolerance:.3g}, relative to the larger of f(z0) and 1",
                    got=f"f(z) of {value:.3g}",
                    fix="run the solver for more iterations, or pass a larger tolerance",
                )
            )
        return solved


def _iterate(solver: FixedPointIteration | Newton, step: Map, z: Tensors) -> Tensors:
    """Repeat a step until it is within the tolerance. In compiled code, return NaN if it never is."""
    count = len(z)
    tolerance = solver.tolerance or _eps(z) ** 0.75

    def body(*carry: Any) -> tuple[Any, ...]:
        z, sizes = carry[:count], carry[count:-1]
        new = [ops.stop_gradient(x) for x in step(z)]
        sizes = tuple([ops.maximum(size, _max_abs(x)) for size, x in zip(sizes, new, strict=True)])
        moved = [_max_abs(x - old) for x, old in zip(new, z, strict=True)]
        # Steps are relative to the current `z`, because a large initial `z` would make all later steps look
        # short. A solution of zero has no scale, so the scale is at least the largest `z` of any iteration,
        # up to 1.
        scales = [
            ops.maximum(_max_abs(x), ops.minimum(size, 1.0)) for x, size in zip(new, sizes, strict=True)
        ]
        lengths = [ops.where(m > 0.0, m / s, m) for m, s in zip(moved, scales, strict=True)]  # NaN stays NaN
        return *new, *sizes, ops.max(ops.stack(lengths))

    carry = body(*z, *[ops.zeros_like(_max_abs(x)) for x in z], None)
    if _is_shape_inference():
        return carry[:count]
    length = _concrete(carry[-1])
    if length is None:
        limit = solver.max_iterations - 1
        # The condition is also false for NaN, so a NaN ends the loop and is returned.
        carry = tuple(backend.active.while_loop(lambda *c: c[-1] > tolerance, body, carry, limit))
        converged = carry[-1] <= tolerance
        return [ops.where(converged, x, ops.full_like(x, float("nan"))) for x in carry[:count]]
    iterations = 1
    while length > tolerance and iterations < solver.max_iterations:
        carry, iterations = body(*carry), iterations + 1
        length = _concrete(carry[-1])
    if not length <= tolerance:
        raise _not_converged(solver, tolerance, length, iterations)
    return carry[:count]


def _concrete(tensor: Any) -> Any:
    """Return a scalar tensor as a Python float, or None if it is traced."""
    value = backend.active.concrete(tensor)
    return None if value is None else float(value)


_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
_EPS["complex128"] = _EPS["float64"]


def _eps(tensors: Tensors) -> float:
    return max(_EPS.get(dtype_of(x), _EPS["float32"]) for x in tensors)


def _max_abs(x: Any) -> Any:
    """Return the largest absolute value, as a scalar tensor of float32 or float64."""
    wide = "float64" if dtype_of(x) in ("float64", "complex128") else "float32"
    if 0 in tuple(x.shape):
        return ops.zeros((), wide)
    size = ops.abs(x) if dtype_of(x).startswith("complex") else x
    # Not the maximum of `ops.abs`: OpenVINO 2026.4 returns negative numbers for abs(0.5 * (z + a / z) - z).
    return ops.cast(ops.maximum(ops.max(size), -ops.min(size)), wide)


def _is_shape_inference() -> bool:
    """Return whether Keras infers shapes and dtypes, with arbitrary values."""
    with keras.SymbolicScope() as scope:
        return scope.original_scope is not None


def _not_converged(
    solver: FixedPointIteration | Newton, tolerance: float, length: float, iterations: int
) -> RuntimeError:
    return RuntimeError(
        message(
            solver.name,
            f"{solver.unknown} did not converge",
            required=f"a last step of at most {tolerance:.3g}, relative to the largest element",
            got=f"a last step of {length:.3g}, after {iterations} iterations",
            fix="make the function a contraction, start closer to the solution, or allow more iterations or "
            "a larger tolerance",
        )
    )


def check_options(name: str, tolerance: Any, max_iterations: Any) -> None:
    """Raise ValueError unless the tolerance and the number of iterations are positive numbers."""
    fix = "pass one, or leave it out"
    if tolerance is not None and not (is_number(tolerance) and 0.0 < tolerance < math.inf):
        required = "a positive number, or None"
        raise unusable(ValueError, name, "tolerance", required=required, got=tolerance, fix=fix)
    if not (is_integer(max_iterations) and max_iterations > 0):
        required = "a positive integer"
        raise unusable(ValueError, name, "max_iterations", required=required, got=max_iterations, fix=fix)

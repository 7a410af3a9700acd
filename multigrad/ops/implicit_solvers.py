"""The solvers of `fixed_point` and `implicit_root`: they solve equations without gradients."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import keras
from keras import ops

from multigrad import backend
from multigrad.calculus.derivatives import jacobian, vjp
from multigrad.core.errors import message, unusable
from multigrad.ops.arguments import is_integer, is_number
from multigrad.ops.dtypes import dtype_of
from multigrad.ops.linear_solvers import (
    METHODS,
    Affine,
    Map,
    Tensors,
    flatten,
    solve_by_products,
    unflatten,
)

_ADJOINT = "w, the solution of the adjoint equation,"
"""The name of the adjoint in messages."""

_SMALL = 1000
"""The largest number of unknowns for which the default is a dense matrix."""

_PRODUCTS = 1000
"""The largest number of products with a matrix for one step of Newton's method, or for an adjoint."""


_ARGUMENTS = {"linear_solve": ("matvec", "b"), "implicit_argmin": ("f", "x0")}


def argument_names(op: str) -> tuple[str, str]:
    """Return how an op names its function, and its initial guess or right side."""
    return _ARGUMENTS.get(op, ("f", "z0"))


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

    def __init__(
        self,
        name: str,
        tolerance: float | None,
        max_iterations: int,
        on_failure: str = "raise",
        unknown: str = "z",
    ) -> None:
        self.name, self.tolerance, self.max_iterations = name, tolerance, max_iterations
        self.on_failure, self.unknown = on_failure, unknown

    def adjoint(self) -> "FixedPointIteration":
        return FixedPointIteration(self.name, self.tolerance, self.max_iterations, self.on_failure, _ADJOINT)

    def solve(self, equation: Map, z: Tensors) -> Tensors:
        return _iterate(self, equation, z)


class Linear:
    """Solves a linear equation, an `Affine` map whose value is zero at the solution.

    Arguments:
        name, unknown: the name of the op and of the solution, for messages.
        method: the name of a linear solver, or None to choose one by the number of unknowns.
        tolerance: the largest residual, relative to the right side of the equation. With a dense matrix, the
            largest last correction.
        max_iterations: the largest number of products with the matrix.
        on_failure: "raise" or "nan".
    """

    def __init__(
        self,
        name: str,
        method: str | None,
        tolerance: float | None,
        max_iterations: int,
        on_failure: str,
        unknown: str = _ADJOINT,
    ) -> None:
        self.name, self.method, self.tolerance = name, method, tolerance
        self.max_iterations, self.on_failure, self.unknown = max_iterations, on_failure, unknown

    def adjoint(self) -> "Linear":
        return Linear(self.name, self.method, self.tolerance, self.max_iterations, self.on_failure)

    def solve(self, equation: Map, z: Tensors) -> Tensors:
        assert isinstance(equation, Affine)
        if self.method_for(z) != "dense":
            return self.by_products(equation.product, [-x for x in equation.offset])
        matrix = _matrix(equation, z)
        return _iterate(self, lambda z: _minus(z, _dense_solution(matrix, equation(z))), z)

    def method_for(self, z: Tensors) -> str:
        """Return the method for a solution `z`."""
        for x in z:
            if None in tuple(x.shape):
                fix = "fix the batch size, as in keras.Input(..., batch_size=8)"
                required = "a static shape, for a linear solver"
                start = argument_names(self.name)[1]
                raise unusable(ValueError, self.name, start, required=required, got=x, fix=fix)
        sizes = [math.prod(x.shape) for x in z]
        # On JAX, sizes that are unknown in a `keras.Input` are symbols, which cannot be compared.
        is_small = not all([isinstance(size, int) for size in sizes]) or sum(sizes) <= _SMALL
        return self.method or ("dense" if is_small else "gmres")

    def by_products(self, product: Map, right: Tensors) -> Tensors:
        if _is_shape_inference():
            return right
        tolerance = self.tolerance or _eps(right) ** 0.75
        return solve_by_products(self, self.method_for(right), product, right, tolerance)


class Newton:
    """Finds a root by Newton's method, whose steps a linear solver computes."""

    unknown = "z"

    def __init__(
        self,
        name: str,
        tolerance: float | None,
        max_iterations: int,
        linear_solver: str | None = None,
        on_failure: str = "raise",
    ) -> None:
        self.name, self.tolerance, self.max_iterations = name, tolerance, max_iterations
        self.linear_solver, self.on_failure = linear_solver, on_failure

    def adjoint(self) -> Linear:
        return self.linear(_ADJOINT, self.tolerance)

    def linear(self, unknown: str, tolerance: float | None) -> Linear:
        """Return the solver of a linear equation for `unknown`."""
        return Linear(self.name, self.linear_solver, tolerance, _PRODUCTS, self.on_failure, unknown)

    def solve(self, equation: Map, z: Tensors) -> Tensors:
        linear = self.linear("a step of Newton's method", self.tolerance)
        dense = linear.method_for(z) == "dense"

        def step(z: Tensors) -> Tensors:
            if dense:
                return _minus(z, _dense_solution(_matrix(equation, z), equation(z)))
            return _minus(z, linear.by_products(_product(equation, z), equation(z)))

        return _iterate(self, step, z)


def _product(equation: Map, z: Tensors) -> Map:
    """Return the product with the Jacobian of an equation, as in `multigrad.jvp`."""
    value, pull = vjp(lambda *z: list(equation(z)), *z)
    _, transpose = vjp(lambda *upstream: list(pull(list(upstream))), *[ops.ones_like(x) for x in value])
    return lambda direction: list(transpose(list(direction)))


def _minus(z: Tensors, moves: Tensors) -> Tensors:
    return [x - move for x, move in zip(z, moves, strict=True)]


def _dense_solution(matrix: Any, right: Tensors) -> Tensors:
    """Return the solution of `matrix @ x = right`."""
    column = ops.cast(flatten(right)[:, None], matrix.dtype)
    return unflatten(ops.solve(matrix, column)[:, 0], right)


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

    def adjoint(self) -> Linear:
        return self.newton.linear(_ADJOINT, None)  # the tolerance is that of the user's solver

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
        if not value <= tolerance and self.newton.on_failure == "nan":
            return [ops.full_like(x, float("nan")) for x in solved]
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


def _iterate(solver: FixedPointIteration | Linear | Newton, step: Map, z: Tensors) -> Tensors:
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
    if length <= tolerance:
        return carry[:count]
    if solver.on_failure == "raise":
        raise _not_converged(solver, tolerance, length, iterations)
    return [ops.full_like(x, float("nan")) for x in carry[:count]]


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
    solver: FixedPointIteration | Linear | Newton, tolerance: float, length: float, iterations: int
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


def check_options(
    name: str,
    tolerance: Any,
    max_iterations: Any,
    on_failure: Any = "raise",
    linear_solver: Any = None,
    argument: str = "linear_solver",
) -> None:
    """Raise ValueError for an option that cannot be used."""
    fix = "pass one, or leave it out"
    if tolerance is not None and not (is_number(tolerance) and 0.0 < tolerance < math.inf):
        required = "a positive number, or None"
        raise unusable(ValueError, name, "tolerance", required=required, got=tolerance, fix=fix)
    if not (is_integer(max_iterations) and max_iterations > 0):
        required = "a positive integer"
        raise unusable(ValueError, name, "max_iterations", required=required, got=max_iterations, fix=fix)
    for option, value, values in (
        ("on_failure", on_failure, ("raise", "nan")),
        (argument, linear_solver, (None, *METHODS)),
    ):
        if not (isinstance(value, (str, type(None))) and value in values):
            required = " or ".join(map(repr, values))
            raise unusable(ValueError, name, option, required=required, got=value, fix=fix)

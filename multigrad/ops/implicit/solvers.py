"""The solvers of `fixed_point` and `implicit_root`: they solve equations without gradients."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras import ops

from multigrad.calculus.derivatives import vjp
from multigrad.common.errors import message
from multigrad.ops.dtypes import dtype_of, nan_unless
from multigrad.ops.implicit.linear_solvers import (
    ADJOINT,
    Affine,
    Map,
    Settings,
    Tensors,
    as_rows,
    inverse_at,
    repeat,
    solve_linear,
    unflatten,
)

_PRODUCTS = 1000
"""The largest number of products with a matrix for one step of Newton's method, or for an adjoint."""

_UNMOVED = 3e38
"""The length of a step before the first one: not Inf, which the debug switches of the frameworks report."""

_ARGUMENTS = {"linear_solve": ("matvec", "b"), "implicit_argmin": ("f", "x0")}


def argument_names(op: str) -> tuple[str, str]:
    """Return how an op names its function, and its initial guess or right side."""
    return _ARGUMENTS.get(op, ("f", "z0"))


class FixedPointIteration(Settings):
    """Finds a fixed point by applying the map repeatedly."""

    def solve(self, equation: Map, z: Tensors) -> Tensors:
        """Return the solution of an equation, starting from `z`."""
        return _iterate(self, equation, z)


class Linear(Settings):
    """Solves a linear equation, an `Affine` map whose value is zero at the solution."""

    def solve(self, equation: Map, z: Tensors) -> Tensors:
        assert isinstance(equation, Affine)
        return solve_linear(self, equation.product, [-x for x in equation.offset])


@dataclass(frozen=True)
class Newton(Settings):
    """Finds a root by Newton's method, whose steps a linear solver computes.

    Arguments:
        by_user: a function that returns the root, which is checked, instead of Newton's method.
    """

    by_user: Callable[[], Tensors] | None = None

    def adjoint(self) -> Linear:  # type: ignore[override]
        # The tolerance for a user's solver is not that of linear equations.
        return self._linear(ADJOINT, None if self.by_user else self.tolerance)

    def solve(self, equation: Map, z: Tensors) -> Tensors:
        if self.by_user is not None:
            return self._checked(equation, z, [ops.stop_gradient(x) for x in self.by_user()])
        linear = self._linear("a step of Newton's method", self.tolerance)
        is_dense = linear.method_for(z) == "dense"

        def step(z: Tensors) -> Tensors:
            if is_dense:
                value, inverse = inverse_at(equation, z, self.batched)
                moves = unflatten(inverse(value), z, self.batched)
            else:
                value, product = _product(equation, z)
                moves = solve_linear(linear, product, value)
            return [x - move for x, move in zip(z, moves, strict=True)]

        return _iterate(self, step, z)

    def _linear(self, unknown: str, tolerance: float | None) -> Linear:
        return Linear(self.name, tolerance, _PRODUCTS, self.on_failure, self.batched, self.method, unknown)

    def _checked(self, equation: Map, z: Tensors, solved: Tensors) -> Tensors:
        """Return the result of a user's solver, with NaN or an error where it is not a root."""
        tolerance = self.tolerance_for(z, 0.5)
        scales = [ops.maximum(self._largest(x), 1.0) for x in equation(z)]
        residual = _maximum(
            [self._largest(x) / scale for x, scale in zip(equation(solved), scales, strict=True)]
        )
        self.raise_for(residual <= tolerance, residual, lambda *got: _not_a_root(self, tolerance, *got))
        rows = [nan_unless(residual <= tolerance, as_rows(x, self.batched)) for x in solved]
        return [ops.reshape(row, ops.shape(x)) for row, x in zip(rows, solved, strict=True)]

    def _largest(self, x: Any) -> Any:
        return _max_abs(as_rows(x, self.batched))


def _product(equation: Map, z: Tensors) -> tuple[Tensors, Map]:
    """Return the value of an equation, and the product with its Jacobian, as in `multigrad.jvp`."""
    value, pull = vjp(lambda *z: list(equation(z)), *z)
    _, transpose = vjp(lambda *upstream: list(pull(list(upstream))), *[ops.ones_like(x) for x in value])
    return value, lambda direction: list(transpose(list(direction)))


def _iterate(solver: FixedPointIteration | Newton, step: Map, z: Tensors) -> Tensors:
    """Repeat a step until it is within the tolerance. A row that is, or that is NaN, no longer changes."""
    tolerance, limit, count = solver.tolerance_for(z), solver.max_iterations, len(z)

    def restored(rows: Tensors) -> Tensors:
        # The cast is for NumPy, where `ops.where` (Keras 3.15) returns float32 for float64.
        pairs = zip(rows, z, strict=True)
        return [ops.cast(ops.reshape(x, ops.shape(like)), dtype_of(like)) for x, like in pairs]

    def more(*carry: Any) -> Any:
        return ops.logical_and(ops.any(carry[-2] > tolerance), carry[-1] < limit)

    def body(*carry: Any) -> tuple[Any, ...]:
        rows, sizes, length, iterations = carry[:count], carry[count:-2], *carry[-2:]
        active = length > tolerance
        new = [as_rows(x, solver.batched, like) for x, like in zip(step(restored(rows)), z, strict=True)]
        if solver.batched:  # otherwise, the loop ends
            new = [ops.where(active, x, old) for x, old in zip(new, rows, strict=True)]
        largest = [_max_abs(x) for x in new]
        sizes = tuple([ops.maximum(size, now) for size, now in zip(sizes, largest, strict=True)])
        moved = [_max_abs(x - old) for x, old in zip(new, rows, strict=True)]
        # Steps are relative to the current `z`, because a large initial `z` would make all later steps look
        # short. A solution of zero has no scale, so the scale is at least the largest `z` of any iteration,
        # up to 1.
        scales = [ops.maximum(now, ops.minimum(size, 1.0)) for now, size in zip(largest, sizes, strict=True)]
        lengths = [m / ops.where(s > 0.0, s, 1.0) for m, s in zip(moved, scales, strict=True)]
        return *new, *sizes, ops.where(active, _maximum(lengths), length), iterations + 1

    rows = [as_rows(x, solver.batched) for x in z]
    sizes = [ops.zeros_like(_max_abs(x)) for x in rows]
    length = ops.full_like(_maximum(sizes), _UNMOVED)
    carry = repeat(more, body, (*rows, *sizes, length, ops.convert_to_tensor(0, "int32")), limit)
    length, iterations = carry[-2:]
    solver.raise_for(
        length <= tolerance, length, lambda *got: _not_converged(solver, tolerance, int(iterations), *got)
    )
    return restored([nan_unless(length <= tolerance, x) for x in carry[:count]])


def _max_abs(x: Any) -> Any:
    """Return the largest absolute value of each row, as float32 or float64."""
    wide = "float64" if dtype_of(x) in ("float64", "complex128") else "float32"
    if x.shape[-1] == 0:
        return ops.zeros((*ops.shape(x)[:-1], 1), wide)
    size = ops.abs(x) if dtype_of(x).startswith("complex") else x
    # Not the maximum of `ops.abs`: OpenVINO 2026.4 returns negative numbers for abs(0.5 * (z + a / z) - z).
    largest = ops.maximum(ops.max(size, axis=-1, keepdims=True), -ops.min(size, axis=-1, keepdims=True))
    return ops.cast(largest, wide)


def _maximum(sizes: Tensors) -> Any:
    """Return the largest of the sizes of several tensors, for each row."""
    return ops.max(
        ops.concatenate([ops.cast(size, "float32") for size in sizes], axis=-1), axis=-1, keepdims=True
    )


def _not_converged(
    solver: FixedPointIteration | Newton, tolerance: float, iterations: int, length: float, where: str
) -> RuntimeError:
    problem = f"{solver.unknown} did not converge"
    fix = "start closer to the solution, or allow more iterations or a larger tolerance"
    if isinstance(solver, FixedPointIteration):
        fix = f"make the function a contraction, {fix}"
    elif math.isnan(length):
        problem = f"{solver.unknown} did not converge, because the matrix of derivatives is singular, or NaN"
        fix = "start where the matrix has an inverse and the function is finite"
    required = f"a last step of at most {tolerance:.3g}, relative to the largest element"
    got = f"a last step of {length:.3g}, after {iterations} iterations{where}"
    return RuntimeError(message(solver.name, problem, required=required, got=got, fix=fix))


def _not_a_root(solver: Newton, tolerance: float, residual: float, where: str) -> RuntimeError:
    is_root = solver.unknown == "z"
    value = "f(z)" if is_root else "the derivative of f"
    return RuntimeError(
        message(
            solver.name,
            f"the result of the solver is not a {'root' if is_root else 'minimum'}",
            argument="'solver'",
            required=f"{value} of at most {tolerance:.3g}, relative to the larger of its start and 1",
            got=f"{value} of {residual:.3g}{where}",
            fix="run the solver for more iterations, or pass a larger tolerance",
        )
    )

"""Solvers of linear equations: by a dense matrix, or by products with it alone.

The unknowns of an equation are a vector, or the rows of a matrix: one row for each example of a batch. A row
that is solved, or that cannot be solved, no longer changes. The loops run in Python in eager code, and by
a loop of the backend in compiled code. The solvers of the frameworks are not used: that of JAX does not say
whether it has converged, that of TensorFlow is conjugate gradients alone, and PyTorch has none.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

from keras import ops

from multigrad import backend
from multigrad.calculus.derivatives import jacobian
from multigrad.common.errors import describe, message, unusable
from multigrad.ops.arguments import is_integer, is_number, with_rank_of
from multigrad.ops.dtypes import EPSILON, REAL_DTYPES, dtype_of, nan_unless

Tensors = Sequence[Any]
Map = Callable[[Tensors], Tensors]
Product = Callable[[Any], Any]

METHODS = ("dense", "gmres", "cg")
"""The names of the linear solvers."""

ADJOINT = "w, the solution of the adjoint equation,"
"""The name of the adjoint in messages."""

_SMALL = 1000
"""The largest number of unknowns for which the default is a dense matrix."""

_BASIS = 30
"""The number of steps of GMRES before a restart. It keeps two vectors per step."""

_PROGRESS = 0.99
"""A row is given up after a cycle that multiplies its residual by more than this."""


class Affine:
    """The map `x -> product(x) + offset`, with a linear product."""

    def __init__(self, product: Map, offset: Tensors) -> None:
        self.product, self.offset = product, offset

    def __call__(self, x: Tensors) -> Tensors:
        return [a + b for a, b in zip(self.product(x), self.offset, strict=True)]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a solver needs beside its equation.

    Arguments:
        name: the name of the op, for messages.
        tolerance: the largest last step or residual. None is a power of the dtype's precision.
        max_iterations: the largest number of steps, or of products with the matrix.
        on_failure: "raise" or "nan".
        batched: whether the first axis of each tensor is a batch of separate equations.
        method: the name of a linear solver, or None to choose one by the number of unknowns.
        unknown: the name of the solution, for messages.
    """

    name: str
    tolerance: float | None
    max_iterations: int
    on_failure: str = "raise"
    batched: bool = False
    method: str | None = None
    unknown: str = "z"

    def __post_init__(self) -> None:
        """Raise ValueError for an option that cannot be used."""
        tolerance, steps, fix = self.tolerance, self.max_iterations, "pass one, or leave it out"
        if tolerance is not None and not (is_number(tolerance) and 0.0 < tolerance < math.inf):
            required = "a positive number, or None"
            raise unusable(ValueError, self.name, "tolerance", required=required, got=tolerance, fix=fix)
        if not (is_integer(steps) and steps > 0):
            required = "a positive integer"
            raise unusable(ValueError, self.name, "max_iterations", required=required, got=steps, fix=fix)
        solver = "solver" if self.name == "linear_solve" else "linear_solver"
        choices: Any = (
            ("on_failure", self.on_failure, ("raise", "nan")),
            (solver, self.method, (None, *METHODS)),
        )
        for option, value, values in choices:
            if not (isinstance(value, (str, type(None))) and value in values):
                required = " or ".join(map(repr, values))
                raise unusable(ValueError, self.name, option, required=required, got=value, fix=fix)

    def adjoint(self) -> Self:
        """Return the solver of the adjoint equation."""
        return dataclasses.replace(self, unknown=ADJOINT)

    def raise_for(self, passed: Any, lengths: Any, error: Callable[[float, str], Exception]) -> None:
        """Raise the error for the first row that has not passed, unless the rows are traced.

        `error` gets the length of the row, and a text that names the row if there are several.
        """
        rows, values = backend.active.concrete(passed), backend.active.concrete(lengths)
        if self.on_failure != "raise" or rows is None or values is None or rows.all():
            return
        row = int(rows.argmin())
        where = f", in example {row} of {len(rows)}" if rows.ndim > 1 else ""
        raise error(float(values.flat[row]), where)

    def tolerance_for(self, z: Tensors, power: float = 0.75) -> float:
        """Return the tolerance for a solution `z`."""
        dtypes = [REAL_DTYPES.get(dtype_of(x), dtype_of(x)) for x in z]
        return self.tolerance or max(EPSILON.get(dtype, EPSILON["float32"]) for dtype in dtypes) ** power

    def method_for(self, z: Tensors) -> str:
        """Return the linear solver for a solution `z`. The number of unknowns may not be known."""
        for x in z:
            if "complex" in dtype_of(x):
                problem = "a linear solver cannot solve a complex equation"
                required, fix = "real numbers", "solve for the real and imaginary parts"
                raise TypeError(message(self.name, problem, required=required, got=describe(x), fix=fix))
        size = sum(_size(x, self.batched) for x in z)
        return self.method or ("dense" if isinstance(size, int) and size <= _SMALL else "gmres")


def solve_linear(settings: Settings, product: Map, right: Tensors) -> Tensors:
    """Return the solution `x` of `product(x) = right`.

    The norm of its residual is at most the tolerance times the norm of `right`. It is computed from `x`
    itself at the end of each cycle of the method, not from its recursion. With a dense matrix, both sides are
    first multiplied by its inverse, so that the residual is a correction of `x`. The right side is scaled to
    a norm of 1, so that its square is not out of range.
    """
    batched, limit, method = settings.batched, settings.max_iterations, settings.method_for(right)
    tolerance = settings.tolerance_for(right, 0.5 if method == "dense" else 0.75)
    condition = inverse_at(product, right, batched)[1] if method == "dense" else lambda x: x
    unscaled = condition(flatten(right, batched))
    size = _norm(unscaled)
    scale = ops.where(size > 0.0, size, 1.0)
    b = unscaled / scale

    def flat_product(x: Any) -> Any:
        return condition(flatten(product(unflatten(x, right, batched)), batched, right))

    threshold = ops.full_like(size, tolerance)

    def more(x: Any, residual: Any, length: Any, active: Any, count: Any) -> Any:
        return ops.logical_and(ops.any(active), count < limit)

    def refine(x: Any, residual: Any, length: Any, active: Any, count: Any) -> tuple[Any, ...]:
        change, count = _CYCLES[method](flat_product, residual, threshold, count, limit)
        x = x + change
        residual = b - flat_product(x)
        new = ops.where(active, _norm(residual), length)
        active = ops.logical_and(new > threshold, new < _PROGRESS * length)
        return x, ops.where(active, residual, 0.0), new, active, count + 1

    length = _norm(b)
    start = ops.zeros_like(b), b, length, length > threshold, ops.convert_to_tensor(0, "int32")
    x, _, length, _, count = repeat(more, refine, start, limit)
    # The loop solved the scaled equation. If the map is linear, the original one has the same residual.
    error = _norm(flat_product(x * size) - unscaled) / scale
    converged = length <= threshold
    linear = ops.logical_not(ops.abs(error - length) > threshold + 0.5 * length)  # NaN is not a sign of it
    required = f"matvec(x) - b of norm {tolerance:.3g} or less, as for b / norm(b), relative to b"
    settings.raise_for(linear, error, lambda *got: _not_linear(settings, required, *got))
    settings.raise_for(
        converged, length, lambda *got: _not_solved(settings, method, tolerance, int(count), *got)
    )
    solved = ops.logical_and(converged, linear)
    return unflatten(nan_unless(solved, x * size), right, batched)


def require_zero(settings: Settings, at_zero: Tensors, right: Tensors) -> None:
    """Raise if the value of a map at zero is not zero, relative to the right side."""

    def size(tensors: Tensors) -> Any:
        rows = [as_rows(ops.abs(x), settings.batched, like) for x, like in zip(tensors, right, strict=True)]
        return sum([ops.sum(ops.cast(row, "float32"), axis=-1, keepdims=True) for row in rows])

    if settings.on_failure == "raise":
        offset = size(at_zero)
        passed = offset <= settings.tolerance_for(right) * size(right)
        settings.raise_for(
            passed, offset, lambda *got: _not_linear(settings, "matvec(x) of 0 for x = 0", *got)
        )


def inverse_at(equation: Map, z: Tensors, batched: bool) -> tuple[Any, Product]:
    """Return the flat value of an equation, and the product with the inverse of its Jacobian.

    A row with a singular Jacobian is NaN or Inf.

    The Jacobian of the sum of all rows holds that of each row, because the rows do not depend on each other.
    It is in float32 for half precision, in which no backend solves linear systems.
    """

    def total(x: Any) -> Any:
        value = flatten(equation(unflatten(x, z, batched)), batched, z)
        return ops.sum(value, axis=0) if batched else value, value

    matrix, value = jacobian(total, has_aux=True)(flatten(z, batched))
    if batched:
        matrix = ops.transpose(matrix, (1, 0, 2))
    return value, lambda right: backend.active.solve(matrix, right[..., None])[..., 0]


def _correction(product: Product, b: Any, threshold: Any, count: Any, limit: int) -> tuple[Any, Any]:
    """Return the residual itself, because it is multiplied by the inverse of the matrix."""
    return b, count


def _conjugate_gradients(product: Product, b: Any, threshold: Any, count: Any, limit: int) -> tuple[Any, Any]:
    """Hestenes and Stiefel 1952. The matrix is symmetric and positive or negative definite."""

    last = ops.minimum(limit, count + 2 * ops.shape(b)[-1] + 10)  # exact numbers take as many as the unknowns

    def more(x: Any, r: Any, p: Any, squared: Any, active: Any, count: Any) -> Any:
        return ops.logical_and(ops.any(active), count < last)

    def body(x: Any, r: Any, p: Any, squared: Any, active: Any, count: Any) -> tuple[Any, ...]:
        q = product(p)
        curvature = _dot(p, q)
        active = ops.logical_and(active, curvature != 0.0)
        step = ops.where(active, squared, 0.0) / ops.where(active, curvature, 1.0)
        x, r = x + step * p, r - step * q
        new = _dot(r, r)
        active = ops.logical_and(active, ops.sqrt(new) > threshold)
        p = r + new / ops.where(active, squared, 1.0) * p
        return x, r, ops.where(active, p, 0.0), new, active, count + 1

    squared = _dot(b, b)
    start = ops.zeros_like(b), b, b, squared, ops.sqrt(squared) > threshold, count
    x, *_, count = repeat(more, body, start, limit)
    return x, count


def _minimal_residuals(product: Product, b: Any, threshold: Any, count: Any, limit: int) -> tuple[Any, Any]:
    """One cycle of GMRES, in the form that keeps the products: Jiranek and Rozloznik 2010.

    `images` has orthonormal vectors, the products of those of `basis`. The next direction is the residual if
    the last step made it shorter, and otherwise the last image: the residual alone would break down, for
    example for a rotation by 90 degrees.
    """
    size = ops.shape(b)[-1]
    steps = min(_BASIS, size) if isinstance(size, int) else _BASIS
    last = ops.minimum(steps, size)

    def more(x: Any, r: Any, before: Any, p: Any, basis: Any, images: Any, step: Any) -> Any:
        return ops.logical_and(
            ops.any(before > threshold), ops.logical_and(step < last, count + step < limit)
        )

    def body(x: Any, r: Any, before: Any, p: Any, basis: Any, images: Any, step: Any) -> tuple[Any, ...]:
        q = product(p)
        for _ in range(2):  # the second time removes what rounding has left
            along = ops.swapaxes(ops.matmul(images, q[..., None]), -1, -2)
            q, p = q - ops.matmul(along, images)[..., 0, :], p - ops.matmul(along, basis)[..., 0, :]
        length = _norm(q)
        active = ops.logical_and(before > threshold, length > 0.0)
        length = ops.where(active, length, 1.0)
        p, q = ops.where(active, p / length, 0.0), ops.where(active, q / length, 0.0)
        move = _dot(q, r)
        x, r = x + move * p, r - move * q
        after = _norm(r)
        place = with_rank_of(ops.cast(ops.arange(steps) == step, b.dtype)[:, None], basis)
        following = ops.where(after < 0.9 * before, r / ops.where(after > 0.0, after, 1.0), q)
        basis, images = basis + place * p[..., None, :], images + place * q[..., None, :]
        return x, r, after, following, basis, images, step + 1

    length = _norm(b)
    row = ops.zeros_like(b)[..., None, :]
    empty = with_rank_of(ops.zeros((steps, 1), b.dtype), row) + row
    start = (
        ops.zeros_like(b),
        b,
        length,
        b / ops.where(length > 0.0, length, 1.0),
        empty,
        empty,
        ops.zeros_like(count),
    )
    x, *_, step = repeat(more, body, start, steps)
    return x, count + step


_CYCLES = {"dense": _correction, "gmres": _minimal_residuals, "cg": _conjugate_gradients}


def repeat(
    more: Callable[..., Any], body: Callable[..., Any], carry: tuple[Any, ...], limit: int
) -> tuple[Any, ...]:
    """Repeat `body` while `more` holds, in Python as long as its value is known.

    In a `vmap`, the value is known until the carry depends on a mapped tensor.
    """

    def step(*carry: Any) -> tuple[Any, ...]:
        return tuple([ops.stop_gradient(x) for x in body(*carry)])

    value = backend.active.concrete(more(*carry))
    while value:
        carry = step(*carry)
        value = backend.active.concrete(more(*carry))
    return carry if value is not None else tuple(backend.active.while_loop(more, step, carry, limit))


def flatten(tensors: Tensors, batched: bool, like: Tensors | None = None) -> Any:
    """Return the tensors as one vector or matrix of float32 or float64, with their elements side by side."""
    like = like or tensors
    wide = "float64" if any(dtype_of(x) == "float64" for x in tensors) else "float32"
    pairs = zip(tensors, like, strict=True)
    return ops.concatenate([ops.cast(as_rows(x, batched, shaped), wide) for x, shaped in pairs], axis=-1)


def unflatten(rows: Any, like: Tensors, batched: bool) -> Tensors:
    """Return a vector or matrix as tensors with the shapes and dtypes of others."""
    parts, start = [], 0
    for x in like:
        end = start + _size(x, batched)
        parts.append(ops.cast(ops.reshape(rows[..., start:end], ops.shape(x)), dtype_of(x)))
        start = end
    return parts


def as_rows(x: Any, batched: bool, like: Any = None) -> Any:
    """Return a tensor as a vector, or as a matrix with a row for each example if batched.

    `like` is a tensor of its shape: TensorFlow (2.21) does not know the rank of second derivatives in a loop.
    """
    like = x if like is None else like
    return ops.reshape(x, (*ops.shape(like)[: 1 if batched else 0], _size(like, batched)))


def _size(x: Any, batched: bool) -> Any:
    """Return the number of elements, of each example if batched: an integer, or a tensor if it is unknown."""
    return math.prod(ops.shape(x)[1 if batched else 0 :])


def _dot(x: Any, y: Any) -> Any:
    return ops.sum(x * y, axis=-1, keepdims=True)


def _norm(x: Any) -> Any:
    """Return the Euclidean norm of each row, also of numbers whose squares are out of range."""
    # Not of `ops.abs`, see `_max_abs` of `implicit_solvers`.
    largest = ops.maximum(ops.max(x, axis=-1, keepdims=True), -ops.min(x, axis=-1, keepdims=True))
    scale = ops.where(largest > 0.0, largest, 1.0)
    return scale * ops.sqrt(ops.sum(ops.square(x / scale), axis=-1, keepdims=True))


def _not_solved(
    settings: Settings, method: str, tolerance: float, count: int, residual: float, where: str
) -> RuntimeError:
    if method == "dense":
        problem = f"the matrix of the equation for {settings.unknown} is singular or ill-conditioned"
        required = f"a linear equation that the inverse of its matrix solves, within {tolerance:.3g}"
        got = f"a correction of {residual:.3g}{where}"
        fix = "add equations or a multiple of the identity, so that there is one solution, use float64, or "
        fix += "allow a larger tolerance"
    else:
        problem = f"{settings.unknown} did not converge"
        required = f"a residual of norm {tolerance:.3g} or less, relative to the right side"
        got = f"a residual of norm {residual:.3g}, after {count} products of {method}{where}"
        fix = (
            "scale the equations so that the matrix is closer to the identity, choose another linear solver "
        )
        fix += "(cg needs a symmetric matrix), or allow a larger tolerance"
    return RuntimeError(message(settings.name, problem, required=required, got=got, fix=fix))


def _not_linear(settings: Settings, required: str, got: float, where: str) -> RuntimeError:
    problem = "the function is not linear"
    fix = "return zero for x = 0 and twice the result for twice x, or use implicit_root"
    return RuntimeError(message(settings.name, problem, required=required, got=f"{got:.3g}{where}", fix=fix))

"""Solvers of linear equations that need only products with the matrix, for `implicit_solvers`.

Tensors are flattened to one vector. The loops run in Python in eager code, and by a loop of the backend in
compiled code. The solvers of the frameworks are not used: that of JAX does not say whether it has converged,
that of TensorFlow is conjugate gradients alone, and PyTorch has none.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keras import ops

from multigrad import backend
from multigrad.core.errors import describe, message
from multigrad.ops.dtypes import dtype_of

Tensors = Sequence[Any]
Map = Callable[[Tensors], Tensors]
Product = Callable[[Any], Any]

_BASIS = 30
"""The number of steps of GMRES before a restart. It keeps two vectors per step."""


class Affine:
    """The map `x -> product(x) + offset`, with a linear product."""

    def __init__(self, product: Map, offset: Tensors) -> None:
        self.product, self.offset = product, offset

    def __call__(self, x: Tensors) -> Tensors:
        return [a + b for a, b in zip(self.product(x), self.offset, strict=True)]


class Settings(Protocol):
    """What a solution needs beside its equation: names for messages, a limit, and what happens beyond it."""

    name: str
    unknown: str
    max_iterations: int
    on_failure: str


def solve_by_products(
    settings: Settings, method: str, product: Map, right: Tensors, tolerance: float
) -> Tensors:
    """Return the solution `x` of `product(x) = right`, whose residual is at most the tolerance times `right`.

    The residual is computed from `x` itself at the end of each cycle of the method, not from its recursion.
    The right side is scaled to a norm of 1, so that its square is not out of range.
    """
    for x in right:
        if "complex" in dtype_of(x):
            raise TypeError(
                message(
                    settings.name,
                    "a linear solver that uses products alone cannot solve a complex equation",
                    required="real numbers",
                    got=describe(x),
                    fix="solve for the real and imaginary parts",
                )
            )
    if not sum(map(_size, right)):
        return right
    unscaled = flatten(right)
    size = _norm(unscaled)
    scale = ops.where(size > 0.0, size, 1.0)
    b = unscaled / scale

    def flat_product(x: Any) -> Any:
        return flatten(product(unflatten(x, right)))

    threshold, limit = ops.full_like(size, tolerance), settings.max_iterations
    cycle = _CYCLES[method]

    def more(x: Any, residual: Any, length: Any, count: Any) -> Any:
        return ops.logical_and(length > threshold, count < limit)

    def refine(x: Any, residual: Any, length: Any, count: Any) -> tuple[Any, ...]:
        change, count = cycle(flat_product, residual, threshold, count, limit)
        x = x + change
        residual = b - flat_product(x)
        return x, residual, _norm(residual), count + 1

    start = ops.zeros_like(b), b, _norm(b), ops.convert_to_tensor(0, "int32")
    x, _, length, count = _repeat(more, refine, start, limit)
    solution = unflatten(x * size, right)
    # The loop solved the scaled equation. If the map is not linear, `x` may not solve the original one.
    error = _norm(flatten(product(solution)) - unscaled) / scale
    is_solved = ops.logical_and(length <= threshold, error <= 2.0 * threshold)
    if settings.on_failure == "raise" and _is_false(is_solved):
        if _is_false(length <= threshold):
            raise _not_solved(settings, method, tolerance, length, count)
        raise _not_linear(settings, tolerance, error)
    return [ops.where(is_solved, x, ops.full_like(x, float("nan"))) for x in solution]


def _conjugate_gradients(product: Product, b: Any, threshold: Any, count: Any, limit: int) -> tuple[Any, Any]:
    """Hestenes and Stiefel 1952. The matrix is symmetric and positive or negative definite."""

    def more(x: Any, r: Any, p: Any, squared: Any, count: Any) -> Any:
        return ops.logical_and(ops.sqrt(squared) > threshold, count < limit)

    def body(x: Any, r: Any, p: Any, squared: Any, count: Any) -> tuple[Any, ...]:
        q = product(p)
        step = squared / ops.sum(p * q)
        x, r = x + step * p, r - step * q
        new = ops.sum(r * r)
        return x, r, r + new / squared * p, new, count + 1

    x, _, _, _, count = _repeat(more, body, (ops.zeros_like(b), b, b, ops.sum(b * b), count), limit)
    return x, count


def _stabilized_biconjugate_gradients(
    product: Product, b: Any, threshold: Any, count: Any, limit: int
) -> tuple[Any, Any]:
    """van der Vorst 1992."""

    def more(x: Any, r: Any, p: Any, rho: Any, count: Any) -> Any:
        return ops.logical_and(_norm(r) > threshold, count < limit)

    def body(x: Any, r: Any, p: Any, rho: Any, count: Any) -> tuple[Any, ...]:
        v = product(p)
        alpha = rho / ops.sum(b * v)
        half = r - alpha * v
        t = product(half)
        squared = ops.sum(t * t)
        omega = ops.where(squared > 0.0, ops.sum(t * half) / ops.where(squared > 0.0, squared, 1.0), 0.0)
        x, r = x + alpha * p + omega * half, half - omega * t
        new = ops.sum(b * r)
        beta = ops.where(omega == 0.0, 0.0, new / rho * alpha / ops.where(omega == 0.0, 1.0, omega))
        return x, r, r + beta * (p - omega * v), new, count + 2

    x, _, _, _, count = _repeat(more, body, (ops.zeros_like(b), b, b, ops.sum(b * b), count), limit)
    return x, count


def _minimal_residuals(product: Product, b: Any, threshold: Any, count: Any, limit: int) -> tuple[Any, Any]:
    """One cycle of GMRES, in the form that keeps the products: Jiranek and Rozloznik 2010.

    `images` has orthonormal rows, the products of the rows of `basis`. The next direction is the residual if
    the last step made it shorter, and otherwise the last image: the residual alone would break down, for
    example for a rotation by 90 degrees.
    """
    rows = min(_BASIS, _size(b))

    def more(x: Any, r: Any, p: Any, basis: Any, images: Any, row: Any) -> Any:
        return ops.logical_and(_norm(r) > threshold, ops.logical_and(row < rows, count + row < limit))

    def body(x: Any, r: Any, p: Any, basis: Any, images: Any, row: Any) -> tuple[Any, ...]:
        q = product(p)
        for _ in range(2):  # the second time removes what rounding has left
            along = ops.matmul(images, q)
            q, p = q - ops.matmul(along, images), p - ops.matmul(along, basis)
        length = _norm(q)
        p, q = p / length, q / length
        before, step = _norm(r), ops.sum(q * r)
        x, r = x + step * p, r - step * q
        after = _norm(r)
        place = ops.cast(ops.arange(rows) == row, b.dtype)[:, None]
        following = ops.where(after < 0.9 * before, r / ops.where(after > 0.0, after, 1.0), q)
        return x, r, following, basis + place * p, images + place * q, row + 1

    empty = ops.zeros((rows, _size(b)), b.dtype)
    start = ops.zeros_like(b), b, b / _norm(b), empty, empty, ops.zeros_like(count)
    x, _, _, _, _, row = _repeat(more, body, start, rows)
    return x, count + row


_CYCLES = {
    "gmres": _minimal_residuals,
    "bicgstab": _stabilized_biconjugate_gradients,
    "cg": _conjugate_gradients,
}
METHODS = ("dense", *_CYCLES)
"""The names of the linear solvers."""


def _repeat(
    more: Callable[..., Any], body: Callable[..., Any], carry: tuple[Any, ...], limit: int
) -> tuple[Any, ...]:
    """Repeat `body` while `more` holds, in Python as long as its value is known.

    In a `vmap`, the value is known until the carry depends on a mapped tensor.
    """
    value = backend.active.concrete(more(*carry))
    while value:
        carry = tuple([ops.stop_gradient(x) for x in body(*carry)])
        value = backend.active.concrete(more(*carry))
    return carry if value is not None else tuple(backend.active.while_loop(more, body, carry, limit))


def _is_false(condition: Any) -> bool:
    value = backend.active.concrete(condition)
    return value is not None and not value


def flatten(tensors: Tensors) -> Any:
    """Return the tensors as one vector of float32 or float64."""
    wide = "float64" if any(dtype_of(x) == "float64" for x in tensors) else "float32"
    return ops.concatenate([ops.cast(ops.reshape(x, (-1,)), wide) for x in tensors])


def unflatten(vector: Any, like: Tensors) -> Tensors:
    """Return a vector as tensors with the shapes and dtypes of others."""
    parts, start = [], 0
    for x in like:
        part = vector[start : start + _size(x)]
        parts.append(ops.cast(ops.reshape(part, x.shape), dtype_of(x)))
        start += _size(x)
    return parts


def _size(tensor: Any) -> int:
    return math.prod(tuple(tensor.shape))


def _norm(x: Any) -> Any:
    """Return the Euclidean norm, also of numbers whose squares are out of range."""
    largest = ops.maximum(ops.max(x), -ops.min(x))  # not of `ops.abs`, see `_max_abs` of `implicit_solvers`
    scale = ops.where(largest > 0.0, largest, 1.0)
    return scale * ops.sqrt(ops.sum(ops.square(x / scale)))


def _not_solved(settings: Settings, method: str, tolerance: float, residual: Any, count: Any) -> RuntimeError:
    return RuntimeError(
        message(
            settings.name,
            f"{settings.unknown} did not converge",
            required=f"a residual of norm {tolerance:.3g} or less, relative to the right side",
            got=f"a residual of norm {float(residual):.3g}, after {int(count)} products of {method}",
            fix="scale the equations so that the matrix is closer to the identity, choose another linear "
            "solver (cg needs a symmetric matrix), or allow a larger tolerance",
        )
    )


def _not_linear(settings: Settings, tolerance: float, residual: Any) -> RuntimeError:
    return RuntimeError(
        message(
            settings.name,
            "the function is not linear",
            required=f"matvec(x) - b of norm {2.0 * tolerance:.3g} or less, relative to b",
            got=f"{float(residual):.3g}, though x solves the equation for b / norm(b)",
            fix="return zero for x = 0 and twice the result for twice x, or use implicit_root",
        )
    )

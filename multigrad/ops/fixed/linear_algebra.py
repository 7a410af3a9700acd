"""Determinants with right gradients, at singular matrices too.

The derivative of a determinant is the cofactor matrix, which needs no inverse. Up to 3 rows, the cofactors
are polynomials. For more rows, `A = Q R`, with an orthogonal matrix `Q` and a triangular matrix `R`. The
adjugate of `R` is computed from the adjugates of its blocks.

For the second derivative, with the singular value decomposition `A = U S V^T`, the cofactors of `A` are those
of the diagonal matrix `S`, which are products of the other singular values (Magnus and Neudecker 2019, Matrix
Differential Calculus, chapter 8).
"""

from typing import Any

from keras import ops

from multigrad.op import op_custom_gradient
from multigrad.ops.arguments import Pair, Tensor
from multigrad.ops.dtypes import dtype_of
from multigrad.ops.fixed.common import by_derivative


@by_derivative("tensorflow", "torch", real_only=True)
def det(u: Any, y: Any, x: Tensor) -> Any:
    """the matrix of cofactors, which is exact at singular matrices."""
    return u[..., None, None] * (_small_cofactors(x) if x.shape[-1] <= 3 else _cofactors(x))


def _small_cofactors(x: Any) -> Any:
    """Return the cofactors of matrices with up to 3 rows, as polynomials."""
    size = x.shape[-1]
    if size < 2:
        return ops.ones_like(x)
    if size == 2:
        turned = ops.flip(x, axis=(-2, -1))
        return turned * ops.convert_to_tensor([[1.0, -1.0], [-1.0, 1.0]], dtype_of(x))
    # Row i is the cross product of the next two rows.
    above, below = ops.roll(x, -1, axis=-2), ops.roll(x, -2, axis=-2)

    def next_column(rows: Any) -> Any:
        return ops.roll(rows, -1, axis=-1)

    return next_column(above * next_column(below) - next_column(above) * below)


@op_custom_gradient(name="multigrad>_cofactors")
def _cofactors(x: Tensor) -> Pair:
    """Return the cofactors. The rule is their derivative in the basis of the singular vectors."""
    # The rows are divided by powers of two, because the decomposition loses the digits of small rows.
    size = ops.sum(ops.abs(x), axis=-1, keepdims=True)
    usable = ops.logical_and(size > 0.0, ops.isfinite(size))
    exponents = ops.floor(ops.log2(ops.where(usable, size, ops.ones_like(size))))
    q, r = ops.qr(x * ops.power(2.0, -exponents))
    sign = ops.sign(ops.det(q))[..., None, None]
    others = ops.sum(exponents, axis=-2, keepdims=True) - exponents
    y = ops.power(2.0, others) * sign * (q @ ops.swapaxes(_adjugate_of_triangular(r), -1, -2))

    def rule(upstream: Any) -> Any:
        u, s, vt, sign = _decompose(x)
        pairs = sign[..., None] * _products_without_two(s)
        turned = ops.swapaxes(u, -1, -2) @ upstream @ ops.swapaxes(vt, -1, -2)
        main = ops.diagonal(turned, axis1=-2, axis2=-1)
        on_diagonal = ops.sum(pairs * main[..., None, :], axis=-1)
        eye = ops.eye(x.shape[-1], dtype=x.dtype)
        middle = on_diagonal[..., None] * eye - pairs * ops.swapaxes(turned, -1, -2)
        return u @ middle @ vt

    return y, rule


def _adjugate_of_triangular(r: Any) -> Any:
    """Return the adjugate of upper triangular matrices, by multiplications only.

    The adjugate of `[[A, B], [0, D]]` is `[[det(D) adj(A), -adj(A) B adj(D)], [0, det(A) adj(D)]]`. This
    doubles the size of the blocks on the diagonal, from one row to all rows.
    """
    rows, batch = r.shape[-1], ops.shape(r)[:-2]
    padded = 1 << (rows - 1).bit_length()
    if padded > rows:
        more = padded - rows
        ones = ops.pad(ops.eye(more, dtype=dtype_of(r)), [(rows, 0)] * 2)
        r = ops.pad(r, [(0, 0)] * len(batch) + [(0, more)] * 2) + ones
    det = ops.diagonal(r, axis1=-2, axis2=-1)[..., None, None]
    adjugate, size = ops.ones_like(det), 1
    while size < padded:
        pairs = padded // (2 * size)
        blocks = ops.reshape(r, (*batch, pairs, 2, size, pairs, 2, size))[..., 0, :, :, 1, :]
        above = ops.moveaxis(ops.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        left, right = adjugate[..., ::2, :, :], adjugate[..., 1::2, :, :]
        det_left, det_right = det[..., ::2, :, :], det[..., 1::2, :, :]
        top = ops.concatenate([det_right * left, -(left @ above @ right)], axis=-1)
        bottom = ops.concatenate([ops.zeros_like(left), det_left * right], axis=-1)
        adjugate, det = ops.concatenate([top, bottom], axis=-2), det_left * det_right
        size *= 2
    return adjugate[..., 0, :rows, :rows]


def _decompose(x: Any) -> tuple[Any, Any, Any, Any]:
    """Return the decomposition and the product of the determinants of its rotations, 1 or -1."""
    u, s, vt = ops.svd(x, full_matrices=False)
    sign = ops.sign(ops.stop_gradient(ops.det(u) * ops.det(vt)))
    return u, s, vt, sign[..., None]


def _products_without_two(s: Any) -> Any:
    """Return the product of the other elements, for each pair of elements, and 0 on the diagonal."""
    eye = ops.eye(s.shape[-1], dtype=s.dtype)
    left_out = 1.0 - (1.0 - eye[:, None, :]) * (1.0 - eye[None, :, :])
    products = _prod(s[..., None, None, :] * (1.0 - left_out) + left_out)
    return products * (1.0 - eye)


def _prod(x: Any) -> Any:
    """Return the product along the last axis. Without the dtype, Keras (3.15) returns float32 on PyTorch."""
    return ops.prod(x, axis=-1, dtype=dtype_of(x))

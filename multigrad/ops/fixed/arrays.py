"""Products along an axis, powers of a vector and updates of slices, with right gradients."""

from typing import Any

import keras
from keras import ops

from multigrad.calculus.derivatives import vjp
from multigrad.common.errors import unusable
from multigrad.ops.arguments import Pair, Tensor
from multigrad.ops.dtypes import dtype_of, has_gradient
from multigrad.ops.fixed.common import (
    axes_of,
    by_derivative,
    define_op,
    keep_axes,
    replacement,
    to_operand,
)
from multigrad.ops.fixed.elementwise import clip, minimum, power


@by_derivative("tensorflow", real_only=True)
def cumprod(u: Any, y: Any, x: Tensor, axis: int | None = None, dtype: str | None = None) -> Any:
    """the sums of the products of the other elements, also where an element is 0."""
    return _pull_cumprod(u, x, y, axis)


@by_derivative("tensorflow", real_only=True)
def nancumprod(u: Any, y: Any, x: Tensor, axis: int | None = None, dtype: str | None = None) -> Any:
    """that of `cumprod` with 1 in place of NaN, and 0 for the NaN."""
    missing = ops.isnan(x)
    gradient = _pull_cumprod(u, ops.where(missing, ops.ones_like(x), x), y, axis)
    return ops.where(missing, ops.zeros_like(x), gradient)


def _pull_cumprod(u: Any, x: Any, products: Any, axis: int | None) -> Any:
    """Return the gradient of `cumprod`, without a division."""
    along, shape = (0, ops.shape(x)) if axis is None else (axis, ops.shape(x))
    if axis is None:
        x = ops.reshape(x, (-1,))
    u, x, products = (ops.moveaxis(value, along, 0) for value in (u, x, products))
    before = ops.concatenate([ops.ones_like(x[:1]), products[:-1]])
    # s[i] = u[i] + x[i + 1] * s[i + 1], from the last element to the first.
    factors = ops.concatenate([x[1:], ops.zeros_like(x[:1])])
    return ops.reshape(ops.moveaxis(before * _recurrence(factors, u), 0, along), shape)


def _recurrence(factors: Any, terms: Any) -> Any:
    """Return `s[i] = terms[i] + factors[i] * s[i + 1]`, by a recurrence of every second element.

    `keras.ops.associative_scan` (3.15) loses the shapes in a graph of TensorFlow.
    """
    size = terms.shape[0]
    if size is None:
        required = "a static size of the axis for its gradient, on TensorFlow"
        fix = "set the shape with `tf.ensure_shape`"
        raise unusable(NotImplementedError, "cumprod", "x", required=required, got=terms, fix=fix)
    if size < 2:
        return terms
    if size % 2:
        padded = (ops.concatenate([value, ops.zeros_like(value[:1])]) for value in (factors, terms))
        return _recurrence(*padded)[:size]
    shape = ops.shape(terms)
    pairs = (size // 2, 2, *shape[1:])
    factors, terms = ops.reshape(factors, pairs), ops.reshape(terms, pairs)
    even = _recurrence(factors[:, 0] * factors[:, 1], terms[:, 0] + factors[:, 0] * terms[:, 1])
    after = ops.concatenate([even[1:], ops.zeros_like(even[:1])])
    odd = terms[:, 1] + factors[:, 1] * after
    return ops.reshape(ops.stack([even, odd], axis=1), shape)


@by_derivative("tensorflow", real_only=True)
def prod(
    u: Any, y: Any, x: Tensor, axis: Any = None, keepdims: bool = False, dtype: str | None = None
) -> Any:
    """the products of the other elements, also where an element is 0."""
    return keep_axes(x, axis, u) * _products_of_others(x, axis)


@by_derivative("tensorflow", real_only=True)
def nanprod(u: Any, y: Any, x: Tensor, axis: Any = None, keepdims: bool = False) -> Any:
    """that of `prod` with 1 in place of NaN, and 0 for the NaN."""
    missing = ops.isnan(x)
    others = _products_of_others(ops.where(missing, ops.ones_like(x), x), axis)
    return keep_axes(x, axis, u) * ops.where(missing, ops.zeros_like(x), others)


def _products_of_others(x: Any, axis: Any) -> Any:
    """Return the product of the other elements of the reduced axes, for each element."""
    count, last = len(x.shape), axes_of(x, axis)
    order = [a for a in range(count) if a not in last] + last
    moved = ops.transpose(x, order)
    shape = ops.shape(moved)
    flat = ops.reshape(moved, (*shape[: count - len(last)], -1))
    one = ops.ones_like(flat[..., :1])
    before = cumprod(ops.concatenate([one, flat[..., :-1]], axis=-1), axis=-1)
    after = cumprod(ops.concatenate([one, ops.flip(flat[..., 1:], axis=-1)], axis=-1), axis=-1)
    others = ops.reshape(before * ops.flip(after, axis=-1), shape)
    return ops.transpose(others, [order.index(a) for a in range(count)])


@by_derivative(real_only=True)
def vander(u: Any, y: Any, x: Tensor, N: int | None = None, increasing: bool = False) -> Any:  # noqa: N803
    """`k * x**(k - 1)` for the column of the power `k`, also at 0."""
    count = y.shape[-1]
    powers = range(count) if increasing else range(count - 1, -1, -1)
    terms = [u[:, i] * float(k) * power(x, float(k - 1)) for i, k in enumerate(powers) if k]
    return sum(terms, ops.zeros_like(x))


@replacement("tensorflow")
@define_op
def slice_update(inputs: Tensor, start_indices: Any, updates: Tensor) -> Pair:
    """1 for the update, and 1 for the inputs outside of the slice."""
    inputs = to_operand("slice_update", "inputs", inputs)
    updates = to_operand("slice_update", "updates", updates)
    y = ops.slice_update(inputs, start_indices, ops.cast(updates, inputs.dtype))

    def rule(upstream: Any) -> Any:
        zeros = ops.zeros(ops.shape(updates), upstream.dtype)
        outside = slice_update(upstream, start_indices, zeros) if has_gradient(inputs) else None
        inside = ops.slice(upstream, start_indices, ops.shape(updates)) if has_gradient(updates) else None
        return outside, None, inside

    return y, rule


@replacement("tensorflow", "torch")
@define_op
def bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0, sparse: bool = False) -> Pair:
    """1 for the count to which a weight is added."""
    weights = to_operand("bincount", "weights", weights)
    y = ops.bincount(x, weights=weights, minlength=minlength, sparse=sparse)

    def rule(upstream: Any) -> Any:
        pulled = ops.take if len(upstream.shape) == 1 else _take_rows
        return None, None if weights is None else pulled(upstream, ops.convert_to_tensor(x)), None, None

    return y, rule


def _take_rows(x: Any, indices: Any) -> Any:
    return ops.take_along_axis(x, indices, axis=-1)


@replacement("torch")
def full(shape: Any, fill_value: Any, dtype: str | None = None) -> Tensor:
    """1 for each element."""
    return ops.broadcast_to(ops.convert_to_tensor(fill_value, dtype or keras.config.floatx()), shape)


@replacement("torch")
def full_like(x: Tensor, fill_value: Any, dtype: str | None = None) -> Tensor:
    """0 for `x`, and 1 for the value in each element."""
    zeros = ops.zeros_like(x, dtype=dtype)
    return zeros + ops.cast(fill_value, dtype_of(zeros))


@by_derivative("tensorflow", path="image.hsv_to_rgb")
def hsv_to_rgb(u: Any, y: Any, images: Tensor, data_format: str | None = None) -> Any:
    """that of the linear pieces of the conversion."""
    axis = -3 if (data_format or keras.config.image_data_format()) == "channels_first" else -1
    return vjp(lambda z: _rgb(z, axis), images)[1](u)[0]


def _rgb(images: Any, axis: int) -> Any:
    hue, saturation, value = ops.unstack(images, axis=axis)
    colors = []
    for shift in (5.0, 3.0, 1.0):
        place = ops.mod(shift + 6.0 * hue, 6.0)
        colors.append(value - value * saturation * clip(minimum(place, 4.0 - place), 0.0, 1.0))
    return ops.stack(colors, axis=axis)

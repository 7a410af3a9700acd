"""Vectors replaced by the closest of a learned few."""

from typing import Any, NamedTuple

import keras
from keras import ops

from multigrad.core.errors import unusable
from multigrad.core.op import op_custom_gradient
from multigrad.ops.arguments import Pair, Tensor, is_number, stacked, with_plain
from multigrad.ops.dtypes import dtype_of, exact

_NAME = "vector_quantize"


class VectorQuantized(NamedTuple):
    """What `vector_quantize` returns."""

    quantized: Tensor
    """The closest vector of the codebook to each of `x`, with the gradient of the identity to `x`."""
    indices: Tensor
    """Which one it is, in int32."""
    loss: Tensor
    """What each vector adds to the loss that trains the codebook, and commits `x` to it."""


@with_plain("commitment")
def vector_quantize(x: Tensor, codebook: Tensor, commitment: float = 0.25) -> VectorQuantized:
    """Each vector of `x` replaced by the closest one of a codebook, as VQ-VAE has it.

    ```python
    from multigrad import ops

    codebook = ops.array([[0.0, 0.0], [1.0, 1.0]])
    quantized, indices, loss = ops.vector_quantize(ops.array([[0.9, 0.8]]), codebook)
    print(ops.convert_to_numpy(quantized), ops.convert_to_numpy(indices))  # [[1., 1.]] [1]
    ```

    Add `mean(loss)` to the model's own loss. That of the paper's equation 3 has two terms of one value, the
    squared distance between `x` and its vector `e` of the codebook: `|sg(x) - e|**2` moves the vector, and
    `commitment * |x - sg(e)|**2` moves `x`. No tensor of shape `(..., k, d)` is made.

    Arguments:
        x: a floating tensor of shape `(..., d)`.
        codebook: a floating tensor or Variable of shape `(k, d)`, such as a layer's weight.
        commitment: the factor of the second term, beta in the paper: a number that is not negative.

    Returns:
        A named tuple of three. `quantized` has the shape and dtype of `x`. For an upstream gradient `u`, its
        gradient is `u` with respect to `x`, and none with respect to the codebook.

        `indices` is int32 of shape `(...)`. The first of equally close vectors is chosen. Distances are
        compared as `|e|**2 / 2 - x @ e`, in float32 for half precision: vectors whose distances differ by
        no more than its rounding are equally close.

        `loss` is `(1 + commitment) * |x - e|**2`, of shape `(...)`, in the dtype of `x`, or float32 for
        float16 and bfloat16. For an upstream gradient `v`, its gradient is `2 * commitment * v * (x - e)`
        with respect to `x`, and the sum of `2 * v * (e - x)` over the vectors that chose it with respect to a
        vector of the codebook.

        Derivatives of these gradients hold the other argument fixed, too, as `sg` does.

    Raises:
        TypeError: when `x` or `codebook` is not floating, or `commitment` is no number.
        ValueError: when the shapes do not fit, or `commitment` is negative.

    References:
        van den Oord, Vinyals and Kavukcuoglu 2017, Neural Discrete Representation Learning, arXiv:1711.00937,
        section 3.2.
    """
    x, codebook = [stacked(_NAME, name, v) for name, v in (("x", x), ("codebook", codebook))]
    _check(x, codebook, commitment)
    # Keras makes named tuples by `keras.tree`, which on PyTorch (3.15) leaves a cycle with tensors in it.
    return VectorQuantized(*_vector_quantize(x, codebook, float(commitment)))


@op_custom_gradient(name="multigrad>vector_quantize")
def _vector_quantize(x: Any, codebook: Any, commitment: float) -> Pair:
    width = codebook.shape[1]
    wide = exact(dtype_of(x))
    vectors, codes = ops.reshape(ops.cast(x, wide), (-1, width)), ops.cast(codebook, wide)
    # The operator, because `ops.matmul` (Keras 3.15) computes in float32 on PyTorch what is of float64.
    scores = 0.5 * ops.sum(codes * codes, axis=1) - vectors @ ops.transpose(codes)
    indices = ops.reshape(ops.cast(ops.argmin(scores, axis=1), "int32"), ops.shape(x)[:-1])
    chosen = ops.take(codes, indices, axis=0)
    distance = ops.sum(ops.square(ops.cast(x, wide) - chosen), axis=-1)

    def rule(upstream: Any) -> tuple[Any, ...]:
        of_quantized, _, of_loss = upstream
        of_loss = ops.expand_dims(2.0 * of_loss, -1)
        own, codes = ops.cast(x, wide), ops.cast(codebook, wide)
        by_x = of_loss * (own - ops.stop_gradient(ops.take(codes, indices, axis=0)))
        by_chosen = of_loss * (ops.take(codes, indices, axis=0) - ops.stop_gradient(own))
        by_code = _sums_by_code(ops.reshape(by_chosen, (-1, width)), indices, codebook.shape[0])
        return ops.cast(of_quantized, wide) + commitment * by_x, by_code, None

    return (ops.cast(chosen, x.dtype), indices, (1.0 + commitment) * distance), rule


def _sums_by_code(vectors: Any, indices: Any, count: int) -> Any:
    """For each vector of the codebook, the sum of those that chose it."""
    indices = ops.reshape(indices, (-1,))
    if dtype_of(vectors) == "float64":  # of which `ops.segment_sum` (Keras 3.15) makes float32 on PyTorch
        return ops.transpose(ops.one_hot(indices, count, dtype="float64")) @ vectors
    return ops.segment_sum(vectors, indices, count)


def _check(x: Any, codebook: Any, commitment: Any) -> None:
    """See `vector_quantize` for what is required."""
    for name, tensor in (("x", x), ("codebook", codebook)):
        if not keras.backend.is_float_dtype(dtype_of(tensor)):
            raise _error(TypeError, name, "a floating dtype", tensor, "cast it")
    if len(codebook.shape) != 2 or None in tuple(codebook.shape) or not codebook.shape[0]:
        required = "two known dimensions, (k, d), and at least one vector"
        raise _error(ValueError, "codebook", required, codebook, "pass one row for each vector")
    width = codebook.shape[1]
    if not len(x.shape) or x.shape[-1] != width:
        required = f"shape (..., {width}), as the vectors of the codebook have {width} elements"
        raise _error(ValueError, "x", required, x, "bring the vectors to the last axis")
    required = "a number, 0 or more"
    if not is_number(commitment):
        raise _error(TypeError, "commitment", required, commitment, "multiply the loss by what is learned")
    if not commitment >= 0.0:
        raise _error(ValueError, "commitment", required, commitment, "write commitment=0.25, for example")


def _error(kind: type[Exception], argument: str, required: str, got: Any, fix: str) -> Exception:
    return unusable(kind, _NAME, argument, required=required, got=got, fix=fix)

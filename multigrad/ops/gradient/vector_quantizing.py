"""Vector quantization with a learned codebook."""

from typing import Any, NamedTuple

import keras
from keras import ops

from multigrad.common.errors import unusable
from multigrad.op import op_custom_gradient
from multigrad.ops.arguments import Pair, Tensor, is_number, stack_tensors, with_python_numbers
from multigrad.ops.dtypes import dtype_of, wide_dtype

_NAME = "vector_quantize"


class VectorQuantized(NamedTuple):
    """The result of `vector_quantize`."""

    quantized: Tensor
    """The codebook vector closest to each vector of `x`. Its gradient passes to `x` unchanged."""
    indices: Tensor
    """The indices of these codebook vectors, in int32."""
    loss: Tensor
    """The loss of each vector, which trains the codebook and commits `x` to it."""


@with_python_numbers("commitment")
def vector_quantize(x: Tensor, codebook: Tensor, commitment: float = 0.25) -> VectorQuantized:
    """Replace each vector of `x` by the closest vector of a codebook, as in VQ-VAE.

    ```python
    from multigrad import ops

    codebook = ops.array([[0.0, 0.0], [1.0, 1.0]])
    quantized, indices, loss = ops.vector_quantize(ops.array([[0.9, 0.8]]), codebook)
    print(ops.convert_to_numpy(quantized), ops.convert_to_numpy(indices))  # [[1., 1.]] [1]
    ```

    Add `mean(loss)` to the loss of the model. Equation 3 of the paper has two terms, with the squared
    distance between `x` and its codebook vector `e`: `|sg(x) - e|**2` moves `e`, and
    `commitment * |x - sg(e)|**2` moves `x`. The op never creates a tensor of shape `(..., k, d)`.

    Arguments:
        x: a floating tensor of shape `(..., d)`.
        codebook: a floating tensor or Variable of shape `(k, d)`, for example a weight of a layer.
        commitment: the factor of the second term, beta in the paper. It must not be negative.

    Returns:
        A named tuple of three tensors. `quantized` has the shape and dtype of `x`. For an upstream gradient
        `u`, its gradient with respect to `x` is `u`. The codebook gets no gradient from it.

        `indices` is int32 of shape `(...)`. Of equally close vectors, the first is chosen. Distances are
        compared as `|e|**2 / 2 - x @ e`, in float32 for half precision. Distances that differ by less than
        the rounding error count as equal.

        `loss` is `(1 + commitment) * |x - e|**2`, of shape `(...)`, in the dtype of `x`, or float32 for
        float16 and bfloat16. For an upstream gradient `v`, its gradient with respect to `x` is
        `2 * commitment * v * (x - e)`. Its gradient with respect to a codebook vector is the sum of
        `2 * v * (e - x)` over the vectors `x` that were replaced by it.

        Derivatives of these gradients also treat the argument of `sg` as a constant.

    Raises:
        TypeError: if `x` or `codebook` is not floating, or `commitment` is not a number.
        ValueError: if the shapes do not match, or `commitment` is negative.

    References:
        van den Oord, Vinyals and Kavukcuoglu 2017, Neural Discrete Representation Learning, arXiv:1711.00937,
        section 3.2.
    """
    x, codebook = [stack_tensors(_NAME, name, v) for name, v in (("x", x), ("codebook", codebook))]
    _check(x, codebook, commitment)
    # Outside of the op: on PyTorch, `keras.tree` (3.15) rebuilds a named tuple with a reference cycle that
    # holds tensors.
    return VectorQuantized(*_vector_quantize(x, codebook, float(commitment)))


@op_custom_gradient(name="multigrad>vector_quantize")
def _vector_quantize(x: Any, codebook: Any, commitment: float) -> Pair:
    width = codebook.shape[1]
    wide = wide_dtype(dtype_of(x))
    vectors, codes = ops.reshape(ops.cast(x, wide), (-1, width)), ops.cast(codebook, wide)
    # The operator, because `ops.matmul` (Keras 3.15) computes float64 in float32 on PyTorch.
    scores = 0.5 * ops.sum(codes * codes, axis=1)[None] - vectors @ ops.transpose(codes)
    indices = ops.reshape(ops.cast(ops.argmin(scores, axis=1), "int32"), ops.shape(x)[:-1])
    chosen = ops.take(codes, indices, axis=0)
    distance = ops.sum(ops.square(ops.cast(x, wide) - chosen), axis=-1)

    def rule(upstream: Any) -> tuple[Any, ...]:
        quantized_upstream, _, loss_upstream = upstream
        loss_upstream = ops.expand_dims(2.0 * loss_upstream, -1)
        vectors, codes = ops.cast(x, wide), ops.cast(codebook, wide)
        x_gradient = loss_upstream * (vectors - ops.stop_gradient(ops.take(codes, indices, axis=0)))
        chosen_gradient = loss_upstream * (ops.take(codes, indices, axis=0) - ops.stop_gradient(vectors))
        code_gradients = _sums_by_code(ops.reshape(chosen_gradient, (-1, width)), indices, codebook.shape[0])
        return ops.cast(quantized_upstream, wide) + commitment * x_gradient, code_gradients, None

    return (ops.cast(chosen, x.dtype), indices, (1.0 + commitment) * distance), rule


def _sums_by_code(vectors: Any, indices: Any, count: int) -> Any:
    """Return, for each codebook vector, the sum of the vectors with its index."""
    indices = ops.reshape(indices, (-1,))
    if dtype_of(vectors) == "float64":  # `ops.segment_sum` (Keras 3.15) returns float32 on PyTorch
        return ops.transpose(ops.one_hot(indices, count, dtype="float64")) @ vectors
    return ops.segment_sum(vectors, indices, count)


def _check(x: Any, codebook: Any, commitment: Any) -> None:
    """Raise unless the arguments are as `vector_quantize` requires."""
    for name, tensor in (("x", x), ("codebook", codebook)):
        if not keras.backend.is_float_dtype(dtype_of(tensor)):
            raise _error(TypeError, name, "a floating dtype", tensor, "cast it")
    if len(codebook.shape) != 2 or None in tuple(codebook.shape) or not codebook.shape[0]:
        required = "a static shape (k, d), with at least one vector"
        raise _error(ValueError, "codebook", required, codebook, "pass one row per vector")
    width = codebook.shape[1]
    if not len(x.shape) or x.shape[-1] != width:
        required = f"shape (..., {width}), because the codebook vectors have {width} elements"
        raise _error(ValueError, "x", required, x, "move the vectors to the last axis")
    check_commitment(commitment)


def check_commitment(commitment: Any) -> None:
    """Raise unless it is a number that is not negative."""
    required = "a number, 0 or more"
    if not is_number(commitment):
        raise _error(TypeError, "commitment", required, commitment, "multiply the loss by the tensor instead")
    if not commitment >= 0.0:
        raise _error(ValueError, "commitment", required, commitment, "write commitment=0.25, for example")


def _error(kind: type[Exception], argument: str, required: str, got: Any, fix: str) -> Exception:
    return unusable(kind, _NAME, argument, required=required, got=got, fix=fix)

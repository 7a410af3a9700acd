"""`linear_cross_entropy`: a linear layer and its softmax cross entropy, without storing all logits.

This module holds the public function and its checks. `chunked_loss` defines the ops, and `chunked_head` the
computation in chunks. The gradients of a loss per token are computed in the backward pass, which computes the
logits again. The gradients of the loss of all tokens are computed in the forward pass, up to a factor.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

from multigrad import backend
from multigrad.core.errors import message, unusable
from multigrad.ops import chunked_loss
from multigrad.ops.arguments import (
    Tensor,
    as_tensor,
    is_integer,
    shapes_may_match,
    stacked,
    with_python_numbers,
)
from multigrad.ops.dtypes import dtype_of, wide_dtype
from multigrad.ops.stable import safe_divide

_NAME = "linear_cross_entropy"
_CHUNK_SIZE = 1024
_CHUNK_SIZE_IN_ONE_PASS = 2048  # larger, because these chunks have few rows


@with_python_numbers("chunk_size", "ignore_index")
def linear_cross_entropy(
    features: Tensor,
    kernel: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    sample_weight: Tensor | None = None,
    reduction: str | None = None,
    chunk_size: int | None = None,
    ignore_index: int | None = None,
) -> Tensor:
    """Return the cross entropy of `softmax(features @ kernel + bias)`, without storing all logits.

    ```python
    import numpy as np
    from multigrad import grad
    from multigrad.ops import linear_cross_entropy

    features, labels = np.ones((2, 3)), np.array([0, 3])  # two tokens

    def loss(kernel):
        return linear_cross_entropy(features, kernel, labels, reduction="mean")

    print(grad(loss)(np.zeros((3, 4)))[0])  # [-0.25, 0.25, 0.25, -0.25]
    ```

    It can be the loss of a model with tied embeddings. Here, padding has the label -100:

    ```python
    import keras
    import numpy as np
    from multigrad.ops import linear_cross_entropy

    class TiedLoss(keras.losses.Loss):
        def __init__(self, embedding):
            super().__init__(reduction="sum")
            self.embedding = embedding

        def call(self, labels, features):
            kernel = keras.ops.transpose(self.embedding.embeddings)
            return linear_cross_entropy(features, kernel, labels, ignore_index=-100, reduction="mean")

    embedding = keras.layers.Embedding(10, 4)
    model = keras.Sequential([keras.Input((3,)), embedding, keras.layers.Dense(4)])
    model.compile("adam", loss=TiedLoss(embedding))
    history = model.fit(np.array([[1, 2, 0]], "int32"), np.array([[2, 3, -100]], "int32"), verbose=0)
    ```

    It computes `keras.ops.matmul` and `keras.losses.sparse_categorical_crossentropy(from_logits=True)`
    together. Those hold up to four copies of the logits of all tokens and classes. This op holds the logits
    of one chunk. With the logits `z = x W + b` and `p = softmax(z)`, the loss of a token with the label `y`
    is `log(sum(exp(z))) - z[y]`, and its gradient with respect to `z` is `p - one_hot(y)`. The chunks
    accumulate the logarithm of the sum, which is stable for logits of any size.

    Use `reduction` instead of reducing the losses yourself. With a reduction there is one upstream gradient.
    The forward pass then computes the gradients for an upstream gradient of one, with three matrix products,
    as in plain code. For a loss per token, the backward pass computes each chunk of logits again, which is a
    fourth product. The same happens with a reduction if the op cannot know that gradients will be needed, in
    `torch.compile`, for symbolic tensors, and for float16, also under `torch.autocast`, because its gradients
    may underflow without the loss scale.

    On JAX and TensorFlow, each pass is an XLA program, which is compiled when it first runs with new shapes.
    Eager TensorFlow, and a graph with an unknown number of tokens, round the number of tokens up to a
    multiple of 64 or by at most an eighth, so that few programs are compiled. In a TensorFlow graph, the
    backward pass of a loss per token is not an XLA program.

    Arguments:
        features: a floating tensor of shape `(..., d)`, with one row per token.
        kernel: a floating tensor of shape `(d, classes)`, which is cast to the dtype of the features.
        labels: integers of shape `(...)`, from 0 to `classes - 1`. Other labels raise an error in eager code.
            In compiled code their loss is NaN, but JAX without x64 first truncates 64-bit integers to 32
            bits. Whole numbers in float32 or float64, as a `keras.losses.Loss` gets them, are cast. float32
            represents all integers up to `2**24`.
        bias: a tensor of shape `(classes,)`, or None for no bias.
        sample_weight: numbers or bools of shape `(...)`, which multiply the losses.
        reduction: how the losses are reduced, as in Keras. None or `"none"`: one loss per token; `"sum"`:
            their sum; `"mean"` or `"sum_over_batch_size"`: the sum divided by the number of tokens;
            `"mean_with_sample_weight"`: the sum divided by the sum of the weights. The mean of no tokens is
            0.
        chunk_size: the number of classes in a chunk of logits. A chunk has one row per token, and the default
            is 1024. If the forward pass computes gradients, a chunk has rows for 64 to 512 tokens, depending
            on the number of features, and the default is 2048. The op then holds all logits of these tokens.
        ignore_index: a label whose tokens are ignored: their loss is zero, and a mean does not count them.

    Returns:
        The loss of each token, of shape `(...)`, or of all tokens, of shape `()`. It has the dtype of the
        features, or float32 for float16 and bfloat16. In half precision, the products are computed in the
        dtype of the features, and sums in float32. The labels have no gradient.

        The gradient can be differentiated. Its derivative holds the results of all chunks in memory.

    Raises:
        TypeError: if `features`, `kernel` or `bias` is not floating, if `labels` are not whole numbers, if
            `sample_weight` is complex, or if `chunk_size` or `ignore_index` is not an integer.
        ValueError: if the shapes do not match, the number of classes is unknown, `chunk_size` is not
            positive, `reduction` is unknown, or a label is out of range.

    References:
        [Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary Language Models](
        https://arxiv.org/abs/2411.09009); [Hsu et al. 2024, Liger Kernel: Efficient Triton Kernels for LLM
        Training](https://arxiv.org/abs/2410.10989), which computes gradients in the forward pass; [Milakov
        and Gimelshein 2018, Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867).
    """
    arguments = {"features": features, "kernel": kernel, "labels": labels}
    optional = {"bias": bias, "sample_weight": sample_weight}
    arguments |= {name: value for name, value in optional.items() if value is not None}
    tensors = {name: as_tensor(stacked(_NAME, name, value)) for name, value in arguments.items()}
    tensors["labels"] = _as_integers(tensors["labels"])
    kept = None if ignore_index is None else _kept(tensors, ignore_index)
    _check(**tensors, chunk_size=chunk_size, reduction=reduction)
    labels, weights = tensors.pop("labels"), tensors.pop("sample_weight", None)
    dtype = wide_dtype(dtype_of(tensors["features"]))
    weights = None if weights is None else ops.cast(weights, dtype)
    count: Any = None
    if kept is not None:
        kept = ops.cast(kept, dtype)
        count, weights = ops.sum(kept), kept if weights is None else ops.where(kept > 0.0, weights, kept)
    if reduction in (None, "none"):
        losses = chunked_loss.losses(tensors, labels, chunk_size or _CHUNK_SIZE)
        return losses if weights is None else chunked_loss.weighted(losses, weights)
    expected = _expected(tensors, labels)
    primals = tensors | {"weights": _scales(reduction, weights, labels, dtype, count)}
    if not any(expected.values()):
        return chunked_loss.weighted_sum(primals, labels, chunk_size or _CHUNK_SIZE)
    all_gradients = expected["kernel"] or expected.get("bias", False)
    size = chunk_size or _CHUNK_SIZE_IN_ONE_PASS
    return chunked_loss.sum_with_gradients(primals, labels, size, all_gradients)


def _as_integers(labels: Any) -> Any:
    """Return the labels as integers if they are whole numbers of a floating dtype. Others become -1."""
    if dtype_of(labels) not in ("float32", "float64"):
        return labels
    values = None if isinstance(labels, keras.KerasTensor) else backend.active.concrete(labels)
    if values is not None and not (values == np.floor(values)).all():
        raise _error(TypeError, "labels", "whole numbers, one class per token", labels, "round them")
    return ops.cast(ops.where(ops.equal(labels, ops.floor(labels)), labels, -1.0), "int32")


def _kept(tensors: dict[str, Any], ignore_index: Any) -> Any:
    """Return a mask of the tokens that are not ignored, and set the labels of ignored tokens to 0."""
    if not is_integer(ignore_index):
        required, fix = "an integer, or None", "write ignore_index=-100, for example"
        raise _error(TypeError, "ignore_index", required, ignore_index, fix)
    labels = tensors["labels"]
    if dtype_of(labels) in ("uint8", "uint16"):
        labels = ops.cast(labels, "int32")  # because a negative `ignore_index` would wrap around
    kept = ops.not_equal(labels, ignore_index)
    tensors["labels"] = ops.where(kept, labels, ops.zeros_like(labels))
    return kept


def _scales(reduction: str, weights: Any, labels: Any, dtype: str, count: Any) -> Any:
    """Return the factor of each token's loss in the sum. `count` is the number of tokens not ignored."""
    if weights is None:
        weights = ops.ones_like(labels, dtype=dtype)
    elif reduction == "mean_with_sample_weight":
        return safe_divide(weights, ops.sum(weights))
    if reduction == "sum":
        return weights
    return weights / ops.cast(ops.size(labels), dtype) if count is None else safe_divide(weights, count)


def _expected(tensors: dict[str, Any], labels: Any) -> dict[str, bool]:
    """Return which gradients the forward pass should compute."""
    symbolic = any(isinstance(tensor, keras.KerasTensor) for tensor in (labels, *tensors.values()))
    counted = all(size is None or (isinstance(size, int) and size) for size in labels.shape)
    narrow = any(dtype_of(tensor) == "float16" for tensor in tensors.values())
    if symbolic or not counted or narrow:
        return dict.fromkeys(tensors, False)
    return dict(zip(tensors, backend.active.gradients_expected(list(tensors.values())), strict=True))


_REDUCTIONS = (None, "none", "sum", "mean", "sum_over_batch_size", "mean_with_sample_weight")
_CHUNK_SIZE_FIX = "pass the number of classes per chunk, or leave it out"


def _check(
    features: Any,
    kernel: Any,
    labels: Any,
    bias: Any = None,
    sample_weight: Any = None,
    *,
    chunk_size: Any,
    reduction: Any,
) -> None:
    """Raise unless the arguments are as `linear_cross_entropy` requires."""
    arguments = {"features": features, "kernel": kernel, "bias": bias}
    for name, tensor in arguments.items():
        if tensor is not None and not keras.backend.is_float_dtype(dtype_of(tensor)):
            raise _error(TypeError, name, "a floating dtype", tensor, "cast it")
    if not keras.backend.is_int_dtype(dtype_of(labels)):
        raise _error(TypeError, "labels", "integers, one class per token", labels, "cast them to int32")
    if sample_weight is not None and "complex" in dtype_of(sample_weight):
        raise _error(
            TypeError, "sample_weight", "real numbers, or bools", sample_weight, "take its real part"
        )
    if chunk_size is not None and not is_integer(chunk_size):
        raise _error(TypeError, "chunk_size", "a positive integer, or None", chunk_size, _CHUNK_SIZE_FIX)
    if chunk_size is not None and chunk_size < 1:
        raise _error(ValueError, "chunk_size", "a positive integer, or None", chunk_size, _CHUNK_SIZE_FIX)
    if not (reduction is None or isinstance(reduction, str)) or reduction not in _REDUCTIONS:
        required = f"one of {', '.join(map(repr, _REDUCTIONS))}"
        fix = "leave it out for one loss per token"
        raise _error(ValueError, "reduction", required, reduction, fix)
    _check_shapes(features, kernel, labels, bias, sample_weight)
    values = None if isinstance(labels, keras.KerasTensor) else backend.active.concrete(labels)
    if values is not None and values.size and not 0 <= values.min() <= values.max() < kernel.shape[1]:
        got = f"labels from {values.min()} to {values.max()}"
        raise ValueError(
            message(
                _NAME,
                "a label is out of range",
                argument="'labels'",
                required=f"from 0 to {kernel.shape[1] - 1}, because the kernel has {kernel.shape[1]} columns",
                got=got,
                fix="pass ignore_index=-100, or another label, for tokens to ignore",
            )
        )


def _check_shapes(features: Any, kernel: Any, labels: Any, bias: Any, sample_weight: Any) -> None:
    if len(kernel.shape) != 2 or not all(kernel.shape):
        required = "a static shape (d, classes), with at least one row and one class"
        raise _error(ValueError, "kernel", required, kernel, "pass one column per class")
    width, classes = kernel.shape
    if not len(features.shape) or features.shape[-1] != width:
        raise _error(
            ValueError, "features", f"shape (..., {width}), because the kernel has {width} rows", features,
            "pass one row per token, and the kernel as (d, classes)",
        )  # fmt: skip
    tokens = tuple(features.shape)[:-1]
    per_token = {"labels": (labels, "class"), "sample_weight": (sample_weight, "weight")}
    for name, (tensor, noun) in per_token.items():
        if tensor is not None and not shapes_may_match(tuple(tensor.shape), tokens):
            required = f"shape {tokens}, the shape of the features without the last axis"
            raise _error(ValueError, name, required, tensor, f"pass one {noun} per token")
    if bias is not None and tuple(bias.shape) != (classes,):
        raise _error(ValueError, "bias", f"shape ({classes},)", bias, "pass one number per class, or None")


def _error(kind: type[Exception], argument: str, required: str, got: Any, fix: str) -> Exception:
    return unusable(kind, _NAME, argument, required=required, got=got, fix=fix)

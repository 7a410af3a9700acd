"""`linear_cross_entropy`: a linear layer and its softmax cross entropy, without storing all logits.

This module holds the public function, its checks and its ops. `head_blocks` computes in blocks of tokens.
The gradients of a loss per token are computed in the backward pass, which computes the logits again. The
gradients of the loss of all tokens are computed in the forward pass, up to the upstream gradient.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from multigrad import backend
from multigrad.calculus.flat_structure import shapes_may_match
from multigrad.common.errors import message, unusable
from multigrad.op import op_custom_gradient
from multigrad.ops.arguments import (
    Tensor,
    as_tensor,
    is_integer,
    is_number,
    stack_tensors,
    with_python_numbers,
)
from multigrad.ops.dtypes import dtype_of, wide_dtype
from multigrad.ops.stable import safe_divide
from multigrad.ops.vocabulary.head_blocks import Head, LossOptions, over_blocks

_NAME = "linear_cross_entropy"


@with_python_numbers("label_smoothing", "logit_softcap", "z_loss", "ignore_index", "block_size")
def linear_cross_entropy(
    features: Tensor,
    kernel: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    sample_weight: Tensor | None = None,
    class_weight: Tensor | None = None,
    reduction: str | None = None,
    label_smoothing: float = 0.0,
    logit_softcap: float | None = None,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    block_size: int | None = None,
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

    It computes `keras.ops.matmul` and `keras.losses.sparse_categorical_crossentropy(from_logits=True)`
    together. These two hold up to four copies of the logits of all tokens and classes. This op holds the
    logits of one block of tokens. For a model, use `multigrad.layers.LinearCrossEntropy`, which owns the
    kernel.

    With the logits `z = features @ kernel + bias` of a token and the label `y`, the loss is
    `logsumexp(z) - (1 - label_smoothing) * z[y] - label_smoothing * mean(z) + z_loss * logsumexp(z)**2`. With
    `logit_softcap`, `z` is first replaced by `logit_softcap * tanh(z / logit_softcap)`.

    Use `reduction` instead of reducing the losses yourself. With a reduction there is one upstream gradient.
    The forward pass then computes the gradients, with three matrix products, as in plain code. For a loss per
    token, the backward pass computes the logits again, which is a fourth product. The gradients are not
    computed if no gradient is recorded. For symbolic tensors, they are computed in the backward pass.

    Arguments:
        features: a floating tensor of shape `(..., d)`, with one row per token.
        kernel: a floating tensor of shape `(d, classes)`, which is cast to the dtype of the features.
        labels: integers of shape `(...)`, from 0 to `classes - 1`. Other labels raise an error in eager code.
            In compiled code their loss and gradients are NaN, but JAX without x64 first truncates 64-bit
            integers to 32 bits. Whole numbers in float32 or float64, as a `keras.losses.Loss` gets them, are
            cast. float32 represents all integers up to `2**24`.
        bias: a tensor of shape `(classes,)`, or None for no bias.
        sample_weight: numbers or bools of shape `(...)`, which multiply the losses.
        class_weight: numbers of shape `(classes,)`. The loss of a token is multiplied by the weight of its
            label, as by the `class_weight` of `fit`. The weights count as sample weights in a reduction.
        reduction: how the losses are reduced, as in Keras. None or `"none"`: one loss per token; `"sum"`:
            their sum; `"mean"` or `"sum_over_batch_size"`: the sum divided by the number of tokens;
            `"mean_with_sample_weight"`: the sum divided by the sum of the weights. The mean of no tokens is
            0.
        label_smoothing: the share of the target distribution that is spread over all classes.
        logit_softcap: the largest absolute value of the logits, as in Gemma 2, or None.
        z_loss: the weight of the square of the log-sum-exp of the logits, as in PaLM.
        ignore_index: a label whose tokens are ignored: their loss is zero, and a mean does not count them.
        block_size: the number of tokens in a block. By default, a block's logits take about half of the
            memory of the kernel's gradient, for 256 to 1024 tokens, or 8 MB.

    Returns:
        The loss of each token, of shape `(...)`, or of all tokens, of shape `()`. It has the dtype of the
        features, or float32 for float16 and bfloat16. In half precision, the products are computed in the
        dtype of the features, and sums in float32. The labels have no gradient.

        The gradient can be differentiated. Its derivative is computed in blocks, too.

    Raises:
        TypeError: if `features`, `kernel` or `bias` is not floating, if `labels` are not whole numbers, if a
            weight is complex, or if an option has the wrong type.
        ValueError: if the shapes do not match, the number of classes is unknown, an option is out of range,
            `reduction` is unknown, or a label is out of range.

    References:
        [Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary Language Models](
        https://arxiv.org/abs/2411.09009); [Hsu et al. 2024, Liger Kernel: Efficient Triton Kernels for LLM
        Training](https://arxiv.org/abs/2410.10989), which computes gradients in the forward pass; [Gemma Team
        2024, Gemma 2](https://arxiv.org/abs/2408.00118), for the soft cap; [Chowdhery et al. 2022,
        PaLM](https://arxiv.org/abs/2204.02311), for the z-loss.
    """
    if isinstance(labels, np.ndarray) and labels.dtype in ("int64", "uint64"):
        labels = np.clip(labels, _INVALID, 2**31 - 1)  # JAX could truncate an invalid label to a valid one
    given = {"features": features, "kernel": kernel, "labels": labels, "bias": bias}
    given |= {"sample_weight": sample_weight, "class_weight": class_weight}
    tensors = {
        # A Variable is read here, where TensorFlow records the read.
        name: as_tensor(x.value if isinstance(x, keras.Variable) else stack_tensors(_NAME, name, x))
        for name, x in given.items()
        if x is not None or name in ("features", "kernel", "labels")
    }
    numbers: Any = {"label_smoothing": label_smoothing, "logit_softcap": logit_softcap, "z_loss": z_loss}
    check_options(_NAME, reduction, **numbers, ignore_index=ignore_index, block_size=block_size)
    tensors["labels"] = _in_32_bits(tensors["labels"])
    kept = None
    if ignore_index is not None:
        kept = ops.not_equal(tensors["labels"], ignore_index)
        tensors["labels"] = ops.where(kept, tensors["labels"], 0)
    _check(**tensors)
    features, kernel, bias = [tensors.get(name) for name in ("features", "kernel", "bias")]
    labels = ops.expand_dims(tensors["labels"], -1)
    weights, count = _weights(tensors, kept, wide_dtype(dtype_of(features)))
    width, classes = kernel.shape
    default_size = max(256, min(1024, width // 2), 2**21 // classes)
    options = tuple(LossOptions(block_size or default_size, **numbers))
    if reduction in (None, "none"):
        losses = ops.squeeze(_losses(kernel, bias, features, labels, options), -1)
        return losses if weights is None else _weight(losses, weights)
    weights = ops.expand_dims(_scales(reduction, weights, tensors["labels"], features, count), -1)
    differentiable = [x for x in (kernel, bias, features) if x is not None]
    symbolic = any([isinstance(x, keras.KerasTensor) for x in (labels, weights, *differentiable)])
    if symbolic or 0 in tuple(labels.shape) or not backend.active.may_record(differentiable):
        return ops.sum(_weight(_losses(kernel, bias, features, labels, options), weights))
    with_sums = backend.active.may_record(differentiable[:-1])
    known = _in_one_pass(kernel, bias, features, weights, labels, options, with_sums)
    return _total(kernel, bias, features, weights, labels, options, known)


# In the ops, `features` have shape `(..., d)`. Labels, losses and their weights have shape `(..., 1)`.
#
# The kernel is before the features, so that its gradient is computed first. That computes the gradient of the
# features, too, which nearly every model needs. The kernel may be frozen, so its own gradient may be unused.
#
# Each function computes with constants, because a tape of TensorFlow would keep the operations of all blocks.
# The rules close over inputs only, so that they can be differentiated. If `known` has the results, the op
# only defines their derivatives.


@op_custom_gradient(name="multigrad>linear_cross_entropy")
def _losses(kernel: Any, bias: Any, features: Any, labels: Any, options: Any, known: Any = None) -> Any:
    """Return the loss of each token."""
    losses = known
    if known is None:
        fixed_kernel, fixed_bias, rows = _constants(kernel, bias, features)
        head = Head(options, fixed_kernel, fixed_bias, dtype_of(features))
        like = ops.cast(labels, head.wide)
        _, (losses,) = over_blocks(head.losses, [rows, labels], options[0], [], [like])

    def rule(upstream: Any) -> dict[str, Any]:
        if backend.active.is_compiling():
            # TensorFlow would run the loops of both passes concurrently, which takes the memory of both. This
            # upstream gradient depends on the losses, but keeps its value: no number is NaN and Inf.
            total = ops.sum(losses)
            never = ops.logical_and(ops.isnan(total), ops.isinf(total))
            upstream = ops.where(never, ops.zeros_like(upstream), upstream)

        def compute(name: str) -> Any:
            return _gradients(kernel, bias, features, upstream, labels, options, name != "features")

        return {**_entries(compute, kernel=kernel, bias=bias, features=features), "known": None}

    return losses, rule


@op_custom_gradient(name="multigrad>linear_cross_entropy_gradients")
def _gradients(
    kernel: Any, bias: Any, features: Any, scale: Any, labels: Any,
    options: Any, with_sums: bool, known: Any = None,
) -> Any:  # fmt: skip
    """Return the gradients of the sum of the losses, multiplied by `scale`."""
    computed = known
    if known is None:
        computed = _compute_gradients(kernel, bias, features, scale, labels, options, with_sums, False)

    def rule(directions: Any) -> dict[str, Any]:
        def compute(name: str) -> Any:
            head = Head(options, kernel, bias, dtype_of(features))
            along = [directions.get(name) for name in ("kernel", "bias")]
            along_kernel, along_bias = [
                None if d is None else ops.cast(d, dtype)
                for d, dtype in zip(along, (head.dtype, head.wide), strict=True)
            ]
            step = functools.partial(head.hessian_product, along_kernel=along_kernel, along_bias=along_bias)
            direction = ops.cast(directions["features"], head.dtype)
            rows = [features, labels, ops.cast(scale, head.wide), direction]
            sums = [tensor for tensor in (kernel, bias) if tensor is not None]
            totals, results = over_blocks(step, rows, options[0], sums, [scale, features])
            return dict(zip(("kernel", "bias"), totals, strict=False)) | dict(
                zip(("scale", "features"), results, strict=True)
            )

        entries = _entries(compute, kernel=kernel, bias=bias, features=features, scale=scale)
        return {**entries, "known": None}

    return computed, rule


@op_custom_gradient(name="multigrad>linear_cross_entropy_sum")
def _total(
    kernel: Any, bias: Any, features: Any, weights: Any, labels: Any, options: Any, known: dict[str, Any]
) -> Any:
    """Return the weighted sum of the losses, which are known with their gradients."""
    primals = {"kernel": kernel, "bias": bias, "features": features}
    value = ops.sum(_weight(known["losses"], weights))

    def rule(upstream: Any) -> dict[str, Any]:
        factor = upstream * known["largest"]

        def compute(name: str) -> Any:
            if name == "weights":
                losses = _losses(kernel, bias, features, labels, options, known["losses"])
                return {"weights": upstream * losses}
            scaled = {n: _times(factor, known[n], primals[n]) for n in primals if n in known}
            is_known, with_sums = name in known, name != "features"
            return _gradients(
                kernel, bias, features, upstream * weights, labels, options,
                "kernel" in known if is_known else with_sums, scaled if is_known else None,
            )  # fmt: skip

        return {**_entries(compute, **primals, weights=weights), "known": None}

    return value, rule


def _in_one_pass(
    kernel: Any, bias: Any, features: Any, weights: Any, labels: Any, options: Any, with_sums: bool
) -> dict[str, Any]:
    """Return the losses, and the gradients of their weighted sum divided by the largest weight.

    Without this division, the gradients of a mean could underflow float16.
    """
    (weights,) = _constants(weights)
    largest = ops.amax(ops.abs(weights))
    largest = ops.where(largest > 0.0, largest, ops.ones_like(largest))
    known = _compute_gradients(kernel, bias, features, weights / largest, labels, options, with_sums, True)
    return known | {"largest": largest}


def _compute_gradients(
    kernel: Any, bias: Any, features: Any, scale: Any, labels: Any,
    options: Any, with_sums: bool, with_loss: bool,
) -> dict[str, Any]:  # fmt: skip
    """Compute the gradients as constants. With the losses, sums in float16 are returned in float32."""
    kernel, bias, features, scale = _constants(kernel, bias, features, scale)
    head = Head(options, kernel, bias, dtype_of(features))
    scale = ops.cast(scale, head.wide)
    step = functools.partial(head.gradients, with_sums=with_sums, with_loss=with_loss)
    sums = [x for x in (kernel, bias) if x is not None] if with_sums else []
    if with_loss:
        sums = [ops.cast(x, "float32") if dtype_of(x) == "float16" else x for x in sums]
    results = [scale, features] if with_loss else [features]
    totals, results = over_blocks(step, [features, labels, scale], options[0], sums, results)
    computed = dict(zip(("kernel", "bias"), totals, strict=False)) | {"features": results[-1]}
    return computed | ({"losses": results[0]} if with_loss else {})


def _constants(*tensors: Any) -> list[Any]:
    return [None if tensor is None else ops.stop_gradient(tensor) for tensor in tensors]


def _entries(compute: Callable[[str], Any], **primals: Any) -> dict[str, Any]:
    """Return lazy entries of a rule. `compute(name)` may return other gradients along with this one."""
    computed: dict[str, Any] = {}

    def entry(name: str) -> Any:
        if name not in computed:
            computed.update(compute(name))
        return computed[name]

    return {n: None if x is None else functools.partial(entry, n) for n, x in primals.items()}


def _times(factor: Any, gradient: Any, like: Any) -> Any:
    wide = wide_dtype(dtype_of(gradient))
    return ops.cast(ops.cast(factor, wide) * ops.cast(gradient, wide), like.dtype)


def _weight(losses: Any, weights: Any) -> Any:
    """Return the losses times their weights. A weight of zero gives zero, also for an infinite loss."""
    ignored = ops.logical_and(ops.equal(weights, 0.0), ops.isinf(losses))
    return ops.where(ignored, ops.zeros_like(losses), losses) * weights


def _weights(tensors: dict[str, Any], kept: Any, dtype: str) -> tuple[Any, Any]:
    """Return the weights of tokens, None if all are 1, and the number of tokens that are not ignored."""
    weights, count, by_class = tensors.get("sample_weight"), None, tensors.get("class_weight")
    weights = None if weights is None else ops.cast(weights, dtype)
    if by_class is not None:
        index = ops.clip(tensors["labels"], 0, tensors["kernel"].shape[1] - 1)
        factors = ops.take(ops.cast(by_class, dtype), index, axis=0)
        weights = factors if weights is None else weights * factors
    if kept is not None:
        kept = ops.cast(kept, dtype)
        count, weights = ops.sum(kept), kept if weights is None else ops.where(kept > 0.0, weights, kept)
    return weights, count


def _scales(reduction: str, weights: Any, labels: Any, features: Any, count: Any) -> Any:
    """Return the factor of each token's loss in the sum. `count` tokens are not ignored."""
    dtype = wide_dtype(dtype_of(features))
    if weights is None:
        weights = ops.ones_like(labels, dtype=dtype)
    elif reduction == "mean_with_sample_weight":
        return safe_divide(weights, ops.sum(weights))
    if reduction == "sum":
        return weights
    return weights / ops.cast(ops.size(labels), dtype) if count is None else safe_divide(weights, count)


_INVALID = -(2**31)
"""An int32 label that is not a class."""


def _in_32_bits(labels: Any) -> Any:
    """Return labels in int32. A label that int32 cannot represent stays out of range."""
    dtype = dtype_of(labels)
    if dtype in ("float32", "float64"):  # as a `keras.losses.Loss` gets them
        values = None if isinstance(labels, keras.KerasTensor) else backend.active.concrete(labels)
        if values is not None and not (values == np.floor(values)).all():
            raise _error(TypeError, "labels", "whole numbers, one class per token", labels, "round them")
        is_whole = ops.logical_and(ops.equal(labels, ops.floor(labels)), ops.abs(labels) < 2.0**31)
        labels = ops.where(is_whole, labels, float(_INVALID))
    elif not keras.backend.is_int_dtype(dtype):
        raise _error(TypeError, "labels", "integers, one class per token", labels, "cast them to int32")
    elif dtype in ("int64", "uint64", "uint32"):
        labels = ops.clip(ops.cast(labels, "int64"), _INVALID, 2**31 - 1)
    return ops.cast(labels, "int32")


_REDUCTIONS = (None, "none", "sum", "mean", "sum_over_batch_size", "mean_with_sample_weight")
_OPTIONS: dict[str, tuple[str, Callable[[Any], bool], Callable[[Any], bool], str]] = {
    "label_smoothing": ("a number from 0 to 1", is_number, lambda x: 0.0 <= x <= 1.0, "write 0.1"),
    "logit_softcap": ("a positive number, or None", is_number, lambda x: 0.0 < x < math.inf, "write 30.0"),
    "z_loss": ("a number, 0 or more", is_number, lambda x: 0.0 <= x < math.inf, "write 1e-4"),
    "ignore_index": ("an integer, or None", is_integer, lambda x: True, "write ignore_index=-100"),
    "block_size": ("a positive integer, or None", is_integer, lambda x: x > 0, "write 256"),
}
"""For each option: the required value, two conditions for its type and its value, and a fix."""


def check_options(name: str, reduction: Any, **options: Any) -> None:
    """Raise unless the options are as `linear_cross_entropy` requires."""
    if not isinstance(reduction, (str, type(None))) or reduction not in _REDUCTIONS:
        required, fix = f"one of {', '.join(map(repr, _REDUCTIONS))}", "leave it out for one loss per token"
        raise unusable(ValueError, name, "reduction", required=required, got=reduction, fix=fix)
    for argument, value in options.items():
        required, has_type, is_valid, example = _OPTIONS[argument]
        if value is None and "None" in required:
            continue
        if not (has_type(value) and is_valid(value)):
            kind = ValueError if has_type(value) else TypeError
            fix = f"{example}, for example"
            raise unusable(kind, name, argument, required=required, got=value, fix=fix)


def _check(
    features: Any,
    kernel: Any,
    labels: Any,
    bias: Any = None,
    sample_weight: Any = None,
    class_weight: Any = None,
) -> None:
    """Raise unless the tensors are as `linear_cross_entropy` requires."""
    for name, tensor in {"features": features, "kernel": kernel, "bias": bias}.items():
        if tensor is not None and not keras.backend.is_float_dtype(dtype_of(tensor)):
            raise _error(TypeError, name, "a floating dtype", tensor, "cast it")
    for name, tensor in {"sample_weight": sample_weight, "class_weight": class_weight}.items():
        if tensor is not None and "complex" in dtype_of(tensor):
            raise _error(TypeError, name, "real numbers, or bools", tensor, "take its real part")
    _check_shapes(features, kernel, labels, bias, sample_weight, class_weight)
    values = None if isinstance(labels, keras.KerasTensor) else backend.active.concrete(labels)
    if values is not None and values.size and not 0 <= values.min() <= values.max() < kernel.shape[1]:
        got = f"labels from {values.min()} to {values.max()}"
        problem = "a label is out of range"
        required = f"from 0 to {kernel.shape[1] - 1}, because the kernel has {kernel.shape[1]} columns"
        fix = "pass ignore_index=-100, or another label, for tokens to ignore"
        raise ValueError(message(_NAME, problem, argument="'labels'", required=required, got=got, fix=fix))


def _check_shapes(
    features: Any, kernel: Any, labels: Any, bias: Any, sample_weight: Any, class_weight: Any
) -> None:
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
    for name, tensor in {"bias": bias, "class_weight": class_weight}.items():
        if tensor is not None and tuple(tensor.shape) != (classes,):
            raise _error(
                ValueError, name, f"shape ({classes},)", tensor, "pass one number per class, or None"
            )


def _error(kind: type[Exception], argument: str, required: str, got: Any, fix: str) -> Exception:
    return unusable(kind, _NAME, argument, required=required, got=got, fix=fix)

"""A linear layer and the cross entropy of its softmax, over so many classes that the logits are too large.

What is computed, in chunks, is in `chunked_head`; here is what an op of it asks, and when. A loss for each
token has its gradients computed in the backward pass, by the logits that are computed once more. Of a loss
of all tokens they are known in the forward pass, up to a factor.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from multigrad import backend
from multigrad.calculus.derivatives import vjp
from multigrad.core.errors import message, unusable
from multigrad.core.op import op_custom_gradient
from multigrad.ops import chunked_head
from multigrad.ops.arguments import Tensor, as_tensor, is_integer, may_be_alike, stacked, with_plain
from multigrad.ops.chunked_head import Plan
from multigrad.ops.dtypes import dtype_of, exact
from multigrad.ops.stable import safe_divide

_NAME = "linear_cross_entropy"
_CHUNK_SIZE = 1024
_CHUNK_SIZE_OF_FEW = 2048  # of chunks that have rows for few tokens


@with_plain("chunk_size", "ignore_index")
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
    """The cross entropy of `softmax(features @ kernel + bias)` for each label, without the logits.

    ```python
    import numpy as np
    from multigrad import grad
    from multigrad.ops import linear_cross_entropy

    features, labels = np.ones((2, 3)), np.array([0, 3])  # two tokens

    def loss(kernel):
        return linear_cross_entropy(features, kernel, labels, reduction="mean")

    print(grad(loss)(np.zeros((3, 4)))[0])  # [-0.25, 0.25, 0.25, -0.25]
    ```

    As the loss of a model whose head is its embedding, where padding has the label -100:

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
    history = model.fit(np.array([[1, 2, 0]]), np.array([[2, 3, -100]]), verbose=0)
    ```

    It is what `keras.ops.matmul` and `keras.losses.sparse_categorical_crossentropy(from_logits=True)` compute
    together. Those hold the logits of all tokens and classes up to four times over; this holds those of one
    chunk. With the logits `z = x W + b` and the softmax `p`, the loss of a token with the label `y` is
    `log(sum(exp(z))) - z[y]`, and its gradient by `z` is `p` less one at `y`. The sum is carried from chunk
    to chunk by its logarithm, which is stable for logits of any size.

    Prefer a `reduction` to one of your own. There is one upstream gradient then, and the gradients for an
    upstream gradient of one are computed in the forward pass, with three products of matrices, as in plain
    code. For a loss of each token, each chunk of logits is computed once more in the backward pass, a fourth
    product, instead of reading and writing the logits. So it is with a `reduction`, too, where nothing says
    that a gradient will be asked for, in `torch.compile`, for symbolic tensors, and where something is of
    float16, under `torch.autocast` too, in which gradients may be too small without the scale of the loss.

    On JAX and TensorFlow either pass is a program of XLA's, which is compiled when it is first run on
    arguments of such shapes. In eager code, and in a graph for any number of tokens, TensorFlow rounds their
    number up for it, to a multiple of 64 or by an eighth at most, so that few programs are compiled. In a
    graph of TensorFlow's, the backward pass of a loss for each token is no program.

    Arguments:
        features: a floating tensor of shape `(..., d)`, a row for each token.
        kernel: a floating tensor of shape `(d, classes)`, which is cast to the dtype of the features.
        labels: integers of shape `(...)`, from 0 to `classes - 1`. A negative one, or one that is larger,
            is an error where there are values; in compiled code its loss is NaN, but that JAX without
            x64 cuts what is of 64 bits to 32 beforehand. Whole numbers in float32 or float64, which a
            `keras.losses.Loss` is given, are cast. float32 has all integers up to `2**24`.
        bias: a tensor of shape `(classes,)`, or None for no bias.
        sample_weight: numbers or bools of shape `(...)`, by which the losses are multiplied.
        reduction: what becomes of the losses, by Keras's names. None or `"none"`: there is one for each
            token; `"sum"`: their sum; `"mean"` or `"sum_over_batch_size"`: that, divided by the number of
            tokens; `"mean_with_sample_weight"`: divided by the sum of the weights. The mean of nothing is 0.
        chunk_size: how many classes are computed at a time. The chunk of logits has so many columns, and a
            row for each token; 1024 if it is not given. Where gradients are computed in the forward pass, it
            has rows for 64 to 512 tokens, depending on the number of features, of which there are all logits
            beside it; 2048 then.

    Returns:
        The loss of each token, of shape `(...)`, or of all of them, of shape `()`. It is of the features'
        dtype, but float32 for float16 and bfloat16, in which the products are computed and nothing is summed
        up. The labels have no gradient.

        A derivative of the gradient is right, and holds what was computed of all chunks.

    Raises:
        TypeError: when `features`, `kernel` or `bias` is not floating, `labels` are not whole numbers,
            `sample_weight` is complex, or `chunk_size` or `ignore_index` is not an integer.
        ValueError: when the shapes do not fit, the number of classes is not known, `chunk_size` is not
            positive, `reduction` is unknown, or a label is out of range.

    References:
        [Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary Language Models](
        https://arxiv.org/abs/2411.09009); [Hsu et al. 2024, Liger Kernel: Efficient Triton Kernels for LLM
        Training](https://arxiv.org/abs/2410.10989), whose gradients are those of the forward pass; [Milakov
        and Gimelshein 2018, Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867).
    """
    given = {"features": features, "kernel": kernel, "labels": labels}
    optional = {"bias": bias, "sample_weight": sample_weight}
    given |= {name: value for name, value in optional.items() if value is not None}
    tensors = {name: as_tensor(stacked(_NAME, name, value)) for name, value in given.items()}
    tensors["labels"] = _as_integers(tensors["labels"])
    kept = None if ignore_index is None else _kept(tensors, ignore_index)
    _check(**tensors, chunk_size=chunk_size, reduction=reduction)
    labels, weights = tensors.pop("labels"), tensors.pop("sample_weight", None)
    dtype = exact(dtype_of(tensors["features"]))
    weights = None if weights is None else ops.cast(weights, dtype)
    count: Any = None
    if kept is not None:
        kept = ops.cast(kept, dtype)
        count, weights = ops.sum(kept), kept if weights is None else ops.where(kept > 0.0, weights, kept)
    if reduction in (None, "none"):
        losses = _losses(tensors, labels, chunk_size or _CHUNK_SIZE)
        return losses if weights is None else _weighted(losses, weights)
    expected = _expected(tensors, labels)
    primals = tensors | {"weights": _shares(reduction, weights, labels, dtype, count)}
    if not any(expected.values()):
        return _weighted_sum(primals, labels, chunk_size or _CHUNK_SIZE)
    whole = expected["kernel"] or expected.get("bias", False)
    return _sum_with_gradients(primals, labels, chunk_size or _CHUNK_SIZE_OF_FEW, whole)


def _as_integers(labels: Any) -> Any:
    """Return the labels; whole numbers of a floating dtype as integers, and -1, no class, for others."""
    if dtype_of(labels) not in ("float32", "float64"):
        return labels
    values = None if isinstance(labels, keras.KerasTensor) else backend.active.concrete(labels)
    if values is not None and not (values == np.floor(values)).all():
        raise _error(TypeError, "labels", "whole numbers, one class for each token", labels, "round them")
    return ops.cast(ops.where(ops.equal(labels, ops.floor(labels)), labels, -1.0), "int32")


def _kept(tensors: dict[str, Any], ignore_index: Any) -> Any:
    """Return which tokens have another label than `ignore_index`, and give those that have it the label 0."""
    if not is_integer(ignore_index):
        required, fix = "an integer, or None", "write ignore_index=-100, for example"
        raise _error(TypeError, "ignore_index", required, ignore_index, fix)
    labels = tensors["labels"]
    if dtype_of(labels) in ("uint8", "uint16"):
        labels = ops.cast(labels, "int32")  # in which a negative number is not a large one
    kept = ops.not_equal(labels, ignore_index)
    tensors["labels"] = ops.where(kept, labels, ops.zeros_like(labels))
    return kept


def _shares(reduction: str, weights: Any, labels: Any, dtype: str, count: Any) -> Any:
    """What the loss of each token is multiplied by in the sum; `count` tokens of a mean, if not all."""
    if weights is None:
        weights = ops.ones_like(labels, dtype=dtype)
    elif reduction == "mean_with_sample_weight":
        return safe_divide(weights, ops.sum(weights))
    if reduction == "sum":
        return weights
    return weights / ops.cast(ops.size(labels), dtype) if count is None else safe_divide(weights, count)


def _expected(tensors: dict[str, Any], labels: Any) -> dict[str, bool]:
    """Which gradients are worth being computed in the forward pass."""
    symbolic = any(isinstance(tensor, keras.KerasTensor) for tensor in (labels, *tensors.values()))
    counted = all(size is None or (isinstance(size, int) and size) for size in labels.shape)
    narrow = any(dtype_of(tensor) == "float16" for tensor in tensors.values())
    if symbolic or not counted or narrow:
        return dict.fromkeys(tensors, False)
    return dict(zip(tensors, backend.active.gradients_expected(list(tensors.values())), strict=True))


# The kernel stands before the features, so that its gradient is asked for first: what it computes has the
# features' in it, which nearly everybody needs, while a kernel may be frozen.
@op_custom_gradient(name="multigrad>linear_cross_entropy")
def _loss_and_normalizer(kernel: Any, bias: Any, features: Any, labels: Any, chunk_size: int) -> Any:
    """The loss of each token, and the logarithm of its summed exponentials.

    The latter is an output because the rule uses it: so the rule is what differentiates it in its turn.
    """
    others, rows, plan = _flat(kernel, bias, features, labels, chunk_size)
    with backend.active.unrecorded():  # as TensorFlow's tape would keep all chunks
        found, _ = backend.active.program(chunked_head.normalizer_and_target, plan)(rows, [], others)
    normalizer, target = [ops.reshape(x, ops.shape(labels)) for x in found]

    def rule(upstream: Any) -> tuple[Any, ...]:
        def compute(name: str) -> dict[str, Any]:
            # Once more, to be recorded where this is differentiated.
            others, rows, _ = _flat(kernel, bias, features, labels, chunk_size)
            rows.append(ops.reshape(normalizer, (-1, 1)))
            columns = [ops.reshape(u, (-1, 1)) for u in upstream]
            run = backend.active.program(chunked_head.gradients, plan, name != "features")
            (of_features,), of_others = run(rows, columns, others)
            found = {"features": ops.reshape(of_features, ops.shape(features))}
            return found | dict(zip(("kernel", "bias"), of_others, strict=False))

        of = _on_demand(compute)
        return of("kernel"), None if bias is None else of("bias"), of("features"), None, None

    return (normalizer - target, normalizer), rule


def _on_demand(compute: Callable[[str], dict[str, Any]]) -> Callable[[str], Callable[[], Any]]:
    """Entries of a rule by name: `compute(name)` gives that gradient, and others that came with it."""
    computed: dict[str, Any] = {}

    def of(name: str) -> Callable[[], Any]:
        def gradient() -> Any:
            if name not in computed:
                computed.update(compute(name))
            return computed[name]

        return gradient

    return of


def _flat(kernel: Any, bias: Any, features: Any, labels: Any, chunk_size: int) -> tuple[Any, Any, Plan]:
    """What has a row for each token, what has not, and how large it is."""
    plan = Plan(kernel.shape[0], kernel.shape[1], min(chunk_size, kernel.shape[1]))
    labels = ops.reshape(labels, (-1, 1))
    if dtype_of(labels) in ("int64", "uint64"):  # one that is no class would become one in 32 bits
        labels = ops.clip(ops.cast(labels, "int64"), -1, plan.classes)
    rows = [ops.cast(labels, "int32"), ops.reshape(features, (-1, plan.width))]
    return [kernel] if bias is None else [kernel, bias], rows, plan


def _losses(primals: dict[str, Any], labels: Any, chunk_size: int) -> Any:
    kernel, bias, features = [primals.get(name) for name in ("kernel", "bias", "features")]
    return _loss_and_normalizer(kernel, bias, features, labels, chunk_size)[0]


def _weighted_sum(primals: dict[str, Any], labels: Any, chunk_size: int) -> Any:
    """The sum of the losses, each times its weight, of which every derivative is right."""
    return ops.sum(_weighted(_losses(primals, labels, chunk_size), primals["weights"]))


def _weighted(losses: Any, weights: Any) -> Any:
    """The losses times their weights: zero for a weight of zero, of what is infinite, too."""
    ignored = ops.logical_and(ops.equal(weights, 0.0), ops.equal(losses, float("inf")))
    return ops.where(ignored, ops.zeros_like(losses), losses) * weights


@op_custom_gradient(name="multigrad>linear_cross_entropy_sum")
def _sum_with_gradients(primals: dict[str, Any], labels: Any, chunk_size: int, whole: bool) -> Any:
    """The same, with its gradients in the same go: all of them, or without `whole` by features and weights.

    One that is not known is computed when the rule is asked for it.
    """
    fixed = {name: ops.stop_gradient(primal) for name, primal in primals.items()}
    weights = fixed.pop("weights")
    others, rows, plan = _flat(fixed["kernel"], fixed.get("bias"), fixed["features"], labels, chunk_size)
    run = backend.active.program(chunked_head.losses_and_gradients, plan, whole)
    with backend.active.unrecorded():
        (losses, of_features), of_others = run(rows, [ops.reshape(weights, (-1, 1))], others)
        losses = ops.reshape(losses, ops.shape(weights))
        value = ops.sum(_weighted(losses, weights))
    known = {"features": ops.reshape(of_features, ops.shape(fixed["features"])), "weights": losses}
    known |= dict(zip(("kernel", "bias"), of_others, strict=False))

    def rule(upstream: Any) -> Any:
        def compute(name: str) -> Any:
            if backend.active.needs_plain_rule():
                return _written_gradients(upstream, primals, labels, chunk_size)
            if name in known:
                return _scaled(upstream, primals, labels, chunk_size, known)
            _, pull = vjp(lambda primals: _weighted_sum(primals, labels, chunk_size), primals)
            return pull(upstream)[0]

        of = _on_demand(compute)
        return {"primals": {name: of(name) for name in primals}}

    return value, rule


# The gradients `g` of the weighted sum are known for an upstream gradient of one, as constants. The two
# functions that are linear in something else, `u * g` and `sum(v * g)`, are one another's transposes, so that
# they are what there is to do with them in derivatives of any order; by the primals these are of `g` itself.


@op_custom_gradient(name="multigrad>linear_cross_entropy_gradients")
def _scaled(
    upstream: Any, primals: dict[str, Any], labels: Any, chunk_size: int, known: dict[str, Any]
) -> Any:
    """`u * g` for a number `u`."""

    def rule(directions: dict[str, Any]) -> Any:
        return {
            "upstream": lambda: _along(directions, primals, labels, chunk_size, known),
            "primals": lambda: _of_primals(upstream, directions, primals, labels, chunk_size),
            "known": None,
        }

    def times(gradient: Any) -> Any:
        dtype = dtype_of(gradient)
        return ops.cast(ops.cast(upstream, exact(dtype)) * ops.cast(gradient, exact(dtype)), dtype)

    return {name: times(gradient) for name, gradient in known.items()}, rule


@op_custom_gradient(name="multigrad>linear_cross_entropy_slope")
def _along(
    directions: dict[str, Any], primals: dict[str, Any], labels: Any, chunk_size: int, known: dict[str, Any]
) -> Any:
    """`sum(v * g)` for directions `v`, in the dtype of the loss."""

    def rule(upstream: Any) -> Any:
        return {
            "directions": lambda: _scaled(upstream, primals, labels, chunk_size, known),
            "primals": lambda: _of_primals(upstream, directions, primals, labels, chunk_size),
            "known": None,
        }

    dtype = dtype_of(primals["weights"])
    return sum(ops.sum(ops.cast(directions[n], dtype) * ops.cast(g, dtype)) for n, g in known.items()), rule


def _of_primals(
    upstream: Any, directions: dict[str, Any], primals: dict[str, Any], labels: Any, chunk_size: int
) -> Any:
    """The gradient of `u * sum(v * g)` by the primals."""

    def gradients(primals: dict[str, Any]) -> Any:
        found = _written_gradients(upstream, primals, labels, chunk_size)
        return {name: found[name] for name in directions}

    _, pull = vjp(gradients, primals)
    return pull(directions)[0]


def _written_gradients(
    upstream: Any, primals: dict[str, Any], labels: Any, chunk_size: int
) -> dict[str, Any]:
    """The gradients of the weighted sum by operations of the framework's alone, so with all derivatives."""
    features, weights = primals["features"], primals["weights"]
    others, rows, plan = _flat(primals["kernel"], primals.get("bias"), features, labels, chunk_size)
    with backend.active.unrecorded():
        fixed = [list(map(ops.stop_gradient, tensors)) for tensors in (rows, others)]
        (normalizer, _), _ = chunked_head.normalizer_and_target(False, plan, fixed[0], [], fixed[1])
    normalizer, target = chunked_head.with_derivatives(plan, [*rows, normalizer], others)
    scale = ops.reshape(upstream * weights, (-1, 1))
    columns = [scale, ops.zeros_like(scale)]
    (of_features,), of_others = chunked_head.gradients(
        False, plan, True, [*rows, normalizer], columns, others
    )
    found = {
        "features": ops.cast(ops.reshape(of_features, ops.shape(features)), features.dtype),
        "weights": upstream * ops.reshape(normalizer - target, ops.shape(weights)),
    }
    return found | dict(zip(("kernel", "bias"), of_others, strict=False))


_REDUCTIONS = (None, "none", "sum", "mean", "sum_over_batch_size", "mean_with_sample_weight")
_MEND_SIZE = "pass how many classes are computed at a time, or leave it out"


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
    """See the function of the module's name for what is required."""
    given = {"features": features, "kernel": kernel, "bias": bias}
    for name, tensor in given.items():
        if tensor is not None and not keras.backend.is_float_dtype(dtype_of(tensor)):
            raise _error(TypeError, name, "a floating dtype", tensor, "cast it")
    if not keras.backend.is_int_dtype(dtype_of(labels)):
        raise _error(TypeError, "labels", "integers, one class for each token", labels, "cast them to int32")
    if sample_weight is not None and "complex" in dtype_of(sample_weight):
        raise _error(
            TypeError, "sample_weight", "real numbers, or bools", sample_weight, "take its real part"
        )
    if chunk_size is not None and not is_integer(chunk_size):
        raise _error(TypeError, "chunk_size", "a positive integer, or None", chunk_size, _MEND_SIZE)
    if chunk_size is not None and chunk_size < 1:
        raise _error(ValueError, "chunk_size", "a positive integer, or None", chunk_size, _MEND_SIZE)
    if not (reduction is None or isinstance(reduction, str)) or reduction not in _REDUCTIONS:
        required = f"one of {', '.join(map(repr, _REDUCTIONS))}"
        fix = "leave it out for the loss of each token"
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
                required=f"from 0 to {kernel.shape[1] - 1}, as the kernel has {kernel.shape[1]} columns",
                got=got,
                fix="pass ignore_index=-100, or another label, for tokens that are to be ignored",
            )
        )


def _check_shapes(features: Any, kernel: Any, labels: Any, bias: Any, sample_weight: Any) -> None:
    if len(kernel.shape) != 2 or not all(kernel.shape):
        required = "two known dimensions, (d, classes), and at least one row and one class"
        raise _error(ValueError, "kernel", required, kernel, "pass one column for each class")
    width, classes = kernel.shape
    if not len(features.shape) or features.shape[-1] != width:
        raise _error(
            ValueError, "features", f"shape (..., {width}), as the kernel has {width} rows", features,
            "pass one row for each token, and the kernel as (d, classes)",
        )  # fmt: skip
    tokens = tuple(features.shape)[:-1]
    for_each = {"labels": (labels, "class"), "sample_weight": (sample_weight, "weight")}
    for name, (tensor, what) in for_each.items():
        if tensor is not None and not may_be_alike(tuple(tensor.shape), tokens):
            required = f"shape {tokens}, that of the features without the last axis"
            raise _error(ValueError, name, required, tensor, f"pass one {what} for each token")
    if bias is not None and tuple(bias.shape) != (classes,):
        raise _error(
            ValueError, "bias", f"shape ({classes},)", bias, "pass one number for each class, or None"
        )


def _error(kind: type[Exception], argument: str, required: str, got: Any, fix: str) -> Exception:
    return unusable(kind, _NAME, argument, required=required, got=got, fix=fix)

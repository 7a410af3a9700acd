"""A linear layer and the cross entropy of its softmax, over so many classes that the logits are too large.

The logits are computed in chunks of classes, twice: forward for the logarithm of their summed exponentials,
which is all that is kept, and backward for the softmax. A chunk of classes has its own part of the kernel's
gradient. Chunks of tokens would each have to add to the whole of it, and hold it three times without
operations in place.

Where there is a compiler, the chunks are a loop in a program of their own, in which each takes the place of
the one before. XLA, when it is given them one by one, as in a graph of TensorFlow's, has all of them at once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from multigrad import backend
from multigrad.custom_gradient import op_custom_gradient
from multigrad.errors import message, unusable
from multigrad.ops.arguments import as_tensor, is_integer, stacked, with_plain
from multigrad.ops.dtypes import dtype_of, exact

_NAME = "linear_cross_entropy"
_CHUNK_SIZE = 1024


@with_plain("chunk_size")
def linear_cross_entropy(
    features: Any, kernel: Any, labels: Any, bias: Any = None, *, chunk_size: int | None = None
) -> Any:
    """The cross entropy of `softmax(features @ kernel + bias)` for each label, without the logits.

    ```python
    from multigrad import grad
    from multigrad.ops import linear_cross_entropy

    features, labels = np.ones((2, 3)), np.array([0, 3])  # two tokens

    def loss(kernel):
        return ops.sum(linear_cross_entropy(features, kernel, labels))

    print(grad(loss)(np.zeros((3, 4)))[0])  # [-0.5, 0.5, 0.5, -0.5]
    ```

    It is what `keras.ops.matmul` and `keras.losses.sparse_categorical_crossentropy(from_logits=True)` compute
    together. Those hold the logits of all tokens and classes several times over; this holds those of one
    chunk of classes. With the logits `z = x W + b` and the softmax `p`, the loss of a token with the label
    `y` is `log(sum(exp(z))) - z[y]`, and its gradient by `z` is `p` less one at `y`. Forward, the sum is
    carried from chunk to chunk by its logarithm, which is stable for logits of any size, and kept. Backward,
    each chunk of logits is computed once more, and with it `p`: an extra product of matrices, instead of
    reading and writing the logits.

    On JAX, and in eager code of TensorFlow, either pass is a program of XLA's, which is compiled when it is
    first run on arguments of such shapes. TensorFlow rounds the number of tokens up for it, to a multiple of
    64 or by an eighth at most, so that few programs are compiled.

    Arguments:
        features: a floating tensor of shape `(..., d)`, a row for each token.
        kernel: a floating tensor of shape `(d, classes)`, which is cast to the dtype of the features.
        labels: integers of shape `(...)`, from 0 to `classes - 1`. A negative one, or one that is larger,
            is an error where there are values; in compiled code its loss is NaN. To ignore a token, give
            it any label and multiply its loss by zero.
        bias: a tensor of shape `(classes,)`, or None for no bias.
        chunk_size: how many classes are computed at a time. The chunk of logits has so many columns, and
            a row for each token. If not given, it is 1024.

    Returns:
        The loss of each token, of shape `(...)`. It is of the features' dtype, but float32 for float16 and
        bfloat16, in which the products are computed and nothing is summed up. The labels have no gradient.

        A derivative of the gradient is right, and holds what was computed of all chunks.

    Raises:
        TypeError: when `features`, `kernel` or `bias` is not floating, `labels` is not of integers, or
            `chunk_size` is no integer.
        ValueError: when the shapes do not fit, the number of classes is not known, `chunk_size` is not
            positive, or a label is out of range.

    References:
        [Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary Language Models](
        https://arxiv.org/abs/2411.09009); [Milakov and Gimelshein 2018, Online normalizer calculation for
        softmax](https://arxiv.org/abs/1805.02867).
    """
    given = {"features": features, "kernel": kernel, "labels": labels}
    features, kernel, labels = [as_tensor(stacked(_NAME, name, value)) for name, value in given.items()]
    bias = None if bias is None else as_tensor(stacked(_NAME, "bias", bias))
    _check(features, kernel, labels, bias, chunk_size)
    return _loss_and_normalizer(kernel, bias, features, labels, chunk_size or _CHUNK_SIZE)[0]


# The kernel stands before the features, so that its gradient is asked for first: what it computes has the
# features' in it, which nearly everybody needs, while a kernel may be frozen.
@op_custom_gradient(name="multigrad>linear_cross_entropy")
def _loss_and_normalizer(kernel: Any, bias: Any, features: Any, labels: Any, chunk_size: int) -> Any:
    """The loss of each token, and the logarithm of its summed exponentials.

    The latter is an output because the rule uses it: so the rule is what differentiates it in its turn.
    """
    others = [kernel] if bias is None else [kernel, bias]
    tokens, shape = ops.shape(labels), ops.shape(features)
    labels = ops.cast(ops.reshape(labels, (-1, 1)), "int32")
    plan = _Plan(kernel.shape[0], kernel.shape[1], min(chunk_size, kernel.shape[1]))
    with backend.active.unrecorded():  # as TensorFlow's tape would keep all chunks
        rows = [labels, ops.reshape(features, (-1, plan.width))]
        found, _ = backend.active.program(_normalizer_and_target, plan)(rows, [], others)
    normalizer, target = [ops.reshape(x, tokens) for x in found]

    def rule(upstream: Any) -> tuple[Any, ...]:
        computed: dict[str, Any] = {}

        def of(name: str) -> Callable[[], Any]:
            def gradient() -> Any:
                if name not in computed:
                    rows = [labels, ops.reshape(features, (-1, plan.width)), ops.reshape(normalizer, (-1, 1))]
                    columns = [ops.reshape(u, (-1, 1)) for u in upstream]
                    run = backend.active.program(_gradients, plan, name != "features")
                    (of_features,), of_others = run(rows, columns, others)
                    computed["features"] = ops.reshape(of_features, shape)
                    computed.update(zip(("kernel", "bias"), of_others, strict=False))
                return computed[name]

            return gradient

        return of("kernel"), None if bias is None else of("bias"), of("features"), None, None

    return (normalizer - target, normalizer), rule


class _Plan(NamedTuple):
    """What is the same in every call of a head. Programs are told apart by it, so it is no tensor's shape."""

    width: int
    classes: int
    chunk_size: int


def _normalizer_and_target(
    in_place: bool, plan: _Plan, rows: list[Any], upstream: list[Any], others: list[Any]
) -> tuple[list[Any], list[Any]]:
    head = _Head(in_place, plan, *rows, *others)
    return [*head.normalizer_and_target()], []


def _gradients(
    in_place: bool, plan: _Plan, whole: bool, rows: list[Any], upstream: list[Any], others: list[Any]
) -> tuple[list[Any], list[Any]]:
    labels, features, normalizer = rows
    u, v = upstream
    of_features, *parts = _Head(in_place, plan, labels, features, *others).gradients(normalizer, u, v, whole)
    return [of_features], parts


class _Head:
    """The layer and the labels, with a row for each token, and its computations chunk by chunk."""

    def __init__(
        self, in_place: bool, plan: _Plan, labels: Any, features: Any, kernel: Any, bias: Any = None
    ) -> None:
        self.in_place, self.plan, self.labels = in_place, plan, labels
        self.kernel, self.features, self.bias = kernel, features, bias
        self.dtype = dtype_of(features)
        self.exact = exact(self.dtype)

    def normalizer_and_target(self) -> tuple[Any, Any]:
        """The logarithm of each token's summed exponentials, and the logit of its label."""

        def step(start: Any, size: int, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            normalizer, target = carry
            logits = self.logits(backend.active.after(self.features, normalizer), start, size)
            place = self.labels - start
            inside = ops.logical_and(place >= 0, place < size)
            found = ops.take_along_axis(logits, ops.clip(place, 0, size - 1), axis=1)
            both = ops.concatenate([normalizer, ops.logsumexp(logits, axis=1, keepdims=True)], axis=1)
            return ops.logsumexp(both, axis=1, keepdims=True), ops.where(inside, found, target)

        nothing = ops.cast(ops.zeros_like(self.labels), self.exact)
        return self.fold(step, (nothing - float("inf"), nothing + float("nan")))

    def gradients(self, normalizer: Any, u: Any, v: Any, whole: bool) -> tuple[Any, ...]:
        """The gradients by features, kernel and bias, or by the features alone."""
        both = u + v

        def step(start: Any, size: int, of_features: Any) -> tuple[Any, tuple[Any, ...]]:
            features, labels = [backend.active.after(x, of_features) for x in (self.features, self.labels)]
            softmax = ops.exp(self.logits(features, start, size) - normalizer)
            hit = ops.equal(labels - start, ops.arange(size, dtype="int32"))
            of_logits = softmax * both - ops.where(hit, u, ops.zeros_like(u))
            narrow = ops.cast(of_logits, self.dtype)
            more = narrow @ ops.transpose(self.columns(start, size))
            of_features = of_features + ops.cast(more, self.exact)
            if not whole:
                return of_features, ()
            of_kernel = ops.cast(ops.transpose(features) @ narrow, self.kernel.dtype)
            of_features = backend.active.after(of_features, of_kernel)
            if self.bias is None:
                return of_features, (of_kernel,)
            of_bias = ops.cast(ops.sum(of_logits, axis=0), self.bias.dtype)
            return of_features, (of_kernel, of_bias)

        zeros = ops.cast(ops.zeros_like(self.features), self.exact)
        like = [x for x in (self.kernel, self.bias) if whole and x is not None]
        of_features, parts = self.collect(step, zeros, like)
        return of_features, *parts

    def columns(self, start: Any, size: int) -> Any:
        return ops.cast(ops.slice(self.kernel, (0, start), (self.plan.width, size)), self.dtype)

    def logits(self, features: Any, start: Any, size: int) -> Any:
        # The operator, because `ops.matmul` (Keras 3.15) computes in float32 on PyTorch what is of float64.
        logits = ops.cast(features @ self.columns(start, size), self.exact)
        return logits if self.bias is None else logits + ops.cast(self.bias_of(start, size), self.exact)

    def bias_of(self, start: Any, size: int) -> Any:
        return ops.slice(self.bias, (start,), (size,))

    def fold(self, step: Callable[..., Any], carry: Any) -> Any:
        """`carry = step(start, size, carry)` for each chunk."""
        return self.collect(lambda *chunk: (step(*chunk), ()), carry, [])[0]

    def collect(
        self, step: Callable[..., tuple[Any, tuple[Any, ...]]], carry: Any, like: list[Any]
    ) -> tuple[Any, list[Any]]:
        """`carry, parts = step(start, size, carry)` for each chunk: the last carry, and the parts joined.

        Each of the parts is a chunk, along the last axis, of something like a tensor of `like`.
        """
        if self.in_place:
            return self._collect_in_place(step, carry, like)
        pieces = []
        classes, chunk_size = self.plan.classes, self.plan.chunk_size
        for start in range(0, classes, chunk_size):
            carry, parts = step(start, min(chunk_size, classes - start), carry)
            pieces.append(parts)
        return carry, [ops.concatenate(of_one, axis=-1) for of_one in zip(*pieces, strict=True)]

    def _collect_in_place(
        self, step: Callable[..., tuple[Any, tuple[Any, ...]]], carry: Any, like: list[Any]
    ) -> tuple[Any, list[Any]]:
        def body(start: Any, size: int, state: tuple[Any, tuple[Any, ...]]) -> tuple[Any, tuple[Any, ...]]:
            carry, wholes = state
            carry, parts = step(start, size, carry)
            both = zip(wholes, parts, strict=True)
            return carry, tuple(
                [ops.slice_update(w, (0,) * (w.ndim - 1) + (start,), part) for w, part in both]
            )

        classes, chunk_size = self.plan.classes, self.plan.chunk_size
        count, rest = divmod(classes, chunk_size)
        state = carry, tuple(map(ops.zeros_like, like))
        state = ops.fori_loop(0, count, lambda i, state: body(i * chunk_size, chunk_size, state), state)
        if rest:
            state = body(classes - rest, rest, state)
        return state[0], list(state[1])


def _check(features: Any, kernel: Any, labels: Any, bias: Any, chunk_size: Any) -> None:
    """See the function of the module's name for what is required."""
    given = {"features": features, "kernel": kernel, "bias": bias}
    for name, tensor in given.items():
        if tensor is not None and not keras.backend.is_float_dtype(dtype_of(tensor)):
            raise _error(TypeError, name, "a floating dtype", tensor, "cast it")
    if not keras.backend.is_int_dtype(dtype_of(labels)):
        raise _error(TypeError, "labels", "integers, one class for each token", labels, "cast them to int32")
    if chunk_size is not None and not is_integer(chunk_size):
        raise _error(TypeError, "chunk_size", "a positive integer, or None", chunk_size, _MEND_SIZE)
    if chunk_size is not None and chunk_size < 1:
        raise _error(ValueError, "chunk_size", "a positive integer, or None", chunk_size, _MEND_SIZE)
    _check_shapes(features, kernel, labels, bias)
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
                mend="give a token that is to be ignored any label, and multiply its loss by zero",
            )
        )


_MEND_SIZE = "pass how many classes are computed at a time, or leave it out"


def _check_shapes(features: Any, kernel: Any, labels: Any, bias: Any) -> None:
    if len(kernel.shape) != 2 or None in tuple(kernel.shape) or not kernel.shape[1]:
        required = "two known dimensions, (d, classes), and at least one class"
        raise _error(ValueError, "kernel", required, kernel, "pass one column for each class")
    width, classes = kernel.shape
    if not len(features.shape) or features.shape[-1] != width:
        raise _error(
            ValueError, "features", f"shape (..., {width}), as the kernel has {width} rows", features,
            "pass one row for each token, and the kernel as (d, classes)",
        )  # fmt: skip
    tokens = tuple(features.shape)[:-1]
    own = tuple(labels.shape)
    if len(own) != len(tokens) or any(
        None not in pair and pair[0] != pair[1] for pair in zip(own, tokens, strict=True)
    ):
        required = f"shape {tokens}, that of the features without the last axis"
        raise _error(ValueError, "labels", required, labels, "pass one class for each token")
    if bias is not None and tuple(bias.shape) != (classes,):
        raise _error(
            ValueError, "bias", f"shape ({classes},)", bias, "pass one number for each class, or None"
        )


def _error(kind: type[Exception], argument: str, required: str, got: Any, mend: str) -> Exception:
    return unusable(kind, _NAME, argument, required=required, got=got, mend=mend)

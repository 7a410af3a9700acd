"""A linear layer and its cross entropy in chunks, without storing all logits at once.

The functions of this module run as one compiled program each, where the backend has a compiler. There are two
ways to compute gradients:

- In two passes, for a loss per token, whose upstream gradients are unknown in the forward pass.
  `normalizer_and_target` loops over chunks of classes in the forward pass. `gradients` does the same in the
  backward pass, and computes the logits again. Each chunk of classes owns a part of the kernel's gradient.
- In one pass, for the loss of all tokens, whose gradients are known up to a factor. `losses_and_gradients`
  loops over chunks of tokens, too, which are small enough to keep all logits of a chunk for both uses.

`rows` are the labels and features, with one row per token. `others` are the kernel and the bias, if any.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from multigrad import backend
from multigrad.ops.chunks import Body, InPlace, Loops, Unrolled
from multigrad.ops.dtypes import dtype_of, wide_dtype

Answer = tuple[list[Any], list[Any]]
"""The results with one row per token, and the other results."""


class Plan(NamedTuple):
    """The static sizes of a head, which are a part of the cache key of a compiled program."""

    width: int
    classes: int
    chunk_size: int

    def tokens(self, in_place: bool) -> int:
        """Return the number of tokens per chunk, where their logits are kept.

        Each chunk reads and writes the whole gradient of the kernel. A loop in Python holds that gradient
        twice at its end, so it has memory for larger chunks of tokens.
        """
        return max(64, min(256 if in_place else 512, self.width))


def normalizer_and_target(
    in_place: bool, plan: Plan, rows: list[Any], upstream: list[Any], others: list[Any]
) -> Answer:
    """Return the log-sum-exp of each token's logits, and the logit of its label."""
    normalizer, target, _ = _Head(_loops(in_place), plan, *rows, *others).normalizer_and_target(keep=False)
    return [normalizer, target], []


def differentiable_normalizer_and_target(plan: Plan, rows: list[Any], others: list[Any]) -> tuple[Any, Any]:
    """Return the same in a form that the framework can differentiate. `rows[2]` is the constant normalizer.

    The normalizer is `n + log(sum(exp(z - n)))` with the constant `n`. Its derivative is finite even for a
    chunk whose logits are all minus infinity, where the derivative of the chunk's own log-sum-exp is NaN.
    """
    labels, features, normalizer = rows
    head = _Head(Unrolled(), plan, labels, features, *others)
    return head.differentiable_normalizer_and_target(normalizer)


def gradients(
    in_place: bool, plan: Plan, all_gradients: bool, rows: list[Any], upstream: list[Any], others: list[Any]
) -> Answer:
    """Return the gradients of the features, and with `all_gradients` also of the others.

    `rows[2]` is the normalizer. `upstream` are the upstream gradients of the loss and of the normalizer.
    """
    labels, features, normalizer = rows
    loss_upstream, normalizer_upstream = upstream
    loops = _loops(in_place)
    buffers = _empty(loops, others if all_gradients else [], dtype_of)
    head = _Head(loops, plan, labels, features, *others)
    features_gradient, buffers = head.gradients(
        normalizer, loss_upstream, loss_upstream + normalizer_upstream, buffers, None
    )
    return [features_gradient], _joined(loops, buffers, others)


def losses_and_gradients(
    in_place: bool, plan: Plan, all_gradients: bool, rows: list[Any], upstream: list[Any], others: list[Any]
) -> Answer:
    """Return the losses, and the gradients of their weighted sum.

    These are the gradients of the features, and with `all_gradients` also of the others. `upstream` is the
    list of the weights, one per token.
    """
    loops = _loops(in_place)
    count, dtype = ops.shape(rows[0])[0], dtype_of(rows[1])

    def step(start: Any, size: int, state: Any) -> Any:
        losses, features_gradient, buffers = state
        labels, features, weights = [ops.slice(x, (start, 0), (size, x.shape[1])) for x in (*rows, *upstream)]
        head = _Head(loops, plan, labels, features, *others)
        normalizer, target, logits = head.normalizer_and_target(keep=True)
        gradient, buffers = head.gradients(normalizer, weights, weights, buffers, logits)
        losses = loops.write(losses, 0, start, normalizer - target)
        return losses, loops.write(features_gradient, 0, start, ops.cast(gradient, dtype)), buffers

    results = loops.empty((count, 1), wide_dtype(dtype)), loops.empty((count, plan.width), dtype)
    buffers = _empty(loops, others if all_gradients else [], lambda x: wide_dtype(dtype_of(x)))
    *results, buffers = loops.loop(count, plan.tokens(in_place), step, (*results, buffers))
    return [loops.joined(result, 0) for result in results], _joined(loops, buffers, others)


def _loops(in_place: bool) -> Loops:
    return InPlace() if in_place else Unrolled()


def _empty(loops: Loops, others: list[Any], dtype: Callable[[Any], str]) -> list[Any]:
    return [loops.empty(tuple(tensor.shape), dtype(tensor)) for tensor in others]


def _joined(loops: Loops, buffers: list[Any], others: list[Any]) -> list[Any]:
    pairs = zip(buffers, others, strict=False)
    return [ops.cast(loops.joined(buffer, -1), dtype_of(tensor)) for buffer, tensor in pairs]


class _Head:
    """The layer, and the features and labels of some tokens, with one row per token."""

    def __init__(
        self, loops: Loops, plan: Plan, labels: Any, features: Any, kernel: Any, bias: Any = None
    ) -> None:
        self.loops, self.plan, self.labels = loops, plan, labels
        self.kernel, self.features, self.bias = kernel, features, bias
        self.dtype = dtype_of(features)
        self.wide = wide_dtype(self.dtype)

    def normalizer_and_target(self, keep: bool) -> tuple[Any, Any, Any]:
        """Return the normalizer, the target logits, and a buffer of all logits if they are to be kept."""

        def step(start: Any, size: int, state: Any) -> Any:
            normalizer, target, kept = state
            logits = self.logits(backend.active.after(self.features, normalizer), start, size)
            target = self.target(logits, start, size, target)
            pair = ops.concatenate([normalizer, ops.logsumexp(logits, axis=1, keepdims=True)], axis=1)
            kept = self.loops.write(kept, -1, start, logits) if keep else kept
            return ops.logsumexp(pair, axis=1, keepdims=True), target, kept

        zeros = ops.cast(ops.zeros_like(self.labels), self.wide)
        kept = self.loops.empty((ops.shape(self.labels)[0], self.plan.classes), self.wide) if keep else ()
        return self.each_chunk(step, (zeros - float("inf"), zeros + float("nan"), kept))

    def differentiable_normalizer_and_target(self, normalizer: Any) -> tuple[Any, Any]:
        """Return the normalizer and the target logits, given the normalizer as a constant."""

        def step(start: Any, size: int, state: Any) -> Any:
            total, target = state
            logits = self.logits(backend.active.after(self.features, total), start, size)
            total = total + ops.sum(ops.exp(logits - normalizer), axis=1, keepdims=True)
            return total, self.target(logits, start, size, target)

        zeros = ops.zeros_like(normalizer)
        total, target = self.each_chunk(step, (zeros, zeros + float("nan")))
        return normalizer + ops.log(total), target

    def target(self, logits: Any, start: Any, size: int, otherwise: Any) -> Any:
        """Return the logit of each label that is in a chunk, and `otherwise` for the other labels."""
        index = self.labels - start
        inside = ops.logical_and(index >= 0, index < size)
        taken = ops.take_along_axis(logits, ops.clip(index, 0, size - 1), axis=1)
        return ops.where(inside, taken, otherwise)

    def gradients(
        self, normalizer: Any, target_scale: Any, softmax_scale: Any, buffers: list[Any], logits: Any
    ) -> tuple[Any, list[Any]]:
        """Return the gradient of the features, and add the gradients of the others to the buffers.

        The gradient of the logits is `softmax_scale * softmax - target_scale * one_hot(label)`.
        """

        def step(start: Any, size: int, state: Any) -> Any:
            features_gradient, buffers = state
            features, labels = [
                backend.active.after(x, features_gradient) for x in (self.features, self.labels)
            ]
            if logits is None:
                chunk = self.logits(features, start, size)
            else:
                chunk = self.loops.read(logits, -1, start, size)
            is_label = ops.equal(labels - start, ops.arange(size, dtype="int32"))
            subtracted = ops.where(is_label, target_scale, ops.zeros_like(target_scale))
            logits_gradient = ops.exp(chunk - normalizer) * softmax_scale - subtracted
            narrow = ops.cast(logits_gradient, self.dtype)
            product = narrow @ ops.transpose(self.columns(start, size))
            features_gradient = features_gradient + ops.cast(product, self.wide)
            if not buffers:
                return features_gradient, buffers
            parts = [ops.transpose(features) @ narrow]
            features_gradient = backend.active.after(features_gradient, parts[0])
            if self.bias is not None:
                parts.append(ops.sum(logits_gradient, axis=0))
            update = self.loops.write if logits is None else self.loops.add
            pairs = zip(buffers, parts, strict=True)
            return features_gradient, [update(buffer, -1, start, part) for buffer, part in pairs]

        zeros = ops.cast(ops.zeros_like(self.features), self.wide)
        return self.each_chunk(step, (zeros, buffers))

    def each_chunk(self, step: Body, state: Any) -> Any:
        return self.loops.loop(self.plan.classes, self.plan.chunk_size, step, state)

    def columns(self, start: Any, size: int) -> Any:
        return ops.cast(ops.slice(self.kernel, (0, start), (self.plan.width, size)), self.dtype)

    def logits(self, features: Any, start: Any, size: int) -> Any:
        # The operator, because `ops.matmul` (Keras 3.15) computes float64 in float32 on PyTorch.
        logits = ops.cast(features @ self.columns(start, size), self.wide)
        return logits if self.bias is None else logits + ops.cast(self.bias_slice(start, size), self.wide)

    def bias_slice(self, start: Any, size: int) -> Any:
        return ops.slice(self.bias, (start,), (size,))

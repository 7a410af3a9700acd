"""A linear layer and its cross entropy in blocks of tokens, each with the logits of all classes.

The steps of `Head` compute a block. `over_blocks` loops over the blocks.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from multigrad import backend
from multigrad.ops.dtypes import dtype_of, nan_unless, wide_dtype

Step = Callable[..., tuple[list[Any], list[Any]]]
"""`sums, results = step(*rows)` for a block: tensors to add up, and tensors with one row per token."""


class LossOptions(NamedTuple):
    """The static options of the loss. As arguments of an op they are a plain tuple, which can be saved."""

    block_size: int
    label_smoothing: float = 0.0
    logit_softcap: float | None = None
    z_loss: float = 0.0


class Head:
    """The linear layer and the loss of a token.

    For the logits `z` of a token, `p = softmax(z)` and `n = logsumexp(z)`, the loss is
    `n - (1 - s) z[label] - s mean(z) + c n**2`, with the smoothing `s` and the weight `c` of the z-loss.
    """

    def __init__(self, options: Any, kernel: Any, bias: Any, dtype: str) -> None:
        self.options, self.dtype, self.wide = LossOptions(*options), dtype, wide_dtype(dtype)
        self.kernel = ops.cast(kernel, dtype)
        # In eager code, JAX and TensorFlow copy the transpose, so it is computed once. A compiled program has
        # no copy.
        self.transposed = None if backend.active.is_compiling() else ops.transpose(self.kernel)
        self.bias = None if bias is None else ops.cast(bias, self.wide)[None]
        self.classes = kernel.shape[1]
        self.cap = self.options.logit_softcap or math.inf

    def losses(self, features: Any, labels: Any) -> tuple[list[Any], list[Any]]:
        logits, _ = self._logits(features)
        normalizer = ops.logsumexp(logits, axis=1, keepdims=True)
        return [], [self._loss(normalizer, self._target(logits, labels))]

    def gradients(
        self, features: Any, labels: Any, scale: Any, with_sums: bool, with_loss: bool
    ) -> tuple[list[Any], list[Any]]:
        """Return the gradients of the losses, multiplied by `scale`. The gradient of the features is last."""
        logits, slope = self._logits(features)
        # One multiplication normalizes the softmax and applies the scale.
        top = ops.amax(logits, axis=1, keepdims=True)
        target = self._target(logits, labels) if with_loss else None
        logits -= top  # in place on PyTorch
        powers = ops.exp(logits)
        del logits
        total = ops.sum(powers, axis=1, keepdims=True)
        normalizer = top + ops.log(total)
        results = [self._loss(normalizer, target)] if with_loss else []
        scale = nan_unless(self._is_label(labels), scale)
        gradient = powers * (scale * self._softmax_factor(normalizer) / total)
        del powers
        gradient -= self._target_gradient(labels, scale)
        gradient = gradient if slope is None else gradient * slope
        narrow = ops.cast(gradient, self.dtype)
        results.append(self._by_features(narrow))
        if not with_sums:
            return [], results
        return self._sums(ops.transpose(features) @ narrow, gradient), results

    def hessian_product(
        self, features: Any, labels: Any, scale: Any, direction: Any, along_kernel: Any, along_bias: Any
    ) -> tuple[list[Any], list[Any]]:
        """Differentiate the inner product of the gradients and directions.

        Return the derivatives with respect to the kernel and the bias, and to the scale and the features.
        """
        logits, slope = self._logits(features)
        # The derivatives of the logits, of the normalizer and of the gradient along the directions.
        change = ops.cast(direction @ self.kernel, self.wide)
        if along_kernel is not None:
            change = change + ops.cast(features @ along_kernel, self.wide)
        change = change if along_bias is None else change + along_bias[None]
        change = change if slope is None else change * slope
        normalizer = ops.logsumexp(logits, axis=1, keepdims=True)
        softmax = ops.exp(logits - normalizer)
        normalizer_change = ops.sum(softmax * change, axis=1, keepdims=True)
        factor, twice = self._softmax_factor(normalizer), 2.0 * self.options.z_loss
        ones = nan_unless(self._is_label(labels), ops.ones_like(scale))
        gradient = softmax * factor * ones - self._target_gradient(labels, ones)
        along = ops.sum(gradient * change, axis=1, keepdims=True)
        second = softmax * ((change - normalizer_change) * factor + twice * normalizer_change)
        if slope is not None:
            second = second * slope - gradient * change * logits * (2.0 / self.cap**2)
            gradient = gradient * slope
        second, gradient = second * scale, gradient * scale
        narrow, narrow_second = ops.cast(gradient, self.dtype), ops.cast(second, self.dtype)
        by_features = self._by_features(narrow_second)
        if along_kernel is not None:
            by_features = by_features + narrow @ ops.transpose(along_kernel)
        by_kernel = ops.transpose(features) @ narrow_second + ops.transpose(direction) @ narrow
        return self._sums(by_kernel, second), [along, by_features]

    def _sums(self, by_kernel: Any, gradient: Any) -> list[Any]:
        """Return the gradients of the kernel and the bias, from those of the kernel and the logits."""
        return [by_kernel] if self.bias is None else [by_kernel, ops.sum(gradient, axis=0)]

    def _by_features(self, gradient: Any) -> Any:
        """Return the gradient of the features, from the gradient of the logits."""
        return gradient @ (ops.transpose(self.kernel) if self.transposed is None else self.transposed)

    def _logits(self, features: Any) -> tuple[Any, Any]:
        """Return the logits, and the derivative of the soft cap, None without one."""
        # The operator, because `ops.matmul` (Keras 3.15) computes float64 in float32 on PyTorch.
        logits = ops.cast(features @ self.kernel, self.wide)
        logits = logits if self.bias is None else logits + self.bias
        cap = self.options.logit_softcap
        if cap is None:
            return logits, None
        bounded = logits / cap
        if self.wide == "float64":  # `ops.tanh` (Keras 3.15) computes it in float32 on JAX
            bounded = 1.0 - 2.0 / (ops.exp(2.0 * bounded) + 1.0)
        else:
            bounded = ops.tanh(bounded)
        return cap * bounded, 1.0 - ops.square(bounded)

    def _target(self, logits: Any, labels: Any) -> Any:
        """Return the expected logit under the target distribution."""
        smoothing = self.options.label_smoothing
        index = ops.clip(labels, 0, self.classes - 1)
        target = nan_unless(self._is_label(labels), ops.take_along_axis(logits, index, axis=1))
        if smoothing:
            # Not `ops.mean`, which computes float64 in float32 on PyTorch (Keras 3.15).
            total = ops.sum(logits, axis=1, keepdims=True)
            target = (1.0 - smoothing) * target + (smoothing / self.classes) * total
        return target

    def _loss(self, normalizer: Any, target: Any) -> Any:
        loss = normalizer - target
        return loss + self.options.z_loss * ops.square(normalizer) if self.options.z_loss else loss

    def _is_label(self, labels: Any) -> Any:
        """Return whether each label is a class. Other labels have a loss and gradients of NaN."""
        return ops.logical_and(labels >= 0, labels < self.classes)

    def _softmax_factor(self, normalizer: Any) -> Any:
        return 1.0 + 2.0 * self.options.z_loss * normalizer

    def _target_gradient(self, labels: Any, scale: Any) -> Any:
        """Return the gradient of the expected logit, the target distribution, multiplied by the scale."""
        smoothing = self.options.label_smoothing
        hit = ops.equal(labels, ops.arange(self.classes, dtype="int32")[None])
        others = scale * (smoothing / self.classes)
        return ops.where(hit, scale * (1.0 - smoothing) + others, others)


def over_blocks(
    step: Step, rows: list[Any], size: int, sums: list[Any], results: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Call `step` on blocks of at most `size` rows. Return its sums added up, and its results joined.

    `rows` and `results` have shape `(..., width)`, with one row per token. `sums` and `results` have the
    shapes and dtypes of the tensors that are returned. Sums of half precision are computed in float32.
    """
    rows = [ops.reshape(x, (-1, x.shape[-1])) for x in rows]
    count = ops.shape(rows[0])[0]
    if isinstance(count, int) and not count:
        return [ops.zeros_like(x) for x in sums], [ops.zeros_like(x) for x in results]
    as_program = backend.active.is_compiling() and not backend.active.is_reading_code()
    totals, joined = (_in_program if as_program else _one_by_one)(step, rows, size, sums, results)
    found = [ops.reshape(x, ops.shape(like)) for x, like in zip(joined, results, strict=True)]
    return [ops.cast(x, like.dtype) for x, like in zip(totals, sums, strict=True)], found


def _one_by_one(
    step: Step, rows: list[Any], size: int, sums: list[Any], results: list[Any]
) -> tuple[list[Any], list[Any]]:
    totals: list[Any] = []
    parts = []
    count = rows[0].shape[0]
    for start in range(0, count, size):
        added, block_results = step(*[x[start : start + size] for x in rows])
        if totals:
            totals = [_add(total, part) for total, part in zip(totals, added, strict=True)]
        else:
            totals = [ops.cast(part, _wide_of(part)) for part in added]
        parts.append([ops.cast(r, x.dtype) for r, x in zip(block_results, results, strict=True)])
    return totals, [ops.concatenate(list(column)) for column in zip(*parts, strict=True)]


def _add(total: Any, part: Any) -> Any:
    if hasattr(total, "add_"):  # PyTorch: in place, without a copy of the part in float32
        return total.add_(part)
    return total + ops.cast(part, total.dtype)


def _in_program(
    step: Step, rows: list[Any], size: int, sums: list[Any], results: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Loop in a compiled program.

    Block `i` has the rows `i, i + blocks, ...`, so that tokens which are distributed over devices stay on
    their devices. Rows of zeros fill the last block.
    """
    count = ops.shape(rows[0])[0]
    if isinstance(count, int):
        blocks = -(-count // size)
        size = -(-count // blocks)  # the blocks have almost equal sizes
    elif ops.is_tensor(count):
        # One block of zeros if there are no tokens: XLA refuses the slice of an empty block.
        size = ops.clip(count, 1, size)
        blocks = ops.maximum(-(-count // size), 1)
    else:  # a dimension of jax.export
        blocks = -(-count // size)
    padded = [ops.pad(x, [[0, blocks * size - count], [0, 0]]) for x in rows]
    split = [ops.transpose(ops.reshape(x, (size, blocks, x.shape[1])), (1, 0, 2)) for x in padded]
    # Zeros that are mapped and distributed over devices like the tensors of a block.
    tensors = [x for x in (*rows, *sums, *results) if "float" in dtype_of(x)]
    wide = _wide_of(tensors[0])
    zero = sum(ops.cast(ops.zeros_like(ops.sum(x[..., :1])), wide) for x in tensors)
    totals = [ops.zeros(x.shape, _wide_of(x)) + ops.cast(zero, _wide_of(x)) for x in sums]
    buffers = [ops.zeros((blocks, size, x.shape[-1]), x.dtype) + ops.cast(zero, x.dtype) for x in results]

    def body(i: Any, state: Any) -> Any:
        totals, buffers = state
        # TensorFlow runs iterations concurrently, which takes the memory of several blocks. An index that
        # depends on the results of the last iteration prevents this. No number is both NaN and infinite.
        # The index does not depend on a total, because a compiler removes a total that is not used.
        last = ops.reshape(buffers[-1], (-1,))[0]
        i = ops.where(ops.logical_and(ops.isnan(last), ops.isinf(last)), i + 1, i)
        block = [
            ops.reshape(ops.slice(x, (i, 0, 0), (1, size, x.shape[2])), (size, x.shape[2])) for x in split
        ]
        added, block_results = step(*block)
        totals = [total + ops.cast(part, total.dtype) for total, part in zip(totals, added, strict=True)]
        pairs = zip(buffers, block_results, strict=True)
        index = ops.reshape(ops.cast(i, "int32"), (1, 1))
        buffers = [ops.scatter_update(b, index, ops.cast(r, b.dtype)[None]) for b, r in pairs]
        return totals, buffers

    totals, buffers = ops.fori_loop(0, blocks, body, (totals, buffers))
    joined = [ops.reshape(ops.transpose(b, (1, 0, 2)), (blocks * size, b.shape[2])) for b in buffers]
    return list(totals), [x[:count] for x in joined]


def _wide_of(tensor: Any) -> str:
    return wide_dtype(dtype_of(tensor))

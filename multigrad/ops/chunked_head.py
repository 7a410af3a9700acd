"""What a linear layer and its cross entropy compute, in chunks, so that the logits never exist whole.

There are two ways to the gradients, and the functions of this module are what is computed in one go for them:
as a program of its own, where there is a compiler.

- In two goes, for a loss of each token, of which the backward pass alone knows the upstream gradients.
  Forward, `normalizer_and_target` takes the classes in chunks; backward, `gradients` does so again, and
  computes the logits a second time. A chunk of classes has its own part of the kernel's gradient.
- In one go, for a loss of all tokens, whose gradients are known up to a factor: `losses_and_gradients` takes
  tokens in chunks, too, few enough to keep all logits of theirs from one use to the other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from multigrad import backend
from multigrad.ops.chunks import Body, InPlace, Loops, Written
from multigrad.ops.dtypes import dtype_of, exact

Answer = tuple[list[Any], list[Any]]
"""What has a row for each token, and what has not."""


class Plan(NamedTuple):
    """What is the same in every call of a head. Programs are told apart by it, so it is no tensor's shape."""

    width: int
    classes: int
    chunk_size: int

    def tokens(self, in_place: bool) -> int:
        """How many tokens are taken at a time, where their logits are kept, beside the kernel's gradient.

        That is read and written for each so many. Where it is not in place, it is there twice in the end, so
        that there is room for more of them.
        """
        return max(64, min(256 if in_place else 512, self.width))


def normalizer_and_target(
    in_place: bool, plan: Plan, rows: list[Any], upstream: list[Any], others: list[Any]
) -> Answer:
    """The logarithm of each token's summed exponentials, and the logit of its label.

    `rows` are labels and features, `others` the kernel and maybe a bias, here and in the following.
    """
    normalizer, target, _ = _Head(_loops(in_place), plan, *rows, *others).normalizer_and_target(keep=False)
    return [normalizer, target], []


def with_derivatives(plan: Plan, rows: list[Any], others: list[Any]) -> tuple[Any, Any]:
    """The same as it is written, for who differentiates it: the third of the rows is the normalizer, fixed.

    The logarithm of a sum that is one has its derivatives, too, where a chunk has only logits of minus
    infinity. That of its own sum, which is zero, has none.
    """
    labels, features, normalizer = rows
    return _Head(Written(), plan, labels, features, *others).with_derivatives(normalizer)


def gradients(
    in_place: bool, plan: Plan, whole: bool, rows: list[Any], upstream: list[Any], others: list[Any]
) -> Answer:
    """The gradients by the features, and, for the `whole`, by the others.

    The third of the rows is the normalizer; the upstream gradients are those of the loss and of that.
    """
    labels, features, normalizer = rows
    of_loss, of_normalizer = upstream
    loops = _loops(in_place)
    of_others = _nothing(loops, others if whole else [], dtype_of)
    head = _Head(loops, plan, labels, features, *others)
    of_features, of_others = head.gradients(normalizer, of_loss, of_loss + of_normalizer, of_others, None)
    return [of_features], _joined(loops, of_others, others)


def losses_and_gradients(
    in_place: bool, plan: Plan, whole: bool, rows: list[Any], upstream: list[Any], others: list[Any]
) -> Answer:
    """The losses, and the gradients of their weighted sum by the features, and for the `whole` by the others.

    The weights, one for each token, are its only upstream gradient.
    """
    loops = _loops(in_place)
    count, dtype = ops.shape(rows[0])[0], dtype_of(rows[1])

    def step(start: Any, size: int, state: Any) -> Any:
        losses, of_features, of_others = state
        labels, features, weights = [ops.slice(x, (start, 0), (size, x.shape[1])) for x in (*rows, *upstream)]
        head = _Head(loops, plan, labels, features, *others)
        normalizer, target, logits = head.normalizer_and_target(keep=True)
        more, of_others = head.gradients(normalizer, weights, weights, of_others, logits)
        losses = loops.put(losses, 0, start, normalizer - target)
        return losses, loops.put(of_features, 0, start, ops.cast(more, dtype)), of_others

    of_rows = loops.empty((count, 1), exact(dtype)), loops.empty((count, plan.width), dtype)
    of_others = _nothing(loops, others if whole else [], lambda x: exact(dtype_of(x)))
    *of_rows, of_others = loops.loop(count, plan.tokens(in_place), step, (*of_rows, of_others))
    return [loops.joined(of_row, 0) for of_row in of_rows], _joined(loops, of_others, others)


def _loops(in_place: bool) -> Loops:
    return InPlace() if in_place else Written()


def _nothing(loops: Loops, others: list[Any], dtype: Callable[[Any], str]) -> list[Any]:
    return [loops.empty(tuple(tensor.shape), dtype(tensor)) for tensor in others]


def _joined(loops: Loops, of_others: list[Any], others: list[Any]) -> list[Any]:
    pairs = zip(of_others, others, strict=False)
    return [ops.cast(loops.joined(whole, -1), dtype_of(tensor)) for whole, tensor in pairs]


class _Head:
    """The layer, and the features and labels of some tokens, with a row for each."""

    def __init__(
        self, loops: Loops, plan: Plan, labels: Any, features: Any, kernel: Any, bias: Any = None
    ) -> None:
        self.loops, self.plan, self.labels = loops, plan, labels
        self.kernel, self.features, self.bias = kernel, features, bias
        self.dtype = dtype_of(features)
        self.exact = exact(self.dtype)

    def normalizer_and_target(self, keep: bool) -> tuple[Any, Any, Any]:
        """See above; and a whole of the logits, if they are to be kept."""

        def step(start: Any, size: int, state: Any) -> Any:
            normalizer, target, kept = state
            logits = self.logits(backend.active.after(self.features, normalizer), start, size)
            target = self.target(logits, start, size, target)
            both = ops.concatenate([normalizer, ops.logsumexp(logits, axis=1, keepdims=True)], axis=1)
            kept = self.loops.put(kept, -1, start, logits) if keep else kept
            return ops.logsumexp(both, axis=1, keepdims=True), target, kept

        nothing = ops.cast(ops.zeros_like(self.labels), self.exact)
        kept = self.loops.empty((ops.shape(self.labels)[0], self.plan.classes), self.exact) if keep else ()
        return self.each_chunk(step, (nothing - float("inf"), nothing + float("nan"), kept))

    def with_derivatives(self, normalizer: Any) -> tuple[Any, Any]:
        """The same of a normalizer that is given as a constant."""

        def step(start: Any, size: int, state: Any) -> Any:
            total, target = state
            logits = self.logits(backend.active.after(self.features, total), start, size)
            total = total + ops.sum(ops.exp(logits - normalizer), axis=1, keepdims=True)
            return total, self.target(logits, start, size, target)

        zeros = ops.zeros_like(normalizer)
        total, target = self.each_chunk(step, (zeros, zeros + float("nan")))
        return normalizer + ops.log(total), target

    def target(self, logits: Any, start: Any, size: int, otherwise: Any) -> Any:
        """The logit of each label that is in a chunk."""
        place = self.labels - start
        inside = ops.logical_and(place >= 0, place < size)
        found = ops.take_along_axis(logits, ops.clip(place, 0, size - 1), axis=1)
        return ops.where(inside, found, otherwise)

    def gradients(
        self, normalizer: Any, of_target: Any, of_softmax: Any, of_others: list[Any], logits: Any
    ) -> tuple[Any, list[Any]]:
        """The gradient by the features, and the wholes of those by the others, which are added to these.

        The gradient by the logits is the softmax times `of_softmax`, less `of_target` at the label.
        """

        def step(start: Any, size: int, state: Any) -> Any:
            of_features, of_others = state
            features, labels = [backend.active.after(x, of_features) for x in (self.features, self.labels)]
            if logits is None:
                own = self.logits(features, start, size)
            else:
                own = self.loops.chunk(logits, -1, start, size)
            hit = ops.equal(labels - start, ops.arange(size, dtype="int32"))
            less = ops.where(hit, of_target, ops.zeros_like(of_target))
            of_logits = ops.exp(own - normalizer) * of_softmax - less
            narrow = ops.cast(of_logits, self.dtype)
            more = narrow @ ops.transpose(self.columns(start, size))
            of_features = of_features + ops.cast(more, self.exact)
            if not of_others:
                return of_features, of_others
            found = [ops.transpose(features) @ narrow]
            of_features = backend.active.after(of_features, found[0])
            if self.bias is not None:
                found.append(ops.sum(of_logits, axis=0))
            keep = self.loops.put if logits is None else self.loops.add
            pairs = zip(of_others, found, strict=True)
            return of_features, [keep(whole, -1, start, part) for whole, part in pairs]

        zeros = ops.cast(ops.zeros_like(self.features), self.exact)
        return self.each_chunk(step, (zeros, of_others))

    def each_chunk(self, step: Body, state: Any) -> Any:
        return self.loops.loop(self.plan.classes, self.plan.chunk_size, step, state)

    def columns(self, start: Any, size: int) -> Any:
        return ops.cast(ops.slice(self.kernel, (0, start), (self.plan.width, size)), self.dtype)

    def logits(self, features: Any, start: Any, size: int) -> Any:
        # The operator, because `ops.matmul` (Keras 3.15) computes in float32 on PyTorch what is of float64.
        logits = ops.cast(features @ self.columns(start, size), self.exact)
        return logits if self.bias is None else logits + ops.cast(self.bias_of(start, size), self.exact)

    def bias_of(self, start: Any, size: int) -> Any:
        return ops.slice(self.bias, (start,), (size,))

"""The ops of `linear_cross_entropy`: a loss per token, and the weighted sum of the losses."""

from collections.abc import Callable
from typing import Any

from keras import ops

from multigrad import backend
from multigrad.calculus.derivatives import vjp
from multigrad.core.op import op_custom_gradient
from multigrad.ops import chunked_head
from multigrad.ops.chunked_head import Plan
from multigrad.ops.dtypes import dtype_of, wide_dtype


# The kernel is before the features, so that its gradient is computed first. That computes the gradient of the
# features, too, which nearly every model needs. The kernel may be frozen, so its own gradient may be unused.
@op_custom_gradient(name="multigrad>linear_cross_entropy")
def _loss_and_normalizer(kernel: Any, bias: Any, features: Any, labels: Any, chunk_size: int) -> Any:
    """Return the loss of each token, and the log-sum-exp of its logits.

    The rule uses the log-sum-exp. It is an output, so that a derivative of the rule calls the rule again.
    """
    others, rows, plan = _flat(kernel, bias, features, labels, chunk_size)
    with backend.active.unrecorded():  # because TensorFlow's tape would keep all chunks
        results, _ = backend.active.program(chunked_head.normalizer_and_target, plan)(rows, [], others)
    normalizer, target = [ops.reshape(x, ops.shape(labels)) for x in results]

    def rule(upstream: Any) -> tuple[Any, ...]:
        def compute(name: str) -> dict[str, Any]:
            # Flattened again, to record the operations where the rule is differentiated.
            others, rows, _ = _flat(kernel, bias, features, labels, chunk_size)
            rows.append(ops.reshape(normalizer, (-1, 1)))
            columns = [ops.reshape(u, (-1, 1)) for u in upstream]
            run = backend.active.program(chunked_head.gradients, plan, name != "features")
            (features_gradient,), other_gradients = run(rows, columns, others)
            gradients = {"features": ops.reshape(features_gradient, ops.shape(features))}
            return gradients | dict(zip(("kernel", "bias"), other_gradients, strict=False))

        entry = _lazy_entries(compute)
        return entry("kernel"), None if bias is None else entry("bias"), entry("features"), None, None

    return (normalizer - target, normalizer), rule


def _lazy_entries(compute: Callable[[str], dict[str, Any]]) -> Callable[[str], Callable[[], Any]]:
    """Return a function that maps a name to the entry of a rule.

    `compute(name)` returns a dict with this gradient, and with others that were computed along with it.
    """
    computed: dict[str, Any] = {}

    def entry(name: str) -> Callable[[], Any]:
        def gradient() -> Any:
            if name not in computed:
                computed.update(compute(name))
            return computed[name]

        return gradient

    return entry


def _flat(kernel: Any, bias: Any, features: Any, labels: Any, chunk_size: int) -> tuple[Any, Any, Plan]:
    """Return the kernel and bias, the labels and features with one row per token, and the plan."""
    plan = Plan(kernel.shape[0], kernel.shape[1], min(chunk_size, kernel.shape[1]))
    labels = ops.reshape(labels, (-1, 1))
    if dtype_of(labels) in ("int64", "uint64"):  # an invalid label could become a valid one in 32 bits
        labels = ops.clip(ops.cast(labels, "int64"), -1, plan.classes)
    rows = [ops.cast(labels, "int32"), ops.reshape(features, (-1, plan.width))]
    return [kernel] if bias is None else [kernel, bias], rows, plan


def losses(primals: dict[str, Any], labels: Any, chunk_size: int) -> Any:
    """Return the loss of each token."""
    kernel, bias, features = [primals.get(name) for name in ("kernel", "bias", "features")]
    return _loss_and_normalizer(kernel, bias, features, labels, chunk_size)[0]


def weighted_sum(primals: dict[str, Any], labels: Any, chunk_size: int) -> Any:
    """Return the sum of the weighted losses, which can be differentiated to any order."""
    return ops.sum(weighted(losses(primals, labels, chunk_size), primals["weights"]))


def weighted(losses: Any, weights: Any) -> Any:
    """Return the losses times their weights. A weight of zero gives zero, also for an infinite loss."""
    ignored = ops.logical_and(ops.equal(weights, 0.0), ops.equal(losses, float("inf")))
    return ops.where(ignored, ops.zeros_like(losses), losses) * weights


@op_custom_gradient(name="multigrad>linear_cross_entropy_sum")
def sum_with_gradients(primals: dict[str, Any], labels: Any, chunk_size: int, all_gradients: bool) -> Any:
    """Return the weighted sum, and compute its gradients in the same pass.

    Without `all_gradients`, only the gradients of the features and weights are computed. The rule computes
    the others when they are needed.
    """
    constants = {name: ops.stop_gradient(primal) for name, primal in primals.items()}
    weights = constants.pop("weights")
    others, rows, plan = _flat(
        constants["kernel"], constants.get("bias"), constants["features"], labels, chunk_size
    )
    run = backend.active.program(chunked_head.losses_and_gradients, plan, all_gradients)
    with backend.active.unrecorded():
        (losses, features_gradient), other_gradients = run(rows, [ops.reshape(weights, (-1, 1))], others)
        losses = ops.reshape(losses, ops.shape(weights))
        value = ops.sum(weighted(losses, weights))
    features_gradient = ops.reshape(features_gradient, ops.shape(constants["features"]))
    computed = {"features": features_gradient, "weights": losses}
    computed |= dict(zip(("kernel", "bias"), other_gradients, strict=False))

    def rule(upstream: Any) -> Any:
        def compute(name: str) -> Any:
            if backend.active.needs_plain_rule():
                return _differentiable_gradients(upstream, primals, labels, chunk_size)
            if name in computed:
                return _scaled(upstream, primals, labels, chunk_size, computed)
            _, pull = vjp(lambda primals: weighted_sum(primals, labels, chunk_size), primals)
            return pull(upstream)[0]

        entry = _lazy_entries(compute)
        return {"primals": {name: entry(name) for name in primals}}

    return value, rule


# The forward pass computes the gradients `g` of the weighted sum, for an upstream gradient of one. Their
# derivatives need two functions: `u * g`, linear in `u`, and `sum(v * g)`, linear in `v`. Each is the
# transpose of the other, so that two ops are enough for derivatives of any order. Derivatives with respect to
# the primals differentiate `g` itself.


@op_custom_gradient(name="multigrad>linear_cross_entropy_gradients")
def _scaled(
    upstream: Any, primals: dict[str, Any], labels: Any, chunk_size: int, computed: dict[str, Any]
) -> Any:
    """Return `u * g` for a scalar `u`."""

    def rule(directions: dict[str, Any]) -> Any:
        return {
            "upstream": lambda: _along(directions, primals, labels, chunk_size, computed),
            "primals": lambda: _primal_gradients(upstream, directions, primals, labels, chunk_size),
            "computed": None,
        }

    def times(gradient: Any) -> Any:
        dtype = dtype_of(gradient)
        return ops.cast(ops.cast(upstream, wide_dtype(dtype)) * ops.cast(gradient, wide_dtype(dtype)), dtype)

    return {name: times(gradient) for name, gradient in computed.items()}, rule


@op_custom_gradient(name="multigrad>linear_cross_entropy_slope")
def _along(
    directions: dict[str, Any],
    primals: dict[str, Any],
    labels: Any,
    chunk_size: int,
    computed: dict[str, Any],
) -> Any:
    """Return `sum(v * g)` for directions `v`, in the dtype of the loss."""

    def rule(upstream: Any) -> Any:
        return {
            "directions": lambda: _scaled(upstream, primals, labels, chunk_size, computed),
            "primals": lambda: _primal_gradients(upstream, directions, primals, labels, chunk_size),
            "computed": None,
        }

    dtype = dtype_of(primals["weights"])
    terms = [ops.sum(ops.cast(directions[n], dtype) * ops.cast(g, dtype)) for n, g in computed.items()]
    return sum(terms), rule


def _primal_gradients(
    upstream: Any, directions: dict[str, Any], primals: dict[str, Any], labels: Any, chunk_size: int
) -> Any:
    """Return the gradient of `u * sum(v * g)` with respect to the primals."""

    def gradients(primals: dict[str, Any]) -> Any:
        gradients = _differentiable_gradients(upstream, primals, labels, chunk_size)
        return {name: gradients[name] for name in directions}

    _, pull = vjp(gradients, primals)
    return pull(directions)[0]


def _differentiable_gradients(
    upstream: Any, primals: dict[str, Any], labels: Any, chunk_size: int
) -> dict[str, Any]:
    """Return the gradients of the weighted sum, by operations that the framework can differentiate."""
    features, weights = primals["features"], primals["weights"]
    others, rows, plan = _flat(primals["kernel"], primals.get("bias"), features, labels, chunk_size)
    with backend.active.unrecorded():
        constants = [list(map(ops.stop_gradient, tensors)) for tensors in (rows, others)]
        (normalizer, _), _ = chunked_head.normalizer_and_target(False, plan, constants[0], [], constants[1])
    constant = [*rows, normalizer]
    normalizer, target = chunked_head.differentiable_normalizer_and_target(plan, constant, others)
    rows = [*rows, normalizer]
    scale = ops.reshape(upstream * weights, (-1, 1))
    columns = [scale, ops.zeros_like(scale)]
    (features_gradient,), other_gradients = chunked_head.gradients(False, plan, True, rows, columns, others)
    gradients = {
        "features": ops.cast(ops.reshape(features_gradient, ops.shape(features)), features.dtype),
        "weights": upstream * ops.reshape(normalizer - target, ops.shape(weights)),
    }
    return gradients | dict(zip(("kernel", "bias"), other_gradients, strict=False))

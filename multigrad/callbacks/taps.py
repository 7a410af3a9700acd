"""Taps: ops on the outputs of layers that compute statistics of the gradient in a training step.

A tap returns its input, and its rule returns the upstream gradient, so taps do not change the results of a
step. While a step with taps runs, `hooking_layers` passes the calls of layers to them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import keras
from keras import ops

from multigrad import backend
from multigrad.common.errors import message
from multigrad.common.keras_internals import get_mask, set_mask
from multigrad.op import op_custom_gradient

_LOOPS = (keras.layers.RNN, keras.layers.TimeDistributed)
"""Layers that call their inner layers in a loop. These are skipped on every backend."""


def statistics(x: Any) -> Any:
    """Return norm, largest absolute value, counts of zeros, NaN and Inf, and the number of elements.

    The norm and the largest absolute value are those of the finite elements.

    ```python
    print(statistics(ops.convert_to_tensor([3.0, 0.0, -4.0])))  # [5., 4., 1., 0., 0., 3.]
    ```
    """
    x = backend.active.as_tensor(x)
    if keras.backend.standardize_dtype(x.dtype) != "float64":
        x = ops.cast(x, "float32")
    magnitude = ops.where(ops.isfinite(x), ops.abs(x), ops.zeros_like(x))
    largest = ops.max(magnitude)
    unit = ops.where(largest > 0, largest, ops.ones_like(largest))
    norm = unit * ops.sqrt(ops.sum(ops.square(magnitude / unit)))  # a square would overflow or underflow
    size = ops.cast(ops.size(x), "float32")
    shares = [ops.mean(ops.cast(mask, "float32")) for mask in (ops.equal(x, 0), ops.isnan(x), ops.isinf(x))]
    numbers = [ops.cast(norm, "float32"), ops.cast(largest, "float32"), *[share * size for share in shares]]
    return ops.stack([*numbers, size])


@op_custom_gradient
def _tap_into_slot(x: Any, slot: Any) -> Any:
    """Return `x`. The gradient of `slot` is the statistics of the upstream gradient."""
    return x, lambda upstream: (upstream, statistics(upstream))


def _tap_into(store: dict[int, Any], index: int, x: Any) -> Any:
    """Return `x`, and store the statistics of the upstream gradient when it is computed."""

    def rule(upstream: Any) -> Any:
        store[index] = statistics(upstream)
        return upstream

    return op_custom_gradient(lambda x: (x, rule), name="tap")(x)


class Taps:
    """The taps in one run, or one trace, of a training step.

    Arguments:
        model: the model.
        has_layers: whether layers are tapped in addition to weights.
    """

    SIZE: ClassVar[int] = 6
    """The number of statistics of a tensor, which are a vector of float32."""

    def __init__(self, model: Any, has_layers: bool) -> None:
        self.model, self.has_layers = model, has_layers
        self.slots: Sequence[Any] | None = None
        """Tensors whose gradients are the statistics of the upstream gradients. With None, taps store these.
        """
        self.start()

    def start(self) -> None:
        """Discard all statistics."""
        self.names: list[str] = []
        """The names of the tapped tensors, in the order of the calls."""
        self.outputs: list[Any] = []
        """The statistics of each tapped tensor."""
        self.upstream: dict[int, Any] = {}
        """The statistics of the upstream gradient of each tapped tensor, by its index, where there is one."""
        self._weight_names: list[str] = []
        self._weights: list[Any] = []
        self._scale: Any = None
        self._counts: dict[str, int] = {}
        self._running: list[keras.Layer] = []
        self._level: Any = None
        self._is_open = self._is_counting = False

    @contextlib.contextmanager
    def open(self, counting: bool = False) -> Iterator[None]:
        """Return a context in which layers are tapped, or with `counting` only their names are collected."""
        self.start()
        self._is_open, self._is_counting = self.has_layers, counting
        self._level = backend.active.trace_level()
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """End this context early."""
        self._is_open = False

    def call(self, layer: keras.Layer, run: Callable[[], Any]) -> Any:
        """Return the outputs of a layer that `run` calls, with taps."""
        if not self._is_open:
            return run()
        around = list(self._running)
        self._running.append(layer)
        try:
            outputs = run()
        finally:
            self._running.pop()
        path = "/".join(part.name for part in [*around, layer] if part is not self.model)
        is_in_loop = any([isinstance(part, _LOOPS) for part in around])
        if not path or is_in_loop or backend.active.trace_level() != self._level:
            return outputs
        leaves = keras.tree.flatten(outputs)
        if not any([_has_gradient(leaf) for leaf in leaves]):
            return outputs
        self._counts[path] = count = self._counts.get(path, 0) + 1
        name = path if count == 1 else f"{path}#{count}"
        names = [name] if len(leaves) == 1 else [f"{name}[{i}]" for i in range(len(leaves))]
        return keras.tree.pack_sequence_as(outputs, [*map(self._tap, names, leaves)])

    def _tap(self, name: str, x: Any) -> Any:
        if not _has_gradient(x):
            return x
        self.names.append(name)
        if self._is_counting:
            return x
        index = len(self.outputs)
        self.outputs.append(statistics(ops.stop_gradient(x)))
        slots = self.slots
        y = _tap_into(self.upstream, index, x) if slots is None else _tap_into_slot(x, slots[index])
        if (mask := get_mask(x)) is not None:
            set_mask(y, mask)
        return y

    def see(self, gradients: Sequence[Any], names: Sequence[str], values: Sequence[Any], scale: Any) -> None:
        """Compute the statistics of weights and of their gradients, which are multiplied by `scale`."""
        for name, gradient, value in zip(names, gradients, values, strict=True):
            row = ops.zeros((self.SIZE,)) if gradient is None else statistics(gradient)
            self._weight_names.append(name)
            self._weights.append(ops.stack([statistics(value), row]))
        self._scale = ops.cast(scale, "float32")

    def gather(self) -> dict[str, Any]:
        """Return all statistics: arrays with two rows per name, the value and its gradient.

        The names are the keys, so that each trace of a compiled step returns its own.
        """
        if not self._weights:
            raise ValueError(
                message(
                    "GradientLogger",
                    "the training step applied no gradients",
                    required="a model with trainable weights, and a train_step that calls the methods of "
                    "`model.optimizer`",
                    got=f"the train_step of {type(self.model).__name__}",
                    fix="train with the optimizer that was passed to `compile`",
                )
            )
        missing = ops.zeros((self.SIZE,), "float32")
        rows = [ops.stack([row, self.upstream.get(i, missing)]) for i, row in enumerate(self.outputs)]
        layers = ops.stack(rows) if rows else ops.zeros((0, 2, self.SIZE), "float32")
        weights = ops.stack(self._weights)
        return {
            "layers": {"\n".join(self.names): layers},
            "weights": {"\n".join(self._weight_names): weights},
            "scale": self._scale,
        }


def _has_gradient(leaf: Any) -> bool:
    """Return whether a leaf of a layer's output is a floating tensor with elements."""
    if not backend.active.TENSORS[type(leaf)] or isinstance(leaf, keras.KerasTensor):
        return False
    is_floating = keras.backend.is_float_dtype(keras.backend.standardize_dtype(leaf.dtype))
    return is_floating and 0 not in (backend.active.sizes(leaf.shape) or ())

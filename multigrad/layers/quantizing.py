"""Quantizing layers."""

import math
from typing import Any

import keras
from keras import ops

from multigrad.common.errors import message, shape_text, unusable
from multigrad.layers.base import LayerOfSameShape
from multigrad.ops.arguments import is_integer, is_number, stack_tensors, to_python
from multigrad.ops.gradient.quantizing import fake_quantize, level_range
from multigrad.ops.gradient.vector_quantizing import check_commitment, vector_quantize


@keras.saving.register_keras_serializable("multigrad")
class FakeQuantize(LayerOfSameShape):
    """Quantize the inputs with a learned step size (LSQ).

    ```python
    from multigrad import layers, ops

    layer = layers.FakeQuantize(bits=3, step=0.5)
    print(ops.convert_to_numpy(layer(ops.array([0.3, -0.9, 9.0]))))  # [0.5, -1., 1.5]
    ```

    Arguments:
        bits: the number of bits per value, at least 2 if signed and at least 1 if not.
        signed: whether the range is `-2**(bits - 1)` to `2**(bits - 1) - 1` steps, or 0 to `2**bits - 1`.
        axis: an axis with one step size per entry, for example -1 for channels. The default is one step size
            for all.
        step: the initial step size. The default is the step size of the paper for inputs with mean 0 and
            variance 1. `adapt` computes it from data.

    Weights:
        `step`. Training keeps it positive, at least `keras.config.epsilon()`, 1e-7. Rescale data whose values
        are not much larger.

    Input and output:
        A tensor of any shape, of a real floating dtype. Do not wrap the layer in
        `keras.layers.TimeDistributed`, which calls it once per time step. The gradient of `step` is divided
        by the square root of the number of elements per call, so that it would be `sqrt(T)` times as large
        for `T` time steps.

    Raises:
        TypeError: if `axis` is not an integer.
        ValueError: if there are too few bits, `step` is not positive, or the input does not have the axis
            with a static size.

    References:
        Esser et al. 2020, Learned Step Size Quantization, arXiv:1902.08153.
    """

    OPTIONS = ("bits", "signed", "axis")

    def __init__(
        self,
        bits: int = 8,
        signed: bool = True,
        axis: int | None = None,
        step: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        # An op would treat a NumPy scalar as a tensor.
        bits, signed, axis, step = map(to_python, (bits, signed, axis, step))
        _, self._highest = level_range(bits, signed)
        if axis is not None and not is_integer(axis):
            required, fix = "an integer, or None", "pass axis=-1 for the last axis"
            raise unusable(TypeError, "FakeQuantize", "axis", required=required, got=axis, fix=fix)
        if step is not None and not (is_number(step) and step > 0.0):
            required, fix = "a positive number, or None", "leave it out, and call `adapt` with data"
            raise unusable(ValueError, "FakeQuantize", "step", required=required, got=step, fix=fix)
        self.bits, self.signed, self.axis, self._initial = int(bits), signed, axis, step
        self.step: Any = None

    def build(self, input_shape: Any) -> None:
        rank = len(input_shape)
        has_axis = self.axis is None or (-rank <= self.axis < rank and input_shape[self.axis] is not None)
        if not has_axis:
            required = f"an axis of known size, {-rank} to {rank - 1}, for shape {shape_text(input_shape)}"
            fix = "pass axis=-1 for the last axis, or None for one step for all"
            raise unusable(ValueError, "FakeQuantize", "axis", required=required, got=self.axis, fix=fix)
        shape = () if self.axis is None else (input_shape[self.axis],)
        initial = self._initial_step(_MEAN_ABS_OF_NORMAL) if self._initial is None else self._initial
        initializer = keras.initializers.Constant(initial)
        # In float32 for every dtype policy, because small updates are lost in half precision.
        self.step = self.add_weight(
            shape, initializer, "float32", constraint=_Positive(), autocast=False, name="step"
        )

    def _initial_step(self, mean: Any) -> Any:
        """Return the initial step for inputs of this mean absolute value (section 2.1 of the paper)."""
        return 2.0 * mean / math.sqrt(self._highest)

    def adapt(self, data: Any) -> None:
        """Set the step size to the initial value of the paper, `2 * mean(abs(data)) / sqrt(high)`.

        Arguments:
            data: inputs of the layer, a tensor or an array.

        Raises:
            ValueError: if the data for a step is all zero, empty or not finite.
        """
        data = ops.convert_to_tensor(data, dtype="float32")
        if not self.built:
            self.build(data.shape)
        axes = range(len(data.shape))
        reduced = None if self.axis is None else [i for i in axes if i != self.axis % len(axes)]
        mean = ops.mean(ops.abs(data), axis=reduced)
        if not ops.all(ops.logical_and(mean > 0.0, ops.isfinite(mean))):
            raise ValueError(
                message(
                    "FakeQuantize.adapt",
                    "the data is all zero, empty or not finite",
                    argument="'data'",
                    required="finite data for each step, with elements other than zero",
                    got=f"a mean absolute value of {ops.convert_to_numpy(mean)}",
                    fix="pass typical inputs, and remove channels that are always zero",
                )
            )
        self.step.assign(self._initial_step(mean))

    def call(self, inputs: Any) -> Any:
        step = self.step
        if self.axis is not None:
            sizes = [1] * len(inputs.shape)
            sizes[self.axis] = -1
            step = ops.reshape(step, sizes)
        return fake_quantize(inputs, step, self.bits, self.signed)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "step": self._initial}


@keras.saving.register_keras_serializable("multigrad")
class VectorQuantizer(LayerOfSameShape):
    """Replace each vector by the closest vector of a learned codebook: the bottleneck of VQ-VAE.

    ```python
    from multigrad import layers, ops

    layer = layers.VectorQuantizer(16)
    x = ops.ones((2, 5, 4))
    print(layer(x).shape, layer.indices(x).shape)  # (2, 5, 4) (2, 5)
    print(layer.vectors(layer.indices(x)).shape)  # (2, 5, 4)
    ```

    The layer adds the mean of its loss to the loss of the model. The loss moves the codebook towards the
    inputs, and the inputs towards the codebook with the weight `commitment`. Masked vectors do not count.

    Arguments:
        count: the number of vectors in the codebook.
        commitment: the weight of the loss that moves the inputs towards the codebook, beta in the paper.
        initializer: the initializer of the codebook. The default is uniform in `-1 / count` to `1 / count`.

    Weights:
        `codebook`, of shape `(count, d)`.

    Input and output:
        A floating tensor of shape `(..., d)`. The upstream gradient passes to the inputs unchanged. Do not
        wrap the layer in `keras.layers.TimeDistributed`, which calls it once per time step. For `T` time
        steps it would add `T` losses, whose sum is `T` times the mean over all vectors.

    Raises:
        TypeError: if `commitment` is not a number.
        ValueError: if `count` is not positive, or `commitment` is negative.

    References:
        van den Oord, Vinyals and Kavukcuoglu 2017, Neural Discrete Representation Learning, arXiv:1711.00937.
    """

    OPTIONS = ("count", "commitment")

    def __init__(
        self,
        count: int,
        commitment: float = 0.25,
        initializer: str | keras.initializers.Initializer | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        count, commitment = to_python(count), to_python(commitment)
        if not (is_integer(count) and count >= 1):
            required, fix = "an integer of at least 1", "write VectorQuantizer(512), for example"
            raise unusable(ValueError, "VectorQuantizer", "count", required=required, got=count, fix=fix)
        check_commitment(commitment)
        self.count, self.commitment = count, commitment
        if initializer is None:  # created only if needed, because it draws a random seed
            initializer = keras.initializers.RandomUniform(-1.0 / count, 1.0 / count)
        self.initializer = keras.initializers.get(initializer)
        self.codebook: Any = None

    def build(self, input_shape: Any) -> None:
        # In float32 for every dtype policy, as distances are.
        self.codebook = self.add_weight(
            (self.count, input_shape[-1]), self.initializer, "float32", autocast=False, name="codebook"
        )

    def call(self, inputs: Any, mask: Any = None) -> Any:
        quantized, _, loss = vector_quantize(inputs, self.codebook, self.commitment)
        if mask is None:
            self.add_loss(ops.mean(loss))
        else:
            counts = ops.cast(mask, loss.dtype)
            counts = ops.reshape(counts, (*ops.shape(counts), *[1] * (len(loss.shape) - len(mask.shape))))
            counts = ops.broadcast_to(counts, ops.shape(loss))
            self.add_loss(ops.sum(loss * counts) / ops.maximum(ops.sum(counts), 1.0))
        return quantized

    def indices(self, inputs: Any) -> Any:
        """Return the index of the codebook vector closest to each input: int32 of shape `(...)`."""
        inputs = stack_tensors("VectorQuantizer.indices", "inputs", inputs)
        if not self.built:
            self.build(inputs.shape)
        return vector_quantize(inputs, self.codebook, self.commitment).indices

    def vectors(self, indices: Any) -> Any:
        """Return the codebook vectors at these indices, of shape `(..., d)`."""
        if not self.built:
            problem = "the codebook does not exist yet, because its width depends on the inputs"
            required, got = "a layer that was called or built", "a layer that was not"
            fix = "call the layer first, or build it with the shape of its inputs"
            raise ValueError(message("VectorQuantizer.vectors", problem, required=required, got=got, fix=fix))
        return ops.take(self.codebook, indices, axis=0)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "initializer": keras.initializers.serialize(self.initializer)}


_MEAN_ABS_OF_NORMAL = math.sqrt(2.0 / math.pi)
"""The mean absolute value of a standard normal distribution."""


class _Positive(keras.constraints.Constraint):
    """Keeps a step positive when an optimizer moves it to zero or below."""

    def __call__(self, w: Any) -> Any:
        return ops.maximum(w, keras.config.epsilon())

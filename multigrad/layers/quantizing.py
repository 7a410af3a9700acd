"""Layers with few values."""

import math
from typing import Any

import keras
from keras import ops

from multigrad.core.errors import message, shape_text, unusable
from multigrad.ops.arguments import is_integer, is_number, plain, stacked
from multigrad.ops.quantizing import fake_quantize, levels
from multigrad.ops.vector_quantizing import vector_quantize


@keras.saving.register_keras_serializable("multigrad")
class FakeQuantize(keras.layers.Layer):
    """Its input in steps of a learned size: learned step size quantization.

    ```python
    from multigrad import layers, ops

    layer = layers.FakeQuantize(bits=3, step=0.5)
    print(ops.convert_to_numpy(layer(ops.array([0.3, -0.9, 9.0]))))  # [0.5, -1., 1.5]
    ```

    Arguments:
        bits: how many bits a value has, 2 or more; 1 or more where it is not signed.
        signed: whether values are `-2**(bits - 1)` to `2**(bits - 1) - 1` steps, or 0 to `2**bits - 1`.
        axis: the axis along which each entry has a step of its own, such as -1 for channels; one step for all
            if it is not given.
        step: the size that the step begins with. If it is not given, that of the paper for inputs with a mean
            of 0 and a variance of 1. `adapt` finds it for data.

    Weights:
        `step`, which stays positive: once it is trained, `keras.config.epsilon()` at least, 1e-7. Scale data
        that are not much larger.

    Input and output:
        A tensor of any shape, of a real floating dtype. So it needs no `keras.layers.TimeDistributed`, which
        calls it once for each of `T` time steps: the gradient of `step`, which is divided by the root of the
        number of elements in a call, is `sqrt(T)` times as large there.

    Raises:
        TypeError: for an axis that is no integer.
        ValueError: for too few bits, a step that is not positive, or an axis that the input has not, or of
            which the size is not known.

    References:
        Esser et al. 2020, Learned Step Size Quantization, arXiv:1902.08153.
    """

    def __init__(
        self,
        bits: int = 8,
        signed: bool = True,
        axis: int | None = None,
        step: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        bits, signed, axis, step = map(plain, (bits, signed, axis, step))  # a number of NumPy's is a tensor
        _, self._highest = levels(bits, signed)
        if axis is not None and not is_integer(axis):
            required, fix = "an integer, or None", "pass axis=-1 for the last one"
            raise unusable(TypeError, "FakeQuantize", "axis", required=required, got=axis, fix=fix)
        if step is not None and not (is_number(step) and step > 0.0):
            raise ValueError(
                message(
                    "FakeQuantize",
                    "the step is not positive",
                    argument="'step'",
                    required="a positive number, or None",
                    got=repr(step),
                    fix="leave it out, and call `adapt` with data",
                )
            )
        self.bits, self.signed, self.axis, self._given = int(bits), signed, axis, step
        self.step: Any = None

    def build(self, input_shape: Any) -> None:
        rank = len(input_shape)
        known = self.axis is None or (-rank <= self.axis < rank and input_shape[self.axis] is not None)
        if not known:
            raise ValueError(
                message(
                    "FakeQuantize",
                    "the input has no such axis, or not one whose size is known",
                    argument="'axis'",
                    required=f"one of {-rank} to {rank - 1}, for an input of shape {shape_text(input_shape)}",
                    got=repr(self.axis),
                    fix="pass axis=-1 for the last one, or None for one step for all",
                )
            )
        shape = () if self.axis is None else (input_shape[self.axis],)
        first = self._first(_MEAN_OF_NORMAL) if self._given is None else self._given
        constant = keras.initializers.Constant(first)
        # In float32 whatever the layer computes in: an optimizer's updates are lost in half of it.
        self.step = self.add_weight(
            shape, constant, "float32", constraint=_Positive(), autocast=False, name="step"
        )

    def _first(self, mean: Any) -> Any:
        """Section 2.1 of the paper: the step to begin with, for inputs of this mean absolute value."""
        return 2.0 * mean / math.sqrt(self._highest)

    def adapt(self, data: Any) -> None:
        """Set the step to that which the paper begins with, `2 * mean(abs(data)) / sqrt(high)`.

        Arguments:
            data: inputs of the layer, a tensor or an array.

        Raises:
            ValueError: where all of the data for a step is zero, there is none, or it is not finite.
        """
        data = ops.convert_to_tensor(data, dtype="float32")
        if not self.built:
            self.build(data.shape)
        axes = range(len(data.shape))
        beside = None if self.axis is None else [i for i in axes if i != self.axis % len(axes)]
        mean = ops.mean(ops.abs(data), axis=beside)
        if not ops.all(ops.logical_and(mean > 0.0, ops.isfinite(mean))):
            raise ValueError(
                message(
                    "FakeQuantize.adapt",
                    "there is no step for data that is zero, empty or not finite",
                    argument="'data'",
                    required="finite numbers other than zero for each step",
                    got=f"a mean absolute value of {ops.convert_to_numpy(mean)}",
                    fix="pass data that is typical of the inputs, and drop channels that are always zero",
                )
            )
        self.step.assign(self._first(mean))

    def call(self, inputs: Any) -> Any:
        step = self.step
        if self.axis is not None:
            sizes = [1] * len(inputs.shape)
            sizes[self.axis] = -1
            step = ops.reshape(step, sizes)
        return fake_quantize(inputs, step, self.bits, self.signed)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        own = {"bits": self.bits, "signed": self.signed, "axis": self.axis, "step": self._given}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable("multigrad")
class VectorQuantizer(keras.layers.Layer):
    """Each vector replaced by the closest one of a codebook, which is learned: the bottleneck of VQ-VAE.

    ```python
    from multigrad import layers, ops

    layer = layers.VectorQuantizer(16)
    x = ops.ones((2, 5, 4))
    print(layer(x).shape, layer.indices(x).shape)  # (2, 5, 4) (2, 5)
    print(layer.vectors(layer.indices(x)).shape)  # (2, 5, 4)
    ```

    The layer adds the mean of its loss to that of the model: what moves the codebook towards the inputs, and
    `commitment` times as much, the inputs towards the codebook. Vectors that are masked have no part in it.

    Arguments:
        count: how many vectors there are in the codebook.
        commitment: how strongly the inputs are held to their vectors, beta in the paper.
        initializer: what the codebook begins with: uniform in `-1 / count` to `1 / count` if not given.

    Weights:
        `codebook`, of shape `(count, d)`.

    Input and output:
        A floating tensor of shape `(..., d)`. The gradient of the model's loss passes through as it is. It
        needs no `keras.layers.TimeDistributed`, which calls it once for each of `T` time steps and so adds
        `T` losses: their sum is `T` times the mean over all vectors.

    Raises:
        ValueError: for a `count` that is not positive, or a negative `commitment`.

    References:
        van den Oord, Vinyals and Kavukcuoglu 2017, Neural Discrete Representation Learning, arXiv:1711.00937.
    """

    def __init__(self, count: Any, commitment: float = 0.25, initializer: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        count, commitment = plain(count), plain(commitment)
        if not (is_integer(count) and count >= 1 and is_number(commitment) and commitment >= 0.0):
            raise ValueError(
                message(
                    "VectorQuantizer",
                    "there is no such codebook",
                    required="an integer `count`, 1 or more, and a `commitment` of 0 or more",
                    got=f"count={count!r}, commitment={commitment!r}",
                    fix="write VectorQuantizer(512), for example",
                )
            )
        self.supports_masking = True
        self.count, self.commitment = count, commitment
        if initializer is None:  # made only here, because an initializer without a seed draws one
            initializer = keras.initializers.RandomUniform(-1.0 / count, 1.0 / count)
        self.initializer = keras.initializers.get(initializer)
        self.codebook: Any = None

    def build(self, input_shape: Any) -> None:
        # In float32 whatever the layer computes in: distances are.
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
        """Which vector of the codebook is closest to each of the inputs: int32, of shape `(...)`."""
        inputs = stacked("VectorQuantizer.indices", "inputs", inputs)
        if not self.built:
            self.build(inputs.shape)
        return vector_quantize(inputs, self.codebook, self.commitment).indices

    def vectors(self, indices: Any) -> Any:
        """The vectors of the codebook at these indices, of shape `(..., d)`."""
        if not self.built:
            raise ValueError(
                message(
                    "VectorQuantizer.vectors",
                    "there is no codebook yet, of which the inputs tell how wide it is",
                    required="a layer that was called, or built",
                    got="one that was not",
                    fix="call the layer first, or build it with the shape of its inputs",
                )
            )
        return ops.take(self.codebook, indices, axis=0)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        initializer = keras.initializers.serialize(self.initializer)
        own = {"count": self.count, "commitment": self.commitment, "initializer": initializer}
        return {**super().get_config(), **own}


_MEAN_OF_NORMAL = math.sqrt(2.0 / math.pi)  # of the absolute value, where the mean is 0 and the variance 1


class _Positive(keras.constraints.Constraint):
    """A step that an optimizer brings to zero, or across, stays a small positive one."""

    def __call__(self, w: Any) -> Any:
        return ops.maximum(w, keras.config.epsilon())

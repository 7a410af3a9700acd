"""Layers that pass their input on unchanged, and change its gradient."""

import numbers
from typing import Any

import keras
from keras import ops

from multigrad.core.errors import describe, message
from multigrad.ops.arguments import plain
from multigrad.ops.routing import bound_of, clip_gradient, reverse_gradient, scale_gradient

_Schedule = keras.optimizers.schedules.LearningRateSchedule


@keras.saving.register_keras_serializable("multigrad")
class GradientScale(keras.layers.Layer):
    """Passes its input on, and the gradient multiplied by a factor.

    ```python
    import keras
    from multigrad import grad, layers

    layer = layers.GradientScale(0.5)
    print(grad(lambda x: 3.0 * layer(x))(2.0))  # 1.5
    layer.scale.assign(0.1)
    print(grad(lambda x: 3.0 * layer(x))(2.0))  # 0.3
    ```

    Arguments:
        scale: the factor: a number, or a schedule. A number is the initial value of the weight `scale`, which
            is not trained. Values can be assigned to it between two steps, also in a compiled `fit`, and are
            saved with the model. A schedule is a `keras.optimizers.schedules.LearningRateSchedule`, or a
            function from the step, a float32 tensor, to the factor. Register the function with
            `keras.saving.register_keras_serializable` if the model is saved. The weight `steps` counts the
            calls with `training=True`. If the layer is called twice in a step, as `keras.RematScope` does on
            PyTorch for the backward pass, it counts both. In `keras.layers.TimeDistributed` it counts each of
            `T` time steps, so that a schedule runs `T` times as fast: call it on the whole sequence.

    Input and output:
        A tensor of any shape, of a floating dtype.

    Raises:
        TypeError: if `scale` is neither a number nor a schedule.

    References:
        Those of `multigrad.ops.scale_gradient`.
    """

    _op = staticmethod(scale_gradient)

    def __init__(self, scale: Any = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        scheduled = callable(scale)
        if not scheduled and (isinstance(scale, bool) or not isinstance(scale, numbers.Real)):
            raise TypeError(
                message(
                    type(self).__name__,
                    "the factor of the gradient is neither a number nor a schedule",
                    argument="'scale'",
                    required="a number, a LearningRateSchedule of Keras, or a function of the step",
                    got=describe(scale),
                    fix="pass a number, and assign other values to the layer's weight `scale`",
                )
            )
        self._given: Any = scale if scheduled else float(scale)
        # float32 for every dtype policy: float16 would lose the small changes of a slow schedule.
        self.scale = self.steps = None
        if scheduled:
            self.steps = self.add_weight((), "zeros", "int32", trainable=False, autocast=False, name="steps")
        else:
            constant = keras.initializers.Constant(self._given)
            self.scale = self.add_weight(
                (), constant, "float32", trainable=False, autocast=False, name="scale"
            )

    def call(self, inputs: Any, training: bool = False) -> Any:
        if self.steps is None:
            return self._op(inputs, self.scale)
        step = self.steps.value
        if not isinstance(self._given, _Schedule):
            step = ops.cast(step, "float32")  # in which a function may compute with Python floats
        factor = ops.cast(self._given(step), "float32")
        if training:
            self.steps.assign_add(1)
        return self._op(inputs, factor)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        scale = self._given
        if callable(scale):
            scale = keras.saving.serialize_keras_object(scale)
        return {**super().get_config(), "scale": scale}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        scale = config["scale"]
        return cls(**{**config, "scale": keras.saving.deserialize_keras_object(scale)})


@keras.saving.register_keras_serializable("multigrad")
class GradientReversal(GradientScale):
    """Passes its input on, and the negative of the gradient, times a factor.

    What precedes it is trained against what follows: features that a classifier of domains cannot tell apart.

    ```python
    import keras
    from multigrad import grad, layers

    layer = layers.GradientReversal(0.5)
    print(grad(lambda x: 3.0 * layer(x))(2.0))  # -1.5
    ```

    Arguments:
        scale: the factor, lambda in the paper, as in `GradientScale`: a number that can be assigned to, or a
            schedule.

    Input and output:
        A tensor of any shape, of a floating dtype.

    Raises:
        TypeError: when `scale` is neither a number nor a schedule.

    References:
        Ganin and Lempitsky 2015, Unsupervised Domain Adaptation by Backpropagation, arXiv:1409.7495.
    """

    _op = staticmethod(reverse_gradient)


@keras.saving.register_keras_serializable("multigrad")
class GradientClip(keras.layers.Layer):
    """Passes its input on, and the gradient clipped.

    ```python
    import keras
    from multigrad import grad, layers, ops

    layer = layers.GradientClip(norm=1.0)
    print(grad(lambda x: ops.sum(ops.array([3.0, 4.0]) * layer(x)))(ops.array([1.0, 2.0])))  # [0.6, 0.8]
    ```

    Arguments:
        value: the largest absolute value of an element of the gradient.
        norm: the largest Euclidean norm of the gradient, of which a larger one is scaled down to it.
        axis: the axes along which the norm is taken: all of them, that of the batch included, if not given.

    What is clipped is the gradient of what is differentiated: of a loss times the scale of a
    `keras.optimizers.LossScaleOptimizer`, which is that of `compile` under the policy "mixed_float16", it is
    the scaled gradient.

    Input and output:
        A tensor of any shape, of a real floating dtype. Something complex is a TypeError.

    Raises:
        ValueError: unless one of `value` and `norm` is given, and is positive.

    References:
        Those of `multigrad.ops.clip_gradient`.
    """

    def __init__(
        self, value: float | None = None, norm: float | None = None, axis: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.value, self.norm, self.axis = map(plain, (value, norm, axis))
        bound_of(self.value, self.norm)  # raises where there is none

    def call(self, inputs: Any) -> Any:
        return clip_gradient(inputs, value=self.value, norm=self.norm, axis=self.axis)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "value": self.value, "norm": self.norm, "axis": self.axis}

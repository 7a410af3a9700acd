"""Layers that return their input unchanged, and change its gradient."""

import numbers
from typing import Any

import keras
from keras import ops

from multigrad.common.errors import unusable
from multigrad.layers.base import LayerOfSameShape
from multigrad.ops.arguments import to_python
from multigrad.ops.gradient.routing import clip_bound, clip_gradient, reverse_gradient, scale_gradient

_Schedule = keras.optimizers.schedules.LearningRateSchedule


@keras.saving.register_keras_serializable("multigrad")
class GradientScale(LayerOfSameShape):
    """Return the inputs, and multiply the gradient by a factor.

    ```python
    import keras
    from multigrad import grad, layers

    layer = layers.GradientScale(0.5)
    print(grad(lambda x: 3.0 * layer(x))(2.0))  # 1.5
    layer.scale.assign(0.1)
    print(grad(lambda x: 3.0 * layer(x))(2.0))  # 0.3
    ```

    Arguments:
        scale: the factor: a number, or a schedule. A number is the initial value of the non-trainable weight
            `scale`, which is saved with the model. Assign to it between steps, also in a compiled `fit`. A
            schedule is a `keras.optimizers.schedules.LearningRateSchedule`, or a function from the step, a
            float32 tensor, to the factor. Register the function with
            `keras.saving.register_keras_serializable` if the model is saved. A schedule computes the factor
            from the weight `steps`, which counts the calls with `training=True`. It counts every call: both
            calls of a step with `keras.RematScope` on PyTorch, and one per time step in
            `keras.layers.TimeDistributed`. So call the layer on the whole sequence.

    Input and output:
        A tensor of any shape, of a floating dtype.

    Raises:
        TypeError: if `scale` is neither a number nor a schedule.

    References:
        See `multigrad.ops.scale_gradient`.
    """

    _op = staticmethod(scale_gradient)

    def __init__(self, scale: Any = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        scheduled = callable(scale)
        if not scheduled and (isinstance(scale, bool) or not isinstance(scale, numbers.Real)):
            required = "a number, a LearningRateSchedule of Keras, or a function of the step"
            fix = "pass a number, and assign later values to the weight `scale` of the layer"
            raise unusable(TypeError, type(self).__name__, "scale", required=required, got=scale, fix=fix)
        self._initial: Any = scale if scheduled else float(scale)
        # In float32 for every dtype policy, because half precision loses the small steps of a slow schedule.
        self.scale = self.steps = None
        if scheduled:
            self.steps = self.add_weight((), "zeros", "int32", trainable=False, autocast=False, name="steps")
        else:
            initializer = keras.initializers.Constant(self._initial)
            self.scale = self.add_weight(
                (), initializer, "float32", trainable=False, autocast=False, name="scale"
            )

    def call(self, inputs: Any, training: bool = False) -> Any:
        if self.steps is None:
            return self._op(inputs, self.scale)
        step = self.steps.value
        if not isinstance(self._initial, _Schedule):
            step = ops.cast(step, "float32")  # so that a schedule can multiply by Python floats
        factor = ops.cast(self._initial(step), "float32")
        if training:
            self.steps.assign_add(1)
        return self._op(inputs, factor)

    def get_config(self) -> dict[str, Any]:
        scale = self._initial
        if callable(scale):
            scale = keras.saving.serialize_keras_object(scale)
        return {**super().get_config(), "scale": scale}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        scale = config["scale"]
        return cls(**{**config, "scale": keras.saving.deserialize_keras_object(scale)})


@keras.saving.register_keras_serializable("multigrad")
class GradientReversal(GradientScale):
    """Return the inputs, and multiply the gradient by a negative factor.

    Use it for adversarial training, for example to learn features that a domain classifier cannot
    distinguish.

    ```python
    import keras
    from multigrad import grad, layers

    layer = layers.GradientReversal(0.5)
    print(grad(lambda x: 3.0 * layer(x))(2.0))  # -1.5
    ```

    Arguments:
        scale: the factor without its sign, lambda in the paper: a number or a schedule, as in
            `GradientScale`.

    Input and output:
        A tensor of any shape, of a floating dtype.

    Raises:
        TypeError: if `scale` is neither a number nor a schedule.

    References:
        Ganin and Lempitsky 2015, Unsupervised Domain Adaptation by Backpropagation, arXiv:1409.7495.
    """

    _op = staticmethod(reverse_gradient)


@keras.saving.register_keras_serializable("multigrad")
class GradientClip(LayerOfSameShape):
    """Return the inputs, and clip the gradient.

    ```python
    import keras
    from multigrad import grad, layers, ops

    layer = layers.GradientClip(norm=1.0)
    print(grad(lambda x: ops.sum(ops.array([3.0, 4.0]) * layer(x)))(ops.array([1.0, 2.0])))  # [0.6, 0.8]
    ```

    Arguments:
        value: the largest absolute value of an element of the gradient.
        norm: the largest Euclidean norm of the gradient. A gradient with a larger norm is scaled down.
        axis: the axes over which the norm is computed. The default is all axes, including the batch axis.

    With a `keras.optimizers.LossScaleOptimizer`, which `compile` uses under the policy "mixed_float16", the
    layer clips the gradient of the scaled loss.

    Input and output:
        A tensor of any shape, of a real floating dtype. A complex tensor raises TypeError.

    Raises:
        ValueError: unless exactly one of `value` and `norm` is given and positive.

    References:
        See `multigrad.ops.clip_gradient`.
    """

    OPTIONS = ("value", "norm", "axis")

    def __init__(
        self,
        value: float | None = None,
        norm: float | None = None,
        axis: int | tuple[int, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.value, self.norm, self.axis = map(to_python, (value, norm, axis))
        clip_bound(self.value, self.norm)  # raises if it is invalid

    def call(self, inputs: Any) -> Any:
        return clip_gradient(inputs, value=self.value, norm=self.norm, axis=self.axis)

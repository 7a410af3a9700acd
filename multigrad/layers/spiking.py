"""The layer for `spike`."""

from typing import Any

import keras
from keras import ops

from multigrad.layers.base import LayerOfSameShape
from multigrad.ops.arguments import to_python
from multigrad.ops.gradient.spiking import spike, surrogate_derivative


@keras.saving.register_keras_serializable("multigrad")
class Spike(LayerOfSameShape):
    """Return 1 where the input is above a threshold and 0 elsewhere, with the gradient of a smooth step.

    ```python
    from multigrad import layers, ops

    print(ops.convert_to_numpy(layers.Spike(threshold=1.0)(ops.array([0.5, 1.5]))))  # [0., 1.]
    ```

    Arguments:
        threshold: the threshold, a number.
        surrogate: the smooth step function, "fast_sigmoid" or "arctan".
        slope: the steepness of the smooth step function, a positive number. The default is 10 for
            "fast_sigmoid" and 2 for "arctan".

    Input and output:
        A tensor of any shape, of a real floating dtype.

    Raises:
        TypeError: if the slope is not a number.
        ValueError: if the surrogate is unknown, or the slope is not positive.

    References:
        See `multigrad.ops.spike`.
    """

    OPTIONS = ("threshold", "surrogate", "slope")

    def __init__(
        self,
        threshold: float = 0.0,
        surrogate: str = "fast_sigmoid",
        slope: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.threshold, self.surrogate, self.slope = to_python(threshold), surrogate, to_python(slope)
        surrogate_derivative(self.surrogate, self.slope)  # raises if they are invalid

    def call(self, inputs: Any) -> Any:
        # To infer shapes after a product, Keras (3.15) passes a sparse placeholder, which has no subtraction.
        inputs = ops.convert_to_tensor(inputs, sparse=False)
        return spike(inputs - self.threshold, self.surrogate, self.slope)

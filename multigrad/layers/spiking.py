"""The layer of a spike."""

from typing import Any

import keras
from keras import ops

from multigrad.ops.arguments import plain
from multigrad.ops.spiking import spike, surrogate_of


@keras.saving.register_keras_serializable("multigrad")
class Spike(keras.layers.Layer):
    """1 where the input is above a threshold and 0 elsewhere, with the gradient of a smooth step.

    ```python
    from multigrad import layers, ops

    print(ops.convert_to_numpy(layers.Spike(threshold=1.0)(ops.array([0.5, 1.5]))))  # [0., 1.]
    ```

    Arguments:
        threshold: the number above which there is a spike.
        surrogate: "fast_sigmoid" or "arctan", whose derivative stands in for that of the step.
        slope: how steep the smooth step is, positive: 10 for a fast sigmoid and 2 for an arctangent if it is
            not given.

    Input and output:
        A tensor of any shape, of a real floating dtype.

    Raises:
        ValueError: for another surrogate, or a slope that is not positive.

    References:
        Those of `multigrad.ops.spike`.
    """

    def __init__(
        self,
        threshold: float = 0.0,
        surrogate: str = "fast_sigmoid",
        slope: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.threshold, self.surrogate, self.slope = plain(threshold), surrogate, plain(slope)
        surrogate_of(self.surrogate, self.slope)  # raises where there is no such surrogate

    def call(self, inputs: Any) -> Any:
        # Keras (3.15) infers shapes with a sparse placeholder behind a product, which has no difference.
        inputs = ops.convert_to_tensor(inputs, sparse=False)
        return spike(inputs - self.threshold, self.surrogate, self.slope)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        own = {"threshold": self.threshold, "surrogate": self.surrogate, "slope": self.slope}
        return {**super().get_config(), **own}

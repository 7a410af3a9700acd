"""The layer for `fixed_point`."""

import copy
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from multigrad.common.errors import shape_text, unusable
from multigrad.ops.arguments import to_python
from multigrad.ops.implicit.functions import fixed_point
from multigrad.ops.implicit.solvers import FixedPointIteration


@keras.saving.register_keras_serializable("multigrad")
class FixedPoint(keras.layers.Layer):
    """Compute the fixed point of another layer: a deep equilibrium layer.

    ```python
    import keras
    from multigrad import layers

    z, x = keras.Input((8,)), keras.Input((4,))
    both = keras.layers.Dense(8, kernel_initializer="zeros")(z) + keras.layers.Dense(8)(x)
    layer = layers.FixedPoint(keras.Model([z, x], keras.ops.tanh(both)), shape=(8,))
    print(layer(keras.ops.ones((2, 4))).shape)  # (2, 8)
    ```

    It returns `z = cell([z, inputs])`, starting from zeros and calling the cell repeatedly. The gradient is
    the gradient of the solution, computed by `multigrad.ops.fixed_point`. Its memory does not grow with the
    number of calls.

    Arguments:
        cell: a layer or model that is called with a list of `z` and the inputs, and returns the next `z`. It
            must be a contraction, and deterministic: without dropout or batch statistics.
        shape: the shape of `z`, without the batch dimension. The default is the shape of the inputs.
        tolerance: the largest change of an example of `z` in its last call, as in
            `multigrad.ops.fixed_point` with `batched=True`.
        max_iterations: the largest number of calls of the cell, and of iterations in the backward pass.

    Input and output:
        The input is a floating tensor of shape `(batch, ...)`, and the output has shape `(batch, *shape)`.

    Raises:
        RuntimeError: if `z`, or the adjoint equation, has not converged after `max_iterations`. In compiled
            code, for example in `fit`, the result is NaN instead.
        TypeError: if `cell` is not a layer.
        ValueError: if the output of the cell has another shape than `z`, or if `tolerance` or
            `max_iterations` is not positive.

    References:
        Bai, Kolter and Koltun 2019, Deep Equilibrium Models, arXiv:1909.01377.
    """

    def __init__(
        self,
        cell: keras.layers.Layer,
        shape: Sequence[int] | None = None,
        tolerance: float | None = None,
        max_iterations: int = 1000,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not isinstance(cell, keras.layers.Layer):
            required = "a layer or model, whose weights are tracked, called with a list of `z` and the inputs"
            fix = "write the cell as a layer, or call multigrad.ops.fixed_point"
            raise unusable(TypeError, "FixedPoint", "cell", required=required, got=cell, fix=fix)
        self.supports_masking = True
        self.cell, self.tolerance, self.max_iterations = cell, to_python(tolerance), to_python(max_iterations)
        FixedPointIteration("FixedPoint", self.tolerance, self.max_iterations)  # raises if they are invalid
        self._shape = None if shape is None else to_python(tuple(shape))

    def build(self, input_shape: Any) -> None:
        # A symbolic call builds any kind of cell, and returns the shape of its output.
        z = keras.KerasTensor(self.compute_output_shape(input_shape), self.cell.compute_dtype)
        output = self.cell([z, keras.KerasTensor(input_shape, self.compute_dtype)])
        if tuple(output.shape[1:]) != tuple(z.shape[1:]):
            required = f"a layer whose output has the shape of `z`, {shape_text(z.shape)}"
            fix = "pass the shape of the cell's output, without the batch dimension, as `shape`"
            raise unusable(ValueError, "FixedPoint", "cell", required=required, got=output, fix=fix)

    def call(self, inputs: Any) -> Any:
        dtype = self.cell.compute_dtype
        if self._shape is None:
            start = ops.zeros_like(inputs, dtype=dtype)  # not `ops.zeros`, because sizes may be dynamic
        else:
            start = ops.zeros((ops.shape(inputs)[0], *self._shape), dtype=dtype)
        z = fixed_point(
            lambda z, x: self.cell([z, x]),
            start,
            inputs * 1,  # drops the mask, which the cell would get on some backends, although `z` has none
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            batched=True,
        )
        return ops.cast(z, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return tuple(input_shape) if self._shape is None else (input_shape[0], *self._shape)

    def get_config(self) -> dict[str, Any]:
        options = {"shape": self._shape, "tolerance": self.tolerance, "max_iterations": self.max_iterations}
        cell = keras.saving.serialize_keras_object(self.cell)
        return {**super().get_config(), "cell": cell, **options}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        cell = copy.deepcopy(config["cell"])  # because Keras modifies the config
        return cls(**{**config, "cell": keras.saving.deserialize_keras_object(cell)})

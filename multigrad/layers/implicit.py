"""The layer of a fixed point."""

import copy
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from multigrad.core.errors import describe, message, shape_text
from multigrad.ops.arguments import plain
from multigrad.ops.implicit import fixed_point
from multigrad.ops.implicit_solvers import check_options


@keras.saving.register_keras_serializable("multigrad")
class FixedPoint(keras.layers.Layer):
    """The fixed point of another layer: a deep equilibrium layer, as deep as it takes.

    ```python
    import keras
    from multigrad import layers

    z, x = keras.Input((8,)), keras.Input((4,))
    both = keras.layers.Dense(8, kernel_initializer="zeros")(z) + keras.layers.Dense(8)(x)
    layer = layers.FixedPoint(keras.Model([z, x], keras.ops.tanh(both)), shape=(8,))
    print(layer(keras.ops.ones((2, 4))).shape)  # (2, 8)
    ```

    It returns the `z` with `z = cell([z, inputs])`, for each input, found from zeros by calling the cell
    again and again. The gradient is that of the solution, by `multigrad.ops.fixed_point`: the memory that it
    takes does not grow with the number of calls.

    Arguments:
        cell: a layer or model that is called with a list of `z` and the inputs, and returns the next `z`. It
            is to be a contraction, and to give the same for the same: without dropout, or statistics of the
            batch.
        shape: the shape of `z`, without the dimension of the batch: that of the inputs if not given.
        tolerance: how far `z` may move in the last call, as in `multigrad.ops.fixed_point`.
        max_iterations: how often the cell is called at most, and the same on the way back.

    Input and output:
        A floating tensor of shape `(batch, ...)`, to one of shape `(batch, *shape)`.

    Raises:
        RuntimeError: when `z`, or the equation of the gradient, still moves after `max_iterations`. In
            compiled code, such as that of `fit`, the result is NaN then.
        TypeError: when `cell` is no layer.
        ValueError: when the cell's output has another shape than its `z`, or `tolerance` or `max_iterations`
            is not positive.

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
            raise TypeError(
                message(
                    "FixedPoint",
                    "what is to be repeated is no layer, so that its weights would not be this layer's",
                    argument="'cell'",
                    required="a layer or model that is called with a list of `z` and the inputs",
                    got=describe(cell),
                    fix="write it as a layer, or call multigrad.ops.fixed_point",
                )
            )
        self.supports_masking = True
        self.cell, self.tolerance, self.max_iterations = cell, plain(tolerance), plain(max_iterations)
        check_options("FixedPoint", self.tolerance, self.max_iterations)
        self._given = None if shape is None else plain(tuple(shape))

    def build(self, input_shape: Any) -> None:
        # By a call, which builds a cell of any kind, and says what comes out of it.
        z = keras.KerasTensor(self.compute_output_shape(input_shape), self.cell.compute_dtype)
        following = self.cell([z, keras.KerasTensor(input_shape, self.compute_dtype)])
        if tuple(following.shape[1:]) != tuple(z.shape[1:]):
            raise ValueError(
                message(
                    "FixedPoint",
                    "the cell's output has another shape than its first input, and cannot be the next one",
                    argument="'cell'",
                    required=f"an output of shape {shape_text(z.shape)}",
                    got=f"one of shape {shape_text(following.shape)}",
                    fix="pass the shape of the cell's output, without the batch, as `shape`",
                )
            )

    def call(self, inputs: Any) -> Any:
        dtype = self.cell.compute_dtype
        if self._given is None:
            start = ops.zeros_like(inputs, dtype=dtype)  # whose sizes may be known only now
        else:
            start = ops.zeros((ops.shape(inputs)[0], *self._given), dtype=dtype)
        z = fixed_point(
            lambda z, x: self.cell([z, x]),
            start,
            inputs * 1,  # which has no mask: `z` has none, and the cell would get it on some backends
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
        )
        return ops.cast(z, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return tuple(input_shape) if self._given is None else (input_shape[0], *self._given)

    def get_config(self) -> dict[str, Any]:
        own = {"shape": self._given, "tolerance": self.tolerance, "max_iterations": self.max_iterations}
        cell = keras.saving.serialize_keras_object(self.cell)
        return {**super().get_config(), "cell": cell, **own}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        cell = copy.deepcopy(config["cell"])  # Keras takes apart what it is given
        return cls(**{**config, "cell": keras.saving.deserialize_keras_object(cell)})

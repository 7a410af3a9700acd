"""The base class of layers that return a tensor like their input."""

from typing import Any, ClassVar

import keras


class LayerOfSameShape(keras.layers.Layer):
    """A layer that returns a tensor of the shape of its input, and passes on its mask."""

    OPTIONS: ClassVar[tuple[str, ...]] = ()
    """The arguments of the constructor that are stored under their names, for the config."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **{name: getattr(self, name) for name in self.OPTIONS}}

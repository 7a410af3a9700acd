"""The layers that a trace records, and their names."""

from collections.abc import Sequence

import keras

from multigrad.common.errors import describe, message


class TracedLayers:
    """The layers that a trace records, with their paths.

    Arguments:
        roots: the models or layers. Nested layers are found in `layers` of a model, and when a traced layer
            calls them.
    """

    def __init__(self, roots: Sequence[keras.Layer]) -> None:
        self._paths: dict[int, str] = {}
        self._layers: list[keras.Layer] = []  # keeps the layers alive, so that their ids stay unique
        for root in roots:
            if not isinstance(root, keras.Layer):
                raise TypeError(
                    message(
                        "trace_gradients",
                        "only layers can be traced",
                        required="models or layers",
                        got=describe(root),
                        fix="call trace_gradients(model). Ops are always recorded",
                    )
                )
            self._add(root, root.name)
            self._add_within(root, f"{root.name}/" if len(roots) > 1 else "")

    def _add(self, layer: keras.Layer, path: str) -> None:
        if id(layer) not in self._paths:
            self._paths[id(layer)] = path
            self._layers.append(layer)

    def _add_within(self, model: keras.Layer, prefix: str) -> None:
        for layer in getattr(model, "layers", ()):
            if isinstance(layer, keras.Layer) and id(layer) not in self._paths:
                self._add(layer, prefix + layer.name)
                self._add_within(layer, f"{prefix}{layer.name}/")

    def path_of(self, layer: keras.Layer, caller: keras.Layer | None) -> str | None:
        """Return the path of a layer that `caller` calls, or None if it is not traced."""
        within = None if caller is None else self._paths.get(id(caller))
        if id(layer) not in self._paths and within is not None:
            self._add(layer, f"{within}/{layer.name}")
        return self._paths.get(id(layer))

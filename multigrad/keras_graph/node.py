"""KerasTensors: an op as one node of a Functional model.

A node takes the KerasTensors of the call alone, flat. All the rest, the structure and the arguments that
are there already, is its `Application`. So Keras sees positional tensors and a flat list of outputs, and
at run time the op gets exactly what a direct call would have given it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from multigrad.core.errors import describe, message
from multigrad.core.signature import signature_of
from multigrad.core.structure import Layout, Slot, leaves_of, rebuild, split
from multigrad.keras_graph import registry
from multigrad.keras_graph.saving import Unsaved, decode, encode


def apply(op: Callable[..., Any], title: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `op` on arguments with KerasTensors in them: its output, with KerasTensors for tensors."""
    given, keywords = (*args, *kwargs.values()), tuple(kwargs)
    bound, binding = signature_of(op).bind(args, kwargs)
    if _symbolic(bound) > _symbolic(given):  # a default is symbolic, and an input like the others
        given, keywords = bound, binding.keywords
    tensors: list[Any] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, keras.KerasTensor):
            return leaf
        tensors.append(leaf)
        return Slot(len(tensors) - 1)

    template = rebuild(given, take)
    node = CustomGradient(Application(op, title, Layout(template), keywords))
    outputs = node(*tensors)
    assert node.output_layout is not None
    return node.output_layout.join(outputs)


def _symbolic(values: tuple[Any, ...]) -> int:
    """How many KerasTensors there are."""
    return sum([isinstance(leaf, keras.KerasTensor) for leaf in leaves_of(values)])


@keras.saving.register_keras_serializable("multigrad")  # for files of HDF5, where Keras builds it
class Application:
    """An op and its arguments, with slots where the tensors of a node go.

    Cloning a model takes it as it is. Saving asks for its config.
    """

    def __init__(
        self, op: Callable[..., Any], title: str, arguments: Layout, keywords: tuple[str, ...]
    ) -> None:
        self.op, self.title, self._arguments, self._keywords = op, title, arguments, keywords

    def __call__(self, tensors: Sequence[Any]) -> Any:
        values = self._arguments.join(tensors)
        count = len(values) - len(self._keywords)
        return self.op(*values[:count], **dict(zip(self._keywords, values[count:], strict=True)))

    def get_config(self) -> dict[str, Any]:
        """The op's name and its arguments as plain data.

        Raises:
            NotImplementedError: when the op is not registered, or an argument cannot be saved.
        """
        if ">" not in self.title:
            raise registry.without_name(self.title)
        encoded = [self._encode(place, value) for place, value in enumerate(self._arguments.template)]
        count = len(encoded) - len(self._keywords)
        keywords = dict(zip(self._keywords, encoded[count:], strict=True))
        # One level down, because from a file of HDF5 Keras puts a function where it finds its bare name.
        return {"call": {"op": self.title, "args": encoded[:count], "kwargs": keywords}}

    def _encode(self, place: int, value: Any) -> Any:
        try:
            return encode(value)
        except Unsaved as unsaved:
            raise NotImplementedError(
                message(
                    self.title,
                    "an argument cannot be saved in a model",
                    argument=self._name_of(place),
                    required="tensors, arrays, numbers, strings, None, tuples, lists and dicts of them, or "
                    "what is registered with keras.saving, has no state, and is made again, the same, from "
                    "its get_config",
                    got=describe(unsaved.value),
                    fix="pass something that can be saved, such as the name of what is meant",
                )
            ) from unsaved

    def _name_of(self, place: int) -> str:
        count = len(self._arguments.template) - len(self._keywords)
        signature = signature_of(self.op)
        if place >= count:
            return repr(self._keywords[place - count])
        if place < len(signature.positional):
            return repr(signature.positional[place])
        return f"{signature.variadic!r}[{place - len(signature.positional)}]"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Application":
        """What `get_config` told.

        Raises:
            TypeError: when no op of this name is defined.
            ValueError: for what `get_config` does not tell, or an argument that cannot be read here.
        """
        match config:
            case {"call": {"op": title, "args": [*args], "kwargs": dict(kwargs)}}:
                op = registry.find(title)
            case _:
                raise _unreadable("multigrad", describe(config))
        try:
            template = tuple([decode(value) for value in (*args, *kwargs.values())])
        except ValueError as error:
            raise _unreadable(title, str(error)) from error
        slots = [leaf for leaf in leaves_of(template) if type(leaf) is Slot]
        if sorted(slots) != list(range(len(slots))):
            raise _unreadable(title, f"the inputs {', '.join(map(str, slots))}")
        return cls(op, title, Layout(template), tuple(kwargs))


def _unreadable(title: str, got: str) -> ValueError:
    return ValueError(
        message(
            title,
            "the arguments of an op in a saved model cannot be read",
            required="what multigrad wrote, with each object in it registered with keras.saving",
            got=got,
            fix="register what is not registered yet, before the model is loaded; otherwise the file was "
            "changed, or was not written by multigrad: save the model once more",
        )
    )


@keras.saving.register_keras_serializable("multigrad")
class CustomGradient(keras.Operation):
    """The node of one call of an op."""

    output_layout: Layout | None = None
    """The structure of the op's output; known when the node was called."""

    def __init__(self, application: Application, name: str | None = None) -> None:
        super().__init__(name or _unique(registry.identifier(application.title)))
        self.application = application

    def call(self, *tensors: Any) -> list[Any]:
        """The tensors in the op's output, flat."""
        outputs, layout = split(self.application(tensors))
        if self.output_layout is None:
            self.output_layout = layout
        return list(outputs)

    def compute_output_spec(self, *tensors: Any) -> Any:
        """What Keras finds out by running the op on nothing in particular."""
        with np.errstate(all="ignore"):  # NumPy's are the numbers that stood in memory
            return super().compute_output_spec(*tensors)

    def get_config(self) -> dict[str, Any]:
        """What `from_config` needs."""
        return {"name": self.name, "application": self.application}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "CustomGradient":
        """The node of a clone, or of a file in which the application is Keras's config of an object."""
        match config:
            case {"name": name, "application": Application() as application}:
                return cls(application, name)
            case {"name": name, "application": {"config": inner}}:
                return cls(Application.from_config(inner), name)
        raise _unreadable("multigrad", describe(config))


def _unique(prefix: str) -> str:
    """A name that no other node has: `scale`, `scale_1` and so on, as Keras names its layers."""
    count = keras.backend.get_uid(prefix) - 1
    if not count:
        return prefix
    name = f"{prefix}_{count}"
    return name if keras.backend.get_uid(name) == 1 else _unique(prefix)

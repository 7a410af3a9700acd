"""An op as one node of a Functional model, for calls on KerasTensors.

The inputs of a node are the flat KerasTensors of the call, and its outputs are a flat list. The structure of
the arguments, and all other arguments, are in its `Application`, which calls the op as the user did.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from multigrad.common.errors import describe, message
from multigrad.common.keras_internals import scope_here
from multigrad.core.context import outermost_layer
from multigrad.core.signature import Binding, signature_of
from multigrad.core.structure import Layout, Slot, leaves_of, rebuild, split
from multigrad.core.variables import Reads
from multigrad.keras_graph import registry
from multigrad.keras_graph.saving import Unsaved, decode, encode


def apply(op: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `op` on arguments with KerasTensors, and return its output with KerasTensors."""
    values, keywords = (*args, *kwargs.values()), tuple(kwargs)
    bound, binding = signature_of(op).bind(args, kwargs)
    if _count_symbolic(bound) > _count_symbolic(values):  # a default is a KerasTensor, and an input too
        values, keywords = bound, binding.keywords
    tensors: list[Any] = []

    def to_slot(leaf: Any) -> Any:
        if not isinstance(leaf, keras.KerasTensor):
            return leaf
        tensors.append(leaf)
        return Slot(len(tensors) - 1)

    template = rebuild(values, to_slot)
    node = CustomGradient(Application(op, name, Layout(template), keywords))
    outputs = node(*tensors)
    assert node.output_layout is not None
    return node.output_layout.join(outputs)


def _count_symbolic(values: tuple[Any, ...]) -> int:
    return sum([isinstance(leaf, keras.KerasTensor) for leaf in leaves_of(values)])


@keras.saving.register_keras_serializable("multigrad")  # Keras creates it from its config in HDF5 files
class Application:
    """An op and its arguments, with slots for the tensors of a node.

    A cloned model shares it. A saved model contains its config.
    """

    def __init__(
        self, op: Callable[..., Any], name: str, arguments: Layout, keywords: tuple[str, ...]
    ) -> None:
        self.op, self.name, self._arguments, self._keywords = op, name, arguments, keywords

    def __call__(self, tensors: Sequence[Any]) -> Any:
        values = self._arguments.join(tensors)
        count = len(values) - len(self._keywords)
        return self.op(*values[:count], **dict(zip(self._keywords, values[count:], strict=True)))

    def get_config(self) -> dict[str, Any]:
        """Return the name of the op and its arguments as plain data.

        Raises:
            NotImplementedError: if the op is not registered, or an argument cannot be saved.
        """
        if ">" not in self.name:
            raise registry.without_name(self.name)
        count = len(self._arguments.template)
        names = Binding(signature_of(self.op), count, count, self._keywords).names()
        encoded = [self._encode(*pair) for pair in zip(names, self._arguments.template, strict=True)]
        count -= len(self._keywords)
        keywords = dict(zip(self._keywords, encoded[count:], strict=True))
        # Nested in "call", because in a HDF5 file Keras replaces the name of a function by the function.
        return {"call": {"op": self.name, "args": encoded[:count], "kwargs": keywords}}

    def _encode(self, argument: str, value: Any) -> Any:
        try:
            return encode(value)
        except Unsaved as unsaved:
            raise NotImplementedError(
                message(
                    self.name,
                    "an argument cannot be saved in a model",
                    argument=argument,
                    required="tensors, arrays, numbers, strings, None, tuples, lists and dicts of them, or "
                    "an object without state that is registered with keras.saving and that its get_config "
                    "restores",
                    got=describe(unsaved.value),
                    fix="pass an argument that can be saved, such as the name of an object",
                    see="in-a-model#unsaved-arguments",
                )
            ) from unsaved

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Application":
        """Return the application from its config.

        Raises:
            TypeError: if no op of this name is defined.
            ValueError: if `get_config` cannot have returned the config, or an argument cannot be read.
        """
        match config:
            case {"call": {"op": name, "args": [*args], "kwargs": dict(kwargs)}}:
                op = registry.find(name)
            case _:
                raise _unreadable("multigrad", describe(config))
        try:
            template = tuple([decode(value) for value in (*args, *kwargs.values())])
        except ValueError as error:
            raise _unreadable(name, str(error)) from error
        slots = [leaf for leaf in leaves_of(template) if type(leaf) is Slot]
        if sorted(slots) != list(range(len(slots))):
            raise _unreadable(name, f"the inputs {', '.join(map(str, slots))}")
        return cls(op, name, Layout(template), tuple(kwargs))


def _unreadable(name: str, got: str) -> ValueError:
    problem = "the arguments of an op in a saved model cannot be read"
    required = "a file that multigrad wrote, whose objects are all registered with keras.saving"
    fix = "register missing objects before the model is loaded; if the file was changed, save the model again"
    return ValueError(message(name, problem, required=required, got=got, fix=fix))


@keras.saving.register_keras_serializable("multigrad")
class CustomGradient(keras.Operation):
    """The node of one call of an op."""

    output_layout: Layout | None = None
    """The layout of the op's output. It is set by the first call."""
    _variables: Sequence[keras.Variable] = ()
    """The trainable variables that the op reads or gets as arguments. They are set by the first call."""

    def __init__(self, application: Application, name: str | None = None) -> None:
        super().__init__(name or _unique(registry.identifier(application.name)))
        self.application = application

    _call_context_args: frozenset[str] = frozenset()
    """The arguments that Functional (Keras 3.12 to 3.15) passes to `call`: `training` if there are variables.

    With it, a `keras.RematScope` fails on TensorFlow."""

    def call(self, *tensors: Any, training: bool | None = None) -> list[Any]:
        """Return the flat tensors of the op's output."""
        if self.output_layout is None:  # on placeholders
            with Reads() as scope:
                outputs, self.output_layout = split(self.application(tensors))
            self._variables = scope.variables
            self._call_context_args = frozenset(["training"] if self._variables else [])
            return list(outputs)
        if training and self._variables:
            self._require_trained()
        return list(split(self.application(tensors))[0])

    def _require_trained(self) -> None:
        """Raise TypeError for a trainable variable that the model in training does not own.

        On JAX, the model is the state of a scope, which `fit` makes. Otherwise it is the outermost layer.
        """
        scope, model = scope_here(), outermost_layer()
        if scope is None and model is None:
            return
        owned = set(map(id, () if model is None else model.variables))
        for variable in self._variables:
            in_scope = scope is not None and scope.get_current_value(variable) is not None
            if variable.trainable and not (in_scope or id(variable) in owned):
                raise TypeError(
                    message(
                        self.application.name,
                        "the op is called on a keras.Input, and its model does not train its variable",
                        required="a variable that a layer of the model owns",
                        got=f"variable {variable.path!r}, which the model does not own",
                        fix="write a keras.Layer that creates the variable and calls the op",
                        see="limits#weight-without-a-layer",
                    )
                )

    def compute_output_spec(self, *tensors: Any, training: Any = None) -> Any:
        """Return the specs of the outputs. Keras runs the op on placeholders to infer them.

        A `keras.RematScope` passes the arguments of the call, also `training` (3.15).
        """
        with np.errstate(all="ignore"):  # NumPy's placeholders are uninitialized arrays
            return super().compute_output_spec(*tensors)

    def get_config(self) -> dict[str, Any]:
        """Return the config of the node. It holds the application itself, which Keras serializes.

        Where multigrad is not imported, Keras cannot load it and shows the config, which says what to import.
        """
        needs = registry.modules_to_load(self.application.name, self.application.op)
        return {"needed_to_load": needs, "name": self.name, "application": self.application}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "CustomGradient":
        """Return the node of a cloned model, or of a file that holds the application's config."""
        match config:
            case {"name": name, "application": Application() as application}:
                return cls(application, name)
            case {"name": name, "application": {"config": inner}}:
                return cls(Application.from_config(inner), name)
        raise _unreadable("multigrad", describe(config))


def _unique(prefix: str) -> str:
    """Return a name that no other node has: `scale`, `scale_1` and so on, as Keras names its layers."""
    count = keras.backend.get_uid(prefix) - 1
    if not count:
        return prefix
    name = f"{prefix}_{count}"
    return name if keras.backend.get_uid(name) == 1 else _unique(prefix)

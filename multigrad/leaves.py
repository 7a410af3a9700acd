"""Structures to flat tensors, and back.

A leaf is a tensor or a static object. `split` takes a structure apart into its tensors and a `Layout`,
which holds all the rest; `Layout.join` puts other tensors in their places. Above the border everything
has structure; below it there are the flat tensors of `split` alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from multigrad import backend

_TENSOR, _CONVERTED, _NESTED, _STATIC, _SPARSE, _SYMBOLIC = range(6)

_KINDS: dict[type, int] = {}
_TENSORS = backend.active.TENSORS


def _kind(leaf: Any) -> int:
    kind = type(leaf)
    found = _KINDS.get(kind)
    if found is None:
        if backend.active.TENSORS[kind]:
            found = _TENSOR
        elif issubclass(kind, keras.KerasTensor):
            found = _SYMBOLIC
        elif backend.active.CONVERTIBLE[kind]:
            found = _CONVERTED
        elif ops.is_tensor(leaf):  # a tensor to Keras, and not the dense one of the framework
            found = _SPARSE
        else:
            found = _NESTED if tree.is_nested(leaf) else _STATIC
        _KINDS[kind] = found
    return found


class Slot(int):
    """The place of a tensor in a layout: its index among the flat tensors."""


class Layout:
    """A structure with a `Slot` wherever a tensor stood.

    ```python
    tensors, layout = split({"a": x, "b": [y, "same"]})
    assert layout.join([u, v]) == {"a": u, "b": [v, "same"]}
    ```
    """

    __slots__ = ("template",)
    flat = False
    """Whether it is a tuple of tensors and of nothing else, as the arguments of most calls are."""

    def __init__(self, template: Any) -> None:
        self.template = template

    def join(self, tensors: Sequence[Any]) -> Any:
        """The structure with `tensors` in the slots."""
        return _fill(self.template, tensors, lambda static: static)

    def join_tensors_only(self, tensors: Sequence[Any]) -> Any:
        """The structure with `tensors` in the slots and None in every other leaf."""
        return _fill(self.template, tensors, lambda static: None)


class _One(Layout):
    """The layout of a tensor alone."""

    __slots__ = ()

    def join(self, tensors: Sequence[Any]) -> Any:
        return tensors[0]

    join_tensors_only = join


class _Flat(Layout):
    """The layout of a tuple of tensors."""

    __slots__ = ()
    flat = True

    def join(self, tensors: Sequence[Any]) -> Any:
        return tuple(tensors)

    join_tensors_only = join


def _fill(template: Any, tensors: Sequence[Any], static: Callable[[Any], Any]) -> Any:
    kind = type(template)
    if kind is Slot:
        return tensors[template]
    if kind is tuple:  # without the cost of a general tree
        return tuple([_fill(part, tensors, static) for part in template])
    if not tree.is_nested(template):
        return static(template)
    return tree.map_structure(lambda leaf: tensors[leaf] if type(leaf) is Slot else static(leaf), template)


_ONE = _One(Slot(0))
_FLAT = [_Flat(tuple(map(Slot, range(count)))) for count in range(32)]


def split(structure: Any) -> tuple[Sequence[Any], Layout]:
    """Take a structure apart into flat tensors and a layout.

    Keras Variables are read, NumPy arrays become tensors; Python numbers stay as they are, because in
    Keras they take the dtype of the tensor that they meet.

    Raises:
        TypeError: for a sparse tensor, whose gradient no rule could return on every backend.
    """
    if _TENSORS[type(structure)]:
        return (structure,), _ONE
    if type(structure) is tuple and len(structure) < len(_FLAT):
        for part in structure:
            if not _TENSORS[type(part)]:
                break
        else:
            return structure, _FLAT[len(structure)]
    tensors: list[Any] = []
    return tensors, Layout(_split(structure, tensors))


def _split(part: Any, tensors: list[Any]) -> Any:
    kind = _kind(part)
    if kind == _TENSOR:
        tensors.append(part)
        return Slot(len(tensors) - 1)
    if kind == _STATIC:
        return part
    if kind == _NESTED:
        if type(part) is tuple:
            return tuple([_split(child, tensors) for child in part])
        # Not tree.map_structure: on PyTorch (Keras 3.15) it goes through a dict in another order.
        return tree.pack_sequence_as(part, [_split(leaf, tensors) for leaf in tree.flatten(part)])
    if kind == _CONVERTED:
        if isinstance(part, (np.ndarray, np.generic)) and part.dtype.kind in "OSUMm":
            return part
        tensors.append(backend.active.as_tensor(part))
        return Slot(len(tensors) - 1)
    if kind == _SPARSE:
        raise TypeError(
            f"a sparse tensor ({type(part).__name__}) is not an argument or output that a gradient rule "
            "can be written for on every backend; pass its values as a dense tensor"
        )
    raise NotImplementedError(
        "op_custom_gradient was called on a KerasTensor: ops with a rule cannot be nodes of a Functional "
        "model yet; call the op inside a layer's `call`"
    )


def children(template: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a nested template, one level deep, with the text that indexes each."""
    if isinstance(template, Mapping):
        yield from ((f"[{key!r}]", template[key]) for key in template)
    else:
        yield from ((f"[{i}]", part) for i, part in enumerate(template))

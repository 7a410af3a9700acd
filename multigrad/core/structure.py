"""Split nested structures into flat tensors and a layout, and join them again.

A leaf is a tensor or a static object. `split` returns the tensors of a structure and a `Layout`, which holds
the containers and the static leaves. `Layout.join` makes the structure from other tensors.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from multigrad import backend
from multigrad.core.leaves import (
    CONVERTED,
    NESTED,
    NON_NUMERIC,
    REFUSALS,
    SPARSE,
    STATIC,
    STATIC_CLASSES,
    SYMBOLIC,
    TENSOR,
    Refused,
    Symbolic,
    is_converted_type,
    is_inferring_shapes,
    kind_of,
    to_tensor,
)

_TENSORS = backend.active.TENSORS


class Slot(int):
    """The index of a tensor among the flat tensors. A template has one for each tensor."""


class Layout:
    """A structure without its tensors. Its template has a `Slot` for each tensor.

    ```python
    tensors, layout = split({"a": x, "b": [y, "same"]})
    assert layout.join([u, v]) == {"a": u, "b": [v, "same"]}
    ```
    """

    __slots__ = ("template",)
    is_flat = False
    """Whether it is the layout of a tuple of tensors. The arguments of most calls have one."""

    def __init__(self, template: Any) -> None:
        self.template = template

    def static_leaves(self) -> list[Any]:
        """Return the leaves that are not tensors."""
        return [leaf for leaf in leaves_of(self.template) if type(leaf) is not Slot]

    def join(self, tensors: Sequence[Any]) -> Any:
        """Return the structure with `tensors`."""
        return _fill(self.template, tensors, True)

    def join_tensors_only(self, tensors: Sequence[Any]) -> Any:
        """Return the structure with `tensors`, and None for every static leaf."""
        return _fill(self.template, tensors, False)

    def tensors_of(self, answer: Any) -> Sequence[Any] | None:
        """Return the flat tensors of a rule's answer if it has exactly the structure of the arguments.

        With one argument, the answer may have the structure of this argument. None means that the
        structure differs, or that comparing it would take longer.
        """
        return None


class _CachedLayout(Layout):
    """The layout of plain containers that hold only tensors, cached by their skeleton.

    Equal structures usually share one layout. If the cache has made a second one, `tensors_of` returns None.
    """

    __slots__ = ("_only_part",)

    def __init__(self, skeleton: "_Skeleton", only_part: "_CachedLayout | None") -> None:
        super().__init__(_template(skeleton, itertools.count()))
        self._only_part = only_part  # the layout of the only argument

    def static_leaves(self) -> list[Any]:
        return []

    def tensors_of(self, answer: Any) -> Sequence[Any] | None:
        tensors: list[Any] = []
        skeleton = _skeleton(answer, tensors) if type(answer) in _CONTAINERS else None
        layout = None if skeleton is None else _layout_of(skeleton)
        return tensors if layout is not None and (layout is self or layout is self._only_part) else None


class _OneTensor(Layout):
    """The layout of one tensor."""

    __slots__ = ()

    def join(self, tensors: Sequence[Any]) -> Any:
        return tensors[0]

    join_tensors_only = join


class _FlatTuple(Layout):
    """The layout of a tuple of tensors."""

    __slots__ = ()
    is_flat = True

    def static_leaves(self) -> list[Any]:
        return []

    def join(self, tensors: Sequence[Any]) -> Any:
        return tuple(tensors)

    join_tensors_only = join


def rebuild(structure: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return the structure with `leaf(x)` for each leaf `x`, in the order of `keras.tree.flatten`.

    `keras.tree` is not used for plain containers. On PyTorch (Keras 3.15) it leaves a reference cycle behind,
    which keeps tensors alive until garbage is collected, and its `map_structure` visits the items of a
    dict in a different order.
    """
    kind = type(structure)
    if kind is tuple:
        return tuple([rebuild(part, leaf) for part in structure])
    if kind is list:
        return [rebuild(part, leaf) for part in structure]
    if kind is dict:
        parts = {key: rebuild(structure[key], leaf) for key in _in_order(structure)}
        return {key: parts[key] for key in structure}
    # Tested first, because `tree.is_nested` takes as long as the other tests.
    if kind is Slot or _TENSORS[kind]:
        return leaf(structure)
    if kind_of(structure) == STATIC or not tree.is_nested(structure):
        proxy = isinstance(structure, tuple) and _is_proxy(structure)
        return rebuild(structure.__wrapped__, leaf) if proxy else leaf(structure)
    return tree.pack_sequence_as(structure, [leaf(part) for part in tree.flatten(structure)])


def _is_proxy(part: Any) -> bool:
    """Return whether an object is a proxy of a tuple: a tuple for `isinstance`, but not by its class.

    On TensorFlow (2.21), an attribute of a layer that is a tuple of Variables becomes a proxy. `keras.tree`
    (3.15) treats it as a leaf.
    """
    return isinstance(part, tuple) and not issubclass(type(part), tuple)


def _in_order(keys: Iterable[Any]) -> list[Any]:
    try:
        return sorted(keys)
    except TypeError:  # keys of several types, which cannot be compared
        return sorted(keys, key=lambda key: (type(key).__qualname__, repr(key)))


def leaves_of(structure: Any) -> list[Any]:
    """Return the leaves of a structure, in the order of `keras.tree.flatten`."""
    leaves: list[Any] = []
    rebuild(structure, leaves.append)
    return leaves


def _fill(template: Any, tensors: Sequence[Any], static: bool) -> Any:
    """Return the template with tensors for its slots. If not `static`, static leaves become None."""
    kind = type(template)
    if kind is Slot:
        return tensors[template]
    # Slots are inlined: most parts are slots, and a function call for each takes longer.
    if kind is dict:
        return {
            key: tensors[part] if type(part) is Slot else _fill(part, tensors, static)
            for key, part in template.items()
        }
    if kind is list or kind is tuple:
        parts = [tensors[part] if type(part) is Slot else _fill(part, tensors, static) for part in template]
        return parts if kind is list else tuple(parts)
    if kind_of(template) == NESTED:
        return rebuild(template, lambda leaf: _fill(leaf, tensors, static))
    return template if static else None


_CONTAINERS = dict, list, tuple

_Skeleton = int | tuple[type, int | tuple[str, ...], "tuple[_Skeleton, ...] | None"]
"""The structure of plain containers, as a key of a cache. A tensor has the skeleton 0. A container has its
type, its keys or its length, and the skeletons of its parts, or None if all parts are tensors."""


def _skeleton(part: Any, tensors: list[Any]) -> "_Skeleton | None":
    """Return the skeleton of a tensor or plain container, and append its tensors to `tensors`.

    Return None for every other object.
    """
    if _TENSORS[type(part)]:
        tensors.append(part)
        return 0
    keys, parts = _of_dict(part) if type(part) is dict else (len(part), part)
    if keys is None:
        return None
    flat = True
    for inner in parts:
        if not _TENSORS[type(inner)]:
            if type(inner) not in _CONTAINERS:
                return None
            flat = False
    if flat:
        tensors.extend(parts)
        return type(part), keys, None
    skeletons: list[Any] = [_skeleton(inner, tensors) for inner in parts]
    return None if None in skeletons else (type(part), keys, tuple(skeletons))


def _of_dict(container: dict[Any, Any]) -> tuple[int | tuple[str, ...] | None, Sequence[Any]]:
    """Return the keys and the sorted parts of a dict, and None for its keys if one is not a plain string.

    Keys of other types can be equal although they differ, such as 1 and True. Their skeletons would be equal,
    too.
    """
    for key in container:
        if type(key) is not str:
            return None, ()
    keys = tuple(container)
    return keys, [container[key] for key in _in_order_cached(keys)]


_in_order_cached = functools.lru_cache(4096)(_in_order)  # for plain strings only: see `_of_dict`


@functools.lru_cache(4096)
def _layout_of(skeleton: _Skeleton) -> "_CachedLayout":
    """Return the layout of the containers that have a skeleton."""
    assert isinstance(skeleton, tuple)
    parts = skeleton[2]
    return _CachedLayout(skeleton, _layout_of(parts[0]) if parts is not None and len(parts) == 1 else None)


def _template(skeleton: _Skeleton, indices: Iterator[int]) -> Any:
    """Return the containers of a skeleton with slots for the tensors."""
    if not isinstance(skeleton, tuple):
        return Slot(next(indices))
    kind, keys, skeletons = skeleton
    count = keys if isinstance(keys, int) else len(keys)
    parts = [_template(inner, indices) for inner in skeletons or (0,) * count]
    if isinstance(keys, int):
        return kind(parts)
    by_key = dict(zip(_in_order_cached(keys), parts, strict=True))
    return {key: by_key[key] for key in keys}


class _FlatLayouts(dict[int, Layout]):
    """The layouts of tuples of tensors, cached by the number of tensors.

    Small ones are cached from the start, because Dynamo cannot write to the cache (see `TypeSet`).
    """

    def __init__(self) -> None:
        super().__init__()
        for count in range(8):
            self[count]

    def __missing__(self, count: int) -> Layout:
        self[count] = layout = _FlatTuple(tuple(map(Slot, range(count))))
        return layout


ONE_TENSOR = _OneTensor(Slot(0))
FLAT_LAYOUTS = _FlatLayouts()


def split(structure: Any, search_objects: bool = False) -> tuple[Sequence[Any], Layout]:
    """Return the flat tensors of a structure, and its layout.

    Keras Variables and NumPy arrays are converted to tensors. Python numbers are static leaves, because in
    Keras they take the dtype of the tensor that they are combined with.

    Arguments:
        structure: a tensor, another object, or a nested structure of them.
        search_objects: whether to refuse an object with tensors in its attributes. An argument such as
            `self` may have them, an output may not.

    Raises:
        Symbolic: if there is a symbolic tensor.
        Refused: if there is a sparse or ragged tensor, or a tensor in an unknown container.
    """
    if _TENSORS[type(structure)]:
        return (structure,), ONE_TENSOR
    if type(structure) is tuple and all([_TENSORS[type(part)] for part in structure]):
        return structure, FLAT_LAYOUTS[len(structure)]
    if _is_of_method(structure) and not search_objects:
        first, *others = structure
        return others, Layout((first, *FLAT_LAYOUTS[len(others)].template))
    tensors: list[Any] = []
    if type(structure) in _CONTAINERS and not backend.active.is_reading_code():
        skeleton = _skeleton(structure, tensors)
        if skeleton is not None:
            return tensors, _layout_of(skeleton)
        tensors = []
    return tensors, Layout(_split(structure, tensors, search_objects))


def _is_of_method(structure: Any) -> bool:
    """Return whether a structure is a tuple of an object and tensors, as the arguments of a method are.

    They are common, and split without the general code, which takes longer than a small op.
    """
    if type(structure) is not tuple or len(structure) < 2 or backend.active.is_reading_code():
        return False
    first, *others = structure
    is_object = type(first) in STATIC_CLASSES and not isinstance(first, (Mapping, list, tuple))
    return is_object and all([_TENSORS[type(part)] for part in others])


def _split(part: Any, tensors: list[Any], search_objects: bool) -> Any:
    """Return the template of a part of a structure, and append its tensors to `tensors`."""
    kind = kind_of(part)
    if kind == TENSOR:
        tensors.append(part)
        return Slot(len(tensors) - 1)
    if kind == STATIC:
        items = part if isinstance(part, (Mapping, list, tuple)) else None
        if search_objects and items is None:
            items = getattr(part, "__dict__", None)
        return _split_unknown(part, items, tensors, search_objects) if items else part
    if kind == NESTED:

        def split_leaf(leaf: Any) -> Any:
            if _TENSORS[type(leaf)]:  # inlined: most leaves are tensors
                tensors.append(leaf)
                return Slot(len(tensors) - 1)
            return _split(leaf, tensors, search_objects)

        return rebuild(part, split_leaf)
    if kind == SPARSE and is_inferring_shapes():
        tensors.append(ops.convert_to_tensor(part, sparse=False))
        return Slot(len(tensors) - 1)
    if kind == CONVERTED:
        if isinstance(part, (np.ndarray, np.generic)) and part.dtype.kind in NON_NUMERIC:
            return part
        tensors.append(to_tensor(part))
        return Slot(len(tensors) - 1)
    raise (Symbolic if kind == SYMBOLIC else Refused)(part, *REFUSALS[kind])


def _split_unknown(part: Any, items: Any, tensors: list[Any], search_objects: bool) -> Any:
    """Split a container that `keras.tree` does not know, or an object. It must not hold tensors."""
    if _is_proxy(part):
        return _split(part.__wrapped__, tensors, search_objects)
    if _holds_tensors(items):
        raise Refused(part, *REFUSALS[STATIC])
    return part


def _holds_tensors(container: Any) -> bool:
    parts = container.values() if isinstance(container, Mapping) else container
    return any(_TENSORS[type(part)] or isinstance(part, keras.KerasTensor) for part in parts)


def children(template: Any) -> Mapping[Any, Any]:
    """Return the parts of a nested template by their keys or indices."""
    return template if isinstance(template, Mapping) else dict(enumerate(template))


def outline(structure: Any) -> str:
    """Return a short text for a structure or template: `{'a': tensor, 'b': [tensor]}`."""
    if type(structure) is Slot or _TENSORS[type(structure)] or is_converted_type(type(structure)):
        return "tensor"
    if not isinstance(structure, (Mapping, tuple, list)):
        return type(structure).__name__ if tree.is_nested(structure) else repr(structure)
    if isinstance(structure, Mapping):
        return "{" + ", ".join(f"{k!r}: {outline(v)}" for k, v in structure.items()) + "}"
    parts = ", ".join(outline(part) for part in structure)
    if isinstance(structure, list):
        return f"[{parts}]"
    return f"({parts},)" if len(structure) == 1 else f"({parts})"

"""Structures to flat tensors, and back.

A leaf is a tensor or a static object. `split` takes a structure apart into its tensors and a `Layout`,
which holds all the rest; `Layout.join` puts other tensors in their places. Above the border everything
has structure; below it there are the flat tensors of `split` alone.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from multigrad import backend
from multigrad.core.errors import OpError, message
from multigrad.core.reachable import may_hold_tensors

_TENSOR, _CONVERTED, _NESTED, _STATIC, _SPARSE, _RAGGED, _SYMBOLIC, _WRITTEN = range(8)

NO_NUMBERS = "OSUMm"
"""The kinds of NumPy's dtypes that are no tensor's: of objects, text and times."""

_KINDS: dict[type, int] = {}
_TENSORS = backend.active.TENSORS


def _kind(leaf: Any) -> int:
    kind = type(leaf)
    found = _KINDS.get(kind)
    if found is None:
        if _TENSORS[kind]:
            found = _TENSOR
        elif issubclass(kind, keras.KerasTensor):
            found = _SYMBOLIC
        elif backend.active.CONVERTIBLE[kind]:
            found = _CONVERTED
        elif backend.active.STAND_INS[kind]:
            found = _WRITTEN
        elif ops.is_tensor(leaf):  # a tensor to Keras, and not the dense one of the framework
            found = _RAGGED if hasattr(kind, "nested_row_splits") else _SPARSE
        else:
            found = _NESTED if tree.is_nested(leaf) else _STATIC
        if found != _STATIC or kind.__module__ == "builtins":  # other classes may be made in every call
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
    one = False
    """Whether it is a tensor alone, as the output of most calls is."""

    def __init__(self, template: Any) -> None:
        self.template = template

    def has_objects(self) -> bool:
        """Whether there is a static leaf in it through which tensors may be reached."""
        return any(map(may_hold_tensors, self.static_leaves()))

    def static_leaves(self) -> list[Any]:
        """The leaves that are no tensors."""
        return [leaf for leaf in leaves_of(self.template) if type(leaf) is not Slot]

    def join(self, tensors: Sequence[Any]) -> Any:
        """The structure with `tensors` in the slots."""
        return _fill(self.template, tensors, True)

    def join_tensors_only(self, tensors: Sequence[Any]) -> Any:
        """The structure with `tensors` in the slots and None in every other leaf."""
        return _fill(self.template, tensors, False)

    def tensors_of(self, answer: Any) -> Sequence[Any] | None:
        """The flat tensors of an answer for arguments of this layout, if it has their very structure or, for
        a single argument, that of this; None where it has another one, or where that has to be found out.
        """
        return None


class _Plain(Layout):
    """The layout of plain containers of tensors and of nothing else, kept for the next ones of a structure.

    So usually there is one object for each. Where there is another, answers are read in the longer way.
    """

    __slots__ = ("_part",)

    def __init__(self, skeleton: "_Skeleton", part: "_Plain | None") -> None:
        super().__init__(_template(skeleton, itertools.count()))
        self._part = part  # the layout of the only part: an answer for one argument may be that of this

    def static_leaves(self) -> list[Any]:
        return []

    def tensors_of(self, answer: Any) -> Sequence[Any] | None:
        tensors: list[Any] = []
        skeleton = _skeleton(answer, tensors) if type(answer) in _CONTAINERS else None
        layout = None if skeleton is None else _layout_of(skeleton)
        return tensors if layout is not None and (layout is self or layout is self._part) else None


class _One(Layout):
    """The layout of a tensor alone."""

    __slots__ = ()
    one = True

    def join(self, tensors: Sequence[Any]) -> Any:
        return tensors[0]

    join_tensors_only = join


class _Flat(Layout):
    """The layout of a tuple of tensors."""

    __slots__ = ()
    flat = True

    def static_leaves(self) -> list[Any]:
        return []

    def join(self, tensors: Sequence[Any]) -> Any:
        return tuple(tensors)

    join_tensors_only = join


def rebuild(structure: Any, leaf: Callable[[Any], Any]) -> Any:
    """The structure with `leaf(x)` for each leaf `x`, in the order of `keras.tree.flatten`.

    By hand for plain containers. On PyTorch (Keras 3.15) `keras.tree` leaves a reference cycle behind, in
    which tensors wait for the garbage collector, and its `map_structure` goes through a dict in an order of
    its own.
    """
    kind = type(structure)
    if kind is tuple:
        return tuple([rebuild(part, leaf) for part in structure])
    if kind is list:
        return [rebuild(part, leaf) for part in structure]
    if kind is dict:
        parts = {key: rebuild(structure[key], leaf) for key in _in_order(structure)}
        return {key: parts[key] for key in structure}
    # To ask Keras takes as long as all the rest.
    if kind is Slot or _TENSORS[kind]:
        return leaf(structure)
    if not tree.is_nested(structure):
        proxy = isinstance(structure, tuple) and _is_proxy(structure)  # most leaves are none, and save a call
        return rebuild(structure.__wrapped__, leaf) if proxy else leaf(structure)
    return tree.pack_sequence_as(structure, [leaf(part) for part in tree.flatten(structure)])


def _is_proxy(part: Any) -> bool:
    """Whether it passes for a tuple, and is of no class of tuples.

    So does an attribute of a layer on TensorFlow (2.21) that is a tuple with a Variable in it. `keras.tree`
    (3.15) takes it for a leaf.
    """
    return isinstance(part, tuple) and not issubclass(type(part), tuple)


def _in_order(keys: Iterable[Any]) -> list[Any]:
    try:
        return sorted(keys)
    except TypeError:  # of several kinds, which have an order each
        return sorted(keys, key=lambda key: (type(key).__qualname__, repr(key)))


def leaves_of(structure: Any) -> list[Any]:
    """The leaves of a structure, in the order of `keras.tree.flatten`."""
    leaves: list[Any] = []
    rebuild(structure, leaves.append)
    return leaves


def _fill(template: Any, tensors: Sequence[Any], static: bool) -> Any:
    """The structure of a template with tensors in its slots; static leaves stay, or become None."""
    kind = type(template)
    if kind is Slot:
        return tensors[template]
    # Most parts are slots, and a function is not called for those.
    if kind is dict:
        return {
            key: tensors[part] if type(part) is Slot else _fill(part, tensors, static)
            for key, part in template.items()
        }
    if kind is list or kind is tuple:
        parts = [tensors[part] if type(part) is Slot else _fill(part, tensors, static) for part in template]
        return parts if kind is list else tuple(parts)
    if _kind(template) == _NESTED:
        return rebuild(template, lambda leaf: _fill(leaf, tensors, static))
    return template if static else None


_CONTAINERS = dict, list, tuple

_Skeleton = int | tuple[type, int | tuple[str, ...], "tuple[_Skeleton, ...] | None"]
"""What tells plain containers of tensors from others: 0 for a tensor, and for a container its type, its keys
or their number, and the skeletons of its parts, or None where all of them are tensors."""


def _skeleton(part: Any, tensors: list[Any]) -> "_Skeleton | None":
    """The skeleton of a tensor or container, whose tensors are put to the others; None for anything else."""
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
    """The keys and parts of a dict; None for keys that skeletons, which are compared, do not tell apart.

    Those are all but plain strings: 1 is True, and a string may be of a class of its own.
    """
    for key in container:
        if type(key) is not str:
            return None, ()
    keys = tuple(container)
    return keys, [container[key] for key in _in_order_kept(keys)]


_in_order_kept = functools.lru_cache(4096)(_in_order)  # for plain strings: equal keys of others may differ


@functools.lru_cache(4096)
def _layout_of(skeleton: _Skeleton) -> "_Plain":
    """The layout of the containers that have a skeleton."""
    assert isinstance(skeleton, tuple)
    parts = skeleton[2]
    return _Plain(skeleton, _layout_of(parts[0]) if parts is not None and len(parts) == 1 else None)


def _template(skeleton: _Skeleton, places: Iterator[int]) -> Any:
    """The structure of a skeleton, with slots for tensors."""
    if not isinstance(skeleton, tuple):
        return Slot(next(places))
    kind, keys, skeletons = skeleton
    count = keys if isinstance(keys, int) else len(keys)
    parts = [_template(inner, places) for inner in skeletons or (0,) * count]
    if isinstance(keys, int):
        return kind(parts)
    by_key = dict(zip(_in_order_kept(keys), parts, strict=True))
    return {key: by_key[key] for key in keys}


class _FlatLayouts(dict[int, Layout]):
    """The layout of a tuple of so many tensors, made once each.

    Those of a few are there from the start, for a compiler of Python: see `TypeSet`.
    """

    def __init__(self) -> None:
        super().__init__()
        for count in range(8):
            self[count]

    def __missing__(self, count: int) -> Layout:
        self[count] = layout = _Flat(tuple(map(Slot, range(count))))
        return layout


ONE = _One(Slot(0))
FLAT_LAYOUTS = _FlatLayouts()


def split(structure: Any, whole: bool = False) -> tuple[Sequence[Any], Layout]:
    """Take a structure apart into flat tensors and a layout.

    Keras Variables are read, NumPy arrays become tensors; Python numbers stay as they are, because in
    Keras they take the dtype of the tensor that they meet.

    Arguments:
        structure: what is taken apart.
        whole: whether every tensor must be found, so that none is an object's attribute, as it may be of a
            `self` among arguments.

    Raises:
        Symbolic: for a symbolic tensor.
        Refused: for a sparse tensor, or one where it cannot be seen.
    """
    if _TENSORS[type(structure)]:
        return (structure,), ONE
    if type(structure) is tuple and all([_TENSORS[type(part)] for part in structure]):
        return structure, FLAT_LAYOUTS[len(structure)]
    tensors: list[Any] = []
    if type(structure) in _CONTAINERS and not backend.active.is_reading_code():
        skeleton = _skeleton(structure, tensors)
        if skeleton is not None:
            return tensors, _layout_of(skeleton)
        tensors = []
    return tensors, Layout(_split(structure, tensors, whole))


def _split(part: Any, tensors: list[Any], whole: bool) -> Any:
    kind = _kind(part)
    if kind == _TENSOR:
        tensors.append(part)
        return Slot(len(tensors) - 1)
    if kind == _STATIC:
        own = part if isinstance(part, (Mapping, list, tuple)) else None
        if whole and own is None:
            own = getattr(part, "__dict__", None)
        return _split_unknown(part, own, tensors, whole) if own else part
    if kind == _NESTED:

        def take(leaf: Any) -> Any:
            if _TENSORS[type(leaf)]:  # as most are
                tensors.append(leaf)
                return Slot(len(tensors) - 1)
            return _split(leaf, tensors, whole)

        return rebuild(part, take)
    if kind == _SPARSE and _inferring_shapes():
        tensors.append(ops.convert_to_tensor(part, sparse=False))
        return Slot(len(tensors) - 1)
    if kind == _CONVERTED:
        if isinstance(part, (np.ndarray, np.generic)) and part.dtype.kind in NO_NUMBERS:
            return part
        tensors.append(backend.active.as_tensor(part))
        return Slot(len(tensors) - 1)
    raise (Symbolic if kind == _SYMBOLIC else Refused)(part, *_REFUSALS[kind])


def _inferring_shapes() -> bool:
    """Return whether Keras runs this code on placeholders, to infer the shape of a layer's output.

    Keras (3.15) says that `2.0 * x` of a KerasTensor is sparse, so the placeholder of a layer behind it is
    sparse. When the layer runs, its input is dense.
    """
    with keras.SymbolicScope() as scope:
        return scope.original_scope is not None


_REFUSALS = {
    _SPARSE: (
        "a sparse tensor has no gradient that a rule could return on every backend",
        "a dense tensor",
        "pass its values as a dense tensor",
    ),
    _RAGGED: (
        "a ragged tensor cannot be the argument or output of an op",
        "a dense tensor",
        "call tf.ragged.map_flat_values(op, x) if the op computes each value from that value alone; "
        "otherwise pad x with x.to_tensor()",
    ),
    _SYMBOLIC: (
        "there is a symbolic tensor where the op was given none, or is being run",
        "a tensor",
        "pass the symbolic tensor to the op as an argument, so that the function need not close over it",
    ),
    _WRITTEN: (
        "there is a stand-in for a tensor, of a program that is written down without its gradients",
        "a tensor",
        "write it down with torch.export, or compile it with torch.compile",
    ),
    _STATIC: (
        "there are tensors in an object of an unknown class, where they cannot be seen",
        "a tuple, list or dict, or a class that is registered with keras.tree",
        "put them into a plain container",
    ),
}


class Refused(Exception):
    """A leaf that no op can take or return."""

    def __init__(self, leaf: Any, problem: str, required: str, fix: str) -> None:
        super().__init__(problem)
        self._leaf, self._problem, self._required, self._fix = leaf, problem, required, fix

    def error(self, op: str, named: Iterable[tuple[str, Any]]) -> OpError:
        """The error that names the op, and of the `named` values the one in which the leaf stands."""
        name = next((n for n, value in named if any(self._leaf is x for x in tree.flatten(value))), None)
        got = type(self._leaf).__name__
        return OpError(
            message(op, self._problem, argument=name, required=self._required, got=got, fix=self._fix)
        )


class Symbolic(Refused):
    """A leaf that has no value yet: an op that takes it is a node of a Functional model."""


def _split_unknown(part: Any, own: Any, tensors: list[Any], whole: bool) -> Any:
    """A container that `keras.tree` does not know, or an object with attributes: no tensor may be in it."""
    if _is_proxy(part):
        return _split(part.__wrapped__, tensors, whole)
    if _holds_tensors(own):
        raise Refused(part, *_REFUSALS[_STATIC])
    return part


def _holds_tensors(container: Any) -> bool:
    parts = container.values() if isinstance(container, Mapping) else container
    return any(_TENSORS[type(part)] or isinstance(part, keras.KerasTensor) for part in parts)


def children(template: Any) -> Mapping[Any, Any]:
    """The parts of a nested template, one level deep, by what indexes them."""
    return template if isinstance(template, Mapping) else dict(enumerate(template))


def outline(structure: Any) -> str:
    """A structure, or a template, in a few characters: `{'a': tensor, 'b': [tensor]}`."""
    if type(structure) is Slot or _TENSORS[type(structure)] or backend.active.CONVERTIBLE[type(structure)]:
        return "tensor"
    if not isinstance(structure, (Mapping, tuple, list)):
        return type(structure).__name__ if tree.is_nested(structure) else repr(structure)
    if isinstance(structure, Mapping):
        return "{" + ", ".join(f"{k!r}: {outline(v)}" for k, v in structure.items()) + "}"
    parts = ", ".join(outline(part) for part in structure)
    if isinstance(structure, list):
        return f"[{parts}]"
    return f"({parts},)" if len(structure) == 1 else f"({parts})"

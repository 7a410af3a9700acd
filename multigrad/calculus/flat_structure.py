"""A nested structure as flat tensors: the arguments and the output of a function that is differentiated."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops, tree

from multigrad import backend
from multigrad.common.errors import describe, message, shape_text, unusable
from multigrad.core.leaves import is_converted_type, to_tensor
from multigrad.core.structure import ONE_TENSOR, Layout, Slot, children, leaves_of, outline, split


class FlatStructure(NamedTuple):
    """A nested structure whose tensors are sorted by whether they can have a gradient.

    It is a tuple, so that a rule that closes over a pullback closes over its tensors directly. Static leaves
    are part of the layout.
    """

    layout: Layout
    is_differentiable: Sequence[bool]
    differentiable: Sequence[Any]
    """The floating and complex tensors."""
    others: Sequence[Any]
    """All other tensors."""

    @property
    def tensors(self) -> list[Any]:
        """All tensors, in the order of the structure."""
        return self._merge(self.differentiable, self.others)

    def unflatten(self, differentiable: Sequence[Any]) -> Any:
        """Return the structure with other differentiable tensors."""
        return self.layout.join(self._merge(differentiable, self.others))

    def unflatten_with_none(self, differentiable: Sequence[Any]) -> Any:
        """Return the structure with other differentiable tensors, and None for every other leaf."""
        return self.layout.join_tensors_only(self._merge(differentiable, [None] * len(self.others)))

    def _merge(self, differentiable: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        next_differentiable, next_other = iter(differentiable), iter(others)
        return [next(next_differentiable if is_one else next_other) for is_one in self.is_differentiable]

    def flatten_matching(self, name: str, argument: str, structure: Any) -> list[Any]:
        """Flatten a structure like this one: return a tensor for each differentiable tensor, zeros for None.

        Arguments:
            name, argument: the function and the argument that error messages name.
            structure: the tangents of these primals, or the upstream gradient of this output.
        """
        if self.layout is ONE_TENSOR and backend.active.TENSORS[type(structure)]:
            return [_convert_like(name, argument, tensor, structure) for tensor in self.differentiable]
        template = self.unflatten_with_none([Slot(index) for index in range(len(self.differentiable))])
        try:
            tree.assert_same_structure(template, structure)
        except (TypeError, ValueError) as error:
            raise TypeError(
                message(
                    name,
                    "the structures differ",
                    argument=repr(argument),
                    required=outline(template),
                    got=outline(structure),
                    fix="pass the required structure, with None for zero",
                )
            ) from error
        leaves = dict(_match_slots(template, structure))
        return [
            _convert_like(name, argument, tensor, leaves[index])
            for index, tensor in enumerate(self.differentiable)
        ]


def flatten(structure: Any) -> FlatStructure:
    tensors, layout = split(structure)
    is_differentiable = [backend.active.is_differentiable(tensor) for tensor in tensors]
    pairs = list(zip(tensors, is_differentiable, strict=True))
    differentiable = [tensor for tensor, is_one in pairs if is_one]
    return FlatStructure(layout, is_differentiable, differentiable, [t for t, is_one in pairs if not is_one])


def _match_slots(template: Any, structure: Any) -> Iterator[tuple[int, Any]]:
    """Yield each slot of a template with the leaf at the same position of a structure.

    Dicts are matched by key, because a dict and an OrderedDict with the same keys may differ in their order.
    """
    if isinstance(template, (Mapping, tuple, list)):
        parts = children(structure)
        for key, part in children(template).items():
            yield from _match_slots(part, parts[key])
    else:
        pairs = zip(leaves_of(template), leaves_of(structure), strict=True)
        yield from [(slot, leaf) for slot, leaf in pairs if type(slot) is Slot]


def _convert_like(name: str, argument: str, tensor: Any, leaf: Any) -> Any:
    """Convert a leaf to a tensor of the dtype of `tensor`, and check that it has the same shape."""
    if leaf is None:
        return ops.zeros_like(tensor)
    if _is_like(tensor, leaf):
        return leaf  # the common case: there is nothing to convert
    if not (holds_numbers(leaf) or isinstance(leaf, int)):
        required = "tensors, arrays or numbers, and None for zero"
        fix = f"pass a tensor of shape {shape_text(tensor.shape)}"
        raise unusable(TypeError, name, argument, required=required, got=leaf, fix=fix)
    converted = to_tensor(leaf)
    if is_complex(converted) and not is_complex(tensor):
        required, fix = f"real numbers for a {describe(tensor)}", "pass the real part"
        raise unusable(TypeError, name, argument, required=required, got=leaf, fix=fix)
    converted = ops.cast(converted, tensor.dtype)
    sizes, got = backend.active.sizes(tensor.shape), backend.active.sizes(converted.shape)
    if sizes is not None and got is not None and not shapes_may_match(sizes, got):
        required, fix = f"shape {shape_text(sizes)}", "pass one number per element"
        raise unusable(ValueError, name, argument, required=required, got=converted, fix=fix)
    return converted


def _is_like(tensor: Any, leaf: Any) -> bool:
    """Return whether a leaf is a tensor of the same type, shape, dtype and device as `tensor`."""
    is_alike = type(leaf) is type(tensor) and leaf.dtype == tensor.dtype and leaf.shape == tensor.shape
    return is_alike and (not backend.active.HAS_DEVICES or leaf.device == tensor.device)


def shapes_may_match(shape: Sequence[int | None], other: Sequence[int | None]) -> bool:
    """Return whether two shapes may be equal. None is a size that is unknown while TensorFlow traces."""
    if len(shape) != len(other):
        return False
    return all([None in pair or pair[0] == pair[1] for pair in zip(shape, other, strict=True)])


def holds_numbers(leaf: Any) -> bool:
    """Return whether a leaf is a tensor, an array, or a Python float or complex number."""
    kind = type(leaf)
    return backend.active.TENSORS[kind] or is_converted_type(kind) or isinstance(leaf, (float, complex))


def is_complex(tensor: Any) -> bool:
    """Return whether a tensor has a complex dtype."""
    return keras.backend.standardize_dtype(tensor.dtype).startswith("complex")

"""Read and check the answer of a rule: one gradient for each tensor argument.

A rule may return its gradients in several structures. `read_answer` returns one gradient per tensor, with the
shape and dtype of the argument, and None for zero.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from keras import tree

from multigrad import backend
from multigrad.backend.base import Spec
from multigrad.core.expected_gradients import AnswerMismatch, ExpectedGradients, Structured, slot_paths
from multigrad.core.leaves import is_converted_type, to_tensor
from multigrad.core.signature import Arguments
from multigrad.core.structure import Slot, children, outline

Shape = tuple[int | None, ...] | None  # None for an unknown dimension, or rank

Entry = tuple[str, Any, Any]
"""A path, the template at this path, and the part of an answer for it."""

_TENSORS = backend.active.TENSORS
_DEVICES = backend.active.HAS_DEVICES
_SEQUENCES = (tuple, list)


def read_answer(
    arguments: Arguments,
    answer: Any,
    specs: list[Spec | None],
    needed: Sequence[bool],
    structured: Structured | None = None,
) -> Sequence[Any]:
    """Return the gradient of each tensor argument, None for a gradient that is zero or not needed.

    Arguments:
        arguments: the arguments of the op, or the variables.
        answer: the answer that the rule returned.
        specs: the shape and dtype of each tensor's gradient, None for a tensor without one.
        needed: for each tensor argument, whether its gradient is used.
        structured: the upstream gradients and all specs, if the rule got several gradients in one structure.

    Raises:
        TypeError: if the answer has none of the supported structures.
        ValueError: if a gradient has a different shape than its argument.
    """
    entries: Sequence[Any] | None
    layout = arguments.layout
    if layout.is_flat:
        # The common case: every argument is a tensor, and every entry is the gradient of one.
        if _TENSORS[type(answer)]:
            if specs == [(answer.shape, answer.dtype, answer.device if _DEVICES else None)]:
                return (answer,)
            entries = None
        else:
            entries = answer if type(answer) in _SEQUENCES and len(answer) == len(specs) else None
    elif len(specs) == 1 and _TENSORS[type(answer)]:
        # One tensor among other arguments, such as `self`.
        entries = (answer,) if any([type(part) is Slot for part in layout.template]) else None
    else:
        entries = layout.tensors_of(answer)
    if entries is not None:
        for entry, spec in zip(entries, specs):  # noqa: B905 - of equal length, and on the fast path
            if not _TENSORS[type(entry)]:
                break
            if (entry.shape, entry.dtype, entry.device if _DEVICES else None) != spec:
                break
        else:
            return entries
    return _Reader(arguments, specs, structured).gradients(answer, needed)


class _Lazy:
    """An entry that is a function of no arguments. It is called once, if one of its gradients is needed."""

    def __init__(self, compute: Callable[[], Any], reader: "_Reader", path: str, template: Any) -> None:
        self.compute, self._reader, self._path, self._template = compute, reader, path, template
        self._gradients: dict[int, Any] | None = None

    def gradient(self, slot: int) -> Any:
        # Not a `functools.cached_property`, whose lock Dynamo (PyTorch 2.13) cannot trace.
        if self._gradients is None:
            self._gradients = self._read()
        return self._gradients.get(slot)

    def _read(self) -> dict[int, Any]:
        try:
            entry = self.compute()
        except Exception as error:
            error.add_note(f"raised in the rule of {self._reader.arguments.name}")
            raise
        try:
            return self._reader.match_all([(self._path, self._template, entry)])
        except AnswerMismatch as mismatch:
            # The template may be a structure of one tensor. Then the function may also return its gradient
            # alone.
            slots = [slot for _, slot in slot_paths([("", self._template)])]
            if len(slots) == 1 and not tree.is_nested(entry):
                return {slots[0]: entry}
            raise self._reader.wrong_structure(mismatch) from None


class _Reading(dict[int, Any]):
    """One possible meaning of an answer: the gradients by slot."""

    is_certain = True
    """Whether each argument without a gradient has None or 0. The gradient of a number is discarded."""

    def source(self, slot: int) -> Any:
        """Return the gradient for a slot, or the function that computes it."""
        entry = self.get(slot)
        return entry.compute if isinstance(entry, _Lazy) else entry


class _Reader(ExpectedGradients):
    """Reads the answer of one rule."""

    __slots__ = ()

    def gradients(self, answer: Any, needed: Sequence[bool]) -> list[Any]:
        """Return the gradients, None for each that is zero or not needed."""
        gradients: list[Any] = []
        for i, (entry, need) in enumerate(zip(self._entries(answer), needed, strict=True)):
            # An entry that is not needed is checked too, so that all backends raise the same errors.
            wanted = self.specs[i] is not None and (need or not isinstance(entry, _Lazy))
            gradients.append(self._conform(i, entry) if wanted else None)
        return gradients

    def _entries(self, answer: Any) -> Sequence[Any]:
        """Return the entry for each tensor, from the first documented structure that certainly fits.

        Raises:
            TypeError: if an earlier structure gives a tensor another gradient, and discards that of a number.
        """
        if answer is None:  # in place of the gradients of variables
            raise self.wrong_entries(answer)
        readings: list[_Reading] = []
        mismatches = []
        for entries in self._structures(answer):
            try:
                readings.append(self.match_all(entries))
            except AnswerMismatch as mismatch:
                mismatches.append(mismatch)
            else:
                if readings[-1].is_certain:
                    break
        if not readings:
            raise self.wrong_structure(mismatches[0]) if mismatches else self.wrong_entries(answer)
        *others, reading = readings
        for slot, spec in enumerate(self.specs):
            source = reading.source(slot)
            if spec is not None and any(other.source(slot) is not source for other in others):
                raise self.ambiguous(slot, answer)
        return [reading.get(i) for i in range(len(self.specs))]

    def _structures(self, answer: Any) -> Iterator[Iterable[Entry]]:
        """Yield the entries of `answer` in each documented structure with the same number of entries."""
        named = self.arguments.named()
        differentiable = [pair for pair in named if self.is_differentiable(pair[1])]
        if isinstance(answer, (tuple, list)):
            is_method = named and named[0][0] in ("'self'", "'cls'") and named[0] not in differentiable[:1]
            without_self = named[1:] if is_method else named
            for pairs in (named, without_self, differentiable):
                if len(pairs) == len(answer):
                    yield [(*pair, entry) for pair, entry in zip(pairs, answer, strict=True)]
            flat = sorted(slot_paths(named), key=lambda pair: pair[1])
            if len(flat) == len(answer):
                yield [(*pair, entry) for pair, entry in zip(flat, answer, strict=True)]
        elif isinstance(answer, Mapping):
            by_name, repeated = self.by_name()
            wanted = {name for name, (_, template) in by_name.items() if self.is_differentiable(template)}
            if not repeated and wanted <= answer.keys() <= by_name.keys():
                yield [(*pair, answer.get(name)) for name, pair in by_name.items()]
        # An op with variables may have one argument that is not differentiable, such as a number.
        single = differentiable or named
        if len(single) == 1 and not (type(single[0][1]) is Slot and tree.is_nested(answer)):
            yield [(*single[0], answer)]

    def match_all(self, entries: Iterable[Entry]) -> _Reading:
        """Return the gradients in the entries.

        Raises:
            AnswerMismatch: if an entry does not fit its template.
        """
        reading = _Reading()
        for path, template, entry in entries:
            self._match(path, template, entry, reading)
        return reading

    def _match(self, path: str, template: Any, entry: Any, reading: _Reading) -> None:
        """Add the gradients in an entry to `reading`."""
        if entry is None:
            return
        is_tensor = type(template) is Slot
        if self.specs[template] is None if is_tensor else not self.is_differentiable(template):
            is_zero = _is_zero(entry)
            if not (
                is_zero
                or _holds_only(template, float, complex)
                or (_holds_only(template, int, bool, Slot) and _is_integer(entry))
            ):
                raise AnswerMismatch(path, "None or 0, because it has no gradient", entry)
            reading.is_certain &= is_zero
        # Dynamo (PyTorch 2.13) cannot trace `callable` of a dict or list.
        elif (
            not (isinstance(entry, (dict, list)) or _TENSORS[type(entry)])
            and callable(entry)
            and not _has_structure_of(template, entry)
        ):
            lazy = _Lazy(entry, self, path, template)
            reading.update((slot, lazy) for _, slot in slot_paths([(path, template)]))
        elif is_tensor:
            if isinstance(entry, (tuple, list, Mapping)):
                raise AnswerMismatch(path, "one tensor", entry)
            reading[template] = entry
        else:
            parts = children(template)
            alike = tree.is_nested(entry) and isinstance(entry, Mapping) == isinstance(template, Mapping)
            entries = children(entry) if alike else {}
            if entries.keys() != parts.keys():
                raise AnswerMismatch(path, f"the structure of the argument, {outline(template)}", entry)
            for key, part in parts.items():
                inner = entries[key]
                if type(part) is Slot and _TENSORS[type(inner)] and self.specs[part] is not None:
                    reading[part] = inner  # inlined: the common case
                else:
                    self._match(f"{path}[{key!r}]", part, inner, reading)

    def _conform(self, index: int, entry: Any) -> Any:
        """Return the gradient of one tensor in its shape and dtype."""
        spec = self.specs[index]
        assert spec is not None
        gradient = entry
        while isinstance(gradient, _Lazy):  # a lazy entry may return another one
            gradient = gradient.gradient(index)
        if gradient is None:
            return None
        if not _TENSORS[type(gradient)]:
            gradient = self._to_tensor(index, gradient)
        if (gradient.shape, gradient.dtype, gradient.device if _DEVICES else None) == spec:
            return gradient
        shape, framework = spec[0], backend.active
        if not _is_broadcast(framework.sizes(gradient.shape), framework.sizes(shape)):
            raise self.wrong_shape(index, shape, gradient)
        if self.structured is not None and self._is_stacked(
            framework.sizes(gradient.shape), framework.sizes(shape), *self.structured
        ):
            raise self.of_stacked(index, gradient)
        return framework.conform(gradient, spec)

    def _is_stacked(
        self, shape: Shape, original: Shape, upstream: Sequence[Any], specs: Sequence[Spec | None]
    ) -> bool:
        """Return whether the first axis of a gradient is probably that of the outputs.

        Keras stacks tensors of one shape in a tuple, as in `ops.sin(upstream)` of an op with two outputs. The
        axis may also be that of another input, from which broadcasting has it.
        """
        sizes = backend.active.sizes
        output, *others = [None if u is None else sizes(u.shape) for u in upstream]
        if shape is None or original is None or output is None or any([other != output for other in others]):
            return False
        count, axis = len(upstream), len(shape)
        if axis != 1 + max(len(original), len(output)) or shape[0] != count:
            return False
        inputs = [sizes(spec[0]) for spec in specs if spec is not None]
        return not any([s is None or (len(s) >= axis and s[-axis] in (None, count)) for s in inputs])

    def _to_tensor(self, index: int, gradient: Any) -> Any:
        if isinstance(gradient, (int, float, complex)):
            gradient = np.asarray(gradient)  # in double precision, until it is cast
        if is_converted_type(type(gradient)):
            return to_tensor(gradient)
        raise self.not_a_gradient(index, gradient)


def _has_structure_of(template: Any, entry: Any) -> bool:
    """Return whether an entry has the structure of the template. It is then not a lazy entry."""
    nested = type(template) is not Slot and tree.is_nested(entry)
    return nested and children(entry).keys() == children(template).keys()


def _is_broadcast(shape: Shape, original: Shape) -> bool:
    """Return whether `original` can be broadcast to `shape`. An unknown size fits every size."""
    if shape is None or original is None:
        return True
    if len(shape) < len(original):
        return False
    trailing = shape[len(shape) - len(original) :]
    return all(o in (1, None, s) or s is None for s, o in zip(trailing, original, strict=True))


def _is_zero(entry: Any) -> bool:
    """Return whether the leaves of an entry are None, the number 0, or JAX's zero of a structured dtype."""
    for leaf in tree.flatten(entry):
        is_float0 = isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.names is not None
        if not (leaf is None or is_float0 or (isinstance(leaf, (int, float, complex)) and leaf == 0)):
            return False
    return True


def _is_integer(entry: Any) -> bool:
    """Return whether an entry consists of integer or boolean tensors, which no floating argument has."""
    return all([_TENSORS[type(e)] and not backend.active.is_differentiable(e) for e in tree.flatten(entry)])


def _holds_only(template: Any, *types: type) -> bool:
    """Return whether an argument consists of leaves of these types."""
    leaves = tree.flatten(template)
    return bool(leaves) and all([type(leaf) in types for leaf in leaves])

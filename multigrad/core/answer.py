"""How the answer of a rule is read and checked: one gradient for each tensor argument.

A rule may write its answer in several ways. Whichever it chose, what leaves here has a gradient with the
shape and dtype of its argument for each tensor, and None for zero. Nothing here knows a framework.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from keras import tree

from multigrad import backend
from multigrad.backend.base import Spec
from multigrad.core.errors import describe, message, shape_text
from multigrad.core.structure import Layout, Slot, children, outline
from multigrad.core.variables import Variables

Shape = tuple[int | None, ...] | None  # None for an unknown dimension, or rank

_TENSORS = backend.active.TENSORS
_SEQUENCES = (tuple, list)

# What stands at the place of an argument that has no gradient, by the doubt whether it belongs there: nothing
# or a plain zero; anything that can be the gradient of a Python number; zero by its value; or what does not
# fit, such as what is traced and shows no value.
_SURE, _OF_A_NUMBER, _ZERO, _UNFIT = range(4)


class Named(Protocol):
    """What knows the names of the arguments, or variables, that a rule answers for."""

    def names(self) -> list[str]: ...

    @property
    def variadic(self) -> str | None: ...


class Asked(Protocol):
    """What a rule answers for: the op's name, for messages, and the structure and names of its arguments."""

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> Layout: ...

    @property
    def binding(self) -> Named: ...


def read(asked: Asked, answer: Any, specs: list[Spec | None], needed: Sequence[bool]) -> Sequence[Any]:
    """The gradient of each tensor argument, None for one that is zero or not needed.

    Arguments:
        asked: what the rule answers for.
        answer: what the rule returned.
        specs: what each tensor argument requires of its gradient, None where it has none.
        needed: for each tensor argument, whether its gradient is of use to anybody.

    Raises:
        TypeError: when the answer can be read in none of the ways that are documented.
        ValueError: when a gradient has a shape that is not its argument's.
    """
    entries: Sequence[Any] | None
    if asked.arguments.flat:
        # The usual call: every argument is a tensor, and every entry the gradient of one.
        if _TENSORS[type(answer)]:
            if specs == [(answer.shape, answer.dtype, None)]:
                return (answer,)
            entries = None
        else:
            entries = answer if type(answer) in _SEQUENCES and len(answer) == len(specs) else None
    else:
        entries = asked.arguments.tensors_of(answer)
    if entries is not None:
        for entry, spec in zip(entries, specs):  # noqa: B905 - as long as each other, and often run
            if not _TENSORS[type(entry)] or (entry.shape, entry.dtype, None) != spec:
                break
        else:
            return entries
    return _Reader(asked.name, asked.arguments, asked.binding, specs).read(answer, needed)


def slot_paths(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Slot]]:
    for path, template in named:
        if type(template) is Slot:
            yield path, template
        elif tree.is_nested(template):
            yield from slot_paths((f"{path}[{key!r}]", child) for key, child in children(template).items())


class _Misfit(Exception):
    """An entry does not fit its argument: where, what was required and what came."""

    def __init__(self, path: str, required: str, got: Any) -> None:
        # Python keeps the arguments itself; Dynamo (PyTorch 2.13) cannot trace `__init__` of its exceptions.
        self.path, self.required, self.got = path, required, describe(got)


class _Lazy:
    """An entry that is computed only where a gradient in it is needed, and then once."""

    def __init__(self, compute: Callable[[], Any], reader: "_Reader", path: str, template: Any) -> None:
        self.compute, self._reader, self._path, self._template = compute, reader, path, template

    @functools.cached_property
    def gradients(self) -> dict[int, Any]:
        entry = self.compute()
        try:
            return self._reader.fit([(self._path, self._template, entry)])
        except _Misfit as misfit:
            # It may stand for a structure of one tensor, or for that: which one shows only now.
            slots = [slot for _, slot in slot_paths([("", self._template)])]
            if len(slots) == 1 and not tree.is_nested(entry):
                return {slots[0]: entry}
            raise self._reader.unreadable([misfit]) from None


class _Fit(dict[int, Any]):
    """What a reading finds in an answer: the gradients by slot, and how much of a guess it is."""

    doubt = _SURE

    def source(self, slot: int) -> Any:
        """What the answer has for a slot: a gradient, or the function that computes it."""
        entry = self.get(slot)
        return entry.compute if isinstance(entry, _Lazy) else entry


class _Reader:
    """Reads the answers of one call's rule; the arguments of `read` say what it holds."""

    __slots__ = ("_arguments", "_binding", "_op", "_specs")

    def __init__(self, op: str, arguments: Layout, binding: Named, specs: list[Spec | None]) -> None:
        self._op, self._arguments, self._binding, self._specs = op, arguments, binding, specs

    def read(self, answer: Any, needed: Sequence[bool]) -> list[Any]:
        """See the function of this name."""
        gradients: list[Any] = []
        for i, (entry, need) in enumerate(zip(self._entries(answer), needed, strict=True)):
            # An entry that is there is checked, needed or not: an error says the same everywhere.
            wanted = self._specs[i] is not None and (need or not isinstance(entry, _Lazy))
            gradients.append(self._conform(i, entry) if wanted else None)
        return gradients

    def _entries(self, answer: Any) -> Sequence[Any]:
        """The entry for each tensor: of the readings that are documented, the first that fits."""
        if answer is None:
            return [None] * len(self._specs)
        fits: list[_Fit] = []
        misfits = []
        for reading in self._readings(answer):
            try:
                fits.append(self.fit(reading))
            except _Misfit as misfit:
                misfits.append(misfit)
            else:
                if fits[-1].doubt == _SURE:
                    break
        if not fits:
            raise self.unreadable(misfits, answer)
        chosen = fits[0] if len(fits) == 1 else self._choose(fits, answer)
        return [chosen.get(i) for i in range(len(self._specs))]

    def fit(self, reading: Iterable[tuple[str, Any, Any]]) -> _Fit:
        """What a reading finds: (path, template, entry) for each part of the answer; raises `_Misfit`."""
        fit = _Fit()
        for path, template, entry in reading:
            self._match(path, template, entry, fit)
        return fit

    def _choose(self, fits: Sequence[_Fit], answer: Any) -> _Fit:
        """The first of those in the least doubt.

        So it depends on no values. Where the gradient of a tensor may be that of a number, which nobody asks
        for, it would be lost in silence if the wrong one were taken.
        """
        doubt = min([fit.doubt for fit in fits])
        chosen, *others = [fit for fit in fits if fit.doubt == doubt]
        others += [fit for fit in fits if doubt < fit.doubt == _OF_A_NUMBER]
        for slot, spec in enumerate(self._specs):
            source = chosen.source(slot)
            if spec is not None and any(fit.source(slot) is not source for fit in others):
                raise TypeError(
                    message(
                        self._op,
                        "the rule's answer is ambiguous: an entry may be that of a number, or of a tensor",
                        argument=self._path_of(slot),
                        required="an answer that can be meant in one way",
                        got=_extent(answer),
                        fix="return a dict from argument names to entries, each in its argument's structure",
                    )
                )
        return chosen

    def _conform(self, index: int, entry: Any) -> Any:
        """The gradient of one tensor, in its shape and dtype."""
        spec = self._specs[index]
        assert spec is not None
        gradient = entry
        while isinstance(gradient, _Lazy):  # one may stand in what another one returns
            gradient = gradient.gradients.get(index)
        if gradient is None:
            return None
        if not _TENSORS[type(gradient)]:
            gradient = self._to_tensor(index, gradient)
        shape, dtype, like = spec
        if gradient.dtype == dtype and gradient.shape == shape and like is None:
            return gradient
        framework = backend.active
        if not _is_broadcast(framework.sizes(gradient.shape), framework.sizes(spec[0])):
            raise ValueError(
                message(
                    self._op,
                    "the rule returned a gradient of the wrong shape",
                    argument=self._path_of(index),
                    required=f"shape {shape_text(spec[0])}, the argument's, or one broadcast from it",
                    got=describe(gradient),
                    fix="return a gradient with one element for each element of the argument",
                )
            )
        return framework.conform(gradient, spec)

    def _to_tensor(self, index: int, gradient: Any) -> Any:
        if isinstance(gradient, (int, float, complex)):
            gradient = np.asarray(gradient)  # in double precision, until it is cast
        if backend.active.CONVERTIBLE[type(gradient)]:
            return backend.active.as_tensor(gradient)
        raise TypeError(
            message(
                self._op,
                "the rule returned something that is no gradient",
                argument=self._path_of(index),
                required="a tensor, None for zero, or a function of no arguments that returns one",
                got=describe(gradient),
                fix="return the gradient with respect to this argument",
            )
        )

    def _path_of(self, index: int) -> str:
        named = zip(self._binding.names(), self._arguments.template, strict=True)
        return next(path for path, slot in slot_paths(named) if slot == index)

    def _readings(self, answer: Any) -> Iterator[Iterable[tuple[str, Any, Any]]]:
        """The ways in which `answer` may be meant: (path, template, entry) for each of its entries."""
        named = list(zip(self._binding.names(), self._arguments.template, strict=True))
        differentiable = [place for place in named if self._is_differentiable(place[1])]
        if isinstance(answer, (tuple, list)):
            of_object = named and named[0][0] in ("'self'", "'cls'") and named[0] not in differentiable[:1]
            without_self = named[1:] if of_object else named
            for places in (named, without_self, differentiable):
                if len(places) == len(answer):
                    yield [(*place, entry) for place, entry in zip(places, answer, strict=True)]
            flat = sorted(slot_paths(named), key=lambda place: place[1])
            if len(flat) == len(answer):
                yield [(*place, entry) for place, entry in zip(flat, answer, strict=True)]
        elif isinstance(answer, Mapping):
            by_name, shared = self._by_name()
            wanted = {name for name, (_, template) in by_name.items() if self._is_differentiable(template)}
            if not shared and wanted <= answer.keys() <= by_name.keys():
                yield [(*place, answer.get(name)) for name, place in by_name.items()]
        # Beside variables, an op may have no differentiable argument: a number that a rule answers for.
        alone = differentiable or named
        if len(alone) == 1 and not (type(alone[0][1]) is Slot and tree.is_nested(answer)):
            yield [(*alone[0], answer)]

    def _by_name(self) -> tuple[dict[str, tuple[str, Any]], list[str]]:
        """The path and template of each parameter, of which `*args` has one, a tuple.

        And the names that two parameters have, which only `**kwargs` can bring about.
        """
        by_name: dict[str, tuple[str, Any]] = {}
        shared = []
        for path, template in zip(self._binding.names(), self._arguments.template, strict=True):
            name, several, _ = path.strip("'").partition("'[")
            if several:
                _, others = by_name.get(name, ("", ()))
                path, template = repr(name), (*others, template)
            elif name in by_name:
                shared.append(path)
            by_name[name] = path, template
        if self._binding.variadic is not None:  # for which nothing may have come
            by_name.setdefault(self._binding.variadic, (repr(self._binding.variadic), ()))
        return by_name, sorted(shared)

    def _is_differentiable(self, template: Any) -> bool:
        if type(template) is Slot:
            return self._specs[template] is not None
        return any(self._specs[slot] is not None for _, slot in slot_paths([("", template)]))

    def _match(self, path: str, template: Any, entry: Any, fit: _Fit) -> None:
        """Put the gradients in `entry` to the slots of `template`; raises `_Misfit`."""
        if entry is None:
            return
        of_tensor = type(template) is Slot
        if self._specs[template] is None if of_tensor else not self._is_differentiable(template):
            doubt = _doubt(template, entry)
            if doubt == _UNFIT:
                raise _Misfit(path, "None or zero, because it has no gradient", entry)
            fit.doubt = max(fit.doubt, doubt)
        # Dynamo (PyTorch 2.13) can tell neither of a dict nor of a list whether it is callable.
        elif (
            not (isinstance(entry, (dict, list)) or _TENSORS[type(entry)])
            and callable(entry)
            and not _has_structure_of(template, entry)
        ):
            lazy = _Lazy(entry, self, path, template)
            fit.update((slot, lazy) for _, slot in slot_paths([(path, template)]))
        elif of_tensor:
            if isinstance(entry, (tuple, list, Mapping)):
                raise _Misfit(path, "one tensor", entry)
            fit[template] = entry
        else:
            parts = children(template)
            alike = tree.is_nested(entry) and isinstance(entry, Mapping) == isinstance(template, Mapping)
            entries = children(entry) if alike else {}
            if entries.keys() != parts.keys():
                raise _Misfit(path, f"the argument's own structure, {outline(template)}", entry)
            for key, part in parts.items():
                own = entries[key]
                if type(part) is Slot and _TENSORS[type(own)] and self._specs[part] is not None:
                    fit[part] = own  # as most are
                else:
                    self._match(f"{path}[{key!r}]", part, own, fit)

    def unreadable(self, misfits: Sequence[_Misfit], answer: Any = None) -> TypeError:
        """The error for an answer that fits no reading, or fits each up to a `_Misfit`."""
        if misfits:
            closest = misfits[0]
            return TypeError(
                message(
                    self._op,
                    "the rule's answer has the wrong structure",
                    argument=closest.path,
                    required=closest.required,
                    got=closest.got,
                    fix="return each argument's gradient in the structure of the argument",
                )
            )
        named = list(zip(self._binding.names(), self._arguments.template, strict=True))
        differentiable = [name for name, template in named if self._is_differentiable(template)]
        if isinstance(answer, Mapping):
            by_name, shared = self._by_name()
            if shared:
                return TypeError(
                    message(
                        self._op,
                        "the rule returned a dict, and two arguments have one name",
                        argument=", ".join(shared),
                        required="a tuple with one entry per argument",
                        got=_extent(answer),
                        fix="return a tuple, or give the parameters names of their own",
                    )
                )
            keys = [path for path, template in by_name.values() if self._is_differentiable(template)]
            return TypeError(
                message(
                    self._op,
                    "the rule's dict has other keys than the arguments have names",
                    required=f"the keys {', '.join(keys)}",
                    got=_extent(answer),
                    fix="return one entry by the name of each differentiable argument, None for zero",
                )
            )
        if isinstance(self._binding, Variables):
            return self._wrong_number_for_variables(answer)
        required = [f"one entry per argument: {', '.join(self._binding.names()) or 'none'}"]
        if len(differentiable) < len(named):
            required.append(f"one per differentiable argument: {', '.join(differentiable)}")
        if len(self._specs) not in (len(named), len(differentiable)):
            required.append(f"one per flattened tensor: {len(self._specs)}")
        return TypeError(
            message(
                self._op,
                "the rule returned the wrong number of gradients",
                required="; or ".join(required),
                got=_extent(answer),
                fix="return a tuple of gradients, None for those that are zero",
            )
        )

    def _wrong_number_for_variables(self, answer: Any) -> TypeError:
        """Return the error for `gradients_of_variables` of another length than `variables`."""
        names = ", ".join(self._binding.names())
        return TypeError(
            message(
                self._op,
                "the rule returned the wrong number of gradients of variables",
                required=f"one entry per trainable variable that the function reads: {names}"
                if names
                else "an empty list: the function reads no trainable variable, as when its layer is frozen",
                got=_extent(answer),
                fix="return one entry for each of `variables`, as in `[... for v in variables]`",
            )
        )


def _has_structure_of(template: Any, entry: Any) -> bool:
    """Return whether an entry that can be called, such as a namedtuple with `__call__`, is not lazy."""
    nested = type(template) is not Slot and tree.is_nested(entry)
    return nested and children(entry).keys() == children(template).keys()


def _is_broadcast(shape: Shape, original: Shape) -> bool:
    """Whether `shape` can be what broadcasting made of `original` (None where a size is unknown)."""
    if shape is None or original is None:
        return True
    if len(shape) < len(original):
        return False
    trailing = shape[len(shape) - len(original) :]
    return all(o in (1, None, s) or s is None for s, o in zip(trailing, original, strict=True))


def _doubt(template: Any, entry: Any) -> int:
    """Whether `entry` is in its place, at that of an argument that has no gradient."""
    if tree.is_nested(template):
        parts = children(template)
        if tree.is_nested(entry):
            entries = children(entry)
        else:  # what is lazy stands for all of it
            entries = dict.fromkeys(parts, entry) if callable(entry) else {}
        if parts and entries.keys() == parts.keys():
            return max([_doubt(part, entries[key]) for key, part in parts.items()])
    if type(template) in (float, complex) and not tree.is_nested(entry):
        # Nobody asks for it, and what is lazy is never computed.
        number = isinstance(entry, (int, float, complex))
        if _TENSORS[type(entry)] or (number and entry) or callable(entry):
            return _OF_A_NUMBER
    return max([_doubt_of_zero(leaf) for leaf in tree.flatten(entry)], default=_SURE)


def _doubt_of_zero(leaf: Any) -> int:
    if leaf is None:
        return _SURE
    if isinstance(leaf, (int, float, complex)):
        return _UNFIT if leaf else _SURE
    value = backend.active.concrete(leaf) if _TENSORS[type(leaf)] else leaf
    if value is None:  # traced; what has an integer dtype is no gradient of anything
        return _UNFIT if backend.active.is_differentiable(leaf) else _ZERO
    if not isinstance(value, (np.ndarray, np.generic)):
        return _UNFIT
    if value.dtype.names is not None:  # JAX's float0, which has no number but zero, is a structured dtype
        return _SURE
    return _UNFIT if np.any(value) else _ZERO


def _extent(answer: Any) -> str:
    """What an answer has, for a message."""
    if isinstance(answer, Mapping):
        return ", ".join(map(repr, answer)) or "none"
    if isinstance(answer, (tuple, list)):
        return f"{len(answer)} in a {type(answer).__name__}"
    return f"one entry, {describe(answer)}"

"""A rule: how it is called, and how its answer is read and checked.

The rule is the function `grad` that stands beside the output of a function with a custom gradient. Its
signature says how it is called (`Form`); its answer may be written in several ways, and `read` gives
one gradient per tensor whichever was chosen. Nothing here knows a framework.
"""

import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from multigrad import backend
from multigrad.binding import Binding, name_of
from multigrad.errors import describe, message, shape_text
from multigrad.leaves import Layout, Slot, children

FORMS = (
    "grad(upstream), with one positional parameter of any name; "
    "grad(u1, ..., uN) or grad(*us), with one upstream gradient per tensor in the output; "
    "grad(*args, upstream), grad(*args, upstream=None) or grad(x, y, *, upstream), with the op's own "
    "positional arguments; each with a parameter `variables` where trainable variables are read"
)


Shape = tuple[int | None, ...] | None  # None for an unknown dimension, or rank

_TENSORS = backend.active.TENSORS


class Form(enum.Enum):
    """How a rule is called."""

    WHOLE = "grad(U)"
    FLAT = "grad(*flat U)"
    HYBRID = "grad(*args, upstream=U)"


@dataclass(slots=True, frozen=True)
class _Profile:
    """What a rule's signature says of how it can be called."""

    form: Form | None  # None where only the number of outputs can tell
    required: int  # positional parameters without a default
    accepted: float  # positional arguments that a HYBRID rule takes beside `upstream`
    variables: bool


def _profile(rule: Callable[..., Any]) -> _Profile:
    parameters = list(inspect.signature(rule).parameters.values())
    variables = any(p.name == "variables" or p.kind is p.VAR_KEYWORD for p in parameters)
    parameters = [p for p in parameters if p.name != "variables" and p.kind is not p.VAR_KEYWORD]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    needed_keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    names = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY]

    form = None
    accepted: float = 0
    if "upstream" in names and parameters[0].name != "upstream" and needed_keywords <= {"upstream"}:
        form = Form.HYBRID
        before = [p for p in positional if p.name != "upstream"]
        accepted = float("inf") if variadic else len(before)
    elif not needed_keywords:
        if variadic:
            form = Form.FLAT if not positional else None
        elif len(required) == 1 or (not required and len(positional) == 1):
            form = Form.WHOLE
    ambiguous = variadic or bool(needed_keywords)
    return _Profile(form, 0 if ambiguous else len(required), accepted, variables)


_PROFILES: dict[tuple[types.CodeType, int], _Profile] = {}
_KEPT = 4096


def _profile_of(rule: Callable[..., Any]) -> _Profile:
    """The profile of `rule`, read once per code: a rule is made anew in every call."""
    if type(rule) is not types.FunctionType or rule.__dict__ or rule.__kwdefaults__:
        return _profile(rule)
    key = rule.__code__, len(rule.__defaults__ or ())
    found = _PROFILES.get(key)
    if found is None:
        if len(_PROFILES) >= _KEPT:
            _PROFILES.clear()
        _PROFILES[key] = found = _profile(rule)
    return found


def form_of(op: str, rule: Any, binding: Binding, outputs: int) -> Form:
    """How `rule` is called, for an output of so many tensors.

    Raises:
        TypeError: when `rule` is not callable or its signature is none of the forms.
    """
    try:
        profile = _profile_of(rule)
    except (TypeError, ValueError) as error:
        raise TypeError(
            message(
                op,
                "the rule, the second item that the function returns, cannot be called",
                required="a function with a signature",
                got=describe(rule),
                mend="return `output, grad` from the function",
            )
        ) from error
    if profile.form is Form.HYBRID:
        if binding.given <= profile.accepted:
            return Form.HYBRID
    elif profile.form is not None:
        return profile.form
    elif profile.required == outputs:
        return Form.FLAT
    raise TypeError(
        message(
            op,
            "the rule's signature says in no way that is known how it is to be called",
            required=FORMS,
            got=f"{name_of(rule)}{inspect.signature(rule)}, for {outputs} tensor(s) in the output and "
            f"{binding.given} positional argument(s)",
            mend="write the rule in one of these forms",
        )
    )


@dataclass(slots=True)
class Pullback:
    """What it takes to call the rule of one call and to read its answer. It holds no tensor.

    `specs` has what each tensor argument requires of its gradient, None where it has none.
    """

    op: str
    form: Form
    arguments: Layout
    binding: Binding
    output: Layout
    specs: tuple[Any, ...]

    def __call__(
        self, rule: Callable[..., Any], upstream: Sequence[Any], needed: Sequence[bool]
    ) -> list[Any]:
        """Call `rule`: the gradient of each tensor argument, None for zero or where not needed.

        Arguments:
            rule: the rule, with the op's own arguments bound where its form asks for them.
            upstream: the upstream gradient of each tensor in the output, None where it has none.
            needed: for each tensor argument, whether its gradient is of use to anybody.
        """
        if self.form is Form.FLAT:
            answer = rule(*upstream)
        else:
            whole = self.output.join_tensors_only(upstream)
            answer = rule(upstream=whole) if self.form is Form.HYBRID else rule(whole)
        reader = _Reader(self.op, self.arguments.template, self.binding, self.specs)
        return [
            self._conform(i, gradient) if need and self.specs[i] is not None else None
            for i, (gradient, need) in enumerate(zip(reader.read(answer), needed, strict=True))
        ]

    def _conform(self, index: int, gradient: Any) -> Any:
        """The gradient of one tensor, with its shape and dtype."""
        spec = self.specs[index]
        if isinstance(gradient, _Lazy):
            gradient = gradient.gradients[index]
        if gradient is None:
            return None
        if not _TENSORS[type(gradient)]:
            gradient = self._to_tensor(index, gradient)
        if gradient.dtype == spec.dtype and gradient.shape == spec.shape and spec.like is None:
            return gradient
        if not _broadcast(backend.active.shape_of(gradient), backend.active.shape_of(spec)):
            raise ValueError(
                message(
                    self.op,
                    "the rule returned a gradient of the wrong shape",
                    argument=path_of(self.arguments, self.binding, index),
                    required=f"shape {shape_text(spec.shape)}, the argument's own, or one broadcast from it",
                    got=describe(gradient),
                    mend="return a gradient with one element for each element of the argument",
                )
            )
        return backend.active.conform(gradient, spec)

    def _to_tensor(self, index: int, gradient: Any) -> Any:
        if isinstance(gradient, (keras.Variable, np.ndarray, np.generic, int, float, complex)):
            return ops.convert_to_tensor(gradient)
        raise TypeError(
            message(
                self.op,
                "the rule returned something that is no gradient",
                argument=path_of(self.arguments, self.binding, index),
                required="a tensor, None for zero, or a function of no arguments that returns one",
                got=describe(gradient),
                mend="return the gradient with respect to this argument",
            )
        )


def _broadcast(shape: Shape, original: Shape) -> bool:
    """Whether `shape` can be what broadcasting made of `original` (None where a size is unknown)."""
    if shape is None or original is None:
        return True
    if len(shape) < len(original):
        return False
    trailing = shape[len(shape) - len(original) :]
    return all(o in (1, None, s) or s is None for s, o in zip(trailing, original, strict=True))


def path_of(arguments: Layout, binding: Binding, index: int) -> str:
    """How messages call the tensor argument of this index: `'tree'['b'][0]`."""
    for path, slot in _slot_paths(zip(binding.names(), arguments.template, strict=True)):
        if slot == index:
            return path
    raise AssertionError(f"no argument holds tensor {index}")


def _slot_paths(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Slot]]:
    for path, template in named:
        if type(template) is Slot:
            yield path, template
        elif tree.is_nested(template):
            yield from _slot_paths((path + key, child) for key, child in children(template))


class _Misfit(Exception):
    """An entry does not fit its argument: where, what was required and what came."""

    def __init__(self, path: str, required: str, got: Any) -> None:
        super().__init__(path, required, got)
        self.path, self.required, self.got = path, required, describe(got)


class _Lazy:
    """An entry that is computed only where a gradient in it is needed, and then once."""

    def __init__(self, compute: Callable[[], Any], reader: "_Reader", path: str, template: Any) -> None:
        self._compute, self._reader, self._path, self._template = compute, reader, path, template

    @functools.cached_property
    def gradients(self) -> dict[int, Any]:
        found: dict[int, Any] = {}
        try:
            self._reader.match(self._path, self._template, self._compute(), found)
        except _Misfit as misfit:
            raise self._reader.unreadable([misfit]) from None
        return found


@dataclass(slots=True)
class _Reader:
    """Reads the answers of one call's rule: one gradient per tensor argument, None for zero."""

    op: str
    templates: tuple[Any, ...]
    binding: Binding
    specs: tuple[Any, ...]

    def read(self, answer: Any) -> Sequence[Any]:
        """The gradients in `answer`: of the readings that the documentation lists, the first that fits.

        Raises:
            TypeError: when none fits.
        """
        if answer is None:
            return [None] * len(self.specs)
        if None not in self.specs and all(type(t) is Slot for t in self.templates):
            # The usual call: every argument is a differentiable tensor, with one entry for each.
            entries = answer if isinstance(answer, (tuple, list)) else (answer,)
            if len(entries) == len(self.specs) and all(_TENSORS[type(entry)] for entry in entries):
                return entries
        misfits = []
        for reading in self._readings(answer):
            gradients: dict[int, Any] = {}
            try:
                for path, template, entry in reading:
                    self.match(path, template, entry, gradients)
            except _Misfit as misfit:
                misfits.append(misfit)
            else:
                return [gradients.get(i) for i in range(len(self.specs))]
        raise self.unreadable(misfits, answer)

    def _readings(self, answer: Any) -> Iterator[Iterable[tuple[str, Any, Any]]]:
        """The ways in which `answer` may be meant: (path, template, entry) for each of its entries."""
        named = list(zip(self.binding.names(), self.templates, strict=True))
        differentiable = [(name, t) for name, t in named if self._is_differentiable(t)]
        if isinstance(answer, (tuple, list)):
            for places in (named, differentiable, list(_slot_paths(named))):
                if len(places) == len(answer):
                    yield [(*place, entry) for place, entry in zip(places, answer, strict=True)]
        elif isinstance(answer, Mapping):
            keys = {name: name[1:-1] for name, _ in named}
            wanted = {keys[name] for name, _ in differentiable}
            if wanted <= answer.keys() <= set(keys.values()):
                yield [(name, t, answer.get(keys[name])) for name, t in named]
        if len(differentiable) == 1:
            yield [(*differentiable[0], answer)]

    def _is_differentiable(self, template: Any) -> bool:
        return any(self.specs[slot] is not None for _, slot in _slot_paths([("", template)]))

    def match(self, path: str, template: Any, entry: Any, gradients: dict[int, Any]) -> None:
        """Put the gradients in `entry` to the slots of `template`; raises `_Misfit`."""
        if entry is None:
            return
        if not self._is_differentiable(template):
            if not _is_ignorable(template, entry):
                raise _Misfit(path, "None or zero, because it has no gradient", entry)
        elif callable(entry) and not _TENSORS[type(entry)]:
            lazy = _Lazy(entry, self, path, template)
            gradients.update((slot, lazy) for _, slot in _slot_paths([(path, template)]))
        elif type(template) is Slot:
            if isinstance(entry, (tuple, list, Mapping)):
                raise _Misfit(path, "one tensor", entry)
            gradients[template] = entry
        else:
            parts = dict(children(template))
            alike = tree.is_nested(entry) and isinstance(entry, Mapping) == isinstance(template, Mapping)
            entries = dict(children(entry)) if alike else {}
            if entries.keys() != parts.keys():
                raise _Misfit(path, f"the argument's own structure, {_outline(template)}", entry)
            for key, part in parts.items():
                self.match(path + key, part, entries[key], gradients)

    def unreadable(self, misfits: Sequence[_Misfit], answer: Any = None) -> TypeError:
        """The error for an answer that fits no reading, or fits each up to a `_Misfit`."""
        if misfits:
            closest = misfits[0]
            return TypeError(
                message(
                    self.op,
                    "the rule's answer has the wrong structure",
                    argument=closest.path,
                    required=closest.required,
                    got=closest.got,
                    mend="return each argument's gradient in the structure of the argument",
                )
            )
        named = list(zip(self.binding.names(), self.templates, strict=True))
        differentiable = [name for name, template in named if self._is_differentiable(template)]
        required = [f"one entry per argument: {', '.join(self.binding.names())}"]
        if len(differentiable) < len(named):
            required.append(f"one per differentiable argument: {', '.join(differentiable)}")
        if len(self.specs) not in (len(named), len(differentiable)):
            required.append(f"one per flattened tensor: {len(self.specs)}")
        if isinstance(answer, (tuple, list)):
            got = f"{len(answer)} in a {type(answer).__name__}"
        elif isinstance(answer, Mapping):
            got = f"a mapping with the keys {', '.join(map(repr, answer))}"
        else:
            got = f"one entry, {describe(answer)}"
        return TypeError(
            message(
                self.op,
                "the rule returned the wrong number of gradients",
                required="; or ".join(required),
                got=got,
                mend="return a tuple of gradients, None for those that are zero",
            )
        )


def _is_ignorable(template: Any, entry: Any) -> bool:
    """Whether `entry` can stand at the place of an argument that has no gradient."""
    if type(template) in (float, complex) and not tree.is_nested(entry):
        return len(getattr(entry, "shape", ())) == 0  # a number, constant in this call: nobody asks
    return all(_is_zero(leaf) for leaf in tree.flatten(entry))


def _is_zero(leaf: Any) -> bool:
    if leaf is None:
        return True
    if _TENSORS[type(leaf)]:
        value = backend.active.concrete(leaf)
        if value is None:  # traced; what has an integer dtype is no gradient of anything
            return not backend.active.is_differentiable(leaf)
        leaf = value
    if not isinstance(leaf, (int, float, complex, np.ndarray, np.generic)):
        return False
    # JAX's float0, which has no number but zero, is a structured dtype.
    return np.asarray(leaf).dtype.names is not None or not np.any(leaf)


def _outline(template: Any) -> str:
    """The structure of an argument in a few characters: `{'a': tensor, 'b': [tensor]}`."""
    if type(template) is Slot:
        return "tensor"
    if not tree.is_nested(template):
        return repr(template)
    if isinstance(template, Mapping):
        return "{" + ", ".join(f"{k!r}: {_outline(v)}" for k, v in template.items()) + "}"
    parts = ", ".join(_outline(part) for part in template)
    return f"[{parts}]" if isinstance(template, list) else f"({parts})"

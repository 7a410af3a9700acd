"""The gradients that a rule is expected to return, and the errors for an answer that does not have them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from keras import tree

from multigrad.backend.base import Spec
from multigrad.common.errors import describe, message, shape_text
from multigrad.core.forms import flat_form
from multigrad.core.signature import Arguments
from multigrad.core.structure import Slot, children
from multigrad.core.variables import Variables

Structured = tuple[Sequence[Any], Sequence[Spec | None]]
"""The upstream gradients that a rule got in one structure, and the specs of all inputs."""


class AnswerMismatch(Exception):
    """Raised for an entry that does not fit its argument."""

    def __init__(self, path: str, required: str, got: Any) -> None:
        # `Exception.__new__` stores the arguments. Dynamo (PyTorch 2.13) cannot trace `super().__init__`.
        self.path, self.required, self.got = path, required, describe(got)


class ExpectedGradients:
    """One gradient for each tensor among the arguments.

    Arguments:
        arguments: the arguments of the op, or the variables that it read.
        specs: the shape and dtype of each tensor's gradient, None for a tensor without one.
        structured: the upstream gradients and all specs, if the rule got several gradients in one structure.
    """

    __slots__ = ("arguments", "specs", "structured")

    def __init__(self, arguments: Arguments, specs: list[Spec | None], structured: Structured | None) -> None:
        self.arguments, self.specs, self.structured = arguments, specs, structured

    def by_name(self) -> tuple[dict[str, tuple[str, Any]], list[str]]:
        """Return the path and the template of each parameter by its name, and the names that occur twice.

        The template for `*args` is a tuple. An item of `**kwargs` can have the name of another parameter.
        """
        by_name: dict[str, tuple[str, Any]] = {}
        repeated = []
        for path, template in self.arguments.named():
            name, in_variadic, _ = path.strip("'").partition("'[")
            if in_variadic:
                _, items = by_name.get(name, ("", ()))
                path, template = repr(name), (*items, template)
            elif name in by_name:
                repeated.append(path)
            by_name[name] = path, template
        if self.arguments.binding.variadic is not None:  # `*args` may be empty
            by_name.setdefault(self.arguments.binding.variadic, (repr(self.arguments.binding.variadic), ()))
        return by_name, sorted(repeated)

    def is_differentiable(self, template: Any) -> bool:
        """Return whether a template has a slot of a differentiable tensor."""
        if type(template) is Slot:
            return self.specs[template] is not None
        return any(self.specs[slot] is not None for _, slot in slot_paths([("", template)]))

    def path_of(self, index: int) -> str:
        """Return the path of a tensor in messages, such as `'tree'['b']`."""
        return next(path for path, slot in slot_paths(self.arguments.named()) if slot == index)

    def ambiguous(self, index: int, answer: Any) -> TypeError:
        return TypeError(
            message(
                self.arguments.name,
                "the rule's result is ambiguous: an entry could belong to a number or to a tensor",
                argument=self.path_of(index),
                required="a result with one meaning",
                got=_summary(answer),
                fix="return a dict from argument names to entries, each in the structure of its argument",
            )
        )

    def wrong_shape(self, index: int, shape: Any, gradient: Any) -> ValueError:
        return ValueError(
            message(
                self.arguments.name,
                "the rule returned a gradient of the wrong shape",
                argument=self.path_of(index),
                required=f"shape {shape_text(shape)}, as the argument has, or a shape broadcast from it",
                got=describe(gradient),
                fix="return a gradient with one element for each element of the argument",
            )
        )

    def of_stacked(self, index: int, gradient: Any) -> ValueError:
        return ValueError(
            message(
                self.arguments.name,
                "the rule probably computed with several upstream gradients as with one tensor",
                argument=self.path_of(index),
                required="a gradient without an axis for the outputs",
                got=describe(gradient),
                fix="sum the gradient over its first axis if this is another axis" + self._one_by_one(),
            )
        )

    def _one_by_one(self) -> str:
        """Return the end of a fix for a rule that got several upstream gradients in one structure."""
        if self.structured is None:
            return ""
        count = len(self.structured[0])
        return f". The op has {count} outputs: use the parts of `upstream`, or write `{flat_form(count)}`"

    def not_a_gradient(self, index: int, entry: Any) -> TypeError:
        return TypeError(
            message(
                self.arguments.name,
                "the rule returned an entry that is not a gradient",
                argument=self.path_of(index),
                required="a tensor, None for zero, or a function of no arguments that returns one",
                got=describe(entry),
                fix="return the gradient with respect to this argument",
            )
        )

    def wrong_structure(self, mismatch: AnswerMismatch) -> TypeError:
        return TypeError(
            message(
                self.arguments.name,
                "the rule's result has the wrong structure",
                argument=mismatch.path,
                required=mismatch.required,
                got=mismatch.got,
                fix="return each gradient in the structure of its argument, and None where there is none"
                + (self._one_by_one() if mismatch.required == "one tensor" else ""),
                see="rules#static-arguments",
            )
        )

    def wrong_entries(self, answer: Any) -> TypeError:
        """Return the error for an answer that has the wrong number of entries, or the wrong keys."""
        if isinstance(answer, Mapping):
            return self._wrong_keys(answer)
        if isinstance(self.arguments.binding, Variables):
            return self._wrong_number_for_variables(answer)
        named = self.arguments.named()
        differentiable = [name for name, template in named if self.is_differentiable(template)]
        required = [f"one entry per argument: {', '.join(self.arguments.binding.names()) or 'none'}"]
        if len(differentiable) < len(named):
            required.append(f"one per differentiable argument: {', '.join(differentiable)}")
        if len(self.specs) not in (len(named), len(differentiable)):
            required.append(f"one per flattened tensor: {len(self.specs)}")
        return TypeError(
            message(
                self.arguments.name,
                "the rule returned the wrong number of gradients",
                required="; or ".join(required),
                got=_summary(answer),
                fix=f"return as many gradients as required, with None for a zero gradient{self._one_by_one()}"
                if isinstance(answer, (tuple, list))
                else "return a tuple of gradients, with None for a zero gradient, or pass a constant by name",
            )
        )

    def _wrong_keys(self, answer: Mapping[Any, Any]) -> TypeError:
        by_name, repeated = self.by_name()
        if repeated:
            return TypeError(
                message(
                    self.arguments.name,
                    "the rule returned a dict, and two arguments have the same name",
                    argument=", ".join(repeated),
                    required="a tuple with one entry per argument",
                    got=_summary(answer),
                    fix="return a tuple, or rename one of the parameters",
                )
            )
        keys = [path for path, template in by_name.values() if self.is_differentiable(template)]
        return TypeError(
            message(
                self.arguments.name,
                "the keys of the rule's dict are not the names of the arguments",
                required=f"the keys {', '.join(keys)}",
                got=_summary(answer),
                fix="return one entry by the name of each differentiable argument, None for zero",
            )
        )

    def _wrong_number_for_variables(self, answer: Any) -> TypeError:
        names = ", ".join(self.arguments.binding.names())
        return TypeError(
            message(
                self.arguments.name,
                "the rule returned the wrong number of gradients of variables",
                required=f"one entry per trainable variable that the function reads: {names}"
                if names
                else "an empty list: the function reads no trainable variable, as in a frozen layer",
                got=_summary(answer),
                fix="return one entry for each of `variables`, as in `[... for v in variables]`",
            )
        )


def slot_paths(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Slot]]:
    """Yield the path and the slot of each tensor in named templates."""
    for path, template in named:
        if type(template) is Slot:
            yield path, template
        elif tree.is_nested(template):
            yield from slot_paths((f"{path}[{key!r}]", child) for key, child in children(template).items())


def paths_of(named: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the path of each tensor in named templates, in the order of their slots."""
    return [path for path, _ in sorted(slot_paths(named), key=lambda pair: pair[1])]


def _summary(answer: Any) -> str:
    """Return the keys, the number of entries or the type of an answer, for a message."""
    if isinstance(answer, Mapping):
        return ", ".join(map(repr, answer)) or "none"
    if isinstance(answer, (tuple, list)):
        return f"{len(answer)} in a {type(answer).__name__}"
    return f"one entry, {describe(answer)}"

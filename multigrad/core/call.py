"""One call of an op from top to bottom: run the function, then call its rule and read the answer."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras

from multigrad import backend
from multigrad.backend.base import Options, Spec
from multigrad.core.answer import read
from multigrad.core.errors import describe, message
from multigrad.core.keras_internals import Context, context_here, in_force
from multigrad.core.rule import FLAT, HYBRID, WHOLE, arguments_for, form_of, is_handed, is_plain
from multigrad.core.signature import Binding
from multigrad.core.structure import FLAT_LAYOUTS, ONE, Layout, Refused, split
from multigrad.core.type_sets import HoldsNoTensor
from multigrad.core.variables import (
    NONE_READ,
    Pinned,
    ReadBy,
    Reads,
    Unassigned,
    Variables,
    in_scope,
    under_values_of,
)

_framework = backend.active
_TENSORS = _framework.TENSORS
_Reads = _framework.extend_reads(Reads)


class Call:
    """One call of an op, as a backend sees it: flat tensors to flat tensors, and the way back.

    It holds no tensor of the call, and nothing that a run of the function finds out.

    Arguments:
        f: the function.
        back: the pullback of an output that is one tensor.
        options: what the op was defined with.
    """

    __slots__ = ("back", "f", "options")

    def __init__(self, f: Callable[..., Any], back: "Pullback", options: Options) -> None:
        self.f = f
        self.options = options
        self.back = back

    @property
    def name(self) -> str:
        """How messages call the op."""
        return self.back.name

    def run(
        self,
        tensors: Sequence[Any],
        *,
        strict: bool = False,
        read_as: Callable[[Any], Any] | None = None,
    ) -> "Ran":
        """Run the function: its flat outputs, its rule, the inputs of the op, and the pullback.

        The inputs are `tensors` itself, or, where the function read trainable variables, these and the
        values of those.

        Arguments:
            strict: whether the function is to touch no variable; `TouchedVariable` is raised where it does.
            read_as: makes of the value of a variable the one that the function reads.
        """
        back, scope, context = self.back, _Reads(), context_here()
        scope.name = back.name
        if strict:
            scope.strict = True
        if read_as is not None:
            scope.read_as = read_as
        with scope:
            returned = self.f(*tensors) if back.flat else back.call(self.f, tensors)
        # Usually it is a tensor and a rule of one parameter, and no variable has to do with it.
        around = scope.original_scope
        if type(around) is Unassigned:
            around = None
        if (
            around is None
            and not (scope.variables or scope.state)
            and type(returned) is tuple
            and len(returned) == 2
        ):
            output, rule = returned
            if _TENSORS[type(output)] and is_plain(rule):
                return (output,), rule, tensors, back if context is None else back.anew(context)
        return self._accept(returned, tensors, scope, around, context)

    def run_again(
        self, inputs: Sequence[Any], first: "Pullback", f: Callable[..., Any] | None = None
    ) -> "Ran":
        """Run the function once more, for a derivative of the rule's residuals.

        Variables have the values that are among `inputs`, and assignments end with the run. `f` stands in for
        the function, with another closure.
        """
        count = len(inputs) - len(first.variables)
        scope = Pinned(first.variables, inputs[count:], first.around)
        with scope, in_force(first.context):
            returned = self.back.call(f or self.f, inputs[:count])
        return self._accept(returned, inputs[:count], scope, first.around, first.context)

    def _accept(
        self,
        returned: Any,
        tensors: Sequence[Any],
        scope: Reads | Pinned,
        around: keras.StatelessScope | None,
        context: Context | None,
    ) -> "Ran":
        """What `run` returns, for anything that a function may return and read."""
        name, binding = self.back.name, self.back.binding
        if type(returned) not in (tuple, list) or len(returned) != 2 or not callable(returned[1]):
            raise self._no_pair(returned)
        output, given = returned
        try:
            with scope:  # in which a variable is read that is an output itself
                outputs, layout = split(output, whole=True)
        except Refused as refused:
            raise refused.error(name, [("the output", output)]) from None
        form, takes = form_of(name, given, binding, len(outputs))
        variables, rule = scope.read(), given
        if form == HYBRID:
            arguments = self.back.arguments.join(tensors)
            rule = functools.partial(rule, *arguments[: arguments_for(name, given, binding)])
        handed = is_handed(name, given, takes, variables.names())
        if handed or around is not None or variables.state:
            rule = under_values_of(name, rule, variables, scope.latest(), around, handed)
        inputs = (*tensors, *scope.values) if variables else tensors
        back = self.back.anew(context)
        back.output, back.form = layout, form
        back.variables, back.handed, back.around = variables, handed, around
        back.plain = False
        return outputs, rule, inputs, back

    def rehearsal(self) -> AbstractContextManager[Any]:
        """A context behind which variables are as they were before, whatever a rule assigned in it."""
        return Pinned(NONE_READ, ())

    def objects(self) -> Sequence[Any]:
        """The arguments that are no tensors, such as `self`."""
        return self.back.arguments.static_leaves()

    def has_objects(self) -> bool:
        """Whether an argument is an object through which tensors may be reached, such as `self`."""
        return self.back.arguments.has_objects()

    def touches_variables(self) -> bool:
        """Whether a run of the function, or of another of its code, touched a variable."""
        return _code_of(self.f) in _TOUCHING

    def note_touched(self) -> None:
        """Remember that one did."""
        if len(_TOUCHING) >= _KEPT:
            _TOUCHING.clear()
        _TOUCHING.add(_code_of(self.f))

    def may_read_another(self) -> bool:
        """Whether it may read a variable that has another value here than its own, in a scope."""
        return in_scope()

    def _no_pair(self, returned: Any) -> TypeError:
        return TypeError(
            message(
                self.name,
                "the function did not return an output and the rule of its gradient",
                required="a pair `output, rule`, whose second item is a function",
                got=describe(returned),
                fix="end the function with `return output, rule`",
            )
        )


# Codes whose functions touched a variable: the next run need not begin where that is not possible.
_TOUCHING: set[Any] = set()
_KEPT = 4096


def _code_of(f: Any) -> Any:
    return getattr(f, "__code__", type(f))


class Pullback(HoldsNoTensor):
    """How the rule of one run is called, and its answer read. It holds neither the rule nor its tensors.

    Arguments:
        name: how messages call the op.
        binding, arguments: how the arguments of the call were bound, and their layout.
    """

    # What a run finds out, as it is for most of them.
    plain = True
    """Whether it is as it is for most of them: one tensor, and a rule of one parameter."""
    output: Layout = ONE
    """The layout of the output."""
    form = WHOLE
    """The form of the rule."""
    variables: Variables = NONE_READ
    """The trainable variables that the function read."""
    handed = False
    """Whether the rule is handed them."""
    around: keras.StatelessScope | None = None
    """The scope around the call, in which Keras finds variables."""
    context: Context | None = None
    """What Keras knows of the layers around the call."""

    def __init__(self, name: str, binding: Binding, arguments: Layout) -> None:
        self.name, self.binding, self.arguments = name, binding, arguments
        self.flat = arguments.flat and not binding.keywords
        """Whether the function is called with the tensors as they are."""

    def anew(self, context: Context | None) -> "Pullback":
        """A pullback of the same call, in which the rule is to meet this context."""
        kind = Pullback if context is None else _InContext
        back = kind(self.name, self.binding, self.arguments)
        back.context = context
        return back

    def call(self, function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        """What the function returns for the arguments around these tensors."""
        return self.binding.call(function, self.arguments.join(tensors))

    def reading(self, read: Callable[[Any], Any]) -> AbstractContextManager[Any]:
        """A context in which `read` reads what variables hold that are not pinned for the rule."""
        return ReadBy(read)

    @property
    def untraced(self) -> "Pullback":
        """The same, of which no trace takes notice."""
        return self

    def pull(
        self,
        rule: Callable[..., Any],
        upstream: Sequence[Any],
        needed: Sequence[bool],
        specs: list[Spec | None],
    ) -> Sequence[Any]:
        """Call the rule: the gradient of each input, None for zero or where not needed.

        Arguments:
            rule: what `run` returned, or the same around other tensors.
            upstream: the upstream gradient of each tensor in the output, None where it has none.
            needed: for each input, whether its gradient is of use to anybody.
            specs: for each input, what it requires of its gradient.
        """
        if _framework.is_reading_code():  # which enters no scope in a rule, and refuses assignments itself
            answer = self._answer(rule, upstream)
        else:
            scope = Unassigned()
            scope.name = self.name
            with scope:
                answer = self._answer(rule, upstream)
        if self.handed:
            return self._read_both(answer, needed, specs)
        return read(self, answer, specs, needed)

    def _answer(self, rule: Callable[..., Any], upstream: Sequence[Any]) -> Any:
        """Call the rule in its form."""
        if self.plain:
            return rule(upstream[0])
        if self.form == FLAT:
            return rule(*upstream)
        whole = self.output.join_tensors_only(upstream)
        return rule(whole) if self.form == WHOLE else rule(upstream=whole)

    def _read_both(self, answer: Any, needed: Sequence[bool], specs: list[Spec | None]) -> Sequence[Any]:
        """The gradients of the arguments and of the variables, for a rule that was handed the latter."""
        if type(answer) not in (tuple, list) or len(answer) != 2:
            raise TypeError(
                message(
                    self.name,
                    "the rule was handed variables and returned no gradients of theirs",
                    required="a pair `gradients, gradients_of_variables`",
                    got=describe(answer),
                    fix="return both, with one entry per variable in the second",
                )
            )
        count = len(specs) - len(self.variables)
        of_variables = _OfVariables(self.name, FLAT_LAYOUTS[len(self.variables)], self.variables)
        own = read(self, answer[0], specs[:count], needed[:count])
        theirs = read(of_variables, answer[1], specs[count:], needed[count:])
        return [*own, *theirs]


class _InContext(Pullback):
    """The pullback of a call inside of a layer."""

    def pull(
        self,
        rule: Callable[..., Any],
        upstream: Sequence[Any],
        needed: Sequence[bool],
        specs: list[Spec | None],
    ) -> Sequence[Any]:
        with in_force(self.context):
            return super().pull(rule, upstream, needed, specs)


class _OfVariables(NamedTuple):
    """What a rule that is handed variables answers for beside the arguments."""

    name: str
    arguments: Layout
    binding: Variables


Ran = tuple[Sequence[Any], Callable[..., Any], Sequence[Any], Pullback]
"""What a run gives: outputs, rule, inputs, and how the rule is called."""

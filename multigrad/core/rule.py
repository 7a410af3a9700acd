"""The rule of one run: how it is called, and its gradients."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

from multigrad import backend
from multigrad.backend.base import Spec
from multigrad.common.closure import restore
from multigrad.common.errors import describe, message, shape_text
from multigrad.common.process_wide import FORWARD_MODE
from multigrad.common.reachable import UNREADABLE, reachable_tensors
from multigrad.common.type_sets import HoldsNoTensor, TypeSet
from multigrad.core.answer import read_answer
from multigrad.core.context import Context, restore_context
from multigrad.core.expected_gradients import Structured, paths_of
from multigrad.core.forms import FLAT, KEYWORD, WHOLE, flat_form
from multigrad.core.signature import Arguments
from multigrad.core.structure import FLAT_LAYOUTS, ONE_TENSOR, Layout
from multigrad.core.variables import NONE_READ, ReadBy, ReadOnly, RuleScope, Variables

_framework = backend.active
HELD = TypeSet(*_framework.TENSORS.bases, *UNREADABLE)
_NO_CONTEXT = contextlib.nullcontext()


class Rule(HoldsNoTensor):
    """The rule of a run without its residuals.

    It holds the scope around the call, and the state that the function read, and no other tensor.

    Arguments:
        arguments: the arguments of the call.
        context: Keras's state around the call, which is restored for the rule.
    """

    # Set by the run. The class attributes are the common case.
    is_plain = True
    """Whether the output is one tensor and the rule takes only the upstream gradient."""
    output: Layout = ONE_TENSOR
    """The layout of the output."""
    form = WHOLE
    """The form of the rule."""
    variables: Variables = NONE_READ
    """The trainable variables that the function read."""
    gets_variables = False
    """Whether the rule gets these variables."""
    outer_scope: keras.StatelessScope | None = None
    """The scope that was active around the call, from which Keras reads variables."""
    has_scope_values = False
    """Whether the last residuals are values of the variables, and of their state, for the rule's scope."""

    template: Any
    """The rule without its residuals, for `closure.restore`. `Run.lift` sets this attribute and the following
    ones. The backend sets the last one, `specs`."""
    roles: Sequence[int]
    """What each residual is: an index among the inputs followed by the outputs, or `OTHER`."""
    is_opaque: bool
    """Whether the rule holds an object that may hold further tensors."""
    closure_count: int
    """The number of residuals in the closure of the rule. The values for its scope follow them."""
    specs: list[Spec | None]
    """For each input, the shape and dtype of its gradient."""

    def __init__(self, arguments: Arguments, context: Context | None) -> None:
        self.arguments, self.name, self.context = arguments, arguments.name, context

    def held(self) -> list[Any]:
        """Return what the rule can reach through objects: tensors, and iterators, which may hold tensors."""
        if not self.is_opaque:
            return []
        return list(reachable_tensors(restore(self.template, [None] * self.closure_count), HELD))

    def holds_more_than(self, before: Sequence[Any]) -> bool:
        """Return whether the rule can reach a tensor through an object that `Call.held` did not return."""
        return any([not any([held is other for other in before]) for held in self.held()])

    def scope_with_reader(self, reader: Callable[[Any], Any]) -> AbstractContextManager[Any]:
        """Return a context in which the rule reads the framework's variables by `reader(variable)`.

        It does not apply to variables whose values are inputs of the op.
        """
        return ReadBy(reader)

    def scope_of(self, scope_values: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return the scope in which the rule reads variables, with these values.

        A compiler that cannot enter it in the backward pass enters it around the op.
        """
        if not self.has_scope_values:
            return _NO_CONTEXT
        return RuleScope(self.variables, scope_values, self.outer_scope, self.name)

    def pull(
        self,
        residuals: Sequence[Any],
        upstream: Sequence[Any],
        needed: Sequence[bool],
        transposed: bool = False,
    ) -> Sequence[Any]:
        """Call the rule with these residuals, and return the gradient of each input.

        A gradient is None if it is zero or not needed. A trace does not record a call for forward mode.

        Arguments:
            residuals: the residuals.
            upstream: the upstream gradient of each output, None for an output without one.
            needed: for each input, whether its gradient is used.
            transposed: whether the call is for forward mode.
        """
        user_rule = restore(self.template, residuals)
        scope_values: Sequence[Any] = ()
        if self.has_scope_values:  # PyTorch may save the inputs after the residuals
            scope_values = residuals[self.closure_count : len(self.roles)]
        if not transposed:
            return self.call(user_rule, scope_values, upstream, needed, residuals)
        FORWARD_MODE.append(None)
        try:
            # Not `self.call`, which a trace overrides to record a step of the backward pass.
            return Rule.call(self, user_rule, scope_values, upstream, needed, residuals)
        finally:
            FORWARD_MODE.pop()

    def call(
        self,
        user_rule: Callable[..., Any],
        scope_values: Sequence[Any],
        upstream: Sequence[Any],
        needed: Sequence[bool],
        residuals: Sequence[Any] | None = None,
    ) -> Sequence[Any]:
        """Call the rule as a function, and return what `pull` returns.

        Arguments:
            user_rule: the rule as its function returned it, with its residuals.
            scope_values: the values of the variables in its scope.
            upstream, needed: as for `pull`.
            residuals: the residuals, if they have been lifted.
        """
        context = _NO_CONTEXT if self.context is None else restore_context(self.context)
        scope: Any
        if _framework.is_reading_code():  # Dynamo enters no scope in a rule, and itself refuses assignments
            scope = _NO_CONTEXT
        else:
            scope = self.scope_of(scope_values) if self.has_scope_values else ReadOnly()
            scope.name = self.name
            if residuals is not None:
                scope.rule, scope.residuals = self, residuals
        with context, scope:  # also while the answer is read, because lazy gradients may read variables
            answer = self._answer(user_rule, upstream)
            if answer is None:
                raise self._no_answer()
            structured = (upstream, self.specs) if len(upstream) > 1 and self.form != FLAT else None
            if self.gets_variables:
                return self._read_with_variables(answer, needed, structured)
            return read_answer(self.arguments, answer, self.specs, needed, structured)

    def _answer(self, user_rule: Callable[..., Any], upstream: Sequence[Any]) -> Any:
        """Call the rule in its form."""
        try:
            if self.is_plain:
                return user_rule(upstream[0])
            more = {"variables": list(self.variables)} if self.gets_variables else {}
            if self.form == FLAT:
                return user_rule(*upstream, **more)
            structured = self.output.join_tensors_only(upstream)
            return (
                user_rule(structured, **more)
                if self.form == WHOLE
                else user_rule(upstream=structured, **more)
            )
        except Exception as error:
            error.add_note(f"raised in the rule of {self.name}")
            error.add_note(self._shapes(upstream))
            if self.form in (WHOLE, KEYWORD) and len(upstream) > 1:
                error.add_note(f"the op has {len(upstream)} outputs: write {flat_form(len(upstream))}")
            if "numpy" in str(error):
                error.add_note("NumPy cannot read a traced tensor: call it by multigrad.ops.host_call")
            raise

    def _shapes(self, upstream: Sequence[Any]) -> str:
        """Return the shapes of the upstream gradients, and of the inputs that have a gradient."""
        names = [*paths_of(self.arguments.named()), *self.variables.names()]
        named = zip(names, self.specs, strict=True)
        shapes = [f"{name}: {shape_text(spec[0])}" for name, spec in named if spec is not None]
        shapes += [f"upstream: {shape_text(u.shape)}" for u in upstream if u is not None]
        return f"with the shapes {', '.join(shapes)}"

    def _read_with_variables(
        self, answer: Any, needed: Sequence[bool], structured: Structured | None
    ) -> Sequence[Any]:
        """Return the gradients of the arguments and of the variables."""
        if type(answer) not in (tuple, list) or len(answer) != 2:
            raise TypeError(
                message(
                    self.name,
                    "the rule takes variables and does not return their gradients",
                    required="a pair `gradients, gradients_of_variables`",
                    got=describe(answer),
                    fix="return both, with one entry per variable in the second",
                )
            )
        count = len(self.specs) - len(self.variables)
        # None as the first item is written down, unlike a forgotten `return`: zero for all arguments.
        gradients: Sequence[Any] = [None] * count
        if answer[0] is not None:
            gradients = read_answer(self.arguments, answer[0], self.specs[:count], needed[:count], structured)
        variables = Arguments(self.name, self.variables, FLAT_LAYOUTS[len(self.variables)])
        return [
            *gradients,
            *read_answer(variables, answer[1], self.specs[count:], needed[count:], structured),
        ]

    def _no_answer(self) -> TypeError:
        zero = "return gradients, [None for v in variables]" if self.gets_variables else "return None,"
        return TypeError(
            message(
                self.name,
                "the rule returned None instead of a gradient",
                required="a pair `gradients, gradients_of_variables`"
                if self.gets_variables
                else "a gradient, or a tuple, list or dict of gradients, in which None stands for zero",
                got="None, as from a function without `return`",
                fix=f"end the rule with `return gradient`; if the gradient is zero, write `{zero}`",
            )
        )

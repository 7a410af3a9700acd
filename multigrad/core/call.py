"""One call of an op, from the function to the gradients.

A call has one life on every framework. This file and `rule.py` have the steps that are the same on each:

- `op.py` binds the arguments to the signature, and splits them into flat tensors and a layout.
- The backend strips the history of the tensors, except on TensorFlow, whose tapes record the function. It
  calls `Call.run`, which runs the function once in a scope that records the variables that it reads. Their
  values become inputs, too.
- `Run.lift` lifts the tensors out of the closure of the rule: the residuals. It classifies each as an input,
  an output or another tensor.
- The backend ties the outputs to the inputs. In the backward pass it calls `Rule.pull`, which calls the rule
  in its form and reads its answer.
- For a derivative of the gradient, if a residual is an intermediate result, `Call.rerun` runs the function
  again on inputs with history.
- The layout of the output joins the outputs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from multigrad import backend
from multigrad.common.closure import OTHER, classify, lift, residuals_in
from multigrad.common.errors import describe, message
from multigrad.common.reachable import path_to_tensor, reachable_tensors
from multigrad.core.context import Context, current_context, restore_context
from multigrad.core.forms import HYBRID, arguments_for, form_of, gets_variables, takes_upstream_only
from multigrad.core.leaves import Refused
from multigrad.core.rule import HELD, Rule
from multigrad.core.signature import Arguments
from multigrad.core.structure import ONE_TENSOR, Layout, split
from multigrad.core.variables import Pinned, ReadOnly, Reads, in_scope, inputs_of_outer_rule

_framework = backend.active
_TENSORS = _framework.TENSORS
_Reads = _framework.extend_reads(Reads)


class Call:
    """One call of an op. A backend runs it on flat tensors and gets flat tensors.

    It holds no tensor of the call.

    Arguments:
        f: the function.
        arguments: the arguments of the call.
        higher_order: whether the gradient can be differentiated again.
    """

    __slots__ = ("arguments", "f", "higher_order", "layout", "name")

    def __init__(self, f: Callable[..., Any], arguments: Arguments, higher_order: bool) -> None:
        self.f, self.arguments, self.higher_order = f, arguments, higher_order
        self.name = arguments.name
        self.layout: Layout = ONE_TENSOR
        """The layout of the output, which the run of the function sets."""

    def run(self, tensors: Sequence[Any], strip: Callable[[Any], Any] | None = None) -> "Run":
        """Run the function.

        The inputs of the run are the object `tensors`, or `tensors` followed by the values of the trainable
        variables that the function read.

        Arguments:
            tensors: the tensors among the arguments of the call.
            strip: removes the history of the value of each variable; the function reads the result.
        """
        scope, context = _Reads(), current_context()
        scope.name = self.name
        if strip is not None:
            scope.strip = strip
        with scope:
            returned = self.f(*tensors) if self.arguments.is_flat else self.arguments.call(self.f, tensors)
            outputs = self._split(returned)  # an output can be a variable, which is read here
        user_rule, outer_scope = returned[1], scope.original_scope
        if type(outer_scope) is ReadOnly:  # of an outer rule: it has no values
            outer_scope = None
        # The common case: one tensor, a plain rule and no variables.
        is_common = outer_scope is None and not (scope.variables or scope.state)
        if is_common and self.layout is ONE_TENSOR and takes_upstream_only(user_rule):
            scope.strip = None  # an op in the function keeps the scope
            return Run(outputs, tensors, user_rule, Rule(self.arguments, context))
        run = self._result(user_rule, outputs, tensors, scope, outer_scope, context)
        run.originals = scope.originals() if strip is not None else scope.values
        scope.strip = None
        return run

    def outputs(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Run the function for its outputs alone, in the active scope. Its rule will not be called."""
        return self._split(self.arguments.call(self.f, tensors))

    def rerun(self, inputs: Sequence[Any], first: Rule) -> "Run":
        """Run the function again, to differentiate the residuals of its rule, which are lifted.

        The function reads the values of variables from `inputs`. Its assignments to variables are discarded.

        Arguments:
            inputs: the inputs of the first run, or other values of them.
            first: the rule of the first run.
        """
        count = len(inputs) - len(first.variables)
        scope = Pinned(first.variables, inputs[count:], first.outer_scope, first.name)
        with scope, restore_context(first.context):
            returned = self.arguments.call(self.f, inputs[:count])
            outputs = self._split(returned)
        run = self._result(returned[1], outputs, inputs[:count], scope, first.outer_scope, first.context)
        run.lift(self.f)
        return run

    def _result(
        self,
        user_rule: Callable[..., Any],
        outputs: Sequence[Any],
        tensors: Sequence[Any],
        scope: Reads | Pinned,
        outer_scope: keras.StatelessScope | None,
        context: Context | None,
    ) -> "Run":
        """Return the result of a run that returned these outputs, and this function as the rule."""
        binding, variables = self.arguments.binding, scope.as_variables()
        rule = Rule(self.arguments, context)
        rule.form, takes_variables = form_of(self.name, user_rule, binding, len(outputs))
        rule.gets_variables = gets_variables(self.name, user_rule, takes_variables, variables)
        if rule.form == HYBRID:
            arguments = self.arguments.layout.join(tensors)
            count = arguments_for(self.name, user_rule, binding)
            user_rule = functools.partial(user_rule, *arguments[:count])
        rule.output, rule.variables, rule.outer_scope = self.layout, variables, outer_scope
        rule.is_plain = False
        run = Run(outputs, (*tensors, *scope.values) if variables else tensors, user_rule, rule)
        rule.has_scope_values = bool(rule.gets_variables or outer_scope is not None or variables.state)
        if rule.has_scope_values:
            run.scope_values = [
                *(scope.final_values() if scope.assigned else scope.values),
                *[value for _, value in variables.state],
            ]
        return run

    def _split(self, returned: Any) -> Sequence[Any]:
        """Return the flat outputs in what the function returned, and keep their layout."""
        if type(returned) not in (tuple, list) or len(returned) != 2 or not callable(returned[1]):
            raise self._not_a_pair(returned)
        try:
            outputs, self.layout = split(returned[0], search_objects=True)
        except Refused as refused:
            raise refused.error(self.name, [("the output", returned[0])]) from None
        return outputs

    def objects(self) -> Sequence[Any]:
        """Return the arguments that are not tensors, such as `self`."""
        return self.arguments.layout.static_leaves()

    def held(self) -> list[Any]:
        """Return the tensors that the function can reach, and the iterators, which may hold tensors."""
        return [part for root in (self.f, *self.objects()) for part in reachable_tensors(root, HELD)]

    def answers_for_outer_rule(self, inputs: Sequence[Any]) -> bool:
        """Return whether this op is called in a rule and takes each input of the outer op.

        Its own rule is then the derivative of the tensors that it closes over.
        """
        outer = inputs_of_outer_rule()
        return outer is not None and all([any([x is y for y in inputs]) for x in outer])

    def closed_over_path(self, is_differentiated: Callable[[Any], bool]) -> str | None:
        """Return where the function finds a differentiated tensor other than its arguments, for a message."""
        return path_to_tensor(self.f, self.arguments.named(), _TENSORS, is_differentiated)

    def is_in_scope(self) -> bool:
        """Return whether a scope is active, in which variables may have other values than their own."""
        return in_scope()

    def _not_a_pair(self, returned: Any) -> TypeError:
        got, fix = describe(returned), "end the function with `return output, rule`"
        if type(returned) in (tuple, list) and len(returned) > 2:
            got = f"a {type(returned).__name__} of {len(returned)}"
            fix += ". Put several outputs into a tuple, as in `return (a, b), rule`"
        return TypeError(
            message(
                self.name,
                "the function did not return an output and the rule of its gradient",
                required="a pair `output, rule`, whose second item is a function",
                got=got,
                fix=fix,
            )
        )


class Run:
    """The result of one run of the function.

    Arguments:
        outputs: the flat outputs.
        inputs: the inputs by position: the tensors of the call, then the values of the trainable variables
            that the function read. The rule returns their gradients.
        user_rule: the rule as the function returned it.
        rule: what calls it, which `lift` completes.
    """

    __slots__ = ("inputs", "originals", "outputs", "residuals", "rule", "scope_values", "user_rule")

    scope_values: Sequence[Any]
    """The values of the variables, and of their state, in the scope of the rule."""
    originals: Sequence[Any]
    """The values of the trainable variables that were read, before `strip`."""
    residuals: list[Any]
    """The tensors in the closure of the rule, followed by `scope_values`. `lift` sets them."""

    def __init__(
        self, outputs: Sequence[Any], inputs: Sequence[Any], user_rule: Callable[..., Any], rule: Rule
    ) -> None:
        self.outputs, self.inputs, self.user_rule, self.rule = outputs, inputs, user_rule, rule
        self.scope_values = self.originals = ()

    def lift(self, owner: Any) -> Rule:
        """Find the residuals of the rule, which the function `owner` returned, and return the rule."""
        rule = self.rule
        residuals, rule.template, rule.is_opaque = lift(self.user_rule, _TENSORS, owner)
        rule.closure_count = len(residuals)
        self.residuals = [*residuals, *self.scope_values] if rule.has_scope_values else residuals
        rule.roles = classify(self.residuals, self.inputs, self.outputs)
        return rule

    def other_residuals(self) -> list[Any]:
        """Return the residuals that are neither inputs nor outputs."""
        pairs = zip(self.residuals, self.rule.roles, strict=True)
        return [residual for residual, role in pairs if role == OTHER]

    def residuals_with(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return the residuals, with these inputs and outputs in place of those of the run."""
        return residuals_in(self.rule.roles, (*inputs, *outputs), self.other_residuals())

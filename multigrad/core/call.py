"""One call of an op, from the function to the gradients.

A call has one life on every framework. This file has the steps that are the same on each of them:

- `op.py` binds the arguments to the signature, and splits them into flat tensors and a layout.
- The backend strips the history of the tensors, except on TensorFlow, whose tapes record the function. It
  calls `Call.run`, which runs the function once in a scope that records the variables that it reads. Their
  values become inputs, too.
- `Run.lift` lifts the tensors out of the closure of the rule: the residuals. It classifies each as an input,
  an output or another tensor.
- The backend ties the outputs to the inputs. In the backward pass it calls `Pullback.pull`, which calls the
  rule in its form and reads its answer.
- For a derivative of the gradient, if a residual is an intermediate result, `Call.rerun` runs the function
  again on inputs with history.
- The layout of the output joins the outputs.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

from multigrad import backend
from multigrad.backend.base import Spec
from multigrad.common.closure import OTHER, RuleWithTensors, classify, lift, residuals_in, restore
from multigrad.common.errors import describe, message, shape_text
from multigrad.common.process_wide import FORWARD_MODE
from multigrad.common.reachable import UNREADABLE, path_to_tensor, reachable_tensors
from multigrad.common.type_sets import HoldsNoTensor, TypeSet
from multigrad.core.answer import read
from multigrad.core.context import Context, current_context, restore_context
from multigrad.core.expected_gradients import Structured, slot_paths
from multigrad.core.rule import (
    FLAT,
    HYBRID,
    KEYWORD,
    WHOLE,
    arguments_for,
    flat_form,
    form_of,
    gets_variables,
    is_plain,
)
from multigrad.core.signature import Binding
from multigrad.core.structure import FLAT_LAYOUTS, ONE_TENSOR, Layout, Refused, split
from multigrad.core.variables import (
    NONE_READ,
    ByRole,
    Pinned,
    ReadBy,
    ReadOnly,
    Reads,
    Variables,
    in_scope,
    inputs_of_outer_rule,
    scope_of_rule,
)

_framework = backend.active
_TENSORS = _framework.TENSORS
_HELD = TypeSet(*_TENSORS.bases, *UNREADABLE)
_Reads = _framework.extend_reads(Reads)


class Call:
    """One call of an op. A backend runs it on flat tensors and gets flat tensors.

    It holds no tensor of the call.

    Arguments:
        f: the function.
        pullback: the pullback for an output of one tensor and a plain rule.
        higher_order: whether the gradient can be differentiated again.
    """

    __slots__ = ("f", "higher_order", "layout", "pullback")

    def __init__(self, f: Callable[..., Any], pullback: "Pullback", higher_order: bool) -> None:
        self.f = f
        self.higher_order = higher_order
        self.pullback = pullback
        self.layout: Layout = ONE_TENSOR
        """The layout of the output, which the run of the function sets."""

    @property
    def name(self) -> str:
        """The name of the op in messages."""
        return self.pullback.name

    def run(
        self,
        tensors: Sequence[Any],
        *,
        read_as: Callable[[Any], Any] | None = None,
        values: list[Any] | None = None,
    ) -> "Run":
        """Run the function.

        The inputs of the run are the object `tensors`, or `tensors` followed by the values of the trainable
        variables that the function read.

        Arguments:
            tensors: the tensors among the arguments of the call.
            read_as: maps the value of each variable to the value that the function reads.
            values: a list to which the values of these variables before `read_as` are added.
        """
        pullback, scope, context, f = self.pullback, _Reads(), current_context(), self.f
        scope.name = pullback.name
        if read_as is not None:
            scope.read_as = read_as
        with scope:
            returned = f(*tensors) if pullback.is_flat else pullback.call(f, tensors)
        outer_scope = scope.original_scope
        if type(outer_scope) is ReadOnly:
            outer_scope = None
        # The common case: one tensor, a plain rule and no variables.
        if (
            outer_scope is None
            and not (scope.variables or scope.state)
            and type(returned) is tuple
            and len(returned) == 2
        ):
            output, rule = returned
            if _TENSORS[type(output)] and is_plain(rule):
                scope.read_as = None  # an op in the function keeps the scope
                return Run((output,), rule, tensors, pullback if context is None else pullback.copy(context))
        run = self._result(returned, tensors, scope, outer_scope, context)
        if values is not None:
            values += scope.originals()
        scope.read_as = None  # an op in the function keeps the scope
        return run

    def outputs(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Run the function for its outputs alone, in the active scope. Its rule will not be called."""
        return self._split(self.pullback.call(self.f, tensors))

    def rerun(self, inputs: Sequence[Any], first: "Pullback") -> "Run":
        """Run the function again, to differentiate the residuals of its rule, which are lifted.

        The function reads the values of variables from `inputs`. Its assignments to variables are discarded.

        Arguments:
            inputs: the inputs of the first run, or other values of them.
            first: the pullback of the first run.
        """
        count = len(inputs) - len(first.variables)
        scope = Pinned(first.variables, inputs[count:], first.outer_scope, first.name)
        with scope, restore_context(first.context):
            returned = self.pullback.call(self.f, inputs[:count])
        run = self._result(returned, inputs[:count], scope, first.outer_scope, first.context)
        run.pullback = first
        run.lift(self.f)
        return run

    def _result(
        self,
        returned: Any,
        tensors: Sequence[Any],
        scope: Reads | Pinned,
        outer_scope: keras.StatelessScope | None,
        context: Context | None,
    ) -> "Run":
        """Check what the function returned, and return the result of the run."""
        name, binding = self.pullback.name, self.pullback.binding
        with scope:  # an output can be a variable, which is read here
            outputs = self._split(returned)
        original_rule = returned[1]
        form, takes = form_of(name, original_rule, binding, len(outputs))
        variables, rule = scope.read(), original_rule
        if form == HYBRID:
            arguments = self.pullback.arguments.join(tensors)
            rule = functools.partial(rule, *arguments[: arguments_for(name, original_rule, binding)])
        passed = gets_variables(name, original_rule, takes, variables.names())
        if passed or outer_scope is not None or variables.state:
            state = [value for _, value in variables.state]
            rule = RuleWithTensors(rule, [*scope.final_values(), *state])
        inputs = (*tensors, *scope.values) if variables else tensors
        pullback = self.pullback.copy(context)
        pullback.output, pullback.form = self.layout, form
        pullback.variables, pullback.gets_variables, pullback.outer_scope = variables, passed, outer_scope
        pullback.is_plain = False
        return Run(outputs, rule, inputs, pullback)

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
        return self.pullback.arguments.static_leaves()

    def held(self) -> list[Any]:
        """Return the tensors that the function can reach, and the iterators, which may hold tensors."""
        return [part for root in (self.f, *self.objects()) for part in reachable_tensors(root, _HELD)]

    def answers_for_outer_rule(self, inputs: Sequence[Any]) -> bool:
        """Return whether this op is called in a rule and takes each input of the outer op.

        Its own rule is then the derivative of the tensors that it closes over.
        """
        outer = inputs_of_outer_rule()
        return outer is not None and all([any([x is y for y in inputs]) for x in outer])

    def closed_over_path(self, is_differentiated: Callable[[Any], bool]) -> str | None:
        """Return where the function finds a differentiated tensor other than its arguments, for a message."""
        arguments = zip(self.pullback.binding.names(), self.pullback.arguments.template, strict=True)
        return path_to_tensor(self.f, arguments, _TENSORS, is_differentiated)

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
        rule: the rule.
        inputs: the inputs by position: the tensors of the call, then the values of the trainable variables
            that the function read. The rule returns their gradients.
        pullback: calls the rule, or the same rule around other residuals.
    """

    __slots__ = ("inputs", "is_opaque", "outputs", "pullback", "residuals", "roles", "rule", "template")

    residuals: list[Any]
    """The tensors in the closure of the rule. `lift` sets this attribute and the following ones."""
    roles: list[int]
    """What each residual is: an index among the inputs followed by the outputs, or `OTHER`."""
    template: Any
    """The rule without its residuals, for `closure.restore`."""
    is_opaque: bool
    """Whether the rule holds an object that may hold further tensors."""

    def __init__(
        self, outputs: Sequence[Any], rule: Callable[..., Any], inputs: Sequence[Any], pullback: "Pullback"
    ) -> None:
        self.outputs, self.rule, self.inputs, self.pullback = outputs, rule, inputs, pullback

    def lift(self, owner: Any) -> None:
        """Find the residuals of the rule, which the function `owner` returned."""
        self.residuals, self.template, self.is_opaque = lift(self.rule, _TENSORS, owner)
        self.roles = classify(self.residuals, self.inputs, self.outputs)

    def others(self) -> list[Any]:
        """Return the residuals that are neither inputs nor outputs."""
        pairs = zip(self.residuals, self.roles, strict=True)
        return [residual for residual, role in pairs if role == OTHER]

    def residuals_with(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return the residuals, with these inputs and outputs in place of those of the run."""
        return residuals_in(self.roles, (*inputs, *outputs), self.others())

    def rule_with(self, specs: list[Spec | None]) -> "Rule":
        """Return the rule, whose residuals have been lifted. The specs are those of the inputs."""
        return Rule(self.pullback, self.template, self.roles, specs, self.is_opaque)


class Rule(HoldsNoTensor):
    """The rule of a run without its residuals. It holds no tensor.

    Arguments:
        pullback, template, roles, is_opaque: those of the run.
        specs: for each input, the shape and dtype of its gradient.
    """

    __slots__ = ("is_opaque", "pullback", "roles", "specs", "template")

    def __init__(
        self,
        pullback: "Pullback",
        template: Any,
        roles: Sequence[int],
        specs: list[Spec | None],
        is_opaque: bool,
    ) -> None:
        self.pullback, self.template, self.roles = pullback, template, roles
        self.specs, self.is_opaque = specs, is_opaque

    def held(self) -> list[Any]:
        """Return what the rule can reach through objects: tensors, and iterators, which may hold tensors."""
        if not self.is_opaque:
            return []
        return list(reachable_tensors(restore(self.template, [None] * len(self.roles)), _HELD))

    def holds_more_than(self, before: Sequence[Any]) -> bool:
        """Return whether the rule can reach a tensor through an object that `Call.held` did not return."""
        return any([not any([held is other for other in before]) for held in self.held()])

    def pull(
        self,
        residuals: Sequence[Any],
        upstream: Sequence[Any],
        needed: Sequence[bool],
        transposed: bool = False,
    ) -> Sequence[Any]:
        """Call the rule with these residuals. A trace does not record a call for forward mode."""
        rule, by_role = restore(self.template, residuals), (self.roles, residuals)
        if not transposed:
            return self.pullback.pull(rule, upstream, needed, self.specs, by_role)
        FORWARD_MODE.append(None)
        try:
            return self.pullback.without_trace.pull(rule, upstream, needed, self.specs, by_role)
        finally:
            FORWARD_MODE.pop()


class Pullback(HoldsNoTensor):
    """Calls the rule of one run and reads its answer. It holds neither the rule nor any tensor.

    Arguments:
        name: the name of the op in messages.
        binding: the binding of the call's arguments.
        arguments: the layout of the arguments.
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
    context: Context | None = None
    """Keras's state around the call, which is restored for the rule."""

    def __init__(self, name: str, binding: Binding, arguments: Layout) -> None:
        self.name, self.binding, self.arguments = name, binding, arguments
        self.is_flat = arguments.is_flat and not binding.keywords
        """Whether the tensors are the arguments of the function."""

    def copy(self, context: Context | None) -> "Pullback":
        """Return a new pullback of the same call, with a state of Keras to restore for the rule."""
        kind = Pullback if context is None else _PullbackInLayer
        pullback = kind(self.name, self.binding, self.arguments)
        pullback.context = context
        return pullback

    def call(self, function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        """Call a function with the arguments of the call, made from these tensors."""
        return self.binding.call(function, self.arguments.join(tensors))

    def scope_with_reader(self, read: Callable[[Any], Any]) -> AbstractContextManager[Any]:
        """Return a context in which the rule reads the framework's variables by `read(variable)`.

        It does not apply to variables whose values are inputs of the op.
        """
        return ReadBy(read)

    def scope_of(self, rule: Callable[..., Any]) -> AbstractContextManager[Any]:
        """Return the scope in which the rule reads variables.

        A compiler that cannot enter it in the backward pass enters it around the op.
        """
        if type(rule) is not RuleWithTensors:
            return contextlib.nullcontext()
        return scope_of_rule(self.name, self.variables, rule.tensors, self.outer_scope)

    @property
    def without_trace(self) -> "Pullback":
        """The pullback without the records of a trace. `tracing/recording.py` overrides it."""
        return self

    def pull(
        self,
        rule: Callable[..., Any],
        upstream: Sequence[Any],
        needed: Sequence[bool],
        specs: list[Spec | None],
        by_role: ByRole | None = None,
    ) -> Sequence[Any]:
        """Call the rule and return the gradient of each input, None for zero or where it is not needed.

        Arguments:
            rule: the rule that `Call.run` returned, or the same rule around other tensors.
            upstream: the upstream gradient of each output, None for an output without one.
            needed: for each input, whether its gradient is used.
            specs: for each input, the shape and dtype of its gradient.
            by_role: the roles of the residuals, and the residuals.
        """
        scope: Any
        if _framework.is_reading_code():  # Dynamo enters no scope in a rule, and itself refuses assignments
            scope = contextlib.nullcontext()
        else:
            scope = self.scope_of(rule) if type(rule) is RuleWithTensors else ReadOnly()
            scope.name, scope.specs, scope.by_role = self.name, specs, by_role
        with scope:  # also while the answer is read, because lazy gradients may read variables
            answer = self._answer(rule, upstream, specs)
            if answer is None:
                raise self._no_answer()
            structured = (upstream, specs) if len(upstream) > 1 and self.form != FLAT else None
            if self.gets_variables:
                return self._read_with_variables(answer, needed, specs, structured)
            return read(self.name, self.arguments, self.binding, answer, specs, needed, structured)

    def _answer(self, rule: Callable[..., Any], upstream: Sequence[Any], specs: Sequence[Spec | None]) -> Any:
        """Call the rule in its form."""
        try:
            if self.is_plain:
                return rule(upstream[0])
            more = {"variables": list(self.variables)} if self.gets_variables else {}
            if self.form == FLAT:
                return rule(*upstream, **more)
            structured = self.output.join_tensors_only(upstream)
            return rule(structured, **more) if self.form == WHOLE else rule(upstream=structured, **more)
        except Exception as error:
            error.add_note(f"raised in the rule of {self.name}")
            error.add_note(self._shapes(upstream, specs))
            if self.form in (WHOLE, KEYWORD) and len(upstream) > 1:
                error.add_note(f"the op has {len(upstream)} outputs: write {flat_form(len(upstream))}")
            if "numpy" in str(error):
                error.add_note("NumPy cannot read a traced tensor: call it by multigrad.ops.host_call")
            raise

    def _shapes(self, upstream: Sequence[Any], specs: Sequence[Spec | None]) -> str:
        """Return the shapes of the upstream gradients, and of the inputs that have a gradient."""
        named = zip(self.binding.names(), self.arguments.template, strict=True)
        paths = [path for path, _ in sorted(slot_paths(named), key=lambda pair: pair[1])]
        names = [*paths, *self.variables.names()]
        shapes = [f"{n}: {shape_text(s[0])}" for n, s in zip(names, specs, strict=True) if s is not None]
        shapes += [f"upstream: {shape_text(u.shape)}" for u in upstream if u is not None]
        return f"with the shapes {', '.join(shapes)}"

    def _read_with_variables(
        self, answer: Any, needed: Sequence[bool], specs: list[Spec | None], structured: Structured | None
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
        count = len(specs) - len(self.variables)
        # None as the first item is written down, unlike a forgotten `return`: zero for all arguments.
        of_arguments = [None] * count
        if answer[0] is not None:
            of_arguments = [
                *read(
                    self.name,
                    self.arguments,
                    self.binding,
                    answer[0],
                    specs[:count],
                    needed[:count],
                    structured,
                )
            ]
        layout = FLAT_LAYOUTS[len(self.variables)]
        of_variables = read(
            self.name, layout, self.variables, answer[1], specs[count:], needed[count:], structured
        )
        return [*of_arguments, *of_variables]

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


class _PullbackInLayer(Pullback):
    """The pullback of a call inside of a layer."""

    def pull(
        self,
        rule: Callable[..., Any],
        upstream: Sequence[Any],
        needed: Sequence[bool],
        specs: list[Spec | None],
        by_role: ByRole | None = None,
    ) -> Sequence[Any]:
        with restore_context(self.context):
            return super().pull(rule, upstream, needed, specs, by_role)

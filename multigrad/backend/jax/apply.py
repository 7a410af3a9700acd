"""One call of an op on JAX: strip, run, tie.

In eager code, `jax.grad` passes tracers to an op. The function of the op runs on the concrete values in these
tracers, under the trace below the derivatives, as if no derivative were taken. So it runs as fast as without
a gradient, and it can use the values. `tie` then makes the outputs depend on the tracers by the rule.
"""

from collections.abc import Sequence
from typing import Any

import jax

from multigrad.backend.base import Call, Run
from multigrad.backend.jax import private
from multigrad.backend.jax.primitives import TiedRule, tie
from multigrad.backend.jax.residuals import constants_of, uses_intermediate
from multigrad.backend.jax.strip import Strip
from multigrad.backend.jax.tensors import FLOATING, TRACERS, any_traced, as_arrays, specs_of, varying_alike
from multigrad.common.errors import closed_over_error, held_error, message
from multigrad.common.reachable import reachable_tensors


def apply(call: Call, tensors: Sequence[Any]) -> Sequence[Any]:
    first = _FirstRun(call, varying_alike(list(tensors)))
    run, inputs, strip = first.run, first.inputs, first.strip
    outputs = as_arrays(run.outputs)
    if not any_traced([*inputs, *outputs]):  # no derivative is being taken
        return _without_gradient(inputs, outputs)
    order, opens_later = strip.order, False
    if order > 1 and first.order <= 1:
        # The function read a weight of another derivative than those of its arguments.
        run = first.rerun()
    else:
        run.lift(call.f)
    outputs, stores = as_arrays(run.outputs), False
    if order > 1 or strip.in_program:
        stores = run.rule.holds_more_than(first.held)
        if stores and order > 1:
            raise TypeError(held_error(call.name))
        if uses_intermediate(run, first.constants):
            strip.is_open, opens_later = True, order <= 1
            # The function runs again to get the tangents of outer derivatives. In eager code, the first run
            # has none. In a program, it can lack those of weights, which have an equation of `strip` each.
            if order > 1 or any_traced(inputs[len(tensors) :]):
                run = first.rerun_with_tangents()
            if opens_later:
                outputs = as_arrays(run.outputs)
    strip.traces = None
    run.rule.specs = specs_of(run.inputs)
    may_close_over = any_traced(outputs)  # a concrete output depends on no tracer
    rule = TiedRule(
        run.rule,
        closed_over_path=call.closed_over_path(_is_traced) if may_close_over else None,
        is_open=opens_later,
        is_inner=call.answers_for_outer_rule(inputs),
        stores=stores,
    )
    return tie(rule, outputs, inputs, run.residuals)


class _FirstRun:
    """The run of a function on inputs without tangents, in the constructor, and what a second run needs.

    Arguments:
        call: the call.
        tensors: its arguments.
    """

    run: Run
    inputs: list[Any]
    """The inputs of the run, with their tangents."""
    constants: Sequence[Any] = ()
    """The arrays that the function could reach before it ran, if a derivative of the gradient is taken."""
    held: Sequence[Any] = ()
    """The results of `Call.held` before it ran, if a derivative of the gradient is taken."""

    def __init__(self, call: Call, tensors: list[Any]) -> None:
        self._call = call
        self.strip = Strip()
        stripped = self.strip(tensors)
        trace, self.order = self.strip.trace_below, self.strip.order
        if self.order > 1 or self.strip.in_program:
            trace = None
            self._find_constants()
        elif trace is not None and any(True for _ in reachable_tensors(call.f, TRACERS)):
            trace = None  # a tracer that the function closes over can be used under its own trace alone
        try:
            self._execute(tensors, stripped, trace)
        except jax.errors.UnexpectedTracerError as error:
            if trace is None:
                raise
            raise TypeError(closed_over_error(call.name, call.closed_over_path(_is_traced))) from error

    def _find_constants(self) -> None:
        self.constants, self.held = constants_of(self._call), self._call.held()

    def _execute(self, tensors: list[Any], stripped: list[Any], trace: Any) -> None:
        """Run the function under a trace, the current one if it is None."""
        here = private.current_trace()

        def strip_value(value: Any) -> Any:
            with private.under_trace(here):
                return self.strip(varying_alike([value, *tensors])[:1])[0]

        with private.under_trace(trace):
            self.run = self._call.run(stripped, strip_value)
        self.inputs = varying_alike([*tensors, *self.run.originals])

    def rerun(self) -> Run:
        """Run the function again on the inputs of the run, all in one equation of `strip`."""
        self.strip.traces = []
        if self.order <= 1:
            self._find_constants()
        return self._call.rerun(self.strip(self.inputs), self.run.rule)

    def rerun_with_tangents(self) -> Run:
        """Run the function again, with the tangents of outer derivatives, which `strip` lets pass."""
        try:
            return self.rerun()
        except Exception as error:  # of any type, such as an AssertionError of Pallas
            raise _not_differentiable(self._call.name, error) from error


def _is_traced(array: Any) -> bool:
    return TRACERS[type(array)]


def _without_gradient(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return the outputs, with another object for an output that is an input.

    The rule of an outer op would take it for the input.
    """
    aliases = [FLOATING[output.dtype] and any([output is x for x in inputs]) for output in outputs]
    return [private.other_object(o) if is_alias else o for o, is_alias in zip(outputs, aliases, strict=True)]


def _not_differentiable(name: str, error: Exception) -> NotImplementedError:
    return NotImplementedError(
        message(
            name,
            "the rule uses an intermediate result of the function, which failed when it ran again to be "
            "differentiated",
            required="for a derivative of the gradient, a function that can run again and that JAX can "
            "differentiate, or a rule that closes over inputs, outputs and constants only",
            got=f"{type(error).__name__}: {error}",
            fix="compute the intermediate result in a separate op that returns it; create constants outside "
            "of the function; an object of another library, such as a sparse matrix, can be a global "
            "variable",
            see="limits#derivative-of-the-gradient",
        )
    )

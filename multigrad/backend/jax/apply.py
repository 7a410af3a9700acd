"""One call of an op on JAX: strip, run, tie.

In eager code, `jax.grad` passes tracers to an op. The function of the op runs on the concrete values in these
tracers, under the trace below the derivatives, as if no derivative were taken. So it runs as fast as without
a gradient, and it can use the values. `tie` then makes the outputs depend on the tracers by the rule.
"""

from collections.abc import Sequence
from typing import Any

import jax

from multigrad.backend.base import Call, Run
from multigrad.backend.jax.primitives import Strip, tie
from multigrad.backend.jax.private import current_trace, other_object, under_trace
from multigrad.backend.jax.residuals import constants_of, pull_of, uses_intermediate
from multigrad.backend.jax.tensors import FLOATING, TRACERS, any_traced, as_arrays, varying_alike
from multigrad.core.closure import lift, restore
from multigrad.core.errors import message
from multigrad.core.reachable import reachable_tensors


def apply(call: Call, tensors: Sequence[Any]) -> Any:
    first = _FirstRun(call, varying_alike(list(tensors)))
    run, inputs, strip = first.run, first.inputs, first.strip
    outputs = as_arrays(run.outputs)
    # Without a tracer, no derivative is being taken.
    if not (any([FLOATING[x.dtype] for x in inputs]) and any_traced([*inputs, *outputs])):
        return run.pullback.output.join(_without_gradient(inputs, outputs))
    order = strip.order
    if order > 1 and first.order <= 1:
        # The function read a weight of another derivative than those of its arguments.
        run = first.rerun()
    else:
        run.lift(call.f)
    pull = pull_of(run, run.is_opaque and first.may_use_tracers(run))
    if (order > 1 or strip.in_program) and uses_intermediate(
        run, [*first.constants, *first.stripped_closure]
    ):
        strip.is_open = True
        # The function runs again to get the tangents of outer derivatives. In eager code, the first run has
        # none. In a program, it can lack those of the weights, which have an equation of `strip` each.
        if order > 1 or any_traced(inputs[len(tensors) :]):
            run = first.rerun_with_tangents()
            pull = pull_of(run, run.is_opaque)
    strip.traces, outputs = None, as_arrays(run.outputs)
    # A residual from the closure is tied with its tangents, for the derivatives around the op.
    closed_over = dict(zip(map(id, first.stripped_closure), first.closure, strict=True))
    residuals = [closed_over.get(id(residual), residual) for residual in run.residuals]
    return run.pullback.output.join(tie(call.name, outputs, inputs, residuals, run.roles, pull))


class _FirstRun:
    """The run of a function on inputs without tangents, in the constructor, and what a second run needs.

    Arguments:
        call: the call.
        tensors: its arguments.
    """

    run: Run
    inputs: list[Any]
    """The inputs of the run, with their tangents."""
    constants: Sequence[Any]
    """The arrays that the function could reach before it ran, if a derivative of the gradient is taken."""
    stripped_closure: Sequence[Any]
    """The tracers that the function closes over, without tangents: the op has no gradient for them."""

    def __init__(self, call: Call, tensors: list[Any]) -> None:
        self._call = call
        self.closure, self._template, is_opaque = lift(call.f, TRACERS, shared=True)
        self.strip = Strip()
        stripped = self._strip_inputs(tensors)
        below, self.order = self.strip.trace_below, self.strip.order
        self.constants = constants_of(call) if self.order > 1 or self.strip.in_program else ()
        self._object_has_tracers = is_opaque and _reaches_more(call, self.closure)
        if below is None or self.order > 1 or self._object_has_tracers or self.strip.in_program:
            self._execute(tensors, stripped, None)
            return
        try:
            self._execute(tensors, stripped, below)
        except jax.errors.UnexpectedTracerError:
            # An object holds a tracer of a derivative, which can be used under the current trace alone.
            self.strip, self._object_has_tracers = Strip(), True
            self._execute(tensors, self._strip_inputs(tensors), None)

    def _strip_inputs(self, inputs: list[Any]) -> list[Any]:
        """Return the inputs without tangents, from one equation with the tracers of the closure."""
        stripped = self.strip([*inputs, *self.closure])
        self.stripped_closure = stripped[len(inputs) :]
        return stripped[: len(inputs)]

    def _execute(self, tensors: list[Any], stripped: list[Any], trace: Any) -> None:
        """Run the function under a trace, the current one if it is None."""
        here = current_trace()

        def read_as(value: Any) -> Any:
            with under_trace(here):
                return self.strip(varying_alike([value, *tensors])[:1])[0]

        self.inputs = list(tensors)
        f = restore(self._template, self.stripped_closure)
        with under_trace(trace):
            self.run = self._call.run(
                stripped, f=f, read_as=read_as, values=self.inputs, undo=trace is not None
            )
        self.inputs = varying_alike(self.inputs)

    def may_use_tracers(self, run: Run) -> bool:
        """Return whether an object that the rule uses may hold a traced array."""
        mapped = None in (self.strip.traces or ())
        known = [*run.inputs, *run.outputs, *self.stripped_closure]
        return self._object_has_tracers or mapped or any_traced(known) or self._has_traced_attribute()

    def _has_traced_attribute(self) -> bool:
        """Return whether an argument such as `self` has a tracer as an attribute."""
        attributes = [getattr(obj, "__dict__", {}) for obj in self._call.objects()]
        return any([TRACERS[type(value)] for values in attributes for value in values.values()])

    def rerun(self) -> Run:
        """Run the function again on the inputs of the run, all in one equation of `strip`."""
        self.strip.traces = []
        stripped = self._strip_inputs(self.inputs)
        f = restore(self._template, self.stripped_closure)
        return self._call.rerun(stripped, self.run.pullback, f)

    def rerun_with_tangents(self) -> Run:
        """Run the function again, with the tangents of outer derivatives, which `strip` lets pass."""
        try:
            return self.rerun()
        except Exception as error:  # of any type, such as an AssertionError of Pallas
            raise _not_differentiable(self._call.name, error) from error


def _reaches_more(call: Call, closure: Sequence[Any]) -> bool:
    """Return whether the function closes over an object that holds tracers."""
    known = set(map(id, closure))
    return any([id(tracer) not in known for tracer in reachable_tensors(call.f, TRACERS)])


def _without_gradient(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return the outputs without tangents. A tracer that the function reached has no gradient through it.

    An output that is an input becomes another object. The rule of an outer op would take it for the input.
    """
    results: list[Any] = []
    for output in outputs:
        if TRACERS[type(output)]:
            results.append(jax.lax.stop_gradient(output))
        elif FLOATING[output.dtype] and any([output is x for x in inputs]):
            results.append(other_object(output))
        else:
            results.append(output)
    return results


def _not_differentiable(name: str, error: Exception) -> NotImplementedError:
    return NotImplementedError(
        message(
            name,
            "the rule uses an intermediate result of the function, or an object that may hold one, and the "
            "function failed when it ran again to be differentiated",
            required="for a derivative of the gradient, a function that can run again and that JAX can "
            "differentiate, or a rule that closes over inputs, outputs and constants only",
            got=f"{type(error).__name__}: {error}",
            fix="compute the intermediate result in a separate op that returns it; create constants outside "
            "of the function; an object of another library, such as a sparse matrix, can be a global "
            "variable",
            see="jax#derivative-of-the-gradient",
        )
    )

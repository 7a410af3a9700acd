"""Equations of flat tensors, and the op that ties a solution to the parameters of its equation."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from multigrad import backend
from multigrad.calculus.derivatives import vjp
from multigrad.calculus.flat_structure import shapes_may_match
from multigrad.common.closure import lift, restore
from multigrad.common.errors import describe, message, unusable
from multigrad.common.type_sets import HoldsNoTensor
from multigrad.core.leaves import is_inferring_shapes
from multigrad.core.structure import Layout, split
from multigrad.core.variables import Pinned, Reads
from multigrad.op import op_custom_gradient
from multigrad.ops.dtypes import dtype_of
from multigrad.ops.implicit.linear_solvers import Affine, Map, Tensors, require_zero
from multigrad.ops.implicit.solvers import FixedPointIteration, Linear, Newton, argument_names

Solver = FixedPointIteration | Linear | Newton

_NUMBERS = (int, float, np.ndarray, np.generic)


@backend.active.opaque_to_compiler
def solution(
    solver: Solver,
    f: Callable[..., Any],
    z0: Any,
    args: tuple[Any, ...],
    user_solver: Callable[..., Any] | None = None,
    is_linear: bool = False,
) -> Any:
    """Solve the equation of a user's function, with gradients for everything that the function depends on.

    With `is_linear`, `f` is a linear map, and its value at the solution is the first of the `args`.
    """
    start, layout = _initial_guess(solver.name, z0, solver.batched)
    equation = (_LinearEquation if is_linear else _UserEquation)(solver, f, layout, args)
    parameters = equation.parameters_at(start)
    if user_solver is not None:
        assert isinstance(solver, Newton)
        by_user = functools.partial(equation.solve_by, user_solver, parameters, start)
        equation.solver = dataclasses.replace(solver, by_user=by_user)
    solved, hidden = equation.solve(parameters, start)
    return layout.join(_tie(equation, solved, parameters, hidden))


@op_custom_gradient(name="implicit")
def _tie(equation: Any, solved: Tensors, parameters: Tensors, hidden: Tensors | None) -> Any:
    """Return the solution of an equation, as a function of its parameters and of `hidden`.

    `hidden` depends on the tensors that are not parameters, see `_Equation.solve`.
    """
    z = [x * 1 for x in solved]  # an output, because the rule differentiates with respect to it

    def rule(upstream: Tensors) -> tuple[Any, ...]:
        v = list(upstream)
        adjoint, adjoint_parameters = _Adjoint(equation, len(v)), [*z, *parameters, *v]
        solved, adjoint_hidden = adjoint.solve(adjoint_parameters, v)
        w = _tie(adjoint, solved, adjoint_parameters, adjoint_hidden)
        name = equation.solver.name
        hidden_gradients = None if hidden is None else [_first_order_only(x, name) for x in w]
        return None, None, equation.pull(z, parameters, w), hidden_gradients

    return z, rule


@op_custom_gradient(name="implicit")
def _first_order_only(x: Any, name: str) -> Any:
    """Return `x`, and raise where it is differentiated: it depends on tensors that are not parameters."""

    def rule(upstream: Any) -> Any:
        raise RuntimeError(
            message(
                name,
                "the second derivative would be incomplete, because the function uses a hidden tensor",
                argument=repr(argument_names(name)[0]),
                required="a function of tensors that are its arguments, or that it closes over",
                got="a function that reaches a tensor through an object",
                fix="pass the tensor as an argument",
            )
        )

    return x, rule


class _Equation(HoldsNoTensor):
    """An equation for flat tensors `z`, given by a map that depends on parameters.

    The op searches it for no tensors: all of them are parameters, or in `hidden`.

    Arguments:
        solver: the solver, with the name of the op for messages.
        opaque: whether the map may depend on tensors that are not among its parameters.
    """

    def __init__(self, solver: Solver, opaque: bool) -> None:
        self.solver, self.opaque = solver, opaque

    def at(self, parameters: Tensors) -> Map:
        """Return the map for these parameters. The solution is its fixed point or root."""
        raise NotImplementedError

    def solve(self, parameters: Tensors, start: Tensors) -> tuple[Tensors, Tensors | None]:
        """Return the solution without a gradient, and `hidden`: the value of the map at constants.

        `hidden` depends only on the tensors that the function reaches through objects. The framework finds
        them, by recording one call of the map. It is None if there are no such tensors.
        """
        step = self.at([ops.stop_gradient(x) for x in parameters])
        solved = [ops.stop_gradient(x) for x in start]
        is_empty = all(0 in tuple(x.shape) for x in start)
        if not (is_empty or is_inferring_shapes()):
            solved = list(self.solver.solve(step, solved))
        return solved, list(step(solved)) if self.opaque else None

    def pull(self, z: Tensors, parameters: Tensors, w: Tensors) -> list[Any]:
        """Return `A^T w`: the gradients of the parameters, and None for parameters without a gradient."""
        floating = {i: x for i, x in enumerate(parameters) if backend.active.is_differentiable(x)}
        if not floating:
            return [None] * len(parameters)

        def f(*primals: Any) -> Any:
            moved = dict(enumerate(parameters)) | dict(zip(floating, primals, strict=True))
            return list(self.at(list(moved.values()))(z))

        _, pull = vjp(f, *floating.values())
        gradients = dict(zip(floating, pull(list(w)), strict=True))
        return [gradients.get(i) for i in range(len(parameters))]


class _Adjoint(_Equation):
    """The adjoint equation `w = v + J^T w`, with the Jacobian `J` of another equation at its solution `z`.

    Its parameters are the `count` tensors of `z`, the parameters of the other equation, and `v`.
    """

    def __init__(self, equation: _Equation, count: int) -> None:
        super().__init__(equation.solver.adjoint(), equation.opaque)
        self.equation, self.count = equation, count

    def at(self, parameters: Tensors) -> Map:
        count = self.count
        z, inner, v = parameters[:count], parameters[count:-count], parameters[-count:]
        step = self.equation.at(inner)
        _, pull = vjp(lambda *z: list(step(z)), *z)
        return Affine(lambda w: pull(list(w)), v)


class _UserEquation(_Equation):
    """The equation of a user's function.

    Its parameters are the tensors in the arguments, the tensors that the function closes over, and the values
    of the trainable variables that it reads.
    """

    def __init__(self, solver: Solver, f: Callable[..., Any], z: Layout, args: tuple[Any, ...]) -> None:
        self.closed_over, self.f, opaque = lift(f, backend.active.TENSORS)
        super().__init__(solver, opaque)
        self.z = z
        self.tensors, self.args = split(args)
        self.variables: Sequence[keras.Variable] = ()

    def parameters_at(self, z: Tensors) -> Tensors:
        """Return the parameters. One call of the function finds the variables that it reads."""
        tensors = [*self.tensors, *self.closed_over]
        with Reads() as scope:
            returned = self.call(z, [ops.stop_gradient(x) for x in tensors])
        if scope.assigned:
            paths = [repr(variable.path) for variable, _ in scope.assigned.values()]
            raise TypeError(
                message(
                    self.solver.name,
                    "the function assigns variables, so that it differs in every call",
                    argument=repr(argument_names(self.solver.name)[0]),
                    required="a function that depends only on its arguments",
                    got=f"an assignment to {', '.join(paths)}",
                    fix="call layers with training=False, and draw random numbers outside of the function",
                )
            )
        self.flat_result(z, returned, "f")
        self.variables = list(scope.variables)
        return [*tensors, *map(backend.active.as_tensor, self.variables)]

    def call(self, z: Tensors, parameters: Tensors) -> Any:
        """Return the result of the function."""
        f, args, _ = self.parts(parameters)
        return f(self.z.join(z), *args)

    def parts(self, parameters: Tensors) -> tuple[Callable[..., Any], tuple[Any, ...], Tensors]:
        """Return the function and its arguments with these parameters, and the values of the variables."""
        count = len(self.tensors)
        end = count + len(self.closed_over)
        closed_over, values = parameters[count:end], parameters[end:]
        return restore(self.f, closed_over), self.args.join(parameters[:count]), values

    def at(self, parameters: Tensors) -> Map:
        _, _, values = self.parts(parameters)

        def step(z: Tensors) -> Tensors:
            with Pinned(self.variables, values):
                return split(self.call(z, parameters))[0]

        return step

    def solve_by(self, user_solver: Callable[..., Any], parameters: Tensors, z: Tensors) -> Any:
        """Return the flat result of a user's solver for constant parameters."""
        constants = [ops.stop_gradient(x) for x in parameters]
        f, args, values = self.parts(constants)
        try:
            with Pinned(self.variables, values):
                returned = user_solver(f, self.z.join(z), *args)
        except Exception as error:
            if all([backend.active.concrete(x) is not None for x in (*z, *constants)]):
                raise
            raise RuntimeError(
                message(
                    self.solver.name,
                    "the solver failed on tensors that have no values, in a compiled function or vmap",
                    argument="'solver'",
                    required="Keras ops, or NumPy code that multigrad.ops.host_call calls",
                    got=f"{type(error).__name__}: {error}",
                    fix="call the NumPy code as host_call(g, z0, *args, output=z0), with a function g of "
                    "arrays",
                )
            ) from error
        return self.flat_result(z, returned, "solver")

    def flat_result(self, z: Tensors, returned: Any, argument: str) -> Tensors:
        """Return the tensors of a result. Raise unless they are like those of `z`."""
        start = self.z.join(z)
        try:
            tree.assert_same_structure(start, returned)
        except (TypeError, ValueError) as error:
            required = f"the structure of `{argument_names(self.solver.name)[1]}`"
            raise self._differs(TypeError, argument, "structure", describe(returned), required) from error
        if argument == "solver":
            returned = tree.map_structure(
                lambda x, like: ops.convert_to_tensor(x, dtype_of(like)) if isinstance(x, _NUMBERS) else x,
                returned,
                start,
            )
        results, layout = split(returned)
        if len(results) != len(z):
            got = ", ".join(map(describe, layout.static_leaves()))
            raise self._differs(TypeError, argument, "type", got, "tensors")
        for like, result in zip(z, results, strict=True):
            texts = describe(result), describe(like)
            if dtype_of(like) != dtype_of(result):
                raise self._differs(TypeError, argument, "dtype", *texts)
            if not shapes_may_match(tuple(like.shape), tuple(result.shape)):
                raise self._differs(ValueError, argument, "shape", *texts)
        return results

    def _differs(
        self, kind: type[Exception], argument: str, attribute: str, got: str, required: str
    ) -> Exception:
        returning = "the solver" if argument == "solver" else "the function"
        function, start = argument_names(self.solver.name)
        argument = repr(function if argument == "f" else argument)
        problem = f"the result of {returning} has another {attribute} than `{start}`"
        fix = f"pass a `{start}` like the result of {returning}, and return the same {attribute} from it"
        return kind(
            message(self.solver.name, problem, argument=argument, required=required, got=got, fix=fix)
        )


class _LinearEquation(_UserEquation):
    """The equation `f(z) - b = 0` of a user's linear map. The last parameters are the tensors of `b`."""

    def __init__(self, solver: Solver, f: Callable[..., Any], z: Layout, args: tuple[Any, ...]) -> None:
        super().__init__(solver, f, z, args[1:])
        self.right = split(args[0])[0]

    def parameters_at(self, z: Tensors) -> Tensors:
        return [*super().parameters_at([ops.zeros_like(x) for x in z]), *self.right]

    def flat_result(self, z: Tensors, returned: Any, argument: str) -> Tensors:
        results = super().flat_result(z, returned, argument)
        require_zero(self.solver, results, self.right)
        return results

    def at(self, parameters: Tensors) -> Map:
        count = len(self.right)
        return Affine(super().at(parameters[:-count]), [-x for x in parameters[-count:]])


def _initial_guess(name: str, z0: Any, batched: bool) -> tuple[Tensors, Layout]:
    """Return the tensors of `z0`, without a gradient, and their layout."""
    numbers = tree.map_structure(
        lambda leaf: backend.active.as_tensor(leaf) if type(leaf) is float else leaf, z0
    )
    tensors, layout = split(numbers)
    inexact = [dtype_of(x).startswith(("float", "bfloat", "complex")) for x in tensors]
    argument = argument_names(name)[1]
    if not (tensors and all(inexact)) or layout.static_leaves():
        required, fix = "a floating tensor or number, or a nested structure of them", "pass floats"
        raise unusable(TypeError, name, argument, required=required, got=z0, fix=fix)
    batch = tuple(tensors[0].shape)[:1]  # empty for a scalar, which has no batch
    if batched and not all([shapes_may_match(batch, tuple(x.shape)[:1] or (0,)) for x in tensors]):
        required, fix = "tensors with one first axis, the batch", "add the axis, or omit batched=True"
        raise unusable(ValueError, name, argument, required=required, got=z0, fix=fix)
    return [ops.stop_gradient(x) for x in tensors], layout

"""Solutions of equations, differentiated by the implicit function theorem.

How a solution was found has no part in its derivative. For `z = f(z, a)`, with the Jacobians `J` by `z` and
`A` by `a`, it is `dz = (I - J)^-1 A da`; for `0 = f(z, a)` it is `dz = -J^-1 A da`. Backward, both are one
formula: with an upstream gradient `v`, the gradient by `a` is `A^T w`, where `w` solves

    w = v + J^T w  for a fixed point,  and  0 = v + J^T w  for a root.

That is an equation of the same kind as the first, linear in `w`, of which `z`, `a` and `v` are the arguments.
So it is solved by the same op, and a derivative of the gradient is one of a solution once more, to any order.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from multigrad import backend
from multigrad.backend.base import Options
from multigrad.calculus.derivatives import jacobian, vjp
from multigrad.core.closure import lift, restore
from multigrad.core.errors import describe, message, require_function, unusable
from multigrad.core.op import op_custom_gradient
from multigrad.core.structure import Layout, Symbolic, split
from multigrad.core.type_sets import HoldsNoTensor
from multigrad.core.variables import Pinned, Reads
from multigrad.keras_graph import node, registry
from multigrad.ops.arguments import is_integer, is_number, with_plain
from multigrad.ops.dtypes import dtype_of

_NUMBERS = (int, float, np.ndarray, np.generic)
_Tensors = Sequence[Any]
_Map = Callable[[_Tensors], _Tensors]

_OF_GRADIENT = "w, of which the gradient is made,"
"""What is solved for on the way back, for messages."""


def _saved_as(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a saved model find a function that is no op itself, but calls one."""
    return lambda f: registry.register(name, f, Options(False, True), lambda: f)


@with_plain("tolerance", "max_iterations")
@_saved_as("multigrad>fixed_point")
def fixed_point(
    f: Callable[..., Any], z0: Any, *args: Any, tolerance: float | None = None, max_iterations: int = 1000
) -> Any:
    """The fixed point `z = f(z, *args)`, found by repeating `f`, with the gradient of the solution.

    ```python
    from multigrad import grad
    from multigrad.ops import fixed_point

    def root(a):  # Heron's way to the square root
        return fixed_point(lambda z, a: 0.5 * (z + a / z), 1.0, a)

    print(grad(root)(0.25))  # 1.0
    print(grad(grad(root))(0.25))  # -2.0
    ```

    `f` is called until `z` moves no more. The gradient is that of the solution, by the implicit function
    theorem, and not that of the iterations, of which nothing is kept. Backward, with the Jacobian `J` of
    `f` by `z`, the equation `w = v + J^T w` is solved for the upstream gradient `v` in the same way, by
    repetition: it converges as `f` does near its fixed point. `f` itself runs twice for that.

    Arguments:
        f: a function of `z` and the `args`, which returns the next `z`, in the same structure, shapes and
            dtypes. It is to be a contraction near its fixed point, and to depend on its arguments alone: one
            that assigns variables, or draws random numbers, has no fixed point.
        z0: where to start: a floating tensor or number, or a nested structure of them. It has no gradient.
        args: tensors or nested structures of them, by which the fixed point is differentiated, and anything
            else that `f` takes. It is also differentiated by the trainable variables that `f` reads, as when
            it calls a layer, and by the tensors that it closes over.
        tolerance: how far `z` may move in the last step, in each of its tensors: the largest element,
            relative to the largest of `z`, or to the largest that there has been if that is less than 1. So
            a batch with elements of many magnitudes is as exact as its largest one asks for. The same holds
            for `w`. If it is not given, it is `eps ** 0.75` of the dtype, 6e-6 in float32. Where each step is
            shorter than the one before by a factor of `r`, the error is up to `1 / (1 - r)` times the last
            step.
        max_iterations: how many times `f` is called at most, and in the same way for `w`.

    Returns:
        The fixed point, in the structure, shapes and dtypes of `z0`. For an upstream gradient `v`, the
        gradient by an argument with the Jacobian `A` is `A^T w`; by `z0` it is zero. Any order of derivatives
        is right, by a gradient of a gradient. A tensor that `f` reaches through an object, such as an
        attribute of `self`, has a first derivative; a second one is an error.

    Raises:
        RuntimeError: when `z`, or `w` on the way back, still moves after `max_iterations`. In compiled code,
            where no error can be raised, all of the result is NaN then, and so is the gradient.
        TypeError: when `z0` is not floating, what `f` returns is unlike `z0`, or `f` assigns variables.
        ValueError: for a shape unlike that of `z0`, or `tolerance` or `max_iterations` that is not positive.
        flax.errors.TraceContextError: on JAX with `KERAS_NNX_ENABLED`, when `f` calls a Sequential model that
            is not built, under a gradient. NNX raises it for that call under `jax.grad` without
            `fixed_point`, too. Build the model first.

    References:
        [Christianson 1994, Reverse accumulation and attractive fixed points](
        https://doi.org/10.1080/10556789408805572); [Bai, Kolter and Koltun 2019, Deep Equilibrium Models](
        https://arxiv.org/abs/1909.01377).
    """
    name = "fixed_point"
    require_function(name, "f", f)
    check_options(name, tolerance, max_iterations)
    try:
        return _solution(_Repeat(name, tolerance, max_iterations), f, z0, args)
    except Symbolic:
        options = {"tolerance": tolerance, "max_iterations": max_iterations}
        return node.apply(fixed_point, f"multigrad>{name}", (f, z0, *args), options)


@with_plain("tolerance", "max_iterations")
@_saved_as("multigrad>implicit_root")
def implicit_root(
    f: Callable[..., Any],
    z0: Any,
    *args: Any,
    solver: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    max_iterations: int = 50,
) -> Any:
    """The root `z` of `f(z, *args) = 0`, found by Newton's method or another one, with the root's gradient.

    ```python
    from multigrad import grad
    from multigrad.ops import implicit_root

    def root(a):
        return implicit_root(lambda z, a: z**3 + z - a, 0.5, a)

    print(root(2.0))  # 1.0
    print(grad(root)(2.0))  # 0.25
    ```

    The gradient is that of the root, by the implicit function theorem, and not that of the steps to it, of
    which nothing is kept. Backward, with the Jacobian `J` of `f` by `z`, the equation `J^T w = -v` is
    solved for the upstream gradient `v`. It is computed and solved as a dense matrix, with a row for each
    number in `z`: this is for small systems.

    Arguments:
        f: a function of `z` and the `args`, which returns as many numbers as there are in `z`, in its
            structure, shapes and dtypes, and depends on its arguments alone.
        z0: where to start: a floating tensor or number, or a nested structure of them. It has no gradient.
        args: tensors or nested structures of them, by which the root is differentiated, and anything else
            that `f` takes. It is also differentiated by the trainable variables that `f` reads, and by the
            tensors that it closes over.
        solver: how the root is found: a function of `f`, `z0` and the `args` that returns `z`, as tensors, or
            as numbers and arrays, which are cast to the dtype of `z0`. It may be any code that runs where
            this is called, and is not differentiated. If it is not given, it is Newton's method, with dense
            Jacobians.
        tolerance: for Newton's method, how long the last step may be, as for `fixed_point`. For another
            solver, how large `f` may be at its root, relative to the larger of 1 and what it is at `z0`. If
            it is not given, it is `eps ** 0.75` of the dtype, 6e-6 in float32; or `eps ** 0.5` for another
            solver, 3e-4 in float32.
        max_iterations: how many steps of Newton's method there are at most.

    Returns:
        The root, in the structure, shapes and dtypes of `z0`. For an upstream gradient `v`, the gradient by
        an argument with the Jacobian `A` is `A^T w`; by `z0` it is zero. Derivatives of any order and
        closed-over tensors are as for `fixed_point`.

    Raises:
        RuntimeError: when no root is found within the tolerance, or `J` is singular, for which PyTorch and
            TensorFlow have errors of their own. In compiled code, where no error can be raised, all of the
            result is NaN then, and so is the gradient.
        TypeError, ValueError: as for `fixed_point`, and for complex numbers.
        ValueError: on TensorFlow, where a size of `z0` is known only when the graph runs.
        NotImplementedError: on the NumPy and OpenVINO backends, without a `solver`.

    References:
        [Blondel et al. 2022, Efficient and Modular Implicit Differentiation](
        https://arxiv.org/abs/2105.15183).
    """
    name = "implicit_root"
    require_function(name, "f", f)
    if solver is not None:
        require_function(name, "solver", solver)
    check_options(name, tolerance, max_iterations)
    newton = _Newton(name, tolerance, max_iterations)
    try:
        return _solution(newton, f, z0, args, solver)
    except Symbolic:
        options = {"solver": solver, "tolerance": tolerance, "max_iterations": max_iterations}
        return node.apply(implicit_root, f"multigrad>{name}", (f, z0, *args), options)


def _solution(method: Any, f: Callable[..., Any], z0: Any, args: tuple[Any, ...], solver: Any = None) -> Any:
    """The solution of an equation, tied to everything that it depends on."""
    start, layout = _start(method.name, z0)
    equation = _Given(method, f, layout, args)
    parameters = equation.parameters_at(start)
    if solver is not None:
        equation.method = _Brought(method, lambda: equation.solved_by(solver, parameters, start))
    found, beside = equation.solution(parameters, start)
    return layout.join(_tied(equation if equation.opaque else _Held(equation), found, parameters, beside))


@op_custom_gradient(name="implicit")
def _tied(equation: Any, found: _Tensors, parameters: _Tensors, beside: _Tensors | None) -> Any:
    """The solution of an equation, as a function of its parameters, and of what comes beside them."""
    z = [x * 1 for x in found]  # an output of its own, which the rule differentiates

    def rule(upstream: _Tensors) -> tuple[Any, ...]:
        v = list(upstream)
        adjoint, given = _Adjoint(equation.own, len(v)), [*z, *parameters, *v]
        found, more = adjoint.solution(given, v)
        w = _tied(_Held(adjoint), found, given, more)
        of_beside = None if beside is None else [_first_order_alone(x, equation.own.method.name) for x in w]
        return None, None, equation.own.pulled(z, parameters, w), of_beside

    return z, rule


@op_custom_gradient(name="implicit")
def _first_order_alone(x: Any, name: str) -> Any:
    """`x`, of which a derivative is an error: it depends on tensors that nobody can tell."""

    def rule(upstream: Any) -> Any:
        raise RuntimeError(
            message(
                name,
                "a second derivative goes through a tensor that cannot be seen, and would not be whole",
                argument="'f'",
                required="a function of tensors that are its arguments, or that it closes over",
                got="one that reaches a tensor through an object",
                fix="pass the tensor as an argument",
            )
        )

    return x, rule


class _Held(HoldsNoTensor):
    """An equation whose tensors are all among its parameters, or come beside them."""

    def __init__(self, own: Any) -> None:
        self.own = own


class _Equation:
    """An equation of flat tensors `z`, of which it holds none, by a map that its parameters determine.

    Arguments:
        method: how it is solved, with the name of the op for messages.
        opaque: whether there may be tensors that are not among its parameters.
    """

    def __init__(self, method: Any, opaque: bool) -> None:
        self.method, self.opaque = method, opaque

    @property
    def own(self) -> "_Equation":
        return self

    def at(self, parameters: _Tensors) -> _Map:
        """The map, of which the solution is the fixed point or the root."""
        raise NotImplementedError

    def solution(self, parameters: _Tensors, start: _Tensors) -> tuple[_Tensors, _Tensors | None]:
        """The solution, without a gradient, and what comes beside the parameters.

        That is what the map gives for constants. It depends on what the function reaches through an object,
        which is seen by the framework alone, in one call that it records.
        """
        constants = [ops.stop_gradient(x) for x in parameters]
        step = self.at(constants)
        found = self.method.solve(step, [ops.stop_gradient(x) for x in start])
        return found, list(step(found)) if self.opaque else None

    def pulled(self, z: _Tensors, parameters: _Tensors, w: _Tensors) -> list[Any]:
        """`A^T w`: the gradients of the parameters, with None for those that have none."""
        floating = [backend.active.is_differentiable(x) for x in parameters]
        if not any(floating):
            return [None] * len(floating)

        def of(*own: Any) -> Any:
            remaining = iter(own)
            both = zip(parameters, floating, strict=True)
            return list(self.at([next(remaining) if f else x for x, f in both])(z))

        _, pull = vjp(of, *[x for x, f in zip(parameters, floating, strict=True) if f])
        gradients = iter(pull(list(w)))
        return [next(gradients) if f else None for f in floating]


class _Adjoint(_Equation):
    """The equation of `w`: `v + J^T w`, with the Jacobian `J` of another equation at its solution `z`.

    Its parameters are `z`, those of the other equation, and `v`; there are `count` tensors in `z`.
    """

    def __init__(self, of: _Equation, count: int) -> None:
        super().__init__(of.method.of_gradient(), of.opaque)
        self.of, self.count = of, count

    def at(self, parameters: _Tensors) -> _Map:
        count = self.count
        z, given, v = parameters[:count], parameters[count:-count], parameters[-count:]
        step = self.of.at(given)
        _, pull = vjp(lambda *z: list(step(z)), *z)
        return lambda w: [a + b for a, b in zip(v, pull(list(w)), strict=True)]


class _Given(_Equation):
    """The function of a user: its parameters are the tensors in the arguments, those that it closes over, and
    the values of the trainable variables that it reads."""

    def __init__(self, method: Any, f: Callable[..., Any], z: Layout, args: tuple[Any, ...]) -> None:
        self.closed, self.f, opaque = lift(f, backend.active.TENSORS)
        super().__init__(method, opaque)
        self.z = z
        self.given, self.args = split(args)
        self.variables: Sequence[keras.Variable] = ()

    def parameters_at(self, z: _Tensors) -> _Tensors:
        """The parameters. One call of the function tells which variables it reads."""
        own = [*self.given, *self.closed]
        with Reads() as scope:
            returned = self.call(z, [ops.stop_gradient(x) for x in own])
        if scope.assigned:
            raise self._impure([variable for variable, _ in scope.assigned.values()])
        self._check_structure(z, returned, "f")
        self._check_tensors(z, returned, "f")
        self.variables = list(scope.variables)
        return [*own, *map(backend.active.as_tensor, self.variables)]

    def call(self, z: _Tensors, parameters: _Tensors) -> Any:
        """What the function returns."""
        f, args, _ = self.parts(parameters)
        return f(self.z.join(z), *args)

    def parts(self, parameters: _Tensors) -> tuple[Callable[..., Any], tuple[Any, ...], _Tensors]:
        """The function and its arguments around these tensors, and the values of the variables."""
        count = len(self.given)
        end = count + len(self.closed)
        closed, values = parameters[count:end], parameters[end:]
        return restore(self.f, closed), self.args.join(parameters[:count]), values

    def at(self, parameters: _Tensors) -> _Map:
        _, _, values = self.parts(parameters)

        def step(z: _Tensors) -> _Tensors:
            with Pinned(self.variables, values):
                return split(self.call(z, parameters))[0]

        return step

    def solved_by(self, solver: Callable[..., Any], parameters: _Tensors, z: _Tensors) -> Any:
        """What the solver of a user returns for constants."""
        f, args, values = self.parts([ops.stop_gradient(x) for x in parameters])
        with Pinned(self.variables, values):
            returned = solver(f, self.z.join(z), *args)
        self._check_structure(z, returned, "solver")
        returned = tree.map_structure(
            lambda x, own: ops.convert_to_tensor(x, dtype_of(own)) if isinstance(x, _NUMBERS) else x,
            returned,
            self.z.join(z),
        )
        self._check_tensors(z, returned, "solver")
        return split(returned)[0]

    def _impure(self, assigned: Sequence[keras.Variable]) -> TypeError:
        return TypeError(
            message(
                self.method.name,
                "the function assigns variables, and is another one in each call",
                argument="'f'",
                required="a function of its arguments alone",
                got=f"an assignment to {', '.join(repr(variable.path) for variable in assigned)}",
                fix="call layers with training=False, and draw random numbers outside of the function",
            )
        )

    def _check_structure(self, z: _Tensors, returned: Any, argument: str) -> None:
        """See that the function, or the solver, returned the structure of `z`."""
        try:
            tree.assert_same_structure(self.z.join(z), returned)
        except (TypeError, ValueError) as error:
            own = "the structure of `z0`"
            raise self._unlike(TypeError, argument, "another structure", describe(returned), own) from error

    def _check_tensors(self, z: _Tensors, returned: Any, argument: str) -> None:
        """See that it is made of tensors like those of `z`."""
        others, layout = split(returned)
        if len(others) != len(z):
            got = ", ".join(map(describe, layout.static_leaves()))
            raise self._unlike(TypeError, argument, "something else than tensors", got, "tensors like `z0`")
        for own, other in zip(z, others, strict=True):
            both = describe(other), describe(own)
            if dtype_of(own) != dtype_of(other):
                raise self._unlike(TypeError, argument, "another dtype", *both)
            if tuple(own.shape) != tuple(other.shape):
                raise self._unlike(ValueError, argument, "another shape", *both)

    def _unlike(self, kind: type[Exception], argument: str, what: str, got: str, own: str) -> Exception:
        who = "the solver" if argument == "solver" else "the function"
        return kind(
            message(
                self.method.name,
                f"{who} returns {what}, and not what is like `z0`",
                argument=f"'{argument}'",
                required=own,
                got=got,
                fix="let `z0` be like what the function returns, and the function keep it so",
            )
        )


class _Repeat:
    """To find a fixed point, by repetition."""

    def __init__(self, name: str, tolerance: float | None, max_iterations: int, what: str = "z") -> None:
        self.name, self.tolerance, self.max_iterations, self.what = name, tolerance, max_iterations, what

    def of_gradient(self) -> "_Repeat":
        return _Repeat(self.name, self.tolerance, self.max_iterations, _OF_GRADIENT)

    def solve(self, step: _Map, z: _Tensors) -> _Tensors:
        return _repeat(self, step, z)


class _Newton:
    """To find a root, by Newton's method, or, of what is linear, by the same with one Jacobian."""

    def __init__(self, name: str, tolerance: float | None, max_iterations: int, linear: bool = False) -> None:
        self.name, self.tolerance, self.max_iterations, self.linear = name, tolerance, max_iterations, linear
        self.what = _OF_GRADIENT if linear else "z"

    def of_gradient(self) -> "_Newton":
        return _Newton(self.name, self.tolerance, self.max_iterations, linear=True)

    def solve(self, equation: _Map, z: _Tensors) -> _Tensors:
        for x in z:
            if None in tuple(x.shape):
                fix = "fix the batch size, as keras.Input(..., batch_size=8) does"
                required = "sizes that are known, for a dense Jacobian"
                raise unusable(ValueError, self.name, "z0", required=required, got=x, fix=fix)
        matrix = _matrix(equation, z) if self.linear else None

        def step(z: _Tensors) -> _Tensors:
            own = _matrix(equation, z) if matrix is None else matrix
            value = ops.concatenate([ops.reshape(x, (-1, 1)) for x in equation(z)])
            moves = ops.cast(ops.solve(own, ops.cast(value, own.dtype)), value.dtype)
            ends = np.cumsum([math.prod(x.shape) for x in z]).tolist()
            parts = [moves[end - math.prod(x.shape) : end] for x, end in zip(z, ends, strict=True)]
            return [x - ops.cast(ops.reshape(p, x.shape), x.dtype) for x, p in zip(z, parts, strict=True)]

        return _repeat(self, step, z)


def _matrix(equation: _Map, z: _Tensors) -> Any:
    """The Jacobian of an equation, with a row for each number that it gives, and a column for each in `z`."""
    blocks = jacobian(lambda *z: list(equation(z)), range(len(z)))(*z)
    sizes = [math.prod(x.shape) for x in z]
    rows = [
        ops.concatenate([ops.reshape(x, (m, n)) for x, n in zip(row, sizes, strict=True)], axis=1)
        for row, m in zip(blocks, sizes, strict=True)
    ]
    matrix = ops.concatenate(rows, axis=0)
    return ops.cast(matrix, "float32") if "16" in dtype_of(matrix) else matrix  # which no backend solves


class _Brought:
    """To find a root by the solver of a user, and see that it is one."""

    def __init__(self, newton: _Newton, solver: Callable[[], _Tensors]) -> None:
        self.name, self.newton, self.solver = newton.name, newton, solver

    def of_gradient(self) -> _Newton:
        return _Newton(self.newton.name, None, self.newton.max_iterations, linear=True)

    def solve(self, equation: _Map, z: _Tensors) -> _Tensors:
        found = [ops.stop_gradient(x) for x in self.solver()]
        if _is_sketched():
            return found
        tolerance = self.newton.tolerance or _eps(z) ** 0.5
        sizes = [ops.maximum(_largest(x), 1.0) for x in equation(z)]
        values = [_largest(x) / size for x, size in zip(equation(found), sizes, strict=True)]
        length = ops.max(ops.stack(values))
        value = _value(length)
        if value is None:
            return [ops.where(length <= tolerance, x, ops.full_like(x, float("nan"))) for x in found]
        if not value <= tolerance:
            raise RuntimeError(
                message(
                    self.newton.name,
                    "what the solver returned is no root",
                    argument="'solver'",
                    required=f"f(z) of at most {tolerance:.3g}, relative to the larger of f(z0) and 1",
                    got=f"one of {value:.3g}",
                    fix="let the solver go on for longer, or allow a larger tolerance",
                )
            )
        return found


def _repeat(method: Any, step: _Map, z: _Tensors) -> _Tensors:
    """Repeat a step until it is as short as the tolerance; what there is then, NaN where it never is."""
    count = len(z)
    tolerance = method.tolerance or _eps(z) ** 0.75

    def body(*carry: Any) -> tuple[Any, ...]:
        z, sizes = carry[:count], carry[count:-1]
        new = [ops.stop_gradient(x) for x in step(z)]
        sizes = tuple([ops.maximum(size, _largest(x)) for size, x in zip(sizes, new, strict=True)])
        moved = [_largest(x - old) for x, old in zip(new, z, strict=True)]
        # Relative to what is there now: a step is not short because `z` came from far. But the largest that
        # there has been, up to 1, counts as well, as a solution of zero has no scale of its own.
        scales = [
            ops.maximum(_largest(x), ops.minimum(size, 1.0)) for x, size in zip(new, sizes, strict=True)
        ]
        lengths = [ops.where(m > 0.0, m / s, m) for m, s in zip(moved, scales, strict=True)]  # NaN stays NaN
        return *new, *sizes, ops.max(ops.stack(lengths))

    carry = body(*z, *[ops.zeros_like(_largest(x)) for x in z], None)
    if _is_sketched():
        return carry[:count]
    length = _value(carry[-1])
    if length is None:
        limit = method.max_iterations - 1
        # The condition is false for NaN as well, which then stays to the end.
        carry = ops.while_loop(lambda *c: c[-1] > tolerance, body, carry, maximum_iterations=limit)
        found = carry[-1] <= tolerance
        return [ops.where(found, x, ops.full_like(x, float("nan"))) for x in carry[:count]]
    done = 1
    while length > tolerance and done < method.max_iterations:
        carry, done = body(*carry), done + 1
        length = _value(carry[-1])
    if not length <= tolerance:
        raise _not_found(method, tolerance, length, done)
    return carry[:count]


def _value(tensor: Any) -> Any:
    """A number, None while it is traced."""
    value = backend.active.concrete(tensor)
    return None if value is None else float(value)


_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
_EPS["complex128"] = _EPS["float64"]


def _eps(tensors: _Tensors) -> float:
    return max(_EPS.get(dtype_of(x), _EPS["float32"]) for x in tensors)


def _largest(x: Any) -> Any:
    """The largest absolute value, as a number of float32 or float64."""
    wide = "float64" if dtype_of(x) in ("float64", "complex128") else "float32"
    if 0 in tuple(x.shape):
        return ops.zeros((), wide)
    size = ops.abs(x) if dtype_of(x).startswith("complex") else x
    # Not the largest of `ops.abs`: OpenVINO 2026.4 leaves abs(0.5 * (z + a / z) - z) negative.
    return ops.cast(ops.maximum(ops.max(size), -ops.min(size)), wide)


def _is_sketched() -> bool:
    """Whether Keras asks for shapes and dtypes, on numbers that mean nothing."""
    with keras.SymbolicScope() as scope:
        return scope.original_scope is not None


def _not_found(method: Any, tolerance: float, length: float, done: int) -> RuntimeError:
    return RuntimeError(
        message(
            method.name,
            f"{method.what} did not converge",
            required=f"a last step of at most {tolerance:.3g}, relative to the largest element",
            got=f"one of {length:.3g}, after {done} iterations",
            fix="let it be a contraction, start nearer to the solution, or allow more iterations or a "
            "larger tolerance",
        )
    )


def _start(name: str, z0: Any) -> tuple[_Tensors, Layout]:
    """Where to start: its tensors, without a gradient, and their layout."""
    numbers = tree.map_structure(
        lambda leaf: backend.active.as_tensor(leaf) if type(leaf) is float else leaf, z0
    )
    tensors, layout = split(numbers)
    inexact = [dtype_of(x).startswith(("float", "bfloat", "complex")) for x in tensors]
    if tensors and all(inexact) and not layout.static_leaves():
        return [ops.stop_gradient(x) for x in tensors], layout
    raise TypeError(
        message(
            name,
            "there is nothing to start from",
            argument="'z0'",
            required="a floating tensor or number, or a structure of them",
            got=describe(z0),
            fix="pass floats",
        )
    )


def check_options(name: str, tolerance: Any, max_iterations: Any) -> None:
    """See that these say when to stop."""
    fix = "pass one, or leave it out"
    if tolerance is not None and not (is_number(tolerance) and 0.0 < tolerance < math.inf):
        required = "a positive number, or None"
        raise unusable(ValueError, name, "tolerance", required=required, got=tolerance, fix=fix)
    if not (is_integer(max_iterations) and max_iterations > 0):
        required = "a positive integer"
        raise unusable(ValueError, name, "max_iterations", required=required, got=max_iterations, fix=fix)

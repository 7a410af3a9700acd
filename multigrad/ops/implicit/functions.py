"""Solutions of equations, differentiated by the implicit function theorem.

The derivative of a solution does not depend on the solver. For `z = f(z, a)`, with the Jacobians `J` with
respect to `z` and `A` with respect to `a`, it is `dz = (I - J)^-1 A da`. For `0 = f(z, a)` it is
`dz = -J^-1 A da`. In reverse mode both have the same form: for an upstream gradient `v`, the gradient with
respect to `a` is `A^T w`, where the adjoint `w` solves

    w = v + J^T w  for a fixed point,  and  0 = v + J^T w  for a root.

This is an equation of the same kind. It is linear in `w`, and its parameters are `z`, `a` and `v`. So the
same op solves it, and its solution can be differentiated again, to any order.

`implicit_equations` defines the equations and the op, `implicit_solvers` the solvers, and `linear_solvers`
those of linear equations.
"""

from collections.abc import Callable
from typing import Any

from keras import ops

from multigrad import backend
from multigrad.calculus.derivatives import grad
from multigrad.common.errors import require_function
from multigrad.core.leaves import Symbolic
from multigrad.keras_graph import node, registry
from multigrad.ops.arguments import with_python_numbers
from multigrad.ops.implicit.equations import solution
from multigrad.ops.implicit.solvers import FixedPointIteration, Linear, Newton


def _solver_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls an op, but is not an op itself, as a node of models that can be saved."""
    name = f"multigrad>{function.__name__}"

    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except Symbolic:
            return node.apply(op, name, args, options)

    op = with_python_numbers("tolerance", "max_iterations")(backend.active.update_wrapper(call, function))
    return registry.register(name, function, higher_order=True, define=lambda: op)


@_solver_op
def fixed_point(
    f: Callable[..., Any],
    z0: Any,
    *args: Any,
    tolerance: float | None = None,
    max_iterations: int = 1000,
    on_failure: str = "raise",
    batched: bool = False,
) -> Any:
    """Return the fixed point `z = f(z, *args)`, differentiated by the implicit function theorem.

    ```python
    from multigrad import grad
    from multigrad.ops import fixed_point

    def root(a):  # Heron's method for the square root
        return fixed_point(lambda z, a: 0.5 * (z + a / z), 1.0, a)

    print(grad(root)(0.25))  # 1.0
    print(grad(grad(root))(0.25))  # -2.0
    ```

    `f` is applied repeatedly until `z` converges. The gradient is the gradient of the solution, and not of
    the iterations, which are not kept in memory. The backward pass solves the adjoint equation
    `w = v + J^T w`, for the upstream gradient `v` and the Jacobian `J` of `f` with respect to `z`, by the
    same iteration. It converges as fast as `f` does near its fixed point. For this, `f` runs twice more.

    Arguments:
        f: a function of `z` and the `args` that returns the next `z`, with the same structure, shapes and
            dtypes. It must be a contraction near its fixed point, and depend only on its arguments. A
            function that assigns variables or draws random numbers has no fixed point.
        z0: the initial guess: a floating tensor or number, or a nested structure of them. It has no gradient.
        args: tensors or nested structures of tensors, with respect to which the fixed point is
            differentiated, and any other objects that `f` takes. The trainable variables that `f` reads, for
            example in a layer, and the tensors that it closes over, have gradients, too.
        tolerance: the iterations end when `max(abs(new - z)) <= tolerance * max(abs(new))`, for each tensor
            of `z`, and of each example if `batched`. The factor `max(abs(new))` is at least the largest one
            in any iteration, up to 1, because a solution may be zero. The same holds for `w`. The default is
            `eps ** 0.75` of the dtype, 6e-6 in float32. If each step is shorter than the previous one by a
            factor of `r`, the error is at most `1 / (1 - r)` times the last step.
        max_iterations: the largest number of calls of `f`, and of iterations for `w`.
        on_failure: "raise", or "nan" for a result of NaN if `z` has not converged, and for gradients of NaN
            if `w` has not.
        batched: whether the first axis of `z0` is a batch, in which the result of `f` for an example depends
            on the `z` of that example alone. Each example is then an equation of its own: it has its own
            tolerance, and stops when it has converged. With "nan", only examples that fail are NaN.

    Returns:
        The fixed point, with the structure, shapes and dtypes of `z0`. For an upstream gradient `v`, the
        gradient with respect to an argument with the Jacobian `A` is `A^T w`. The gradient with respect to
        `z0` is zero. Gradients of gradients are exact at any order. A tensor that `f` reaches through an
        object, such as an attribute of `self`, has a first derivative. A second one raises an error.

    Raises:
        RuntimeError: if `z`, or `w` in the backward pass, has not converged after `max_iterations`. Compiled
            code cannot raise an error: there, the result and its gradient are NaN.
        TypeError: if `z0` is not floating, if `f` returns another structure or dtype than `z0`, or if `f`
            assigns variables.
        ValueError: if `f` returns another shape than `z0`, or if `tolerance` or `max_iterations` is not
            positive.
        flax.errors.TraceContextError: on JAX with `KERAS_NNX_ENABLED`, if `f` calls a Sequential model that
            is not built, while it is differentiated. NNX raises it for such a call under `jax.grad`, also
            without `fixed_point`. Build the model first.

    References:
        [Christianson 1994, Reverse accumulation and attractive fixed points](
        https://doi.org/10.1080/10556789408805572); [Bai, Kolter and Koltun 2019, Deep Equilibrium Models](
        https://arxiv.org/abs/1909.01377).
    """
    name = "fixed_point"
    require_function(name, "f", f)
    return solution(FixedPointIteration(name, tolerance, max_iterations, on_failure, batched), f, z0, args)


@_solver_op
def implicit_root(
    f: Callable[..., Any],
    z0: Any,
    *args: Any,
    solver: Callable[..., Any] | None = None,
    linear_solver: str | None = None,
    tolerance: float | None = None,
    max_iterations: int = 50,
    on_failure: str = "raise",
    batched: bool = False,
) -> Any:
    """Return a root `z` of `f(z, *args) = 0`, differentiated by the implicit function theorem.

    ```python
    from multigrad import grad
    from multigrad.ops import implicit_root

    def root(a):
        return implicit_root(lambda z, a: z**3 + z - a, 0.5, a)

    print(root(2.0))  # 1.0
    print(grad(root)(2.0))  # 0.25
    ```

    The gradient is the gradient of the root, and not of the iterations, which are not kept in memory. The
    backward pass solves the adjoint equation `J^T w = -v`, for the upstream gradient `v` and the Jacobian `J`
    of `f` with respect to `z`. For at most 1,000 unknowns, `J` is computed as a dense matrix. Otherwise it is
    used in products alone, so that the memory grows linearly with the number of unknowns. With `batched`,
    each example has a small matrix.

    Arguments:
        f: a function of `z` and the `args` that returns the residuals, with the structure, shapes and dtypes
            of `z`. It must depend only on its arguments.
        z0: the initial guess: a floating tensor or number, or a nested structure of them. It has no gradient.
        args: tensors or nested structures of tensors, with respect to which the root is differentiated, and
            any other objects that `f` takes. The trainable variables that `f` reads, and the tensors that it
            closes over, have gradients, too.
        solver: a function of `f`, `z0` and the `args` that returns the root, as tensors, or as numbers and
            arrays, which are cast to the dtype of `z0`. It can be any code that runs where `implicit_root` is
            called. In `fit`, `jit` and `vmap`, it calls SciPy by `host_call`. It is not differentiated. The
            default is Newton's method.
        linear_solver: the method for the steps of Newton's method and for the adjoint equation: "dense" for a
            dense matrix, "gmres" for any matrix, and "cg" for a symmetric and definite one. The default is
            "dense" for at most 1,000 unknowns, and "gmres" for more, or if a graph of TensorFlow does not
            know their number. The last two compute products with `J` by `multigrad.jvp` and `vjp`, at most
            1,000 for a solution. All need real numbers.
        tolerance: for Newton's method, the largest last step, as for `fixed_point`. For a `solver`, the
            largest value of `f` at the root, relative to its value at `z0` or to 1, whichever is larger. The
            default is `eps ** 0.75` of the dtype, 6e-6 in float32, and `eps ** 0.5` for a `solver`, 3e-4 in
            float32. For the adjoint equation, as for `linear_solve`.
        max_iterations: the largest number of steps of Newton's method.
        on_failure: "raise", or "nan" for a result of NaN if no root is found, and for gradients of NaN if the
            adjoint equation is not solved.
        batched: as for `fixed_point`. The linear equations are solved for each example, too.

    Returns:
        The root, with the structure, shapes and dtypes of `z0`. For an upstream gradient `v`, the gradient
        with respect to an argument with the Jacobian `A` is `A^T w`. The gradient with respect to `z0` is
        zero. Higher derivatives and tensors that `f` closes over are handled as by `fixed_point`.

    Raises:
        RuntimeError: if no root is found within the tolerance, if `J` is singular, or if the `solver` fails
            in a compiled function or `vmap`, where it gets tensors without values. Code in `jit` or `vmap`
            cannot raise the others: there, the result and its gradient are NaN.
        TypeError, ValueError: as for `fixed_point`, and for complex numbers.
        NotImplementedError: on the NumPy and OpenVINO backends, without a `solver`.

    References:
        [Blondel et al. 2022, Efficient and Modular Implicit Differentiation](
        https://arxiv.org/abs/2105.15183).
    """
    name = "implicit_root"
    require_function(name, "f", f)
    if solver is not None:
        require_function(name, "solver", solver)
    newton = Newton(name, tolerance, max_iterations, on_failure, batched, linear_solver)
    return solution(newton, f, z0, args, solver)


@_solver_op
def linear_solve(
    matvec: Callable[..., Any],
    b: Any,
    *args: Any,
    solver: str | None = None,
    tolerance: float | None = None,
    max_iterations: int = 1000,
    on_failure: str = "raise",
    batched: bool = False,
) -> Any:
    """Solve `matvec(x, *args) = b` for `x`, for a linear map that is given as a function.

    ```python
    from keras import ops
    from multigrad import grad
    from multigrad.ops import linear_solve

    def total(scale):
        return ops.sum(linear_solve(lambda x, scale: scale * x, ops.ones(2), scale))

    print(ops.round(total(4.0), 3))  # 0.5
    print(ops.round(grad(total)(4.0), 3))  # -0.125
    ```

    The matrix of the map is never computed, except with `solver="dense"`. The gradient solves the equation
    with the transposed map, whose products `vjp` computes. It can be differentiated to any order.

    Arguments:
        matvec: a function of `x` and the `args` that is linear in `x`, and returns its structure, shapes and
            dtypes.
        b: the right side: a real floating tensor or number, or a nested structure of them.
        args: tensors or nested structures of tensors, with respect to which the solution is differentiated,
            and any other objects that `matvec` takes. The trainable variables that it reads, and the tensors
            that it closes over, have gradients, too.
        solver: "dense" for a dense matrix, "gmres" for any matrix, and "cg" for a symmetric and definite one.
            The default is as for `implicit_root`. "gmres" keeps 60 vectors of the size of `b`.
        tolerance: the largest norm of the residual `matvec(x) - b`, relative to the norm of `b`. The default
            is `eps ** 0.75` of the dtype, 6e-6 in float32. For "dense", the largest norm of a correction of
            `x`, relative to the norm of `x`, and by default `eps ** 0.5`, 3e-4 in float32.
        max_iterations: the largest number of products with the matrix.
        on_failure: "raise", or "nan" for a result of NaN if the tolerance is not reached.
        batched: as for `fixed_point`: a matrix for each example.

    Returns:
        `x`, with the structure, shapes and dtypes of `b`.

    Raises:
        RuntimeError: if the tolerance is not reached after `max_iterations`, or not approached any more, if
            the matrix is singular, or if `matvec` is not linear. Compiled code cannot raise an error: there,
            the result and its gradient are NaN.
        TypeError, ValueError: as for `implicit_root`.
        NotImplementedError: on the NumPy and OpenVINO backends, with `solver="dense"`.

    References:
        [Saad and Schultz 1986, GMRES](https://doi.org/10.1137/0907058), in the form of
        [Jiranek and Rozloznik 2010](https://doi.org/10.1007/s11075-009-9300-z);
        [Hestenes and Stiefel 1952](https://doi.org/10.6028/jres.049.044).
    """
    name = "linear_solve"
    require_function(name, "matvec", matvec)
    linear = Linear(name, tolerance, max_iterations, on_failure, batched, solver, "x")
    return solution(linear, matvec, b, (b, *args), is_linear=True)


@_solver_op
def implicit_argmin(
    f: Callable[..., Any],
    x0: Any,
    *args: Any,
    solver: Callable[..., Any] | None = None,
    linear_solver: str | None = None,
    tolerance: float | None = None,
    max_iterations: int = 50,
    on_failure: str = "raise",
    batched: bool = False,
) -> Any:
    """Return the `x` at which a function is smallest, differentiated through its optimality condition.

    ```python
    from multigrad import grad
    from multigrad.ops import implicit_argmin

    def smallest(a):  # at x = a / 2
        return implicit_argmin(lambda x, a: (x - a) ** 2 + x**2, 0.0, a)

    print(smallest(3.0))  # 1.5
    print(grad(smallest)(3.0))  # 0.5
    ```

    It is a root of the gradient of `f` with respect to `x`, as found by `implicit_root`. The Jacobian is the
    Hessian of `f`.

    Arguments:
        f: a function of `x` and the `args` that returns a scalar. It must be differentiable twice, and
            depend only on its arguments.
        x0: the initial guess, as for `implicit_root`.
        args: as for `implicit_root`.
        solver: a function of `f`, `x0` and the `args` that returns the minimum, such as an optimizer. It is
            not differentiated. The default is Newton's method, which finds the minimum of a convex function.
            For another function, it may find a maximum or a saddle point.
        linear_solver, tolerance, max_iterations, on_failure: as for `implicit_root`. The Hessian at a minimum
            is symmetric, so "cg" can be used.
        batched: as for `fixed_point`. `f` returns a vector, with a value for each example.

    Returns:
        The minimizing `x`, with the structure, shapes and dtypes of `x0`. Its gradient with respect to `x0`
        is zero.

    Raises:
        RuntimeError, TypeError, ValueError, NotImplementedError: as for `implicit_root`.

    References:
        See `implicit_root`.
    """
    name = "implicit_argmin"
    require_function(name, "f", f)
    if solver is not None:
        require_function(name, "solver", solver)
    newton = Newton(name, tolerance, max_iterations, on_failure, batched, linear_solver, "x")
    minimizer = None if solver is None else lambda _, *start_and_args: solver(f, *start_and_args)
    total = (lambda *x_and_args: ops.sum(f(*x_and_args))) if batched else f

    def slope(x: Any, *parameters: Any) -> Any:  # not `grad(f)`, an object that hides what `f` closes over
        return grad(total)(x, *parameters)

    return solution(newton, slope, x0, args, minimizer)

"""`fixed_point` and `implicit_root`: solutions of equations, differentiated by the implicit function theorem.

The derivative of a solution does not depend on the solver. For `z = f(z, a)`, with the Jacobians `J` with
respect to `z` and `A` with respect to `a`, it is `dz = (I - J)^-1 A da`. For `0 = f(z, a)` it is
`dz = -J^-1 A da`. In reverse mode both have the same form: for an upstream gradient `v`, the gradient with
respect to `a` is `A^T w`, where the adjoint `w` solves

    w = v + J^T w  for a fixed point,  and  0 = v + J^T w  for a root.

This is an equation of the same kind. It is linear in `w`, and its parameters are `z`, `a` and `v`. So the
same op solves it, and its solution can be differentiated again, to any order.

`implicit_equations` defines the equations and the op, `implicit_solvers` the solvers.
"""

from collections.abc import Callable
from typing import Any

from multigrad.backend.base import Options
from multigrad.core.errors import require_function
from multigrad.core.structure import Symbolic
from multigrad.keras_graph import node, registry
from multigrad.ops.arguments import with_python_numbers
from multigrad.ops.implicit_equations import solution
from multigrad.ops.implicit_solvers import FixedPointIteration, Newton, check_options


def _saved_as(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function, which calls an op but is not an op itself, for saved models."""
    return lambda f: registry.register(name, f, Options(higher_order=True), lambda: f)


@with_python_numbers("tolerance", "max_iterations")
@_saved_as("multigrad>fixed_point")
def fixed_point(
    f: Callable[..., Any], z0: Any, *args: Any, tolerance: float | None = None, max_iterations: int = 1000
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
        tolerance: the largest change of `z` in the last iteration, for each of its tensors: the largest
            absolute element of the change, relative to the largest absolute element of `z`, or to the largest
            one in any iteration if that is less than 1. So the elements of a batch share the tolerance of the
            largest one. The same holds for `w`. The default is `eps ** 0.75` of the dtype, 6e-6 in float32.
            If each step is shorter than the previous one by a factor of `r`, the error is at most
            `1 / (1 - r)` times the last step.
        max_iterations: the largest number of calls of `f`, and of iterations for `w`.

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
    check_options(name, tolerance, max_iterations)
    try:
        return solution(FixedPointIteration(name, tolerance, max_iterations), f, z0, args)
    except Symbolic:
        options = {"tolerance": tolerance, "max_iterations": max_iterations}
        return node.apply(fixed_point, f"multigrad>{name}", (f, z0, *args), options)


@with_python_numbers("tolerance", "max_iterations")
@_saved_as("multigrad>implicit_root")
def implicit_root(
    f: Callable[..., Any],
    z0: Any,
    *args: Any,
    solver: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    max_iterations: int = 50,
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
    of `f` with respect to `z`. `J` is a dense matrix with one row per element of `z`, so use `implicit_root`
    for small systems.

    Arguments:
        f: a function of `z` and the `args` that returns the residuals, with the structure, shapes and dtypes
            of `z`. It must depend only on its arguments.
        z0: the initial guess: a floating tensor or number, or a nested structure of them. It has no gradient.
        args: tensors or nested structures of tensors, with respect to which the root is differentiated, and
            any other objects that `f` takes. The trainable variables that `f` reads, and the tensors that it
            closes over, have gradients, too.
        solver: a function of `f`, `z0` and the `args` that returns the root, as tensors, or as numbers and
            arrays, which are cast to the dtype of `z0`. It can be any code that runs where `implicit_root` is
            called. It is not differentiated. The default is Newton's method with dense Jacobians.
        tolerance: for Newton's method, the largest last step, as for `fixed_point`. For a `solver`, the
            largest value of `f` at the root, relative to its value at `z0` or to 1, whichever is larger. The
            default is `eps ** 0.75` of the dtype, 6e-6 in float32, and `eps ** 0.5` for a `solver`, 3e-4 in
            float32.
        max_iterations: the largest number of steps of Newton's method.

    Returns:
        The root, with the structure, shapes and dtypes of `z0`. For an upstream gradient `v`, the gradient
        with respect to an argument with the Jacobian `A` is `A^T w`. The gradient with respect to `z0` is
        zero. Higher derivatives and tensors that `f` closes over are handled as by `fixed_point`.

    Raises:
        RuntimeError: if no root is found within the tolerance, or if `J` is singular. PyTorch and TensorFlow
            raise their own errors for a singular `J`. Code in `jit` or `vmap` cannot raise an error:
            there, the result and its gradient are NaN.
        TypeError, ValueError: as for `fixed_point`, and for complex numbers.
        ValueError: on TensorFlow, if a size of `z0` is unknown until the graph runs.
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
    newton = Newton(name, tolerance, max_iterations)
    try:
        return solution(newton, f, z0, args, solver)
    except Symbolic:
        options = {"solver": solver, "tolerance": tolerance, "max_iterations": max_iterations}
        return node.apply(implicit_root, f"multigrad>{name}", (f, z0, *args), options)

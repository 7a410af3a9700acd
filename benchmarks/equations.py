"""Solutions of equations and their derivatives, compared with lineax, optimistix and jaxopt if installed.

`python -m benchmarks.equations` prints a table for the active backend: the times of the value, the gradient
and the second derivative, compiled, and the largest difference from the first solver of the problem.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from keras import backend, ops

from multigrad import grad, jit
from multigrad.ops import fixed_point, implicit_argmin, implicit_root, linear_solve

from .measure import time_in_turns

RANDOM = np.random.default_rng(0)
HAS_PEERS = backend.backend() == "jax" and all(
    importlib.util.find_spec(name) for name in ("lineax", "optimistix", "jaxopt")
)


class Problem(NamedTuple):
    """An equation with one parameter, and the ways to solve it."""

    name: str
    parameter: Any
    ways: dict[str, Callable[[Any], Any]]


def tensor(values: Any) -> Any:
    """Return an array as a tensor of float32."""
    return ops.convert_to_tensor(np.asarray(values, "float32"))


def neighbors(z: Any) -> Any:
    """Return the difference of each element from its two neighbors."""
    return 2.0 * z - ops.pad(z[1:], (0, 1)) - ops.pad(z[:-1], (1, 0))


def linear(count: int = 100_000) -> Problem:
    """Return a linear equation whose symmetric matrix is given as a function."""
    b = tensor(RANDOM.standard_normal(count))

    def product(x: Any, scale: Any) -> Any:
        return x + scale * neighbors(x)

    ways = {
        f"multigrad, {solver}": lambda scale, solver=solver: linear_solve(product, b, scale, solver=solver)
        for solver in ("cg", "gmres")
    }
    if HAS_PEERS:
        lineax = importlib.import_module("lineax")

        def by_lineax(scale: Any, solver: Any) -> Any:
            tags = lineax.positive_semidefinite_tag
            operator = lineax.FunctionLinearOperator(lambda x: product(x, scale), b, tags)
            return lineax.linear_solve(operator, b, solver).value

        # lineax's CG (0.1.1) returns NaN for this equation in float32.
        for name in ("GMRES", "BiCGStab"):
            solver = getattr(lineax, name)(rtol=1e-5, atol=1e-5)
            ways[f"lineax, {name}"] = lambda scale, solver=solver: by_lineax(scale, solver)
    return Problem(f"linear, {count:,} unknowns", tensor(0.5), ways)


def diffusion(count: int = 100_000) -> Problem:
    """Return the equation for the steady state of a nonlinear diffusion."""
    source = tensor(np.sin(np.arange(count) * 0.01))

    def residual(z: Any, scale: Any) -> Any:
        return z + scale * neighbors(z) + 0.1 * z**3 - source

    ways = {
        f"multigrad, {solver}": lambda scale, solver=solver: implicit_root(
            residual, ops.zeros(count), scale, linear_solver=solver
        )
        for solver in ("cg", "gmres")
    }
    if HAS_PEERS:
        lineax, optimistix = map(importlib.import_module, ("lineax", "optimistix"))
        newton = optimistix.Newton(rtol=6e-6, atol=6e-6, linear_solver=lineax.GMRES(rtol=1e-5, atol=1e-5))
        adjoint = optimistix.ImplicitAdjoint(lineax.GMRES(rtol=1e-5, atol=1e-5))
        ways["optimistix, Newton and GMRES"] = lambda scale: (
            optimistix.root_find(residual, newton, ops.zeros(count), scale, adjoint=adjoint).value
        )
    return Problem(f"root, {count:,} unknowns", tensor(0.5), ways)


def ridge(rows: int = 200, columns: int = 20) -> Problem:
    """Return a ridge regression, differentiated with respect to the weights of the data."""
    x, y = tensor(RANDOM.standard_normal((rows, columns))), tensor(RANDOM.standard_normal(rows))

    def loss(t: Any, weights: Any) -> Any:
        return ops.sum(weights * (ops.matmul(x, t) - y) ** 2) + 0.5 * ops.sum(t**2)

    ways = {"multigrad": lambda weights: implicit_argmin(loss, ops.zeros(columns), weights)}
    if HAS_PEERS:
        jaxopt = importlib.import_module("jaxopt")
        solver = jaxopt.LBFGS(loss, tol=1e-4, maxiter=100)
        ways["jaxopt, LBFGS"] = lambda weights: solver.run(ops.zeros(columns), weights).params
    return Problem(f"minimum, {columns} unknowns", tensor(np.linspace(0.5, 1.0, rows)), ways)


def equilibrium(width: int = 64) -> Problem:
    """Return the equation for the fixed point of a layer."""
    kernel = tensor(0.4 * RANDOM.standard_normal((width, width)) / np.sqrt(width))

    def layer(z: Any, x: Any) -> Any:
        return ops.tanh(ops.matmul(z, kernel) + x)

    ways = {"multigrad": lambda x: fixed_point(layer, ops.zeros_like(x), x)}
    if HAS_PEERS:
        optimistix = importlib.import_module("optimistix")
        solver = optimistix.FixedPointIteration(rtol=6e-6, atol=6e-6)
        ways["optimistix"] = lambda x: optimistix.fixed_point(layer, solver, ops.zeros_like(x), x).value
    return Problem(f"fixed point, {width} unknowns", tensor(RANDOM.standard_normal((1, width))), ways)


PROBLEMS = (linear, diffusion, ridge, equilibrium)


def derivatives(solve: Callable[[Any], Any]) -> dict[str, Callable[[Any], Any]]:
    """Return functions for the sum of squares of a solution, its gradient, and row sums of its Hessian."""
    loss = lambda p: ops.sum(ops.square(solve(p)))  # noqa: E731
    slope = grad(loss)
    return {"value": loss, "gradient": slope, "second": grad(lambda p: ops.sum(slope(p)))}


def main() -> None:
    """Print the times and differences."""
    print("| problem | way | value, ms | gradient, ms | second derivative, ms | largest difference |")
    print("|---|---|---|---|---|---|")
    for make in PROBLEMS:
        problem = make()
        compiled = {
            way: {name: jit(f) for name, f in derivatives(solve).items()}
            for way, solve in problem.ways.items()
        }
        results = {
            way: {name: ops.convert_to_numpy(f(problem.parameter)) for name, f in functions.items()}
            for way, functions in compiled.items()
        }
        first = next(iter(results.values()))
        times = {
            name: time_in_turns(
                {
                    way: functools.partial(functions[name], problem.parameter)
                    for way, functions in compiled.items()
                },
                rounds=5,
            )
            for name in first
        }
        for way, values in results.items():
            difference = max(
                np.abs(values[name] - first[name]).max() / np.abs(first[name]).max() for name in first
            )
            columns = [f"{times[name][way].median / 1e3:.2f}" for name in first]
            print(f"| {problem.name} | {way} | {' | '.join(columns)} | {difference:.0e} |", flush=True)


if __name__ == "__main__":
    main()

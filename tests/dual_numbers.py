"""The reference for random programs: derivatives by the rules, in NumPy, without multigrad.

`NAMES` defines the names that the text of a program uses (`random_programs.py`). A tensor is a dual number: a
value with its tangents, one for each element that the program is differentiated with respect to. Gradients
are computed in reverse mode on dual numbers, so their tangents are the second derivatives:

- The tangent of an op's output is the transposed rule, applied to the tangents of the op's inputs.
- The tangent of an intermediate is the derivative of the function that computed it.
- A constant has no tangent.
"""

import inspect
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

Array = np.ndarray


class Tensor:
    """A dual number, and the node of the graph that computed it."""

    directions = 0

    def __init__(self, value: Any, tangents: Array | None = None, node: "Node | None" = None) -> None:
        self.primal = np.asarray(value, "float64")
        self._tangents = tangents
        self.node = node

    @property
    def tangents(self) -> Array:
        return np.zeros((Tensor.directions, *self.primal.shape)) if self._tangents is None else self._tangents

    @tangents.setter
    def tangents(self, tangents: Array) -> None:
        self._tangents = tangents

    def __add__(self, other: Any) -> "Tensor":
        a, b = tensor(self), tensor(other)
        return made(a.primal + b.primal, [(a, lambda u: u), (b, lambda u: u)], _row(a, b) + _row(b, a))

    def __mul__(self, other: Any) -> "Tensor":
        a, b = tensor(self), tensor(other)
        tangents = _row(a, b) * b.primal + _row(b, a) * a.primal
        return made(a.primal * b.primal, [(a, lambda u: u * b), (b, lambda u: u * a)], tangents)

    def __neg__(self) -> "Tensor":
        return self * -1.0

    def __sub__(self, other: Any) -> "Tensor":
        return self + tensor(other) * -1.0

    def __rsub__(self, other: Any) -> "Tensor":
        return tensor(other) - self

    __radd__, __rmul__ = __add__, __mul__


class Variable(Tensor):
    """A weight. An op notes that its function reads it."""

    def __init__(self, *values: float) -> None:
        super().__init__(values)

    def assign(self, other: Any) -> None:
        self.primal = np.array(tensor(other).primal)


READS: list[list[Variable]] = []
"""The variables that the functions of the active ops have read, in the order of first use."""


def tensor(value: Any) -> Tensor:
    if isinstance(value, Variable):
        for reads in READS:
            if value not in reads:
                reads.append(value)
    return value if isinstance(value, Tensor) else Tensor(value)


def _row(a: Tensor, b: Tensor) -> Array:
    """Return the tangents of `a` in the shape of `a + b`."""
    shape = np.broadcast_shapes(a.primal.shape, b.primal.shape)
    more = (1,) * (len(shape) - a.primal.ndim)
    return np.broadcast_to(a.tangents.reshape(-1, *more, *a.primal.shape), (Tensor.directions, *shape))


# ------------------------------------------------------------------------------------------ reverse mode


class Node:
    """One operation. `pull` maps the gradients of the outputs to those of the inputs."""

    numbers = itertools.count()

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], pull: Callable[..., Any]) -> None:
        self.inputs, self.outputs, self.pull = inputs, outputs, pull
        self.number = next(Node.numbers)


def made(value: Any, parts: Sequence[tuple[Tensor, Callable[[Tensor], Tensor]]], tangents: Array) -> Tensor:
    """Return the result of an operation, with the function of the upstream gradient for each operand."""
    result = Tensor(value, tangents)
    result.node = Node([a for a, _ in parts], [result], lambda u: [pull(u) for _, pull in parts])
    return result


def gradients(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    upstream = {loss: Tensor(1.0)}
    for node in sorted(_nodes(loss), key=lambda node: -node.number):
        us = [upstream.get(output, Tensor(np.zeros_like(output.primal))) for output in node.outputs]
        for operand, gradient in zip(node.inputs, node.pull(*us), strict=True):
            own = _summed(gradient, operand.primal.shape)
            upstream[operand] = upstream[operand] + own if operand in upstream else own
    return [upstream.get(leaf, Tensor(np.zeros_like(leaf.primal))) for leaf in leaves]


def _nodes(loss: Tensor) -> set[Node]:
    found, todo = set(), [loss]
    while todo:
        node = todo.pop().node
        if node is not None and node not in found:
            found.add(node)
            todo += node.inputs
    return found


def _summed(gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a gradient in the shape before broadcasting: () or that of the gradient."""
    if gradient.primal.shape == shape:
        return gradient
    if gradient.primal.shape == ():
        return gradient * np.ones(shape)
    return total(gradient)


# -------------------------------------------------------------------------------------------------- rules


def op_custom_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    def op(*args: Any) -> Any:
        READS.append([])
        output, rule = f(*args)
        outputs = list(output) if isinstance(output, tuple) else [tensor(output)]
        inputs = [tensor(a) for a in args if isinstance(a, Tensor)]
        variables = [variable for variable in READS.pop() if variable not in inputs]
        inputs += variables
        # The rule holds the outputs, whose tangents and nodes are replaced below. If an output is an input,
        # the rule holds the input.
        outputs = [Tensor(y.primal) if y in inputs else y for y in outputs]
        pull = _pull(rule, isinstance(output, tuple), inputs, len(variables))
        if Tensor.directions:
            for y, rows in zip(outputs, _jacobian(pull, outputs), strict=True):
                tangents = [
                    x.tangents.reshape(len(x.tangents), -1) @ row.T
                    for x, row in zip(inputs, rows, strict=True)
                ]
                y.tangents = sum(tangents).reshape(-1, *y.primal.shape)
        node = Node(inputs, outputs, pull)
        for y in outputs:
            y.node = node
        return tuple(outputs) if isinstance(output, tuple) else outputs[0]

    return op


def _pull(rule: Any, several: bool, inputs: Sequence[Tensor], variables: int) -> Callable[..., list[Tensor]]:
    names = list(inspect.signature(rule).parameters)

    def pull(*us: Tensor) -> list[Tensor]:
        arguments = [us] if several and names[0] == "upstream" else us
        answer = rule(*arguments, *([None] if "variables" in names else []))
        own, of_variables = answer if variables else (answer, [])
        own = list(own) if isinstance(own, (tuple, list)) else [own]
        answers = [*own, *of_variables]
        # Addition, because two entries may be one object.
        zeros = [Tensor(np.zeros_like(x.primal)) for x in inputs]
        return [z if a is None else z + a for z, a in zip(zeros, answers, strict=True)]

    return pull


def _jacobian(pull: Callable[..., list[Tensor]], outputs: Sequence[Tensor]) -> list[list[Array]]:
    """Return for each output a matrix for each input: the rule, at all upstream gradients of one element."""
    at_zero = pull(*[Tensor(np.zeros_like(y.primal)) for y in outputs])
    if any(np.any(gradient.primal) for gradient in at_zero):
        raise ValueError("a rule is not linear in its upstream gradient")
    result = []
    for y in outputs:
        rows = []
        for element in range(y.primal.size):
            us = [Tensor(np.zeros_like(z.primal)) for z in outputs]
            us[outputs.index(y)].primal.reshape(-1)[element] = 1.0
            rows.append([g.primal.ravel() for g in pull(*us)])
        result.append([np.stack(column) for column in zip(*rows, strict=True)])
    return result


# ------------------------------------------------------------------------------------ names of a program


def _elementwise(f: Any, derivative: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    def apply(x: Any) -> Tensor:
        x = tensor(x)
        return made(f(x.primal), [(x, lambda u: u * derivative(x))], x.tangents * derivative(x).primal)

    return apply


def _slope(values: Callable[[Array], tuple[Array, Array]]) -> Callable[[Tensor], Tensor]:
    """Return a derivative as a function of dual numbers, from its value and its own derivative."""

    def slope(x: Tensor) -> Tensor:
        value, second = values(x.primal)
        return Tensor(value, x.tangents * second)

    return slope


sin = _elementwise(np.sin, _slope(lambda x: (np.cos(x), -np.sin(x))))
cos = _elementwise(np.cos, _slope(lambda x: (-np.sin(x), -np.cos(x))))
tanh = _elementwise(
    np.tanh, _slope(lambda x: (1.0 - np.tanh(x) ** 2, -2.0 * np.tanh(x) * (1.0 - np.tanh(x) ** 2)))
)


def total(x: Any) -> Tensor:
    x = tensor(x)
    axes = tuple(range(1, x.primal.ndim + 1))
    return made(np.sum(x.primal), [(x, lambda u: u * np.ones(x.primal.shape))], np.sum(x.tangents, axes))


def flip(x: Any) -> Tensor:
    x = tensor(x)
    return made(x.primal[::-1], [(x, flip)], x.tangents[:, ::-1])


def stop_gradient(x: Any) -> Tensor:
    return Tensor(tensor(x).primal)


class Layer:
    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def same(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as `jit` and `remat` do: without a change of its result."""
    return f


def derivatives(
    loss: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    argnums: Sequence[int],
    variables: Sequence[Variable],
    order: int,
    compiled: bool,
) -> list[Array]:
    """Return the value of a loss, its gradients and, for order 2, those of the gradients' weighted sum."""
    xs = [Tensor(x.primal) for x in inputs]
    leaves = [*[xs[i] for i in argnums], *variables]
    sizes = [leaf.primal.size for leaf in leaves]
    Tensor.directions = sum(sizes) if order == 2 else 0
    parts = np.split(np.eye(Tensor.directions, sum(sizes)), np.cumsum(sizes)[:-1], axis=1)
    for x in [*xs, *variables]:
        x.tangents = None
    for leaf, part in zip(leaves, parts, strict=True):
        leaf.tangents = part.reshape(-1, *leaf.primal.shape)
    value = loss(*xs)
    first = gradients(value, leaves)
    results = [value.primal, *[gradient.primal for gradient in first]]
    if order == 2:
        second = sum(np.sum((g * weights_of(i)).tangents, axis=1) for i, g in enumerate(first))
        results += np.split(second, np.cumsum(sizes)[:-1])
    return results


NAMES: dict[str, Any] = {
    "array": lambda *values: Tensor(values),
    "Variable": Variable,
    "value_of": lambda variable: Tensor(variable.primal),
    "Layer": Layer,
    "op_custom_gradient": op_custom_gradient,
    "derivatives": derivatives,
    "ops": SimpleNamespace(sin=sin, cos=cos, tanh=tanh, sum=total, flip=flip, stop_gradient=stop_gradient),
    "jit": same,
    "plain_jit": same,
    "remat": same,
    "checkpoint": same,
    "vmap": lambda f: lambda x, *others: f(x, *others) + f(0.5 * x, *others),
    "scan": lambda f: lambda x, *others: f(f(x, *others), *others),
    "loop": lambda f: lambda x, *others: f(f(x, *others), *others),
    "cond": same,
}


def weights_of(position: int) -> Array:
    """Return the weights of a gradient's elements in the sum that is differentiated a second time."""
    return np.array([1.0, -0.5, 2.0]) * (1.0 + 0.5 * position)

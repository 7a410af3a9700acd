"""The reference for random programs: derivatives by the rules, in NumPy, without multigrad.

`NAMES` defines the names that the text of a program uses (`random_programs.py`). Gradients are computed in
reverse mode, by operations that are recorded, too. So gradients have gradients, to any order:

- The gradient of an op's output with respect to the inputs is the rule.
- The gradient of an intermediate is that of the operations that computed it.
- A constant has no gradient.
- The gradient of an output with respect to a tensor that is no argument is an error.

All numbers are float64, and every transform of a framework is the plain function.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

Array = np.ndarray


class Tensor:
    """A value, and the node of the graph that computed it."""

    __array_ufunc__ = None  # an array times a tensor is a tensor

    def __init__(self, value: Any, is_low: bool = False) -> None:
        self.value = np.asarray(value, "float64")
        self.node: Node | None = None
        self.is_low = is_low
        """Whether it has a low precision on a backend."""

    def __add__(self, other: Any) -> "Tensor":
        a, b = tensor(self), tensor(other)
        return made(a.value + b.value, [(a, lambda u: u), (b, lambda u: u)])

    def __mul__(self, other: Any) -> "Tensor":
        a, b = tensor(self), tensor(other)
        return made(a.value * b.value, [(a, lambda u: u * b), (b, lambda u: u * a)])

    def __neg__(self) -> "Tensor":
        return self * -1.0

    def __sub__(self, other: Any) -> "Tensor":
        return self + tensor(other) * -1.0

    def __rsub__(self, other: Any) -> "Tensor":
        return tensor(other) - self

    __radd__, __rmul__ = __add__, __mul__


class Variable(Tensor):
    """A weight. Each operation on it is recorded as a read by the active op."""

    def __init__(self, *values: Any) -> None:
        super().__init__(values[0] if len(values) == 1 else values)

    def assign(self, other: Any) -> None:
        self.value = np.array(tensor(other).value)


READS: list[list[Variable]] = []
"""The variables that the functions of the active ops have read, in the order of first use."""


def tensor(value: Any) -> Tensor:
    if isinstance(value, Variable):
        for reads in READS:
            if value not in reads:
                reads.append(value)
    return value if isinstance(value, Tensor) else Tensor(value)


# ------------------------------------------------------------------------------------------ reverse mode


class Node:
    """One operation. `pull` maps the gradients of the outputs to those of the inputs."""

    numbers = itertools.count()

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], pull: Callable[..., Any]) -> None:
        self.inputs, self.outputs, self.pull = inputs, outputs, pull
        self.number = next(Node.numbers)


def made(
    value: Any, parts: Sequence[tuple[Tensor, Callable[[Tensor], Tensor]]], is_low: bool = False
) -> Tensor:
    """Return the result of an operation, with the function of the upstream gradient for each operand."""
    result = Tensor(value, is_low)
    result.node = Node([a for a, _ in parts], [result], lambda u: [pull(u) for _, pull in parts])
    return result


class Refused(Exception):
    """A gradient is asked for with respect to a tensor that an op uses, and that is no argument."""


REFUSED: Any = object()
"""The gradient with respect to such a tensor."""


def gradients(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    nodes = sorted(_nodes(loss), key=lambda node: node.number)
    dependent = set(leaves)
    for node in nodes:
        if not dependent.isdisjoint(node.inputs):
            dependent.update(node.outputs)
    upstream = {loss: Tensor(1.0)}
    for node in reversed(nodes):
        if dependent.isdisjoint(node.inputs) or upstream.keys().isdisjoint(node.outputs):
            continue
        us = [upstream.get(output, zero_like(output)) for output in node.outputs]
        for operand, gradient in zip(node.inputs, node.pull(*us), strict=True):
            if gradient is REFUSED:
                if operand in dependent:
                    raise Refused
            elif gradient is not None:
                own = _summed(gradient, operand.value.shape)
                upstream[operand] = upstream[operand] + own if operand in upstream else own
    return [upstream.get(leaf, zero_like(leaf)) for leaf in leaves]


def _nodes(loss: Tensor) -> set[Node]:
    found, todo = set(), [loss]
    while todo:
        node = todo.pop().node
        if node is not None and node not in found:
            found.add(node)
            todo += node.inputs
    return found


def zero_like(x: Tensor) -> Tensor:
    return Tensor(np.zeros_like(x.value))


def _summed(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a gradient in the shape before broadcasting."""
    if x.value.shape == shape:
        return x
    if np.broadcast_shapes(x.value.shape, shape) == shape:
        return x * np.ones(shape)
    new = x.value.ndim - len(shape)
    ones = [i + new for i, size in enumerate(shape) if size == 1]
    value = np.sum(x.value, (*range(new), *ones)).reshape(shape)
    return made(value, [(x, lambda u: u * np.ones(x.value.shape))])


# -------------------------------------------------------------------------------------------------- rules


def leaves_of(structure: Any) -> list[Tensor]:
    """Return the tensors of a structure, a dict in the order of its keys."""
    if isinstance(structure, dict):
        return [leaf for key in sorted(structure) for leaf in leaves_of(structure[key])]
    if isinstance(structure, (tuple, list)):
        return [leaf for part in structure for leaf in leaves_of(part)]
    return [structure] if isinstance(structure, Tensor) else []


def rebuilt(
    structure: Any, tensors: Iterator[Tensor], static: Callable[[Any], Any] = lambda part: part
) -> Any:
    """Return the structure with other tensors."""
    if isinstance(structure, dict):
        parts = {key: rebuilt(structure[key], tensors, static) for key in sorted(structure)}
        return {key: parts[key] for key in structure}
    if isinstance(structure, (tuple, list)):
        return type(structure)([rebuilt(part, tensors, static) for part in structure])
    return next(tensors) if isinstance(structure, Tensor) else static(structure)


def op_custom_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(f)

    def op(*args: Any, **kwargs: Any) -> Any:
        # New objects: a tensor that is an argument may also be one that the function closes over.
        copies = [made(leaf.value, [(leaf, lambda u: u)], leaf.is_low) for leaf in leaves_of((args, kwargs))]
        args, kwargs = rebuilt((args, kwargs), iter(copies))
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        READS.append([])
        start = next(Node.numbers)
        output, rule = f(*args, **kwargs)
        arguments = _by_name(bound)
        inputs = leaves_of(list(arguments.values()))
        variables = [variable for variable in READS.pop() if variable not in inputs]
        pull = _pull(rule, output, arguments, variables)
        # The rule holds the outputs, whose nodes are replaced. If an output is an input, it holds the input.
        outputs = [Tensor(y.value) if y in inputs else y for y in leaves_of(output)]
        others = [_others(y, [*inputs, *variables], start) for y in leaves_of(output)]
        own = [Tensor(y.value) for y in outputs]
        node = Node([*inputs, *variables], own, pull)
        for y, of_rule, closed in zip(outputs, own, others, strict=True):
            of_rule.node = node
            y.node = Node([of_rule, *closed], [y], lambda u, closed=closed: [u, *[REFUSED for _ in closed]])
        return rebuilt(output, iter(outputs))

    return op


def _by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return the arguments, with one entry for each that `*rest` or `**more` collects."""
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        match bound.signature.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                arguments |= {f"{name}{i}": item for i, item in enumerate(value)}
            case inspect.Parameter.VAR_KEYWORD:
                arguments |= value
            case _:
                arguments[name] = value
    return arguments


def _others(output: Tensor, inputs: Sequence[Tensor], start: int) -> list[Tensor]:
    """Return the tensors from before a run that its output depends on, without the inputs of the run."""
    seen, todo, found = {*inputs}, [output], []
    while todo:
        x = todo.pop()
        if x in seen:
            continue
        seen.add(x)
        if x.node is None or x.node.number < start:
            found.append(x)
        else:
            todo += x.node.inputs
    return found


def _pull(
    rule: Any, output: Any, arguments: dict[str, Any], variables: Sequence[Variable]
) -> Callable[..., list[Tensor | None]]:
    """Return the function that calls a rule in its form, and reads its answer."""
    parameters = inspect.signature(rule).parameters
    names = [name for name in parameters if name != "variables"]
    more = {"variables": None} if "variables" in parameters else {}

    def call(*us: Tensor) -> Any:
        whole = rebuilt(output, iter(us), lambda part: None)
        if len(names) == 1 and parameters[names[0]].kind is not inspect.Parameter.VAR_POSITIONAL:
            return rule(whole, **more)
        if "upstream" in names:
            own = [*arguments.values()][: len(names) - 1]
            return rule(*own, upstream=whole, **more)
        return rule(*us, **more)

    def read(*us: Tensor) -> list[Tensor | None]:
        answer = call(*us)
        if answer is None:
            raise TypeError("the rule returned nothing")
        own, of_variables = answer if variables else (answer, [])
        found = [g for part, entry in _entries(own, arguments) for g in _gradients(entry, part)]
        return found + [
            g for part, entry in zip(variables, of_variables, strict=True) for g in _gradients(entry, part)
        ]

    def pull(*us: Tensor) -> list[Tensor | None]:
        at_zero = read(*map(zero_like, us))
        if any(gradient is not None and np.any(gradient.value) for gradient in at_zero):
            raise ValueError("a rule is not linear in its upstream gradient")
        return read(*us)

    return pull


def _entries(answer: Any, arguments: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each differentiable argument with its entry in the answer."""
    own = {name: argument for name, argument in arguments.items() if leaves_of(argument)}
    if isinstance(answer, dict):
        answer = [answer.get(name) for name in own]
    elif not isinstance(answer, (tuple, list)):
        answer = [answer]
    elif len(answer) == len(arguments) > len(own):
        answer = [
            entry for argument, entry in zip(arguments.values(), answer, strict=True) if leaves_of(argument)
        ]
    return zip(own.values(), answer, strict=True)


def _gradients(entry: Any, part: Any) -> list[Tensor | None]:
    """Return the gradient of each tensor in an argument. Each is a new one, because two may be one object."""
    entry = entry() if callable(entry) else entry
    if entry is None:
        return [None for _ in leaves_of(part)]
    if isinstance(part, dict):
        return [g for key in sorted(part) for g in _gradients(entry[key], part[key])]
    if isinstance(part, (tuple, list)):
        return [g for own, inner in zip(entry, part, strict=True) for g in _gradients(own, inner)]
    return [zero_like(part) + entry] if isinstance(part, Tensor) else []


# ------------------------------------------------------------------------------------ names of a program


def elementwise(f: Callable[[Array], Array], derivative: Callable[[Tensor], Any]) -> Callable[[Any], Tensor]:
    """Return a function of tensors, with its derivative as a function of tensors."""

    def apply(x: Any) -> Tensor:
        x = tensor(x)
        return made(f(x.value), [(x, lambda u: u * derivative(x))])

    return apply


def power(p: float) -> Callable[[Any], Tensor]:
    return elementwise(lambda x: x**p, lambda x: p * power(p - 1.0)(x))


sin = elementwise(np.sin, lambda x: cos(x))
cos = elementwise(np.cos, lambda x: -sin(x))
tanh = elementwise(np.tanh, lambda x: 1.0 - tanh(x) * tanh(x))
sigmoid = elementwise(lambda x: 1.0 / (1.0 + np.exp(-x)), lambda x: sigmoid(x) * (1.0 - sigmoid(x)))


def flip(x: Any) -> Tensor:
    x = tensor(x)
    return made(np.flip(x.value), [(x, flip)])


def stop_gradient(x: Any) -> Tensor:
    return Tensor(tensor(x).value)


def cast(x: Any, dtype: str = "float32") -> Tensor:
    """Return a tensor in float32, which is the same tensor if it was."""
    x = tensor(x)
    return made(x.value, [(x, lambda u: u)]) if x.is_low else x


def times(factor: float) -> Callable[[Any], Tensor]:
    """Return the identity, whose gradient is multiplied by a factor."""

    def apply(x: Any) -> Tensor:
        x = tensor(x)
        return made(x.value, [(x, lambda u: u * factor)])

    return apply


def fixed(x: Any) -> Tensor:
    """Return `z = 0.3 * cos(z) + x`, by iterations that are differentiated."""
    z = tensor(x)
    for _ in range(25):
        z = 0.3 * cos(z) + x
    return z


def _surrogate(x: Tensor) -> Tensor:
    return power(-2.0)(1.0 + 10.0 * (np.sign(x.value) * x))


SHELF = SimpleNamespace(
    log1pexp=elementwise(lambda x: np.log1p(np.exp(x)), sigmoid),
    logcosh=elementwise(lambda x: np.log(np.cosh(x)), tanh),
    safe_sqrt=power(0.5),
    safe_divide=lambda x, y: x * power(-1.0)(y),
    safe_norm=lambda x: power(0.5)(_summed(x * x, ())),
    scale_gradient=lambda x, scale: times(scale)(x),
    reverse_gradient=times(-1.0),
    round_straight_through=elementwise(np.round, lambda x: 1.0),
    sign_straight_through=elementwise(np.sign, lambda x: np.abs(x.value) <= 1.0),
    clip_straight_through=lambda x, low, high: elementwise(lambda x: np.clip(x, low, high), lambda x: 1.0)(x),
    spike=elementwise(lambda x: 1.0 * (x > 0.0), _surrogate),
)


class Layer:
    """A layer casts its arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = rebuilt((args, kwargs), map(cast, leaves_of((args, kwargs))))
        return self.call(*args, **kwargs)


def same(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as `jit` and `remat` do: without a change of its result."""
    return f


def slope(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the gradient of the sum of a function with respect to its first argument."""

    def gradient(x: Tensor, *others: Any) -> Tensor:
        leaf = x * 1.0
        return gradients(_summed(f(leaf, *others), ()), [leaf])[0]

    return gradient


def derivatives(
    loss: Callable[..., Tensor],
    inputs: Sequence[Any],
    argnums: Sequence[int],
    variables: Sequence[Variable],
    modes: Sequence[str],
    compiled: bool,
) -> list[Array]:
    """Return the value of a loss, and its derivatives, one order for each mode.

    They are the gradients and, in forward mode, the derivative along `weights_of`. The next order is that of
    the weighted sum of the gradients.
    """
    xs = [rebuilt(x, iter([Tensor(leaf.value, leaf.is_low) for leaf in leaves_of(x)])) for x in inputs]
    leaves = [*leaves_of([xs[i] for i in argnums]), *variables]
    value = loss(*xs)
    results = [value.value]
    for mode in modes:
        first = gradients(value, leaves)
        value = sum([_summed(g * weights_of(i), ()) for i, g in enumerate(first)], Tensor(0.0))
        results += [value.value] if mode == "jvp" else [gradient.value for gradient in first]
    return results


def array(*values: Any, dtype: str = "float32") -> Tensor:
    return Tensor(values[0] if len(values) == 1 else values, dtype != "float32")


NAMES: dict[str, Any] = {
    "array": array,
    "integers": lambda *values: np.array(values),
    "Variable": Variable,
    "value_of": lambda variable: Tensor(variable.value),
    "Layer": Layer,
    "op_custom_gradient": op_custom_gradient,
    "derivatives": derivatives,
    "ops": SimpleNamespace(
        sin=sin,
        cos=cos,
        tanh=tanh,
        sum=lambda x: _summed(tensor(x), ()),
        flip=flip,
        stop_gradient=stop_gradient,
        cast=cast,
    ),
    "shelf": SHELF,
    "fixed": fixed,
    "host_sin": lambda x: Tensor(np.sin(x.value)),
    "numpy_sin": lambda x: Tensor(np.sin(x.value)),
    "jit": same,
    "plain_jit": same,
    "remat": same,
    "checkpoint": same,
    "vmap": lambda f: lambda x, *others: f(x, *others) + f(0.5 * x, *others),
    "scan": lambda f: lambda x, *others: f(f(x, *others), *others),
    "loop": lambda f: lambda x, *others: f(f(x, *others), *others),
    "cond": same,
    "slope": slope,
    "Holder": SimpleNamespace,
}


def weights_of(position: int) -> Array:
    """Return the weights of a gradient's elements in the sum that is differentiated again."""
    return np.array([1.0, -0.5, 2.0]) * (1.0 + 0.5 * position)

"""The result of a random program: once with ops, as the program defines and calls them, and once without.

A rule multiplies each gradient by a factor, mostly a false one. The equivalent plain function takes its value
from one expression, and its first two derivatives from another one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from programs import Call, Curve, Integers, Op, Place, Program, Term, has_gradient, places

from multigrad import grad, op_custom_gradient

stop = ops.stop_gradient


def product(*factors: Any) -> Any:
    """Return the product of tensors of any dtypes, and of numbers."""
    return functools.reduce(ops.multiply, sorted(factors, key=lambda factor: isinstance(factor, float)))


def scaled(tensor: Any, numbers: Sequence[Any]) -> Any:
    """Return a tensor times numbers, some of which may be integer tensors, in the dtype of the tensor."""
    for number in numbers:
        tensor = tensor * (number if isinstance(number, float) else ops.cast(number, tensor.dtype))
    return tensor


def total(addends: Sequence[Any]) -> Any:
    return functools.reduce(ops.add, addends)


def tanh(x: Any) -> Any:
    """Return tanh by functions that Keras (3.15) computes in float64. `ops.tanh` is float32 on JAX."""
    return 2.0 * ops.sigmoid(2.0 * x) - 1.0


# Each function with its first and second derivative.
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "identity": (lambda x: x, ops.ones_like, ops.zeros_like),
    "tanh": (tanh, lambda x: 1.0 - tanh(x) ** 2, lambda x: 2.0 * tanh(x) * (tanh(x) ** 2 - 1.0)),
    "bell": (
        lambda x: ops.exp(-(x**2)),
        lambda x: -2.0 * x * ops.exp(-(x**2)),
        lambda x: (4.0 * x**2 - 2.0) * ops.exp(-(x**2)),
    ),
    "ratio": (
        lambda x: x / (1.0 + x**2),
        lambda x: (1.0 - x**2) / (1.0 + x**2) ** 2,
        lambda x: 2.0 * x * (x**2 - 3.0) / (1.0 + x**2) ** 3,
    ),
    "square": (lambda x: x**2, lambda x: 2.0 * x, lambda x: 2.0 * ops.ones_like(x)),
}

# Each function with its derivative, as a function of its value.
CURVES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "softplus": (lambda z: ops.log(1.0 + ops.exp(z)), lambda y: 1.0 - ops.exp(-y)),
    "tanh": (tanh, lambda y: 1.0 - y**2),
    "sigmoid": (ops.sigmoid, lambda y: y * (1.0 - y)),
}


# ------------------------------------------------------------------------------------------ structures


def fill(structure: Any, tensors: Sequence[Any]) -> Any:
    """Return the structure with these tensors."""
    if isinstance(structure, Place):
        return tensors[structure.index]
    if isinstance(structure, Integers):
        return ops.convert_to_tensor(np.array(structure.values, "int32"))
    if isinstance(structure, dict):
        return {key: fill(part, tensors) for key, part in structure.items()}
    if isinstance(structure, (tuple, list)):
        return type(structure)([fill(part, tensors) for part in structure])
    return structure


def found(structure: Any, filled: Any) -> tuple[dict[int, Any], list[Any]]:
    """Return the tensors of a filled structure by their numbers, and all Python numbers in it.

    Assert that the rest equals the structure.
    """
    if isinstance(structure, Place):
        assert ops.is_tensor(filled), filled
        return {structure.index: filled}, []
    if isinstance(structure, Integers):
        assert keras.backend.standardize_dtype(filled.dtype) == "int32"
        assert tuple(filled.shape) == (len(structure.values),)
        return {}, [ops.sum(filled)]
    assert type(filled) is type(structure), (filled, structure)
    if isinstance(structure, (dict, tuple, list)):
        assert list(_keys(filled)) == list(_keys(structure)), (filled, structure)
        parts = [found(structure[key], filled[key]) for key in _keys(structure)]
        tensors = {i: tensor for own, _ in parts for i, tensor in own.items()}
        return tensors, [number for _, numbers in parts for number in numbers]
    assert filled == structure
    is_number = isinstance(structure, (int, float)) and not isinstance(structure, bool)
    return {}, [float(structure)] if is_number else []


def upstreams(structure: Any, whole: Any) -> dict[int, Any]:
    """Return the upstream gradients in the structure of the output, None for outputs without a gradient."""
    if isinstance(structure, Place):
        return {structure.index: whole}
    if isinstance(structure, (dict, tuple, list)):
        return {i: u for key in _keys(structure) for i, u in upstreams(structure[key], whole[key]).items()}
    assert whole is None
    return {}


def _keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


# --------------------------------------------------------------------------------------- the definition of an
# op

Table = dict[tuple[str, int, float | None], tuple[Any, Any]]
"""Functions of a leaf, with their derivatives."""


def table(op: Op, leaves: dict[int, Any]) -> Table:
    """Return the parts of the terms of an op. A part is computed by a nested op if its term requires it."""
    keys = {(name, leaf, t.inner): 0 for t in _terms(op) for name, leaf in t.parts}
    return {(name, leaf, inner): _evaluated(name, inner, leaves[leaf]) for name, leaf, inner in keys}


def _terms(op: Op) -> list[Term]:
    return [term for output in op.outputs if isinstance(output, tuple) for term in output]


def _evaluated(name: str, inner: float | None, x: Any) -> tuple[Any, Any]:
    value, first, second = FUNCTIONS[name]
    if inner is None:
        return value(x), first(x)
    return _inner(value, first, inner)(x), _inner(first, second, inner)(x)


def _inner(function: Callable[[Any], Any], derivative: Callable[[Any], Any], factor: float) -> Any:
    return op_custom_gradient(lambda x: (function(x), lambda u: u * factor * derivative(x)))


def of_term(term: Term, parts: Table) -> Any:
    return product(term.coefficient, *[parts[*part, term.inner][0] for part in term.parts])


def slope_of_term(term: Term, nth: int, parts: Table) -> Any:
    """Return the true derivative of a term with respect to the leaf of its `nth` part."""
    own = parts[*term.parts[nth], term.inner][1]
    others = [parts[*part, term.inner][0] for i, part in enumerate(term.parts) if i != nth]
    return product(term.coefficient, own, *others)


def argument_of(curve: Curve, leaves: dict[int, Any], numbers: Sequence[Any]) -> Any:
    return scaled(total([leaves[leaf] * weight for weight, leaf in curve.weights]), numbers)


class Rule:
    """The gradients of one run of an op, each computed when it is needed.

    A rule creates an object of this class from what it closes over.
    """

    def __init__(self, op: Op, leaves: dict[int, Any], numbers: Sequence[Any], parts: Table) -> None:
        self.op, self.leaves, self.numbers, self.parts = op, leaves, numbers, parts

    def gradients(self, us: dict[int, Any], outputs: Sequence[Any]) -> dict[int, Callable[[], Any]]:
        """Return the gradient of each leaf that an output depends on, as functions."""
        addends: dict[int, list[Callable[[], Any]]] = {}
        for i, output in enumerate(self.op.outputs):
            if isinstance(output, Curve):
                slope = functools.partial(self._of_curve, output, us[i], outputs[i])
                for weight, leaf in output.weights:
                    addends.setdefault(leaf, []).append(functools.partial(slope, weight))
            else:
                for term in output:
                    for nth, (_, leaf) in enumerate(term.parts):
                        addends.setdefault(leaf, []).append(
                            functools.partial(self._of_term, term, nth, us[i])
                        )
        return {leaf: functools.partial(self._sum, leaf, own) for leaf, own in addends.items()}

    def _of_curve(self, curve: Curve, u: Any, y: Any, weight: float) -> Any:
        _, derivative = CURVES[curve.name]
        return scaled(product(u, derivative(y), curve.factor * weight), self.numbers)

    def _of_term(self, term: Term, nth: int, u: Any) -> Any:
        return scaled(product(u, slope_of_term(term, nth, self.parts), term.factor), self.numbers)

    def _sum(self, leaf: int, addends: Sequence[Callable[[], Any]]) -> Any:
        style = self.op.convention.styles[leaf]
        terms = [addend() for addend in addends]
        if style.summed or len({tuple(term.shape) for term in terms}) > 1:
            terms = [summed(term, tuple(self.leaves[leaf].shape)) for term in terms]
        gradient = total(terms)
        return ops.cast(gradient, style.dtype) if style.dtype else gradient


def summed(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Return a gradient, summed to the shape before broadcasting."""
    new = len(gradient.shape) - len(shape)
    gradient = ops.sum(gradient, axis=tuple(range(new))) if new else gradient
    ones = tuple(i for i, size in enumerate(shape) if size == 1 and gradient.shape[i] != 1)
    return ops.sum(gradient, axis=ones, keepdims=True) if ones else gradient


class Answer:
    """The gradients of a rule, in the form of the op's convention."""

    def __init__(self, rule: Rule, gradients: dict[int, Callable[[], Any]], names: Sequence[str]) -> None:
        op = rule.op
        self.convention, self.rule, self.gradients = op.convention, rule, gradients
        self.structures = {name: op.arguments[op.names.index(name)] for name in names}
        """The arguments in the order of the call."""

    def whole(self) -> Any:
        differentiable = [name for name, argument in self.structures.items() if has_gradient(argument)]
        match self.convention.answer:
            case "bare":
                return self._of_argument(differentiable[0])
            case "names":
                return {name: self._of_argument(name) for name in differentiable}
            case "differentiable":
                return tuple([self._of_argument(name) for name in differentiable])
            case "flat":
                return [self._of_leaf(leaf) for leaf in places(list(self.structures.values()))]
            case "list":
                return [self._of_argument(name) for name in self.structures]
            case "tuple":
                return tuple([self._of_argument(name) for name in self.structures])

    def _of_argument(self, name: str) -> Any:
        structure = self.structures[name]
        if name in self.convention.lazy and has_gradient(structure):
            return lambda: self._entry(structure)
        return self._entry(structure)

    def _entry(self, structure: Any) -> Any:
        if isinstance(structure, dict):
            return {key: self._entry(part) for key, part in structure.items()}
        if isinstance(structure, (tuple, list)):
            return type(structure)([self._entry(part) for part in structure])
        return self._of_leaf(structure.index if isinstance(structure, Place) else None)

    def _of_leaf(self, leaf: int | None) -> Any:
        if leaf is None:
            return self.convention.static
        style = self.convention.styles[leaf]
        if leaf not in self.gradients:
            return None if style.none else ops.zeros_like(self.rule.leaves[leaf])
        return self.gradients[leaf] if style.lazy else self.gradients[leaf]()


# -------------------------------------------------------------------------------- with and without ops


def with_ops(op: Op) -> Callable[[Call, Sequence[Any]], list[Any]]:
    """Return a function that calls an op as a call defines."""

    def run(named: dict[str, Any]) -> Any:
        names = list(named)
        leaves, numbers = found([op.arguments[op.names.index(name)] for name in names], list(named.values()))
        parts = table(op, leaves)
        outputs = [
            CURVES[output.name][0](argument_of(output, leaves, numbers))
            if isinstance(output, Curve)
            else scaled(total([of_term(term, parts) for term in output]), numbers)
            for output in op.outputs
        ]
        kept = parts if op.convention.keeps == "intermediates" else None

        def answer(us: dict[int, Any], own: tuple[Any, ...]) -> Any:
            again, _ = found(list(op.arguments[: len(own)]), list(own))
            at = {**leaves, **again}
            rule = Rule(op, at, numbers, table(op, at) if kept is None else kept)
            return Answer(rule, rule.gradients(us, outputs), names).whole()

        return fill(op.output, outputs), _rule(op, answer)

    defaults = {name: op.arguments[op.names.index(name)] for name in op.defaults}
    function = op_custom_gradient(_evaluate(_signature(op))(run, defaults))

    def call(call: Call, tensors: Sequence[Any]) -> list[Any]:
        arguments = fill(op.arguments, tensors)
        keywords = {name: arguments[op.names.index(name)] for name in call.keywords}
        tensors, _ = found(op.output, function(*arguments[: call.positional], **keywords))
        return [tensors[i] for i in range(len(tensors))]

    return call


_evaluate = functools.cache(eval)


def _signature(op: Op) -> str:
    """Return the source of a function with the parameters of an op, which calls a function of a dict."""
    written = [f"{name}=defaults[{name!r}]" if name in op.defaults else name for name in op.names]
    by_position, tail = written[: op.positional], written[op.positional :]
    if op.positional_only:
        by_position.insert(op.positional_only, "/")
    named = [f"{name!r}: {name}" for name in op.names[: op.positional]]
    if op.tail == "keyword":
        tail = ["*", *tail] if tail else []
        named += [f"{name!r}: {name}" for name in op.names[op.positional :]]
    elif op.tail == "*rest":
        tail, named = ["*rest"], [*named, f"**dict(zip({op.names[op.positional :]!r}, rest))"]
    else:
        tail, named = ["**more"], [*named, "**more"]
    return f"lambda run, defaults: lambda {', '.join(by_position + tail)}: run({{{', '.join(named)}}})"


def _rule(op: Op, answer: Callable[[dict[int, Any], tuple[Any, ...]], Any]) -> Callable[..., Any]:
    """Return a rule with the parameters of the op's convention."""
    parameters = op.convention.parameters

    def whole(upstream: Any, own: tuple[Any, ...] = ()) -> Any:
        return answer(upstreams(op.output, upstream), own)

    def flat(*us: Any) -> Any:
        places_of = places(op.output)
        return answer({i: u for i, u in zip(places_of, us, strict=True) if i is not None}, ())

    names = [name for name in parameters.replace("=", " ").replace(",", " ").split() if name[0] in "pu*g"]
    first = names[0]
    if first in ("upstream", "g"):
        return _evaluate(f"lambda whole: lambda {parameters}: whole({first})")(whole)
    if "upstream" not in names:
        return _evaluate(f"lambda flat: lambda {parameters}: flat({', '.join(names)})")(flat)
    own = ", ".join(name for name in names if name not in ("upstream", "*"))
    return _evaluate(f"lambda whole: lambda {parameters}: whole(upstream, ({own},))")(whole)


def without_ops(op: Op) -> Callable[[Call, Sequence[Any]], list[Any]]:
    """Return a plain function that is equivalent to the op."""

    def call(call: Call, tensors: Sequence[Any]) -> list[Any]:
        leaves, numbers = found(op.arguments, fill(op.arguments, tensors))
        return [_meant(output, leaves, numbers) for output in op.outputs]

    return call


def _meant(output: Any, leaves: dict[int, Any], numbers: Sequence[Any]) -> Any:
    if isinstance(output, Curve):
        z = argument_of(output, leaves, numbers)
        return CURVES[output.name][0](stop(z) + output.factor * (z - stop(z)))
    return scaled(total([_meant_term(term, leaves) for term in output]), numbers)


def _meant_term(term: Term, leaves: dict[int, Any]) -> Any:
    """The first derivative has a false factor. The second has it, too, and the factor of nested ops."""
    parts = {(*part, term.inner): _evaluated(part[0], None, leaves[part[1]]) for part in term.parts}
    value = of_term(term, parts)
    inner = 1.0 if term.inner is None else term.inner
    moves = [leaves[leaf] - stop(leaves[leaf]) for _, leaf in term.parts]
    line = total([product(stop(slope_of_term(term, i, parts)), move) for i, move in enumerate(moves)])
    potential = ops.cast(term.factor * ((1.0 - inner) * line + inner * value), value.dtype)
    return stop(value) + potential - stop(potential)


# ------------------------------------------------------------------------------------------- a program

Made = Callable[[Op], Callable[[Call, Sequence[Any]], list[Any]]]


def function_of(program: Program, made: Made) -> Callable[..., list[Any]]:
    """Return the function of the inputs that a program computes: the outputs of all calls."""
    functions = [made(op) for op in program.ops]

    def function(*inputs: Any) -> list[Any]:
        values = list(inputs)
        for call in program.calls:
            values += functions[call.op](call, [values[i] for i in call.leaves])
        return values[len(inputs) :]

    return function


def inputs_of(program: Program) -> list[Any]:
    generator = np.random.default_rng(program.seed)
    return [
        ops.convert_to_tensor(generator.uniform(-1.2, 1.2, shape).astype("float32"), dtype=dtype)
        for shape, dtype in program.inputs
    ]


def weighted(tensors: Sequence[Any], seed: int) -> Any:
    """Return the sum of all elements and of their squares, each with a fixed weight."""
    generator = np.random.default_rng(seed)
    sums = []
    for tensor in tensors:
        if keras.backend.standardize_dtype(tensor.dtype) in ("float16", "bfloat16"):
            tensor = ops.cast(tensor, "float32")
        weights = ops.convert_to_tensor(generator.uniform(0.5, 1.5, tensor.shape), dtype=tensor.dtype)
        sums.append(ops.sum(weights * (tensor + 0.25 * tensor**2)))
    return total(sums)


def gradients_of(program: Program, made: Made) -> list[list[Any]]:
    """Return the outputs of a program, the gradients of their weighted sum, and maybe second derivatives."""
    function, inputs = function_of(program, made), inputs_of(program)
    every = tuple(range(len(inputs)))
    results = [function(*inputs)]
    for order in range(program.orders):

        def loss(*inputs: Any, function: Any = function, seed: int = order) -> Any:
            return weighted(function(*inputs), seed)

        function = grad(loss, every)
        results.append(list(function(*inputs)))
    return results


def described(tensors: Sequence[Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtypes and shapes."""
    return [(keras.backend.standardize_dtype(t.dtype), tuple(t.shape)) for t in tensors]


def numbers(tensors: Sequence[Any]) -> np.ndarray:
    """Return all elements, in one array of float64."""
    flat = [ops.convert_to_numpy(ops.cast(tensor, "float64")).ravel() for tensor in tensors]
    return np.concatenate([np.zeros(0), *flat])

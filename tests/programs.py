"""Random programs as plain data: graphs of ops, and forms of their rules and calls.

This module draws them. `meanings.py` computes them, with and without ops. A program is drawn by a
`random.Random`: one with a seed, or one of hypothesis, which then finds the smallest failing program. This
module uses no framework.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

DTYPES = ["float32", "float32", "float32", "float64", "float16", "bfloat16"]
PRECISIONS = ["float64", "float32", "float16", "bfloat16"]
FUNCTIONS = ["identity", "tanh", "bell", "ratio", "square"]
CURVES = ["softplus", "tanh", "sigmoid"]
FACTORS = [3.0, -2.0, 0.5]  # the false factors of rules
# No two of them cancel, because the rest would be rounding errors, whose differences are arbitrary.
COEFFICIENTS = [1.0, -0.5, 0.75]
WEIGHTS = [0.5, -0.75, 0.25]
STATICS = [None, 1, -1, 0.5, True, "same"]
STATIC_OUTPUTS = [None, 3, "same"]
KEYS = ["m", "k", "z", "f", "y", "h"]  # not sorted
NAMES = "abcd"


@dataclass(frozen=True)
class Place:
    """The position of a tensor in a structure, with its number."""

    index: int


@dataclass(frozen=True)
class Integers:
    """A tensor of integers in a structure."""

    values: tuple[int, ...]


@dataclass(frozen=True)
class Term:
    """`coefficient` times the product of functions of leaves."""

    coefficient: float
    parts: tuple[tuple[str, int], ...]
    """A function with its leaf, and possibly another function with a second leaf."""
    factor: float
    """The factor by which the rule multiplies the gradient."""
    inner: float | None
    """The same for the ops that compute the functions, if ops do."""


@dataclass(frozen=True)
class Curve:
    """A function of a weighted sum of leaves, whose rule closes over the output."""

    name: str
    weights: tuple[tuple[float, int], ...]
    factor: float


@dataclass(frozen=True)
class Style:
    """The form of the gradient of one leaf."""

    lazy: bool
    none: bool
    """Whether a zero gradient is None."""
    dtype: str | None
    """Another dtype to which it is cast."""
    summed: bool
    """Whether it is summed to the shape of the leaf after broadcasting."""


@dataclass(frozen=True)
class Convention:
    """The form of a rule."""

    parameters: str
    """The parameters of the rule."""
    answer: str
    keeps: str
    """What the rule closes over: the `inputs`, or the `intermediates`, too."""
    styles: tuple[Style, ...]
    lazy: frozenset[str]
    """The arguments whose entry is lazy as a whole."""
    static: float | None
    """The entry of an argument without a gradient."""


@dataclass(frozen=True)
class Op:
    """A function with a rule."""

    arguments: tuple[Any, ...]
    """Structures with a `Place` for each leaf: the parameters `a`, `b`, ..."""
    positional_only: int
    positional: int
    """The number of arguments that can be passed by position. The others are passed to `tail`."""
    tail: str
    """`keyword` for keyword-only parameters, `*rest` or `**more`."""
    defaults: frozenset[str]
    outputs: tuple[Term | Curve | tuple[Term, ...], ...]
    output: Any
    """A structure with a `Place` for each output."""
    leaves: int
    convention: Convention

    @property
    def names(self) -> str:
        return NAMES[: len(self.arguments)]


@dataclass(frozen=True)
class Call:
    """A call of an op."""

    op: int
    leaves: tuple[int, ...]
    """The numbers of its arguments among the values."""
    positional: int
    keywords: tuple[str, ...]


class Input(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Program:
    """Ops, and their calls in order. A value is an input, or an output of an earlier call."""

    inputs: tuple[Input, ...]
    structure: Any
    """The inputs as one argument."""
    ops: tuple[Op, ...]
    calls: tuple[Call, ...]
    seed: int
    """The seed of the numbers."""

    @property
    def precision(self) -> str:
        """Return the least precise dtype of the inputs."""
        return max((dtype for _, dtype in self.inputs), key=PRECISIONS.index)

    @property
    def orders(self) -> int:
        """Return the number of derivatives that the precision allows."""
        return 2 if self.precision in ("float32", "float64") else 1


# ------------------------------------------------------------------------------------------ structures


def places(structure: Any) -> list[int]:
    """Return the numbers of the tensors in a structure, None for integers, in the order of flattening."""
    if isinstance(structure, (Place, Integers)):
        return [structure.index if isinstance(structure, Place) else None]
    if isinstance(structure, dict):
        return [place for key in sorted(structure) for place in places(structure[key])]
    if isinstance(structure, (tuple, list)):
        return [place for part in structure for place in places(part)]
    return []


def has_gradient(structure: Any) -> bool:
    return any(place is not None for place in places(structure))


def nested(random: Any, leaves: list[Any], depth: int = 2) -> Any:
    """Return the leaves in a nested structure, in their order."""
    if len(leaves) == 1 and (depth == 0 or random.random() < 0.7):
        return leaves[0]
    parts = [nested(random, part, depth - 1) for part in split(random, leaves)] if depth else leaves
    kind = random.choice([tuple, list, dict])
    return dict(zip(random.sample(KEYS, len(KEYS)), parts, strict=False)) if kind is dict else kind(parts)


def split(random: Any, leaves: list[Any], most: int = 3) -> list[list[Any]]:
    """Split the leaves into one to `most` parts, none of them empty."""
    count = random.randint(1, max(1, min(most, len(leaves))))
    cuts = sorted(random.sample(range(1, len(leaves)), count - 1)) if leaves else []
    return [leaves[a:b] for a, b in zip([0, *cuts], [*cuts, len(leaves)], strict=True)]


# --------------------------------------------------------------------------------------------- drawing


def draw(random: Any, dtypes: list[str] = DTYPES, most_calls: int = 4) -> Program:
    """Draw a program with at most `most_calls` calls of ops."""
    base = random.choice([(2, 3), (2, 3), (3,), (), (2, 3), (2, 0)])
    inputs = tuple(Input(_shape(random, base), random.choice(dtypes)) for _ in range(random.randint(1, 3)))
    ops = tuple(_op(random) for _ in range(random.randint(1, 3)))
    calls: list[Call] = []
    values = len(inputs)
    # In low precision, several calls would add up too many rounding errors.
    few = any(dtype not in ("float32", "float64") for _, dtype in inputs)
    for _ in range(random.randint(1, 1 if few else most_calls)):
        index = random.randrange(len(ops))
        leaves = tuple(random.randrange(values) for _ in range(ops[index].leaves))
        calls.append(Call(index, leaves, *_passing(random, ops[index])))
        values += len(ops[index].outputs)
    structure = nested(random, [Place(i) for i in range(len(inputs))])
    return Program(inputs, structure, ops, tuple(calls), random.randrange(1000))


def in_other_forms(random: Any, program: Program) -> Program:
    """Return the same program, with other forms of rules and calls."""
    ops = tuple(dataclasses.replace(op, convention=_convention(random, op)) for op in program.ops)
    calls = tuple(Call(c.op, c.leaves, *_passing(random, ops[c.op])) for c in program.calls)
    return dataclasses.replace(program, ops=ops, calls=calls)


def with_true_rules(program: Program) -> Program:
    """Return the same program with true rules, whose gradients have the precision of the values."""

    def true(output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(map(true, output))
        if isinstance(output, Curve):
            return dataclasses.replace(output, factor=1.0)
        return dataclasses.replace(output, factor=1.0, inner=output.inner and 1.0)

    def true_op(op: Op) -> Op:
        styles = tuple(dataclasses.replace(style, dtype=None) for style in op.convention.styles)
        convention = dataclasses.replace(op.convention, styles=styles)
        return dataclasses.replace(op, outputs=tuple(map(true, op.outputs)), convention=convention)

    return dataclasses.replace(program, ops=tuple(map(true_op, program.ops)))


def _shape(random: Any, base: tuple[int, ...]) -> tuple[int, ...]:
    """Draw a shape that broadcasts to `base`."""
    shape = base[random.randint(0, len(base)) :]
    return tuple(random.choice([size, size, 1]) for size in shape)


def _op(random: Any) -> Op:
    count = random.randint(1, 3)
    leaves: list[Any] = [Place(i) for i in range(count)]
    for _ in range(random.choice([0, 0, 1, 2])):
        leaves.insert(random.randint(0, len(leaves)), random.choice(STATICS))
    if random.random() < 0.2:
        leaves.insert(random.randint(0, len(leaves)), random.choice([Integers((-1,)), Integers((3, -2))]))
    arguments = tuple(nested(random, part) for part in split(random, leaves, len(NAMES)))
    tail = random.choice(["keyword", "*rest", "**more"])
    positional = random.choice([len(arguments), random.randint(0, len(arguments))])
    op = Op(
        arguments=arguments,
        positional_only=random.choice([0, 0, random.randint(0, positional)]),
        positional=positional,
        tail=tail,
        defaults=_defaults(random, arguments, positional, tail),
        outputs=tuple(_output(random, count) for _ in range(random.choice([1, 1, 2, 3]))),
        output=None,
        leaves=count,
        convention=None,
    )
    op = dataclasses.replace(op, output=_output_structure(random, len(op.outputs)))
    return dataclasses.replace(op, convention=_convention(random, op))


def _defaults(random: Any, arguments: tuple[Any, ...], positional: int, tail: str) -> frozenset[str]:
    """Draw the parameters that have their argument as a default. No required parameter follows."""
    static = [not places(argument) and random.random() < 0.7 for argument in arguments]
    last = max([i for i in range(positional) if not static[i]], default=-1)
    by_position = [i for i in range(last + 1, positional) if positional == len(arguments) or tail != "*rest"]
    by_keyword = [i for i in range(positional, len(arguments)) if static[i] and tail == "keyword"]
    return frozenset(NAMES[i] for i in by_position + by_keyword)


def _output(random: Any, leaves: int) -> Any:
    if random.random() < 0.25:
        weights = [(random.choice(WEIGHTS), i) for i in range(leaves)]
        return Curve(random.choice(CURVES), tuple(weights), random.choice(FACTORS))
    return tuple(_term(random, leaves) for _ in range(random.randint(1, 2)))


def _term(random: Any, leaves: int) -> Term:
    parts = [(random.choice(FUNCTIONS), random.randrange(leaves)) for _ in range(random.randint(1, 2))]
    inner = random.choice([None, None, random.choice(FACTORS)])
    return Term(random.choice(COEFFICIENTS), tuple(parts), random.choice(FACTORS), inner)


def _output_structure(random: Any, count: int) -> Any:
    leaves: list[Any] = [Place(i) for i in range(count)]
    if random.random() < 0.3:
        others = [*STATIC_OUTPUTS, Integers((1, 2))]
        leaves.insert(random.randint(0, count), random.choice(others))
    return nested(random, leaves)


def _convention(random: Any, op: Op) -> Convention:
    """Draw a form of the rule."""
    styles = tuple(
        Style(
            lazy=random.random() < 0.2,
            none=random.random() < 0.5,
            dtype=random.choice([None, None, "float32"]),
            summed=random.random() < 0.5,
        )
        for _ in range(op.leaves)
    )
    return Convention(
        parameters=random.choice(_parameters(op)),
        answer=random.choice(_answers(op)),
        keeps=random.choice(["inputs", "intermediates"]),
        styles=styles,
        lazy=frozenset(n for n in op.names if random.random() < 0.15),
        static=random.choice([None, 0.0]),
    )


def _answers(op: Op) -> list[str]:
    """Return the forms of answers that the op's rule can use: the unambiguous ones."""
    differentiable = [argument for argument in op.arguments if has_gradient(argument)]
    lengths = [len(op.arguments), len(differentiable)]
    flat = len(places(op.arguments))
    answers = ["tuple", "list", "differentiable"]
    if flat not in lengths:
        answers.append("flat")
    if len(differentiable) == 1:
        (alone,) = differentiable
        if not isinstance(alone, (tuple, list)) or len(alone) not in (*lengths, flat):
            answers.append("bare")
    if op.positional == len(op.arguments) or op.tail != "*rest":
        answers.append("names")
    return answers


def _parameters(op: Op) -> list[str]:
    """Return the possible signatures of the rule: one upstream gradient, flat, or the op's arguments."""
    flat = len(places(op.output))
    own = len(op.arguments) if op.tail == "*rest" else op.positional
    named = ", ".join(f"p{i}" for i in range(own))
    choices = ["upstream", "g", "g, scale=1.0", "*us", "*args, upstream", "*args, upstream=None"]
    if flat > 1:
        choices.append(", ".join(f"u{i}" for i in range(flat)))
    if own:
        choices += [f"{named}, upstream", f"{named}, *, upstream", f"{named}, upstream=None"]
    return choices


def _passing(random: Any, op: Op) -> tuple[int, tuple[str, ...]]:
    """Draw how many arguments are passed by position, and the names of those that are passed by keyword."""
    if op.tail == "*rest" and op.positional < len(op.arguments):
        return len(op.arguments), ()
    required = [i for i in range(op.positional_only) if op.names[i] not in op.defaults]
    positional = random.randint(max(required, default=-1) + 1, op.positional)
    # The others have their defaults.
    names = list(op.names[max(positional, op.positional_only) :])
    names = [n for n in names if n not in op.defaults or random.random() < 0.5]
    return positional, tuple(random.sample(names, len(names)))

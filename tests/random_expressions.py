"""Random expressions, structures and parameters, from which `random_programs.py` builds programs."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

FACTORS = ["2.0", "-3.0", "0.5", "1.5"]  # the false factors of rules
NUMBERS = ["0.5", "-0.7", "1.3"]
# Structures of two tensors, and how to get these from it. None and strings have no gradient.
STRUCTURES = [
    ("({0}, {1})", ("{}[0]", "{}[1]")),
    ("[{0}, None, ({1},)]", ("{}[0]", "{}[2][0]")),
    ('{{"m": {0}, "k": {1}}}', ('{}["m"]', '{}["k"]')),
    ('{{"z": ({0}, "s"), "b": {{"y": {1}}}}}', ('{}["z"][0]', '{}["b"]["y"]')),
]
# Literals of static arguments, with the number that an op computes from it. Not all are numbers.
STATICS = {
    "2": "{}",
    '"minus"': '{{"minus": -1.0}}[{}]',
    "None": "(0.5 if {} is None else 9.0)",
    "True": "(1.5 * {})",
}
SHELF = [
    "shelf.log1pexp({})",
    "shelf.logcosh({})",
    "shelf.safe_sqrt(1.5 + ops.sin({}))",
    "shelf.safe_divide({}, 1.5 + ops.cos({}))",
    "ops.tanh({}) * shelf.safe_norm(ops.cos({}))",
    "shelf.scale_gradient({}, 3.0)",
    "shelf.reverse_gradient({})",
    "shelf.round_straight_through({})",
    "shelf.sign_straight_through({})",
    "shelf.clip_straight_through({}, -0.5, 0.5)",
    "shelf.spike({})",
]


@dataclass
class Parameter:
    """A parameter of an op.

    Its kind is `full` for a tensor of the shape of the program, `small` for one that broadcasts to this
    shape, `structure` for one of both, `integers` for a tensor of integers, and `static` for a literal.
    """

    name: str
    kind: str
    keyword_only: bool = False
    structure: str = ""
    paths: Sequence[str] = ()
    literal: str = ""
    has_default: bool = False
    positional_only: bool = False

    @property
    def is_differentiable(self) -> bool:
        return self.kind in ("full", "small", "structure")


@dataclass
class Op:
    """An op that a program can call by its name."""

    name: str
    parameters: list[Parameter]
    outputs: list[str]
    """How to get each output from the result."""
    weights: list[str]
    """The weights that its function reads, in the order of first use."""
    is_layer: bool = False


@dataclass
class Names:
    """The names that an expression may use."""

    full: list[str]
    small: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    """Expressions of Python numbers, or of tensors of integers."""
    ops: list[Op] = field(default_factory=list)
    low: list[str] = field(default_factory=list)
    """Tensors of low precision, which are only passed to ops."""


class Expressions:
    """Draws expressions. If `shelf` is set, they call ops of multigrad."""

    def __init__(self, random: Random, shelf: bool) -> None:
        self.random = random
        self.shelf = shelf

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def expression(self, depth: int, names: Names) -> str:
        """Return an elementwise expression of the shape of the program."""
        if depth == 0 or self.chance(0.15):
            return self.random.choice(names.full)

        def part() -> str:
            return self.expression(depth - 1, names)

        kinds = ["+", "*", "*", "number", "sin", "cos", "tanh", "flip", "op", *["shelf"] * 2 * self.shelf]
        kinds += [*["small"] * 3 * bool(names.small), *["numbers"] * 2 * bool(names.numbers)]
        kind = self.random.choice(kinds)
        if kind in "+*":
            return f"({part()} {kind} {part()})"
        if kind == "number":
            return f"{self.random.choice(NUMBERS)} * {part()}"
        if kind == "shelf":
            inner = part()
            return self.random.choice(SHELF).format(inner, inner)
        if kind in ("small", "numbers"):
            return f"({self.random.choice(getattr(names, kind))} * {part()})"
        if kind == "op" and names.ops:
            return self.call(self.random.choice(names.ops), part, names)
        if kind == "op":
            return f"ops.sin({part()})"
        return f"ops.{kind}({part()})"

    def call(self, op: Op, part: Callable[[], str], names: Names) -> str:
        """Return a call of an op. `part` draws a tensor of the shape of the program."""
        # A variable that is passed to the op is not one that its function reads.
        read = [*op.weights, *[f"self.{w}" for w in op.weights]]
        same = part() if self.chance(0.3) else None  # two arguments are one tensor

        def tensor(small: bool) -> str:
            if small and self.chance(0.8):
                drawn = self.random.choice(names.small) if names.small else f"ops.sum({part()})"
            elif names.low and self.chance(0.6):
                drawn = self.random.choice(names.low)
            else:
                drawn = same or part()
            return f"1.0 * {drawn}" if drawn in read else drawn

        arguments, keywords = [], []
        for p in op.parameters:
            if p.has_default and self.chance(0.5):
                continue
            if p.kind in ("static", "integers"):
                drawn = p.literal
            elif p.kind == "structure":
                drawn = p.structure.format(tensor(False), tensor(True))
            else:
                drawn = tensor(p.kind == "small")
            # After a keyword or a default, all arguments are keywords.
            by_name = p.keyword_only or keywords
            if not (by_name or op.is_layer or p.positional_only):
                by_name = self.chance(0.15)
            if by_name or len(arguments) < op.parameters.index(p):
                keywords.append(f"{p.name}={drawn}")
            else:
                arguments.append(drawn)
        self.random.shuffle(keywords)
        return f"{op.name}({', '.join([*arguments, *keywords])})" + self.random.choice(op.outputs)


def packed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"({', '.join(items)})"


def indented(lines: Sequence[str]) -> list[str]:
    return [textwrap.indent(line, "    ") for line in lines]

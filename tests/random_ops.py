"""Random ops as text: functions with false rules, in every form of a definition, a rule and its answer."""

from collections.abc import Sequence
from typing import Any

from random_expressions import FACTORS, NUMBERS, STATICS, STRUCTURES, Names, Op, Parameter, indented, packed

FORMS = ["function", "method", "layer", "layer's call"]
TAILS = ["", "", "", "/", "*rest", "**more"]
"""How a definition ends its positional parameters: positional-only ones, or ones that it collects."""
ARGUMENTS = "abcd"


class OpDrawing:
    """One op of a program (`random_programs.Drawing`) while it is drawn."""

    def __init__(self, program: Any, number: int) -> None:
        self.draws, self.random, self.chance = program.draws, program.random, program.chance
        # The name of a function that computes the outputs in NumPy.
        self.black_box = program.black_box if number == 0 or self.chance(0.3) else None
        self.cast, self.integers = program.low is not None, program.integers
        simple = self.chance(0.5)  # its arguments and outputs are tensors
        # On PyTorch, NumPy cannot read the value of a weight.
        constants = [] if self.black_box else program.constants
        self.form = form = self.random.choice(FORMS)
        full, small = [[w for w in own if self.chance(0.5)] for own in program.weights]
        # PyTorch runs a function again, recorded, for a second derivative of a rule that uses an object.
        of_self = "layer" in form and not self.black_box
        self.written = {w: f"self.{w}" if of_self and self.chance(0.7) else w for w in [*full, *small]}
        self.parameters = self._parameters(simple, form)
        self.tail = self._tail()
        self.name = f"op{number}"
        unpacked, self.names = self._unpacked(constants)
        nested = [op for op in program.ops if set(op.weights) <= set(self.written)]
        self.names.ops = nested if self.chance(0.5) and not self.black_box else []
        self.unpacked = unpacked
        self.inputs = [*self.names.full]
        body = list(unpacked)
        for i, w in enumerate(self.written):
            own = self.written[w]
            # The first lines read the weights, so their order is known.
            body.append(f"s{i} = {own} * {self.random.choice(NUMBERS)}")
            kind = self.names.full if w in full else self.names.small
            kind += [own] if self.black_box else [own, f"s{i}"]
        used_by = self.random.choice(["nothing", "function", "rule", "rule", "both"])
        closed = program.closed
        if not closed or self.black_box:
            used_by = "nothing"
        self.stores = used_by != "nothing" and self.chance(0.15)
        self.names.full += [closed] * 2 * (used_by in ("function", "both"))
        body += self._values(simple)
        if used_by == "function":
            self.names.full = [name for name in self.names.full if name != closed]
        self.names.full += [closed] * 3 * (used_by == "rule")
        paths = [path.format("") for path in self.paths]
        self.op = Op(self.name, self.parameters, paths, list(self.written), "layer" in form)
        self.lines = self._definition([*body, "", *self._rule(), f"return {self.output}, rule"])

    def _parameters(self, simple: bool, form: str) -> list[Parameter]:
        kinds = ["full"] * self.random.choice([0, 1, 1])
        if not simple:
            others = ["small", "structure", "static", *["integers"] * bool(self.integers)]
            kinds += [self.random.choice(others) for _ in range(self.random.choice([0, 1, 1, 2]))]
        if "full" not in kinds and "structure" not in kinds:
            kinds.insert(self.random.randint(0, len(kinds)), "full")
        if len(kinds) == 1 and self.chance(0.5):
            kinds.append("full")
        # A layer of Keras gets literals and None as keywords only.
        late = [(kind == "static" and ("layer" in form or self.chance(0.3)), kind) for kind in kinds]
        late.sort(key=lambda pair: pair[0])
        made = [
            Parameter(name, kind, is_late) for name, (is_late, kind) in zip(ARGUMENTS, late, strict=False)
        ]
        if "layer" not in form and not made[-1].keyword_only and len(made) > 1 and self.chance(0.2):
            made[-1].keyword_only = True
        for p in made:
            if p.kind == "static":
                p.literal = self.random.choice([*STATICS])
                later = made[made.index(p) + 1 :]
                p.has_default = (p.keyword_only or not later) and self.chance(0.5)
            elif p.kind == "integers":
                p.literal = self.integers or ""
            elif p.kind == "structure":
                shapes = [s for s in STRUCTURES if "layer" not in form or not {"None", '"s"'} & _words(s[0])]
                p.structure, p.paths = self.random.choice(shapes)
        return made

    def _tail(self) -> str:
        """Draw how the definition collects parameters. The arguments of `*rest` are passed by position."""
        tail = self.random.choice(TAILS)
        if "layer" in self.form:
            return ""
        if tail == "**more":
            named = [p for p in self.parameters if p.keyword_only]
            return tail if named and not any(p.has_default for p in named) else ""
        by_position = [p for p in self.parameters if not p.keyword_only]
        if tail == "*rest" and by_position[-1].has_default:
            return ""
        if tail == "/":
            by_position = by_position[: self.random.randint(1, len(by_position))]
        for p in by_position if tail else []:
            p.positional_only = True
        return tail

    def _unpacked(self, constants: Sequence[str]) -> tuple[list[str], Names]:
        """Return the lines that get the tensors from the arguments, and the names of these."""
        lines, names = [], Names(full=[*constants])
        self.leaves: dict[str, list[str]] = {}
        for p in self.parameters:
            own = [p.name]
            if p.kind == "structure":
                own = [f"{p.name}0", f"{p.name}1"]
                lines.append(f"{', '.join(own)} = {', '.join([path.format(p.name) for path in p.paths])}")
                names.full.append(own[0])
                names.small.append(own[1])
            elif p.kind == "static":
                names.numbers.append(STATICS[p.literal].format(p.name))
            elif p.kind == "integers":
                names.numbers.append(f'ops.cast({p.name}, "float32")')
            else:
                getattr(names, p.kind).append(p.name)
            if p.is_differentiable:
                self.leaves[p.name] = own
                lines += [f'{leaf} = ops.cast({leaf}, "float32")' for leaf in own if self.cast]
        return lines, names

    def _values(self, simple: bool) -> list[str]:
        """Return the lines that compute intermediates and outputs."""
        lines, random = [], self.random
        tensors = [p.name for p in self.parameters if p.kind in ("full", "structure")]
        own = [self.leaves[name][0] for name in tensors]
        for i in range(0 if self.black_box else random.choice([0, 1, 1, 2])):
            stopped = "ops.stop_gradient({})" if self.chance(0.1) else "{}"
            m = f"m{i}.stored" if self.stores else f"m{i}"
            lines += [f"m{i} = Holder()"] * self.stores
            lines.append(f"{m} = " + stopped.format(f"ops.sin({self.draws.expression(2, self.names)})"))
            self.names.full.append(m)
        self.outputs = [f"y{i}" for i in range(random.choice([1, 1, 1, 2]))]
        for y in self.outputs:
            if self.chance(0.1):  # the output is an input, which the rule cannot tell from it
                # If it is cast, it is a new tensor in the reference.
                lines.append(f"{y} = {random.choice(own)}" + " * 1.0" * self.cast)
                continue
            made = self.draws.expression(2, self.names)
            made = f"{self.black_box}({made})" if self.black_box else made
            lines.append(f"{y} = {random.choice(NUMBERS)} * {made}")
            self.names.full.append(y)
        self.output, self.paths = packed(self.outputs), ["{}"]
        if len(self.outputs) == 2:
            structure, self.paths = random.choice(STRUCTURES[:1] if simple else STRUCTURES)
            self.output = structure.format(*self.outputs)
        elif not simple and self.chance(0.2):
            self.output, self.paths = '{"z": (None, y0)}', ['{}["z"][1]']
        return lines

    def _rule(self) -> list[str]:
        us = [f"u{i}" for i in range(len(self.outputs))]
        flat = us[::-1] if '"k"' in self.output or '"b"' in self.output else us  # in the order of the keys
        kinds = ["upstream", "g", "*us", *["flat"] * (len(us) == 2 or self.output == "y0")]
        if not any(p.keyword_only for p in self.parameters) and not (
            self.black_box and self.form != "function"
        ):
            kinds.append("own")  # the arguments of the op, too
        kind, head = self.random.choice(kinds), []
        parameters = ", ".join(flat) if kind == "flat" else kind
        if kind == "own":
            names = [*["self"] * (self.form != "function"), *[p.name for p in self.parameters]]
            parameters = f"{', '.join(names)}, {self.random.choice(['', '*, '])}upstream"
            kind, head = "upstream", list(self.unpacked)
        if kind in ("upstream", "g"):
            head += [f"{u} = {path.format(kind)}" for u, path in zip(us, self.paths, strict=True)]
        elif kind == "*us":
            head.append(f"({', '.join(flat)},) = us")
        if self.written:
            parameters += ", variables"
        answer = self._answer(us)
        if self.written:
            of_variables = [self._gradient(us, lazy=0.1) for _ in self.written]
            answer = f"{answer}, [{', '.join(of_variables)}]"
        return [f"def rule({parameters}):", *indented([*head, f"return {answer}"])]

    def _answer(self, us: Sequence[str]) -> str:
        """Return the gradients of the arguments, in one of the forms of an answer."""
        entries = {p.name: self._entry(p, us) for p in self.parameters}
        own = [p.name for p in self.parameters if p.is_differentiable]
        forms = {"*rest": ["own", "all"], "**more": ["names"]}.get(self.tail, ["names", "own", "all"])
        # None itself is an error.
        if len(own) == 1 and self.leaves[own[0]] == own and entries[own[0]] != "None":
            forms.append("alone")
        form = self.random.choice(forms)
        if form == "names":
            drawn = self.random.sample(own, len(own))
            return "{" + ", ".join([f'"{name}": {entries[name]}' for name in drawn]) + "}"
        if form == "alone":
            return entries[own[0]]
        own = own if form == "own" else [*entries]
        every = [*["None"] * (form == "all" and self.form != "function"), *[entries[name] for name in own]]
        return f"({', '.join(every)},)" if self.chance(0.7) else f"[{', '.join(every)}]"

    def _entry(self, p: Parameter, us: Sequence[str]) -> str:
        if not p.is_differentiable:
            return "None"
        if p.kind != "structure":
            return self._gradient(us, lazy=0.15)
        if self.chance(0.1):
            return "None"
        structure = p.structure.replace('"s"', "None")
        entry = structure.format(self._gradient(us, lazy=0.15), self._gradient(us, lazy=0.15))
        return f"(lambda: {entry})" if self.chance(0.1) else entry

    def _gradient(self, us: Sequence[str], lazy: float) -> str:
        terms = []
        for u in us:
            if self.chance(0.1):
                continue
            upstream = f"ops.flip({u})" if self.chance(0.1) else u
            expression = self.draws.expression(2, self.names)
            terms.append(f"{self.random.choice(FACTORS)} * {upstream} * {expression}")
        if not terms:
            return "None"
        return f"(lambda: {' + '.join(terms)})" if self.chance(lazy) else " + ".join(terms)

    def _definition(self, body: list[str]) -> list[str]:
        name, form = self.name, self.form
        arguments, unpacked = self._signature()
        body = unpacked + body
        if form == "function":
            return ["@op_custom_gradient", f"def {name}({arguments}):", *indented(body)]
        kind = f"Class{name[2:]}"
        method = "call" if form == "layer's call" else "method"
        lines = ["@op_custom_gradient", f"def {method}(self, {arguments}):", *indented(body)]
        if form == "method":
            return [f"class {kind}:", *indented(lines), "", f"{name} = {kind}().method"]
        attributes = [f"self.{w} = {w}" for w in self.written]
        init = ["def __init__(self):", *indented(["super().__init__()", *attributes]), ""]
        if method == "method":
            passed = [f"{p.name}={p.name}" if p.keyword_only else p.name for p in self.parameters]
            lines += [
                "",
                f"def call(self, {arguments}):",
                *indented([f"return self.method({', '.join(passed)})"]),
            ]
        return [f"class {kind}(Layer):", *indented([*init, *lines]), "", f"{name} = {kind}()"]

    def _signature(self) -> tuple[str, list[str]]:
        """Return the parameters of the definition, and the line that gets the collected ones."""

        def written(of: Sequence[Parameter]) -> list[str]:
            return [f"{p.name}={p.literal}" if p.has_default else p.name for p in of]

        by_position = [p for p in self.parameters if not p.keyword_only]
        by_keyword = [p for p in self.parameters if p.keyword_only]
        if self.tail == "*rest":
            rest = ", ".join(written(by_position[1:]))
            parameters = [*written(by_position[:1]), "*rest", *written(by_keyword)]
            return ", ".join(parameters), [f"({rest},) = rest"] if rest else []
        if self.tail == "**more":
            unpacked = [f'{p.name} = more["{p.name}"]' for p in by_keyword]
            return ", ".join([*written(by_position), "**more"]), unpacked
        parameters = [*written(by_position), *["*"] * bool(by_keyword), *written(by_keyword)]
        if self.tail == "/":
            parameters.insert(sum(p.positional_only for p in by_position), "/")
        return ", ".join(parameters), []


def _words(text: str) -> set[str]:
    return {word for word in ("None", '"s"') if word in text}

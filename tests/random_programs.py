"""Random programs as text: ops with false rules, and a loss that calls them in transforms of the frameworks.

`program_names.py` defines the names that a program uses on the active backend, and `dual_numbers.py` defines
them in NumPy. The text is run with both. It is Python, so a failing program can be read, edited and kept.
"""

import itertools
import linecache
import sys
import textwrap
import types
from dataclasses import dataclass
from random import Random
from typing import Any

FACTORS = ["2.0", "-3.0", "0.5", "1.5"]  # the false factors of rules
NUMBERS = ["0.5", "-0.7", "1.3"]
COMPILERS = ["jit", "plain_jit"]
CHECKPOINTS = ["remat", "checkpoint"]
CONTROL_FLOW = ["vmap", "scan", "loop", "cond"]
FORMS = ["function", "method", "layer", "layer's call"]


@dataclass
class Op:
    """An op that a program can call by its name."""

    name: str
    arguments: int
    outputs: int
    weights: list[str]
    """The weights that its function reads, in the order of first use."""


class Drawing:
    """One program while it is drawn.

    Arguments:
        random: draws it.
        backend: the backend, whose limits it respects.
        small: whether it has one op and one call.
        compiled: whether it may be compiled.
    """

    def __init__(self, random: Random, backend: str, small: bool, compiled: bool) -> None:
        self.random = random
        self.backend = backend
        self.small = small
        self.compiled = compiled
        self.ops: list[Op] = []
        self.weights: list[str] = []
        self.constants: list[str] = []

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def program(self) -> str:
        order, inputs = self.random.choice([1, 2, 2]), self.random.choice([1, 2, 2])
        lines = self._arrays(inputs)
        for number in range(1 if self.small else self.random.randint(1, 3)):
            lines += ["", *self._op(number)]
        lines += ["", *self._loss(inputs, self._transforms(order))]
        argnums, variables = self._differentiated(inputs)
        compiled = self.compiled and self.chance(0.15)
        names = ", ".join(f"x{i}" for i in range(inputs))
        differentiated = f"{argnums}, [{', '.join(variables)}]"
        lines += ["", f"result = derivatives(loss, [{names}], {differentiated}, {order=}, {compiled=})"]
        return "\n".join(lines) + "\n"

    def _transforms(self, order: int) -> list[str]:
        """Return the transforms that the framework supports for this program: see docs/limits."""
        transforms = list(CONTROL_FLOW)
        if self.compiled:
            transforms += COMPILERS
        # TensorFlow: second derivatives through `tf.recompute_grad`, and variables in it.
        if self.backend != "tensorflow" or (order == 1 and not self.weights):
            transforms += CHECKPOINTS
        # TensorFlow: rules in control flow that get an eager tensor from a global name.
        if self.backend == "tensorflow" and self.constants:
            transforms = [t for t in transforms if t not in CONTROL_FLOW]
        return transforms

    def _differentiated(self, inputs: int) -> tuple[list[int], list[str]]:
        argnums = [i for i in range(inputs) if self.chance(0.7)]
        variables = [w for w in self.weights if self.chance(0.6)]
        return ([0], variables) if not argnums and not variables else (argnums, variables)

    def _arrays(self, inputs: int) -> list[str]:
        """Return the definitions of the inputs, weights and constants, some of which are one array."""
        lines: list[str] = []
        arrays: list[str] = []
        for i in range(inputs):
            shared = arrays and self.chance(0.4)
            lines.append(f"x{i} = {self._array(arrays if shared else [])}")
            arrays.append(f"x{i}")
        for i in range(self.random.choice([0, 1, 1, 2])):
            lines.append(f"w{i} = Variable({self._values()})")
            if self.chance(0.4):
                lines.append(f"w{i}.assign({self.random.choice(arrays)})")
            self.weights.append(f"w{i}")
            arrays.append(f"value_of(w{i})")
        if self.chance(0.3):
            shared = self.chance(0.5)
            lines.append(f"k = {self._array(arrays if shared else [])}")
            self.constants.append("k")
        return lines

    def _array(self, arrays: list[str]) -> str:
        return self.random.choice(arrays) if arrays else f"array({self._values()})"

    def _values(self) -> str:
        return ", ".join(f"{self.random.uniform(-1.2, 1.2):.2f}" for _ in range(3))

    # ------------------------------------------------------------------------------------------ expressions

    def _expression(self, depth: int, names: list[str], ops: list[Op]) -> str:
        """Return an elementwise expression of these names, which may call these ops."""
        if depth == 0 or self.chance(0.15):
            return self.random.choice(names)

        def part() -> str:
            return self._expression(depth - 1, names, ops)

        kind = self.random.choice(["+", "*", "*", "number", "sin", "cos", "tanh", "flip", "op"])
        if kind in "+*":
            return f"({part()} {kind} {part()})"
        if kind == "number":
            return f"{self.random.choice(NUMBERS)} * {part()}"
        if kind == "op":
            return self._call(self.random.choice(ops), part) if ops else f"ops.sin({part()})"
        return f"ops.{kind}({part()})"

    def _call(self, op: Op, part) -> str:
        # A variable that is passed to the op is not one that its function reads.
        read = [*op.weights, *[f"self.{w}" for w in op.weights]]
        arguments = [f"1.0 * {a}" if a in read else a for a in [part() for _ in range(op.arguments)]]
        if self.chance(0.3):
            arguments = [arguments[0]] * op.arguments
        one = f"[{self.random.randrange(op.outputs)}]" if op.outputs > 1 else ""
        return f"{op.name}({', '.join(arguments)}){one}"

    # -------------------------------------------------------------------------------------------------- ops

    def _op(self, number: int) -> list[str]:
        random = self.random
        form = random.choice(FORMS)
        arguments = ["a", "b"][: random.choice([1, 2, 2])]
        weights = [w for w in self.weights if self.chance(0.5)]
        written = {w: f"self.{w}" if "layer" in form and self.chance(0.7) else w for w in weights}
        nested = [op for op in self.ops if set(op.weights) <= set(weights)] if self.chance(0.5) else []
        body = [f"s{i} = {w} * {random.choice(NUMBERS)}" for i, w in enumerate(written.values())]
        # The first lines read the weights, so their order is known.
        values = [*arguments, *written.values(), *[f"s{i}" for i in range(len(weights))], *self.constants]
        intermediates = [f"m{i}" for i in range(random.choice([0, 1, 1, 2]))]
        for m in intermediates:
            stopped = "ops.stop_gradient({})" if self.chance(0.1) else "{}"
            body.append(f"{m} = " + stopped.format(f"ops.sin({self._expression(2, values, nested)})"))
            values.append(m)
        outputs = [f"y{i}" for i in range(random.choice([1, 1, 1, 2]))]
        for y in outputs:
            if self.chance(0.1):  # the output is an input, which the rule cannot tell from it
                body.append(f"{y} = {random.choice(arguments)}")
                continue
            body.append(f"{y} = {random.choice(NUMBERS)} * {self._expression(2, values, nested)}")
            values.append(y)
        op = Op(f"op{number}", len(arguments), len(outputs), weights)
        body += ["", *self._rule(op, arguments, values, outputs, nested)]
        body.append(f"return {_packed(outputs)}, rule")
        self.ops.append(op)
        return self._definition(op, form, arguments, weights, body)

    def _rule(
        self, op: Op, arguments: list[str], values: list[str], outputs: list[str], nested: list[Op]
    ) -> list[str]:
        whole = self.chance(0.5)
        us = [f"u{i}" for i in range(len(outputs))]
        parameters = ["upstream"] if whole else list(us)
        head = []
        if whole:
            head = ["u0 = upstream" if len(us) == 1 else f"{', '.join(us)} = upstream"]
        if op.weights:
            parameters.append("variables")

        def gradient() -> str:
            terms = [self._gradient(u, values, nested) for u in us if self.chance(0.9)]
            return " + ".join(terms) if terms else "None"

        own = [gradient() for _ in arguments]
        answer = "(None,)" if own == ["None"] else _packed(own)  # None itself is an error
        if op.weights:
            answer = f"{answer}, [{', '.join(gradient() for _ in op.weights)}]"
        return [f"def rule({', '.join(parameters)}):", *_indented([*head, f"return {answer}"])]

    def _gradient(self, u: str, values: list[str], nested: list[Op]) -> str:
        upstream = f"ops.flip({u})" if self.chance(0.1) else u
        return f"{self.random.choice(FACTORS)} * {upstream} * {self._expression(2, values, nested)}"

    def _definition(
        self, op: Op, form: str, arguments: list[str], weights: list[str], body: list[str]
    ) -> list[str]:
        if form == "function":
            head = ["@op_custom_gradient", f"def {op.name}({', '.join(arguments)}):"]
            return [*head, *_indented(body)]
        name = f"Class{op.name[2:]}"
        method = "call" if form == "layer's call" else "method"
        lines = ["@op_custom_gradient", f"def {method}(self, {', '.join(arguments)}):", *_indented(body)]
        if form == "method":
            return [f"class {name}:", *_indented(lines), "", f"{op.name} = {name}().method"]
        attributes = [f"self.{w} = {w}" for w in weights]
        init = ["def __init__(self):", *_indented(["super().__init__()", *attributes]), ""]
        if method == "method":
            both = ", ".join(arguments)
            lines += ["", f"def call(self, {both}):", *_indented([f"return self.method({both})"])]
        return [f"class {name}(Layer):", *_indented([*init, *lines]), "", f"{op.name} = {name}()"]

    # ------------------------------------------------------------------------------------------------- loss

    def _loss(self, inputs: int, transforms: list[str]) -> list[str]:
        values = [f"x{i}" for i in range(inputs)]
        body = []
        for i in range(1 if self.small else self.random.randint(1, 3)):
            body.append(f"v{i} = {self._statement(values, transforms)}")
            values.append(f"v{i}")
        last = [values[-1], *([self.random.choice(values)] if self.chance(0.5) else [])]
        last += [w for w in self.weights if self.chance(0.2)]
        total = " + ".join(f"{self.random.choice(NUMBERS)} * {v}" for v in last)
        body.append(f"return ops.sum({total})")
        return [f"def loss({', '.join(values[:inputs])}):", *_indented(body)]

    def _statement(self, values: list[str], transforms: list[str]) -> str:
        op = self.random.choice(self.ops)
        if not transforms or self.chance(0.6):
            return self._call(op, lambda: self._expression(1, values, self.ops))
        # A lambda is a new function in each run, because `jax.checkpoint` keeps the trace of a function.
        transform = self.random.choice(transforms)
        arguments = ["p", "q"][: self.random.choice([1, 2, 2])]
        called = self._call(op, lambda: self._expression(1, arguments, self.ops))
        passed = [self.random.choice(values) for _ in arguments]
        return f"{transform}(lambda {', '.join(arguments)}: ops.sin({called}))({', '.join(passed)})"


def _packed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"({', '.join(items)})"


def _indented(lines: list[str]) -> list[str]:
    return [textwrap.indent(line, "    ") for line in lines]


def draw(seed: int, backend: str, small: bool = False, compiled: bool = True) -> str:
    """Return a program that this backend supports."""
    return Drawing(Random(seed), backend, small, compiled).program()


NUMBERS_OF_MODULES = itertools.count()


def run(text: str, names: dict[str, Any]) -> Any:
    """Return the result of a program, run with these names.

    It is run as a module whose source can be read, which AutoGraph requires.
    """
    name = f"random_program_{next(NUMBERS_OF_MODULES)}"
    module = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    linecache.cache[module.__file__] = len(text), None, text.splitlines(keepends=True), module.__file__
    sys.modules[name] = module
    try:
        module.__dict__.update(names)
        exec(compile(text, module.__file__, "exec"), module.__dict__)
        return module.__dict__["result"]
    finally:
        del sys.modules[name], linecache.cache[module.__file__]

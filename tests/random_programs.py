"""Random programs as text: ops with false rules, and a loss that calls them in transforms of the frameworks.

`program_names.py` defines the names that a program uses on the active backend, and `rules_in_numpy.py`
defines them in NumPy. The text is run with both. It is Python, so a failing program can be read, edited and
kept.

`random_ops.py` draws the ops, and `random_expressions.py` what they compute. A program also has:

- arguments that are one array, or nested structures, or have another shape or dtype;
- weights, integers and literals;
- numbers at special points: 0, 1 and -1;
- a tensor of the loss, differentiated or not, that the function of an op, its rule or both close over, by its
  name or on an object, and tensors that a function stores on an object;
- arguments that are gradients;
- ops of multigrad, and ops that NumPy computes;
- one to three orders, each in reverse or in forward mode, or a gradient of a function in a `StatelessScope`,
  or one or two orders by ways of the framework (`transforms/ways.py`).
"""

import itertools
import linecache
import re
import sys
import types
from random import Random
from typing import Any

from random_expressions import NUMBERS, Expressions, Names, Op, indented
from random_ops import OpDrawing

COMPILERS = ["jit", "plain_jit"]
CHECKPOINTS = ["remat", "checkpoint"]
CONTROL_FLOW = ["vmap", "scan", "loop", "cond"]
SHAPES = {(3,): [(1,), ()], (2, 3): [(3,), (2, 1), (1, 3), ()]}
"""Shapes of programs, and shapes that broadcast to these."""


class Drawing:
    """One program while it is drawn, within the limits of a backend. A small one has one op and one call."""

    def __init__(self, random: Random, backend: str, small: bool, compiled: bool) -> None:
        self.random = random
        self.backend = backend
        self.small = small
        self.ops: list[Op] = []
        self.weights: tuple[list[str], list[str]] = [], []
        self.constants: list[str] = []
        self.shape = random.choice([(3,), (3,), (2, 3)])
        self.low = random.choice(["bfloat16", "float16"]) if self.chance(0.2) else None
        self.black_box = random.choice(["host_sin", "numpy_sin"]) if self.chance(0.15) else None
        if self.low and self.backend != "tensorflow":
            # The cast is an intermediate value, for which the function runs again, with a history.
            self.black_box = self.black_box and "host_sin"
        self.compiled = compiled and self.black_box != "numpy_sin"
        self.integers = "n" if self.chance(0.2) else None
        self.special = self.chance(0.2)
        self.closed = self.random.choice(["t", "t", "held.t"]) if self.chance(0.3) else None
        self.draws = Expressions(random, shelf=self.chance(0.3))
        self.values = Names([])
        """The inputs and weights, as the loss uses them."""

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def program(self) -> str:
        order = self.random.choice([1, 1, 2, 2, 2, 3])
        # Rounding errors grow with each order, and numbers overflow.
        order = min(order, {"bfloat16": 1, "float16": 2}.get(self.low, 3))
        self.small |= order == 3  # each order takes several times as long
        modes = [self.random.choice(["grad", "grad", "vjp", "jvp"]) for _ in range(order)]
        inputs = self.random.choice([1, 2, 2])
        lines, inner = self._arrays(inputs), self._closed()
        for number in range(1 if self.small else self.random.randint(1, 3)):
            (inner or lines).extend(["", *self._op(number)])
        argnums, variables = self._differentiated(inputs)
        if variables:
            modes = ["grad" for _ in modes]
        # A constant that is the value of a weight changes with it on PyTorch.
        if len(modes) == 1 and any(self.weights) and not self.constants and self.chance(0.7):
            modes, variables = ["stateless"], [w for own in self.weights for w in own]
        by_ways = order < 3 and not (self.closed or self.low or self.black_box) and self.chance(0.3)
        if by_ways:
            modes, variables, argnums = self._ways(order), [], argnums or [0]
            self.small = True
        lines += ["", *self._loss(inputs, inner, [] if by_ways else self._transforms(modes))]
        compiled = self.compiled and not by_ways and self.chance(0.15)
        names = ", ".join(f"x{i}" for i in range(inputs))
        differentiated = f"{argnums}, [{', '.join(variables)}]"
        lines += ["", f"result = derivatives(loss, [{names}], {differentiated}, {modes=}, {compiled=})"]
        return "\n".join(lines) + "\n"

    def _ways(self, order: int) -> list[str]:
        """Draw the inner and the outer way from those that the framework supports."""
        from ways import EVERY_PAIR, EVERY_WAY

        if order == 1:
            return [self.random.choice([*EVERY_WAY])]
        outer, inner = self.random.choice(EVERY_PAIR)
        return [inner, outer]

    def _transforms(self, modes: list[str]) -> list[str]:
        """Return the transforms that the framework supports for this program: see docs/limits."""
        if len(modes) == 3 or self.chance(0.3):  # transforms take long
            return []
        transforms = list(COMPILERS) if self.compiled else []
        # A black box in control flow calls Python for each element.
        # TensorFlow: rules in control flow that get an eager tensor from a global name.
        if not self.black_box and not (self.backend == "tensorflow" and self.constants):
            transforms += [*CONTROL_FLOW, *["slope"] * 2]
        # TensorFlow: second derivatives and forward mode of `tf.recompute_grad`, and variables in it.
        one_gradient = len(modes) == 1 and modes != ["jvp"] and not any(self.weights)
        # A checkpoint runs its function again in the backward pass, outside of the scope.
        in_scope = modes == ["stateless"]
        if not (self.black_box or in_scope) and (self.backend != "tensorflow" or one_gradient):
            transforms += CHECKPOINTS
        return transforms

    def _closed(self) -> list[str]:
        """Return the definition of the tensor that ops close over. They are then defined in the loss, too."""
        if not self.closed:
            return []
        drawn = self.draws.expression(1, Names([*self.values.full], self.values.small))
        on_object = ["held = Holder()", "held.t = t"] if self.closed == "held.t" else []
        return [f"t = ops.stop_gradient({drawn})" if self.chance(0.2) else f"t = {drawn}", *on_object]

    def _differentiated(self, inputs: int) -> tuple[list[int], list[str]]:
        argnums = [i for i in range(inputs) if self.chance(0.7)]
        variables = [w for own in self.weights for w in own if self.chance(0.6)]
        return ([0], variables) if not argnums and not variables else (argnums, variables)

    # ----------------------------------------------------------------------------------------------- arrays

    def _arrays(self, inputs: int) -> list[str]:
        """Return the definitions of the inputs, weights and constants, some of which are one array."""
        lines: list[str] = []
        arrays: list[str] = []
        for i in range(inputs):
            name = f"x{i}"
            kind = self.random.choice(["full"] * 6 + ["small", "structure"]) if i or inputs == 2 else "full"
            if i == inputs - 1 and not self.values.full:
                kind = "full"
            if kind == "small":
                lines.append(f"{name} = {self._array(self._small())}")
                self.values.small.append(name)
            elif kind == "structure":
                lines.append(f'{name} = {{"m": {self._array()}, "k": [{self._array(self._small())}]}}')
                self.values.full.append(f'{name}["m"]')
                self.values.small.append(f'{name}["k"][0]')
            elif self.low and not self.values.low:
                lines.append(f"{name} = {self._array(dtype=self.low)}")
                self.values.full.append(f'ops.cast({name}, "float32")')
                self.values.low.append(name)
            else:
                same = self.random.choice(arrays) if arrays and self.chance(0.6) else None
                lines.append(f"{name} = {same or self._array()}")
                self.values.full.append(name)
                arrays.append(name)
        lines += self._weights(arrays)
        if self.chance(0.3):
            same = self.random.choice(arrays) if arrays and self.chance(0.5) else None
            lines.append(f"k = {same or self._array()}")
            on_object = self.chance(0.3)
            lines += ["kept = Holder()", "kept.k = k"] * on_object
            self.constants.append("kept.k" if on_object else "k")
        if self.integers:
            lines.append(f"n = integers({', '.join(str(self.random.randint(-2, 3)) for _ in range(3))})")
        return lines

    def _weights(self, arrays: list[str]) -> list[str]:
        """Return the definitions of the weights, and add their values to the arrays."""
        lines = []
        for i in range(self.random.choice([0, 1, 1, 2])):
            small = self.chance(0.25)
            lines.append(f"w{i} = Variable({self._numbers(self._small() if small else self.shape)})")
            if arrays and not small and self.chance(0.4):
                lines.append(f"w{i}.assign({self.random.choice(arrays)})")
            self.weights[small].append(f"w{i}")
            if not small:
                arrays.append(f"value_of(w{i})")
        return lines

    def _small(self) -> tuple[int, ...]:
        return self.random.choice(SHAPES[self.shape])

    def _array(self, shape: tuple[int, ...] | None = None, dtype: str | None = None) -> str:
        more = f', dtype="{dtype}"' if dtype else ""
        return f"array({self._numbers(self.shape if shape is None else shape)}{more})"

    def _numbers(self, shape: tuple[int, ...]) -> str:
        """Return numbers that every dtype represents exactly."""

        def numbers(shape: tuple[int, ...]) -> Any:
            if not shape:
                if self.special and self.chance(0.5):
                    return self.random.choice([0.0, 1.0, -1.0])
                return self.random.randint(-76, 76) / 64
            return [numbers(shape[1:]) for _ in range(shape[0])]

        drawn = numbers(shape)
        return ", ".join(map(str, drawn)) if len(shape) > 0 and len(drawn) > 1 else str(drawn)

    # ------------------------------------------------------------------------------------------ ops and loss

    def _op(self, number: int) -> list[str]:
        drawing = OpDrawing(self, number)
        self.ops.append(drawing.op)
        return drawing.lines

    def _loss(self, inputs: int, inner: list[str], transforms: list[str]) -> list[str]:
        names = Names([*self.values.full], self.values.small, [], self.ops, self.values.low)
        if inner:
            names.full.append("t")
        body = [*inner, *[""] * bool(inner)]
        for i in range(1 if self.small else self.random.randint(1, 3)):
            body.append(f"v{i} = {self._statement(names, transforms)}")
            names.full.append(f"v{i}")
        last = [names.full[-1], *([self.random.choice(names.full)] if self.chance(0.5) else [])]
        last += [w for own in self.weights for w in own if self.chance(0.2)]
        total = " + ".join(f"{self.random.choice(NUMBERS)} * {v}" for v in last)
        body.append(f"return ops.sum({total})")
        return [f"def loss({', '.join([f'x{i}' for i in range(inputs)])}):", *indented(body)]

    def _statement(self, names: Names, transforms: list[str]) -> str:
        op = self.random.choice(self.ops)
        if self.draws.shelf and self.chance(0.1):
            return f"fixed({self.draws.expression(1, names)})"
        if not transforms or self.chance(0.6):
            return self.draws.call(op, lambda: self.draws.expression(1, names), names)
        # A lambda is a new function in each run, because `jax.checkpoint` keeps the trace of a function.
        transform = self.random.choice(transforms)
        arguments = ["p", "q"][: self.random.choice([1, 2, 2])]
        inner = Names(arguments, ops=self.ops)
        called = self.draws.call(op, lambda: self.draws.expression(1, inner), inner)
        passed = [self.random.choice(names.full) for _ in arguments]
        return f"{transform}(lambda {', '.join(arguments)}: ops.sin({called}))({', '.join(passed)})"


def draw(seed: int, backend: str, small: bool = False, compiled: bool = True) -> str:
    """Return a program that this backend supports."""
    return Drawing(Random(seed), backend, small, compiled).program()


def forgetful(text: str) -> str:
    """Return the program without the `return` of its rules. A call of a rule must raise an error."""
    return re.sub(r"(def rule\(.*\):\n(?: +[^r ].*\n)*? +)return ", r"\1", text)


def runnable(text: str, backend: str) -> str:
    """Return a program with the lines that define its names, as a script."""
    return f"""# cd tests; PYTHONPATH=transforms KERAS_BACKEND={backend} python program.py
from program_names import NAMES  # or from rules_in_numpy, for the reference

globals().update(NAMES)

{text}
print(result)
"""


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

"""The cost of one call of an op, as counts that are equal on every machine, and their bounds.

The bounds are earlier counts. After a change that needs fewer calls, or justifies more, copy the output of
this program for each backend, with the versions of constraints.txt and Python 3.11. Later versions of Python
make as many calls or a few less:

```
KERAS_BACKEND=jax PYTHONPATH=.:tests python tests/counts.py
```
"""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from by_hand import PAIRS, total
from support import BACKEND, equations

import multigrad

PACKAGE = os.path.dirname(multigrad.__file__) + os.sep


class Counts(NamedTuple):
    forward: int
    """The number of calls of Python functions of the package in an eager call that is differentiated."""
    backward: int
    """The same for the backward pass."""
    written: int
    """The size of the framework's record: on JAX the equations and on TensorFlow the operations of a traced
    value and gradient, on PyTorch the tensors that one call saves."""


BOUNDS = {
    "jax": {
        "addition": Counts(forward=61, backward=18, written=10),
        "log1pexp": Counts(forward=62, backward=18, written=16),
        "matmul": Counts(forward=65, backward=18, written=15),
        "two outputs": Counts(forward=77, backward=18, written=21),
        "structure": Counts(forward=125, backward=78, written=21),
        "narrow": Counts(forward=62, backward=18, written=16),
        "weight": Counts(forward=100, backward=29, written=16),
        "method": Counts(forward=80, backward=18, written=16),
        "unused": Counts(forward=63, backward=18, written=13),
    },
    "tensorflow": {
        "addition": Counts(forward=42, backward=13, written=22),
        "log1pexp": Counts(forward=43, backward=13, written=31),
        "matmul": Counts(forward=46, backward=13, written=32),
        "two outputs": Counts(forward=62, backward=13, written=37),
        "structure": Counts(forward=120, backward=73, written=45),
        "narrow": Counts(forward=43, backward=13, written=27),
        "weight": Counts(forward=75, backward=27, written=32),
        "method": Counts(forward=69, backward=13, written=31),
        "unused": Counts(forward=44, backward=13, written=25),
    },
    "torch": {
        "addition": Counts(forward=23, backward=11, written=0),
        "log1pexp": Counts(forward=25, backward=11, written=2),
        "matmul": Counts(forward=25, backward=11, written=2),
        "two outputs": Counts(forward=39, backward=12, written=2),
        "structure": Counts(forward=80, backward=72, written=2),
        "narrow": Counts(forward=25, backward=11, written=2),
        "weight": Counts(forward=47, backward=22, written=2),
        "method": Counts(forward=41, backward=11, written=2),
        "unused": Counts(forward=27, backward=11, written=3),
    },
}


def calls(function: Callable[[], Any]) -> tuple[int, Any]:
    """Return the number of calls of functions of the package in a function, and the result of the function.

    List comprehensions are calls only in Python 3.11, and are not counted.
    """
    found = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.endswith("comp>"):
            found += 1

    before = sys.getprofile()
    gc.disable()  # it may call finalizers of other objects
    sys.setprofile(profile)
    try:
        returned = function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found, returned


def calls_of(op: Callable[..., Any], arguments: Sequence[Any]) -> tuple[int, int]:
    """Return the numbers of calls in the forward and the backward pass of an op."""
    forward, pull = calls(lambda: _vjp(op, arguments))
    backward, _ = calls(pull)
    return forward, backward


def _vjp(op: Callable[..., Any], arguments: Sequence[Any]) -> Callable[[], Any]:
    """Return the backward pass of an op from ones, by the framework only."""
    if BACKEND == "jax":
        import jax

        output, pull = jax.vjp(op, *arguments)
        ones = jax.tree.map(jax.numpy.ones_like, output)
        return lambda: pull(ones)
    if BACKEND == "torch":
        import torch

        leaves = [x.detach().clone().requires_grad_() for x in arguments]
        output = op(*leaves)
        outputs = output if type(output) is tuple else (output,)
        ones = [torch.ones_like(o) for o in outputs]
        return lambda: torch.autograd.grad(outputs, leaves, ones)
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(arguments)
        output = op(*arguments)
    return lambda: tape.gradient(output, arguments)


def written(op: Callable[..., Any], arguments: Sequence[Any]) -> int:
    """Return the number of operations that the framework records for an op, see `Counts`."""
    if BACKEND == "jax":
        import jax

        def step(*tensors: Any) -> Any:
            return jax.value_and_grad(total(op), tuple(range(len(tensors))))(*tensors)

        return len(list(equations(jax.make_jaxpr(step)(*arguments).jaxpr)))
    if BACKEND == "torch":
        return len(saved(op, arguments))
    import tensorflow as tf

    def step(*tensors: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = total(op)(*tensors)
        return value, tape.gradient(value, tensors)

    return len(tf.function(step, autograph=False).get_concrete_function(*arguments).graph.get_operations())


def saved(op: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    """Return the tensors that PyTorch saves in a call for the backward pass."""
    import torch

    kept: list[Any] = []
    leaves = [x.detach().clone().requires_grad_() for x in arguments]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        op(*leaves)
    return kept


def counted(op: Callable[..., Any], arguments: Sequence[Any]) -> Counts:
    """Return the counts of a call that is not the first."""
    calls_of(op, arguments)
    return Counts(*calls_of(op, arguments), written(op, arguments))


if __name__ == "__main__":
    print(f'    "{BACKEND}": {{')
    for name, pair in PAIRS.items():
        print(f'        "{name}": {counted(pair.op, pair.arguments())},')
    print("    },")

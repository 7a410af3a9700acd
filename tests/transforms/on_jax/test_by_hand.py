"""An op equals a hand-written `jax.custom_vjp`: the compiled program, and its memory."""

import re

import jax
import pytest
from by_hand import PAIRS, total

pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
# JAX does not remove an argument that a rule does not use, see the test of unused tensors.
_used = {name: pair for name, pair in PAIRS.items() if name != "unused"}
used = pytest.mark.parametrize("pair", _used.values(), ids=_used)


def step(op):
    """Return a function of the value and the gradients, which have no rule in the hand-written function."""

    def gradients(*tensors):
        return jax.value_and_grad(total(op), tuple(range(len(tensors))))(*tensors)

    return gradients


def lowered(function, pair):
    """Return the program before XLA optimizes it. Its text contains no source locations."""
    return jax.jit(function).lower(*pair.arguments())


def optimised(function, pair):
    """Return the text of the optimized program, without source locations."""
    text = lowered(function, pair).compile().as_text()
    text = re.sub(r", metadata=\{[^}]*\}|, stack_frame_id=\d+", "", text)
    return re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", text)


@used
def test_the_lowered_program(pair):
    """Compare StableHLO, operation by operation."""
    ours, by_hand = (lowered(step(op), pair).as_text() for op in (pair.op, pair.by_hand))
    assert ours == by_hand


def test_unused_tensors():
    """A tensor that the rule closes over and does not use is computed in the lowered program.

    It is an argument of the op that ties the outputs to the rule for another derivative, and JAX keeps all
    arguments of a `custom_vjp`. XLA removes it, as everything that is unused.
    """
    pair = PAIRS["unused"]
    ours, by_hand = (lowered(step(op), pair).as_text() for op in (pair.op, pair.by_hand))
    assert (ours.count("stablehlo.sine"), by_hand.count("stablehlo.sine")) == (2, 1)
    assert len(ours.splitlines()) == len(by_hand.splitlines()) + 1
    assert optimised(step(pair.op), pair).count(" sine(") == 1


@pairs
def test_residuals(pair):
    """The residuals are the leaves of the function that `jax.vjp` returns, in eager code and traced."""

    def shapes(op, vjp):
        return sorted(leaf.shape for leaf in jax.tree.leaves(vjp(op)))

    def eager(op):
        return jax.vjp(op, *pair.arguments())[1]

    def traced(op):
        return jax.eval_shape(lambda *tensors: jax.vjp(op, *tensors)[1], *pair.arguments())

    for vjp in (eager, traced):
        assert shapes(pair.op, vjp) == shapes(pair.by_hand, vjp) == sorted(pair.saved)

"""An op equals a hand-written `torch.autograd.Function`: the graphs, and the saved tensors."""

import pytest
import torch
from by_hand import PAIRS, total
from counts import saved
from graphs import graphs, handed, operations

from multigrad import jit

pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
# An op that reads a weight does not compile, see `test_torch_compile.py`.
_compiled = {name: pair for name, pair in PAIRS.items() if name != "weight"}
compiled_pairs = pytest.mark.parametrize("pair", _compiled.values(), ids=_compiled)

# Warnings of PyTorch 2.13 about itself, when it loads its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


def both(pair, prepared):
    """Return the graphs of the op and of the hand-written function, forward and backward."""
    ours, by_hand = (graphs(total(op), pair.arguments(), prepared=prepared) for op in (pair.op, pair.by_hand))
    return zip(ours, by_hand, strict=True)


@compiled_pairs
def test_the_graphs_that_are_compiled(pair):
    """Compare what Inductor compiles: all operations, and all tensors between the passes."""
    for ours, by_hand in both(pair, True):
        assert operations(ours) == operations(by_hand)
        assert handed(ours) == handed(by_hand)


def test_the_graphs_of_multigrad_jit():
    """The function is the same. Its output may be a copy, which the caller may change."""
    pair = PAIRS["log1pexp"]
    ours, by_hand = [
        [str(node.target) for graph in found for node in graph.nodes if node.op == "call_function"]
        for found in (
            graphs(total(pair.op), pair.arguments(), prepared=True, compiler=jit),
            graphs(total(pair.by_hand), pair.arguments(), prepared=True),
        )
    ]
    assert [name for name in ours if name != "aten.clone.default"] == by_hand


def total_bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pairs
def test_saved_tensors(pair):
    """The op saves the same tensors and, if a residual was computed, the inputs for a second derivative."""
    ours, by_hand = (saved(op, pair.arguments()) for op in (pair.op, pair.by_hand))
    assert sorted(t.shape for t in by_hand) == sorted(pair.saved)
    assert sorted(t.shape for t in ours) == sorted(pair.saved + pair.again)
    inputs = total_bytes(pair.arguments()) if pair.again else 0
    assert total_bytes(ours) == total_bytes(by_hand) + inputs


@pairs
def test_saved_inputs_take_no_additional_memory(pair):
    """The inputs belong to the caller, and live as long as the caller keeps them."""
    leaves = [x.clone().requires_grad_() for x in pair.arguments()]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        pair.op(*leaves)
    own = {leaf.data_ptr() for leaf in leaves}
    assert len([t for t in kept if t.data_ptr() in own]) >= len(pair.again)
    new = total_bytes([t for t in kept if t.data_ptr() not in own])
    assert new <= sum(4 * torch.Size(shape).numel() for shape in pair.saved)

"""An op is what one writes by hand with `torch.autograd.Function`: the graphs, and what is saved."""

import collections

import pytest
import torch
from by_hand import DOUBTFUL, PAIRS, total
from counts import saved
from graphs import graphs, handed, operations

pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
# An op that reads a weight does not compile; `test_torch_compile.py` says more.
_compiled = {name: pair for name, pair in PAIRS.items() if name != "weight"}
compiled_pairs = pytest.mark.parametrize("pair", _compiled.values(), ids=_compiled)

# Of PyTorch 2.13, which still uses them itself when it loads its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def both(pair, prepared):
    """The graphs of the op beside those written by hand, forward and backward."""
    ours, by_hand = (graphs(total(op), pair.arguments(), prepared=prepared) for op in (pair.op, pair.by_hand))
    return zip(ours, by_hand, strict=True)


@compiled_pairs
def test_the_graphs_that_are_compiled(pair):
    """In what Inductor compiles: operation by operation, and tensor by tensor between the passes."""
    for ours, by_hand in both(pair, True):
        assert operations(ours) == operations(by_hand)
        assert handed(ours) == handed(by_hand)


@compiled_pairs
def test_the_graphs_that_are_captured(pair):
    """Before a compiler removes what does nothing, each output has a view of itself.

    Where it comes to the rule, the function has run, and PyTorch returns an argument as a view.
    """

    def kinds(graph):
        return collections.Counter(str(node.target) for node in graph.nodes if node.op == "call_function")

    (forward, forward_by_hand), (backward, backward_by_hand) = both(pair, False)
    outputs = pair.op(*pair.arguments())
    views = len(outputs) if type(outputs) is tuple else 1
    assert kinds(forward) == kinds(forward_by_hand) + collections.Counter({"aten.view.default": views})
    assert kinds(backward) == kinds(backward_by_hand)


def total_bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pairs
def test_what_is_saved(pair):
    """What is saved by hand and, where a residual was computed, the inputs, for a second derivative."""
    ours, by_hand = (saved(op, pair.arguments()) for op in (pair.op, pair.by_hand))
    assert sorted(t.shape for t in by_hand) == sorted(pair.saved)
    assert sorted(t.shape for t in ours) == sorted(pair.saved + pair.again)
    inputs = total_bytes(pair.arguments()) if pair.again else 0
    assert total_bytes(ours) == total_bytes(by_hand) + inputs


@pairs
def test_inputs_that_are_saved_take_no_memory_of_their_own(pair):
    """They are the caller's tensors, alive as long as the caller has them."""
    leaves = [x.clone().requires_grad_() for x in pair.arguments()]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        pair.op(*leaves)
    own = {leaf.data_ptr() for leaf in leaves}
    assert len([t for t in kept if t.data_ptr() in own]) >= len(pair.again)
    new = total_bytes([t for t in kept if t.data_ptr() not in own])
    assert new <= sum(4 * torch.Size(shape).numel() for shape in pair.saved)


# ---------------------------------------------------------------------- what is told apart


@pytest.mark.parametrize(
    "test",
    [
        test_the_graphs_that_are_compiled,
        test_the_graphs_that_are_captured,
        test_what_is_saved,
        test_inputs_that_are_saved_take_no_memory_of_their_own,
    ],
)
def test_another_operation_and_another_residual_are_found(test):
    with pytest.raises(AssertionError):
        test(DOUBTFUL)

"""What the benchmarks compare are different ways to the same numbers."""

import pytest
from keras import tree
from support import close

from benchmarks import cases
from benchmarks.measure import _timing, in_turns
from benchmarks.native import active


@pytest.mark.parametrize("case", cases.every(), ids=lambda case: case.name)
def test_every_way_has_the_same_gradients(case):
    runs = {way: active.runner(f, case.args) for way, f in case.ways.items()}
    wanted = tree.flatten(runs.pop("native")())
    assert len(wanted) == len(tree.flatten(list(case.args)))
    assert "multigrad" in runs
    for run in runs.values():
        for got, own in zip(tree.flatten(run()), wanted, strict=True):
            close(got, own, 1e-4)


def test_ways_take_turns():
    calls = []
    timings = in_turns({way: lambda way=way: calls.append(way) for way in "abc"}, rounds=3, seconds=0.0)
    assert "".join(calls[-9:]) == "abcbcacab"
    assert timings["a"].ratio == timings["a"].processor == 1.0
    assert all(t.low <= t.median <= t.high for t in timings.values())


def test_a_ratio_is_of_one_run():
    """However often a way is repeated in its turn: here once, where the first is repeated ten times."""
    timing = _timing([(20.0, 0.004)] * 3, [(10.0, 0.02)] * 3, repeats=10.0)
    assert timing.ratio == timing.processor == 2.0


@pytest.mark.parametrize("order", [1, 2])
def test_derivatives_that_are_timed(order):
    case = cases.log1pexp()
    got = active.derivative(case.ways["multigrad"], order)(*case.args)
    close(got, active.derivative(case.ways["plain"], order)(*case.args), 1e-4)

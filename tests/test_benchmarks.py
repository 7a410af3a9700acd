"""The implementations in the benchmarks have equal gradients, and the timing is correct."""

import pytest
from keras import tree
from support import close

from benchmarks import calculus, cases, large_vocabulary, measure
from benchmarks.measure import time_in_turns
from benchmarks.native import active

CASES = cases.all_cases()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_implementation_has_the_same_gradients(case):
    runs = {name: active.runner(f, case.args) for name, f in case.implementations.items()}
    wanted = tree.flatten(runs.pop("native")())
    assert len(wanted) == len(tree.flatten(list(case.args)))
    assert "multigrad" in runs
    for run in runs.values():
        for got, own in zip(tree.flatten(run()), wanted, strict=True):
            close(got, own, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("with_op", [False, True])
def test_the_derivatives_of_the_framework_are_equal(with_op):
    for case in calculus.cases(with_op, inputs=4).values():
        pairs = zip(tree.flatten(case.multigrad(case.x)), tree.flatten(case.native(case.x)), strict=True)
        for got, own in pairs:
            close(got, own, 1e-4)


class Clock:
    """Clocks that advance only by the time that an implementation claims to take."""

    def __init__(self):
        self.wall, self.processor, self.pauses = 0.0, 0.0, []
        self.sleep = self.pauses.append
        self.perf_counter, self.process_time = lambda: self.wall, lambda: self.processor

    def way(self, wall, processor):
        def run():
            self.wall += wall
            self.processor += processor

        return run


def test_the_measurement_is_the_time_of_one_run(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    ways = {"short": clock.way(0.001, 0.002), "long": clock.way(0.002, 0.012)}
    found = time_in_turns(ways, rounds=2, seconds=0.01)
    assert found["short"].median == pytest.approx(1000.0)
    assert (found["long"].ratio, found["long"].processor) == pytest.approx((2.0, 6.0))
    assert clock.pauses == pytest.approx([0.01] * 4)  # ten of the first, and five of the second


def test_the_losses_of_a_large_vocabulary_are_equal():
    mode = large_vocabulary.MODES[:2][-1]  # compiled, and eager on PyTorch
    result = large_vocabulary.compare(mode, [8, 4, 16], "float32", 1, second=False, with_counts=True)
    assert set(result["variants"]) == {*large_vocabulary.VARIANTS}
    assert all(found["error"] < 1e-4 for found in result["variants"].values())

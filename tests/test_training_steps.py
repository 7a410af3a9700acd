"""Compiled training steps give the weights of eager code, also with gradients or an equation in the loss."""

import pytest
from support import BACKEND, close

from benchmarks.training_steps import PROGRAMS, training_step
from multigrad import jit


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiled_step_trains_as_eager_code(name):
    options = {}
    if BACKEND == "torch":  # the equation is solved between two programs
        options = {"backend": "aot_eager", "fullgraph": name != "implicit layer"}
    eager_step, eager_weights = training_step(PROGRAMS[name], width=4)
    step, weights = training_step(PROGRAMS[name], width=4)
    step, before = jit(step, **options), [w.numpy().copy() for w in weights]
    for _ in range(3):
        close(step(), eager_step(), 1e-4)
    for weight, eager_weight, start in zip(weights, eager_weights, before, strict=True):
        close(weight, eager_weight, 1e-3)
        is_last_bias = weight is weights[-1] and name in ("PINN", "gradient penalty")
        assert is_last_bias or abs(weight.numpy() - start).max() > 1e-3

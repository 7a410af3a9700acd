"""Errors in host code and long training: each in a process of its own, which must end in time."""

import os
import subprocess
import sys

import pytest
from support import BACKEND

HOST_ERRORS = """
from keras import ops
from multigrad import jit, op_custom_gradient, value_and_grad
from multigrad.ops import host_call

def broken(x):
    raise ValueError("the simulator failed")

forward = op_custom_gradient(lambda x: (host_call(broken, x, output=x), lambda u: 2.0 * u))
backward = op_custom_gradient(lambda x: (1.0 * x, lambda u: host_call(broken, u, output=u)))

def scanned(op):
    return lambda x: ops.scan(lambda c, _: (op(c), None), x, length=3)[0]

for op in (forward, backward):
    for f in (op, scanned(op)):
        for wrap in (lambda g: g, jit):
            try:
                # The value too: a program does not compute a value that nobody uses.
                results = wrap(value_and_grad(lambda x: ops.sum(f(x))))(ops.ones(3))
                [ops.convert_to_numpy(result) for result in results]
            except Exception as error:
                text = " ".join([str(error), *getattr(error, "__notes__", [])])
                assert "host_call of 'broken'" in text and "the simulator failed" in text, text
            else:
                raise AssertionError("no error")
print("done")
"""

MEMORY = """
import sys
import keras, numpy as np, psutil
from keras import layers, ops
from multigrad import jit, op_custom_gradient, value_and_grad

class Scale(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    @op_custom_gradient
    def call(self, x):
        y = ops.tanh(x * self.scale)

        def rule(upstream, variables):
            slope = upstream * (1.0 - y * y)
            return slope * self.scale, [ops.sum(slope * x, axis=0)]

        return y, rule

layer = Scale()
x = ops.convert_to_tensor(np.full((4, 3), 0.1, "float32"))
layer(x)

def step(x):
    return value_and_grad(lambda x: ops.mean(layer(x)), variables=layer.trainable_variables)(x)

step = {"eager": lambda f: f, "compiled": jit}[sys.argv[1]](step)

def memory_after(steps):
    for _ in range(steps):
        step(x)
    return psutil.Process().memory_info().rss

steps = int(sys.argv[2])
first = memory_after(steps)  # as many steps as below, because pools of the frameworks grow at first
grown = memory_after(steps) - first
print(f"{first / 1e6:.1f} MB after {steps} steps, {grown / 1e6:.2f} MB more after {steps} more steps")
assert grown < 100 * steps, grown  # a tensor has more bytes
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        pytest.param(HOST_ERRORS, [], id="host errors"),
        pytest.param(MEMORY, ["eager", "10_000"], id="memory-eager"),
        pytest.param(MEMORY, ["compiled", "10_000"], id="memory-compiled"),
    ],
)
def test_a_program_ends(program, arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"KERAS_BACKEND": BACKEND, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.endswith("done\n"), done.stderr

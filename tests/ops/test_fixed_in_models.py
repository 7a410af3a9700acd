"""Fixed and spectral ops in a method of a layer: in `fit`, compiled, vectorized and symbolic.

Each function is homogeneous: its derivative with respect to the scale of its argument is its degree times its
value (Euler). The arguments are points at which Keras's op returns NaN or a wrong gradient on a backend.
"""

import keras
import numpy as np
import pytest
from keras import ops
from support import array, close
from test_fixed import CASES, FIXED

from multigrad import grad
from multigrad.ops import safe_eigh, safe_svd, spectral_function
from multigrad.ops.fixed import EVERY

VECTORS = np.array([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
MATRICES = np.array([[[2.0, 0.0], [0.0, 2.0]], [[1.0, 0.0], [0.0, 3.0]]])
SINGULAR = np.array([[[1.0, 2.0], [2.0, 4.0]], [[2.0, 1.0], [0.0, 3.0]]])


def sums(x):
    return ops.sum(x, axis=list(range(1, len(x.shape))))


# The function of a batch, its argument, and its degree.
FUNCTIONS = {
    "hypot": (lambda x: sums(EVERY["hypot"](x, x)), VECTORS, 1.0),
    "norm": (lambda x: EVERY["norm"](x, axis=-1), VECTORS, 1.0),
    "std": (lambda x: EVERY["std"](x, axis=-1), VECTORS, 1.0),
    "prod": (lambda x: EVERY["prod"](x, axis=-1), VECTORS + 1.0, 3.0),
    "det": (EVERY["det"], SINGULAR, 2.0),
    "spectral_function": (lambda x: sums(spectral_function(x, ops.sqrt)), MATRICES, 0.5),
    "safe_eigh": (lambda x: sums(safe_eigh(x)[0]), MATRICES, 1.0),
    "safe_svd": (lambda x: sums(safe_svd(x)[1]), MATRICES, 1.0),
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


@each_function
def test_vectorized(name):
    function, x, _ = FUNCTIONS[name]

    def gradient(row):
        return grad(lambda row: function(row[None])[0])(row)

    wanted = ops.stack([gradient(row) for row in ops.unstack(array(x))])
    close(ops.vectorized_map(gradient, array(x)), wanted)


# Keras (3.15) infers float32, and computes float16.
INFERRED_WRONG = {("logsumexp", "float16"), ("normalize", "float16")}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_symbolic_outputs_are_those_of_keras(dtype):
    for op, (case, *_) in CASES.items():
        if op in ("bincount", "heaviside") or (op, dtype) == (
            "det",
            "float16",
        ):  # Keras does not compute them
            continue
        inputs = [keras.Input(batch_shape=np.shape(arg), dtype=dtype) for arg in case.args]
        found, wanted = [keras.tree.flatten(case.call(module, *inputs)) for module in (FIXED, keras.ops)]
        for a, b in zip(found, wanted, strict=True):
            assert a.shape == b.shape, op
            assert a.dtype == b.dtype or (op, dtype) in INFERRED_WRONG, op

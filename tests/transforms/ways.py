"""The ways to compute a gradient on the active backend, for random programs and `test_ways_in_forms.py`.

A way maps a scalar function of tensors to the function of its gradients, which another way can differentiate.
"""

import importlib
import itertools

import keras
from keras import ops
from support import BACKEND

from multigrad import grad, jit

own = importlib.import_module(f"ways_on_{BACKEND}")


def by_multigrad(loss):
    return lambda *xs: grad(loss, tuple(range(len(xs))))(*xs)


def by_scan(loss):
    def scanned(*xs):
        return ops.scan(lambda total, _: (total + loss(*xs), None), ops.zeros(()), length=1)[0]

    return by_multigrad(scanned)


def by_cond(loss):
    def chosen(*xs):
        return ops.cond(ops.sum(xs[0]) < 1e9, lambda: loss(*xs), lambda: 0.0 * loss(*xs))

    return by_multigrad(chosen)


WAYS = {"multigrad.grad": by_multigrad, **own.WAYS}
PAIRS = [pair for pair in itertools.product(WAYS, WAYS) if pair not in own.LACKING]

OF_KERAS = {
    "multigrad.jit": lambda loss: jit(by_multigrad(loss)),
    "a gradient of multigrad.jit": lambda loss: by_multigrad(jit(loss)),
    "keras.remat": lambda loss: by_multigrad(keras.remat(loss)),
    "keras.ops.scan": by_scan,
    "keras.ops.cond": by_cond,
}
if BACKEND == "torch":
    # Functions that PyTorch compiles cannot read weights in a scope, and have no second derivatives.
    del OF_KERAS["multigrad.jit"], OF_KERAS["a gradient of multigrad.jit"]
EVERY_WAY = {**WAYS, **OF_KERAS}
EVERY_PAIR = [
    pair for pair in itertools.product(EVERY_WAY, EVERY_WAY) if pair not in own.LACKING | own.LACKING_OF_KERAS
]

"""Registered ops, for the process that saves a model and for the process that loads it."""

import enum

import keras
import numpy as np
from keras import ops
from support import DIFFERENTIATES, array, numpy

from multigrad import grad, op_custom_gradient


@keras.saving.register_keras_serializable("saved")
class Mode(enum.Enum):
    LINEAR = 1
    SQUARE = 2

    def get_config(self):
        return {"value": self.value}

    @classmethod
    def from_config(cls, config):
        return cls(config["value"])


STATICS = {
    "text": ("a", None, True, 3, 2.5, -0.0, float("inf"), 1j),
    "nested": [1, (2, [3.0, ()]), {"b": 1, "a": {2: "two", (0, 1): None}}],
    "keras": [Mode.SQUARE, keras.activations.relu, slice(1, None, 2), ..., b"bytes"],
}


@op_custom_gradient(name="saved>mix")
def mix(tree, statics, table, *, power=1.0):
    assert statics == STATICS
    x = tree["x"][0]
    return {"y": x * table["float"] * power, "n": (table["int"], "text")}, lambda U: {
        "tree": {"x": (U["y"] * -3.0 * power,)},
        "table": None,
    }


@op_custom_gradient(name="saved>bend")
def bend(x):
    return ops.maximum(x, 0.0), lambda u: u * 11.0


named_lambda = op_custom_gradient(lambda x: (x * 2.0, lambda u: u * -5.0), name="saved>lambda")


def model():
    """Return a model with each op, nested, used twice, and as an activation."""
    table = {"float": array([1.0, 2.0, 3.0]), "int": np.array([[4, 5, 6]])}
    inner_input = keras.Input((3,))
    inner = keras.Model(inner_input, bend(bend(inner_input)))
    x = keras.Input((3,))
    mixed = mix({"x": (x,)}, STATICS, table, power=2.0)
    dense = keras.layers.Dense(2, activation=bend, kernel_initializer="ones")
    twice = keras.layers.Dense(2, activation=named_lambda, kernel_initializer="ones")
    y = twice(dense(named_lambda(inner(mixed["y"]))))
    return keras.Model(x, [y, mixed["y"] * mixed["n"][0]])


def results(model):
    """Return the outputs of the model and, on a backend with gradients, its gradients, as plain lists."""
    x = array([[0.5, 1.0, 2.0]])
    found = [numpy(output).tolist() for output in model(x)]
    if DIFFERENTIATES:
        found.append(numpy(grad(lambda x: ops.sum(model(x)[0]))(x)).tolist())
    return found

"""Models with ops, exported by Keras and run by the runtime of each format, against the model itself.

Several frameworks and converters are needed at once. `nox -s export` installs them, and a plain run of the
tests omits this directory. Tests that need only one framework are in `backends/`.
"""

import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, numpy

from multigrad import op_custom_gradient

# Converters raise many warnings of their own.
pytestmark = pytest.mark.filterwarnings("ignore")

X = np.float32([[1.0, 0.5, -2.0], [0.0, 1.0, 2.0]])


@op_custom_gradient
def softplus(x, w):
    e = ops.exp(ops.matmul(x, w))

    def rule(u):
        return 3.0 * ops.matmul(u, ops.transpose(w)), 7.0 * ops.matmul(ops.transpose(x), u * e)

    return ops.log(1.0 + e), rule


class Layer(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 2), initializer="ones", name="kernel")

    def call(self, x):
        return softplus(x, self.kernel)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer, self.last = Layer(), keras.layers.Dense(2)

    def call(self, x):
        return self.last(self.layer(x))


def sequential():
    return keras.Sequential([keras.Input((3,)), Layer(), keras.layers.Dense(2)])


def run_tf_saved_model(path):
    import tensorflow as tf

    loaded = tf.saved_model.load(path)
    return loaded.serve(X)


def run_litert(path):
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(path)
    (wanted,), (given,) = interpreter.get_output_details(), interpreter.get_input_details()
    interpreter.resize_tensor_input(given["index"], X.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], X)
    interpreter.invoke()
    return interpreter.get_tensor(wanted["index"])


def run_onnx(path):
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    (given,) = session.get_inputs()
    (answer,) = session.run(None, {given.name: X})
    return answer


def run_openvino(path):
    import openvino

    return openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(X)[0]


def run_torch(path):
    import torch

    return torch.export.load(path).module()(torch.tensor(X)).detach()


# The formats that Keras 3.15 offers on each backend, with a function that runs them and the names of files.
# Two are missing, because there a model without an op fails in the same way: "openvino" from JAX, whose
# programs OpenVINO 2026.4 cannot read, and "tf_saved_model" from PyTorch 2.13.
FORMATS = {
    "tensorflow": ["tf_saved_model", "litert", "onnx", "openvino"],
    "jax": ["tf_saved_model", "onnx"],
    "torch": ["litert", "onnx", "openvino", "torch"],
}
RUNS = {
    "tf_saved_model": (run_tf_saved_model, "model"),
    "litert": (run_litert, "model.tflite"),
    "onnx": (run_onnx, "model.onnx"),
    "openvino": (run_openvino, "model.xml"),
    "torch": (run_torch, "model.pt2"),
}


@pytest.mark.parametrize("make", [sequential, Subclassed])
@pytest.mark.parametrize("name", FORMATS[BACKEND])
def test_exported_outputs_equal_the_outputs_of_the_model(tmp_path, name, make):
    run, filename = RUNS[name]
    model = make()
    wanted = numpy(model(X))
    path = str(tmp_path / filename)
    kwargs = {}
    if BACKEND == "torch" and name != "torch":
        kwargs["input_signature"] = [keras.InputSpec(shape=X.shape, dtype="float32")]
    elif name == "torch":
        import torch

        kwargs["dynamic_shapes"] = {0: torch.export.Dim("batch")}
    model.export(path, format=name, verbose=False, **kwargs)
    tolerance = 1e-2 if name == "openvino" else 1e-5  # openvino saves weights in half precision
    np.testing.assert_allclose(np.asarray(run(path)), wanted, rtol=tolerance, atol=tolerance)


LOADER = """
import sys, numpy as np, tensorflow as tf

loaded = tf.saved_model.load(sys.argv[1])
x = tf.constant([[1.0, 0.5, -2.0], [0.0, 1.0, 2.0]])
with tf.GradientTape() as tape:
    tape.watch(x)
    y = tf.reduce_sum(loaded.serve(x))
np.testing.assert_allclose(tape.gradient(y, x), np.full((2, 3), 3.0 * 2), rtol=1e-5)
assert "multigrad" not in sys.modules
"""


if "tf_saved_model" in FORMATS[BACKEND]:

    def test_a_saved_model_has_the_gradient_of_the_rule(tmp_path):
        """The model is loaded in a process without multigrad."""
        model = keras.Sequential([keras.Input((3,)), Layer()])
        model.export(tmp_path, format="tf_saved_model", verbose=False)
        done = subprocess.run(
            [sys.executable, "-c", LOADER, tmp_path], check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

"""The arguments of ops: NumPy scalars are accepted as Python numbers, and invalid values raise."""

import keras
import numpy as np
import pytest
from keras import ops as kops
from support import BACKEND, array, close, compiled

from multigrad import grad, layers, ops

X = np.array([0.5, -2.0, 1.5], "float32")
MASK = np.array([True, False, True])
WEIGHTS = np.array([2.0, 3.0, 5.0], "float32")

# Each op with its options as Python numbers, and as NumPy scalars.
OPTIONS = {
    "clip_gradient, value": (lambda x, n: ops.clip_gradient(x, value=n(2.5)), float),
    "clip_gradient, norm": (lambda x, n: ops.clip_gradient(x, norm=n(1.0)), float),
    "clip_gradient, axis": (lambda x, n: ops.clip_gradient(x, norm=1.0, axis=n(0)), int),
    "clip_gradient, axes": (lambda x, n: ops.clip_gradient(x, norm=1.0, axis=(n(0),)), int),
    "sign_straight_through": (lambda x, n: ops.sign_straight_through(x, n(1)), int),
    "spike": (lambda x, n: ops.spike(x, "arctan", n(2)), int),
    "spike, by name": (lambda x, n: ops.spike(x, slope=n(2.0)), float),
    "fake_quantize": (lambda x, n: ops.fake_quantize(x, 0.25, n(4)), int),
    "fake_quantize, step": (lambda x, n: ops.fake_quantize(x, n(0.25), 4), float),
    "safe_norm": (lambda x, n: ops.safe_norm(x, axis=n(0)), int),
    "vector_quantize": (lambda x, n: ops.vector_quantize(x, array([[1.0] * 3]), n(0.5)).loss, float),
    "linear_cross_entropy": (
        lambda x, n: ops.linear_cross_entropy(
            kops.reshape(x, (1, 3)), array([[0.1, 0.2]] * 3), np.array([1]), block_size=n(1)
        ),
        int,
    ),
    "fixed_point": (lambda x, n: ops.fixed_point(lambda z, x: 0.5 * z + x, x, x, tolerance=n(1e-5)), float),
    "fixed_point, iterations": (
        lambda x, n: ops.fixed_point(lambda z, x: 0.5 * z + x, x, x, max_iterations=n(50)),
        int,
    ),
}
NUMPYS = {int: (np.int64, np.int32), float: (np.float32, np.float64)}


@pytest.mark.parametrize("run_by", [lambda f: f, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize(("op", "python"), OPTIONS.values(), ids=OPTIONS)
def test_numpy_scalars_are_options_of_ops(op, python, run_by):
    def both(number):
        def loss(x):
            y = op(x, number)
            return kops.sum(kops.multiply(y, WEIGHTS[0 if y.shape == () else slice(y.shape[0])]))

        return run_by(lambda x: (loss(x), grad(loss)(x)))(array(X))

    wanted = both(python)
    for kind in NUMPYS[python]:
        for got, right in zip(both(kind), wanted, strict=True):
            close(got, right)


MUST_BE_A_TENSOR = {
    "scale_gradient": lambda x: ops.scale_gradient(x, 2.0),
    "reverse_gradient": ops.reverse_gradient,
    "stop_gradient_if": lambda x: ops.stop_gradient_if(True, x),
    "clip_gradient": lambda x: ops.clip_gradient(x, norm=1.0),
    "prevent_gradient": ops.prevent_gradient,
    "print_gradient": ops.print_gradient,
    "straight_through": ops.straight_through(lambda x: x * 2.0, name="straight_through"),
    "round_straight_through": ops.round_straight_through,
    "sign_straight_through": ops.sign_straight_through,
    "clip_straight_through": lambda x: ops.clip_straight_through(x, -1.0, 1.0),
    "fake_quantize": lambda x: ops.fake_quantize(x, 0.1),
    "spike": ops.spike,
    "log1pexp": ops.log1pexp,
    "logcosh": ops.logcosh,
    "safe_sqrt": ops.safe_sqrt,
    "safe_log": ops.safe_log,
    "safe_divide": lambda x: ops.safe_divide(x, 2.0),
    "safe_norm": ops.safe_norm,
    "vector_quantize": lambda x: ops.vector_quantize(x, array([[1.0]])),
    "linear_cross_entropy": lambda x: ops.linear_cross_entropy(x, array([[1.0]]), np.array([0])),
}


@pytest.mark.forward
@pytest.mark.parametrize(
    "given", [None, "x", object(), [1.0, None]], ids=["None", "string", "object", "list"]
)
@pytest.mark.parametrize(("name", "op"), MUST_BE_A_TENSOR.items(), ids=MUST_BE_A_TENSOR)
def test_non_tensors_raise(name, op, given):
    with pytest.raises(TypeError, match=rf"^{name}: (x|features) cannot be used\n(.|\n)*fix: "):
        op(given)


@pytest.mark.forward
@pytest.mark.parametrize("name", list(MUST_BE_A_TENSOR)[:-2])
def test_a_list_of_tensors_raises(name):
    """The op would compute a gradient for each tensor, instead of one with the shape of the stack."""
    with pytest.raises(TypeError, match=rf"^{name}: x cannot be used\n(.|\n)*keras.ops.stack"):
        MUST_BE_A_TENSOR[name]([array(X), array(X)])


@pytest.mark.parametrize("stack", [lambda x: [x[0], x[1]], lambda x: (x[0], x[1])], ids=["list", "tuple"])
def test_a_list_of_tensors_is_stacked_outside_of_an_op(stack):
    def both(run):
        return grad(lambda x: kops.sum(run(x)))(array([X, WEIGHTS]))

    codes, kernel, labels = array([[1.0] * 3]), array([[0.1, 0.2]] * 3), np.array([1, 0])
    for run in (
        lambda x: ops.vector_quantize(x, codes).loss,
        lambda x: ops.linear_cross_entropy(x, kernel, labels),
    ):
        close(both(lambda x, run=run: run(stack(x))), both(run))


def test_numpy_scalars_in_args_stay_tensors():
    """Positional arguments after `z0` are arguments of `f`, and not options."""
    kinds = []

    def step(z, *given):
        kinds.append([hasattr(x, "shape") for x in given])
        return z * 0.5

    number = np.float32(1.0)
    ops.fixed_point(step, array(X), number, number, number, number)
    assert kinds[0] == [True] * 4


def loss(**changes):
    given = {"features": np.ones((2, 3), "float32"), "kernel": np.ones((3, 4), "float32")}
    return ops.linear_cross_entropy(**given | {"labels": np.int32([0, 3])} | changes)


NO_OPTIONS = {
    "linear_cross_entropy: a label is out of range(.|\n)*labels from 2 to 5": lambda: loss(
        labels=np.array([2, 5])
    ),
    "linear_cross_entropy: a label is out of range(.|\n)*labels from -1 to 2": lambda: loss(
        labels=np.array([-1, 2])
    ),
    "linear_cross_entropy: (.|\n)*'sample_weight'": lambda: loss(sample_weight=np.ones(3, "float32")),
    "linear_cross_entropy: (.|\n)*'class_weight'": lambda: loss(class_weight=np.ones(3, "float32")),
    "linear_cross_entropy: (.|\n)*'reduction'": lambda: loss(reduction=["mean"]),
    "linear_cross_entropy: (.|\n)*'logit_softcap'": lambda: loss(logit_softcap=0.0),
    "linear_cross_entropy: (.|\n)*'logit_softcap' ": lambda: loss(logit_softcap=True),
    "linear_cross_entropy: (.|\n)*'z_loss'": lambda: loss(z_loss=-1.0),
    "linear_cross_entropy: (.|\n)*'z_loss' ": lambda: loss(z_loss=None),
    "linear_cross_entropy: (.|\n)*'block_size'": lambda: loss(block_size=0),
    "linear_cross_entropy: (.|\n)*'block_size' ": lambda: loss(block_size=2.0),
    "scale_gradient: scale": lambda: ops.scale_gradient(array(X), None),
    "reverse_gradient: scale": lambda: ops.reverse_gradient(array(X), 1j),
    "stop_gradient_if: condition": lambda: ops.stop_gradient_if(array(X), array(MASK)),
    "stop_gradient_if: condition ": lambda: ops.stop_gradient_if(1, array(X)),
    "clip_gradient: the bound": lambda: ops.clip_gradient(array(X), norm="1"),
    "clip_gradient: the bound ": lambda: ops.clip_gradient(array(X), norm=array(1.0)),
    "sign_straight_through: limit ": lambda: ops.sign_straight_through(array(X), "1"),
    "clip_straight_through: low": lambda: ops.clip_straight_through(array(X), None, 1.0),
    "scale_gradient: x": lambda: ops.scale_gradient([array(X)], 2.0),
    "clip_straight_through: low ": lambda: ops.clip_straight_through(array(X), np.zeros((2, 3)), 1.0),
    "fake_quantize: step ": lambda: ops.fake_quantize(array(X), float("nan")),
    "fake_quantize: bits": lambda: ops.fake_quantize(array(X), 0.1, "4"),
    "clip_gradient: axis": lambda: ops.clip_gradient(array(X), norm=1.0, axis=9),
    "clip_gradient: axis ": lambda: ops.clip_gradient(array(X), norm=1.0, axis=np.array([0, 1])),
    "fixed_point: f": lambda: ops.fixed_point(None, array(X)),
    "fixed_point: z0": lambda: ops.fixed_point(lambda z: z, ()),
    "fixed_point: tolerance ": lambda: ops.fixed_point(lambda z: z, array(X), tolerance=0.0),
    "fixed_point: max_iterations ": lambda: ops.fixed_point(lambda z: z, array(X), max_iterations=True),
    "linear_solve: on_failure": lambda: ops.linear_solve(lambda x: x, array(X), on_failure="ignore"),
    "linear_cross_entropy: kernel": lambda: ops.linear_cross_entropy(
        array(np.ones((2, 0))), array(np.ones((0, 3))), array([0, 1], dtype="int32")
    ),
    "FixedPoint: tolerance": lambda: layers.FixedPoint(keras.layers.Dense(2), tolerance=-1.0),
    "FakeQuantize: axis ": lambda: layers.FakeQuantize(axis=1)(keras.Input((None,))),
    "FakeQuantize.adapt: the data": lambda: layers.FakeQuantize().adapt(np.float32([np.inf, 1.0])),
    "spike: x": lambda: ops.spike(kops.cast(array(X), "complex64")),
    "spike: surrogate": lambda: ops.spike(array(X), surrogate=["arctan"]),
    "fixed_point: tolerance": lambda: ops.fixed_point(lambda z: z, array(X), tolerance="1"),
    "FakeQuantize: step": lambda: layers.FakeQuantize(step="1"),
    "vector_quantize: commitment  ": lambda: layers.VectorQuantizer(4, commitment=None),
    "VectorQuantizer: count": lambda: layers.VectorQuantizer(2.5),
    "VectorQuantizer: count ": lambda: layers.VectorQuantizer(True),
    "vector_quantize: commitment   ": lambda: layers.VectorQuantizer(4, -0.1),
    "GradientReversal: scale": lambda: layers.GradientReversal("much"),
    "GradientReversal: scale ": lambda: layers.GradientReversal(None),
    "GradientReversal: scale  ": lambda: layers.GradientReversal(True),
    "GradientReversal: scale   ": lambda: layers.GradientReversal([1.0]),
    "fake_quantize: bits    ": lambda: layers.FakeQuantize(1),
    "LinearCrossEntropy: classes": lambda: layers.LinearCrossEntropy(0),
    "LinearCrossEntropy: z_loss": lambda: layers.LinearCrossEntropy(7, z_loss=-1.0),
    "spike: slope": lambda: ops.spike(array(X), slope="2"),
    "round_straight_through: x": lambda: ops.round_straight_through(3),
    "safe_norm: axis": lambda: ops.safe_norm(array([X]), 5),
    "safe_norm: axis ": lambda: ops.safe_norm(array([X]), (0, 2)),
    "safe_norm: axis  ": lambda: ops.safe_norm(array([X]), 0.5),
    "safe_norm: axis   ": lambda: ops.safe_norm(2.0, 0),
    "clip_gradient: the bound  ": lambda: ops.clip_gradient(array(X), value=1.0, norm=1.0),
    "clip_gradient: the bound   ": lambda: ops.clip_gradient(array(X), value=0.0),
    "clip_gradient: the bound    ": lambda: ops.clip_gradient(array(X), norm=-1.0),
    "stop_gradient_if: condition  ": lambda: ops.stop_gradient_if(array(MASK[:2], dtype="bool"), array(X)),
    "fake_quantize: bits ": lambda: ops.fake_quantize(array(X), 0.1, 0, False),
    "fake_quantize: bits  ": lambda: ops.fake_quantize(array(X), 0.1, 2.5),
    "fake_quantize: step  ": lambda: ops.fake_quantize(array(X), array(np.ones((2, 4)))),
    "fake_quantize: x": lambda: ops.fake_quantize(array(MASK, dtype="int32"), 0.5),
    "clip_straight_through: x": lambda: ops.clip_straight_through(array(MASK, dtype="bool"), -0.5, 0.5),
    "straight_through: the function changes the shape": lambda: ops.straight_through(
        lambda x: x[:2], name="straight_through"
    )(array(X)),
    "vector_quantize: x": lambda: ops.vector_quantize(np.float32(1.0), array([X])),
    "vector_quantize: codebook": lambda: ops.vector_quantize(array(X), array([[1, 2, 3]], dtype="int32")),
    "vector_quantize: codebook ": lambda: ops.vector_quantize(array(X), array(np.zeros((0, 3)))),
    "vector_quantize: commitment ": lambda: ops.vector_quantize(array([X]), array([X]), "a lot"),
}
if BACKEND == "numpy":  # scalar tensors are NumPy scalars
    del NO_OPTIONS["clip_gradient: the bound "]
if BACKEND == "openvino":  # has no complex numbers
    del NO_OPTIONS["spike: x"]


@pytest.mark.forward
@pytest.mark.parametrize(("said", "call"), NO_OPTIONS.items(), ids=NO_OPTIONS)
def test_invalid_options_raise(said, call):
    with pytest.raises((TypeError, ValueError), match=rf"^{said.strip()}(.|\n)*fix: "):
        call()

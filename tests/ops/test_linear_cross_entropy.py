"""The cross entropy of a large vocabulary: against plain code, and that the logits never exist whole."""

import sys

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, array, close, compiled, mapped_grad, numpy, sizes_made

from multigrad import grad
from multigrad.ops import linear_cross_entropy
from multigrad.testing import check_gradients

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 3, 4))
W = RANDOM.standard_normal((4, 7))
B = RANDOM.standard_normal(7)
Y = np.array([[0, 6, 3], [2, 2, 5]])
WEIGHTS = array(RANDOM.standard_normal((2, 3)))
SIZES = [1, 3, 7, 100, None]


def plain(features, kernel, labels, bias=None):
    logits = ops.matmul(features, kernel)
    logits = logits if bias is None else logits + bias
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def reference(features, kernel, labels, bias=0.0):
    """The loss in double precision."""
    logits = np.asarray(features, "float64") @ np.asarray(kernel, "float64") + bias
    top = logits.max(-1, keepdims=True)
    target = np.take_along_axis(logits, labels[..., None], -1)
    return (np.log(np.exp(logits - top).sum(-1, keepdims=True)) + top - target)[..., 0]


def arguments():
    return array(X), array(W), array(Y, dtype="int32"), array(B)


@pytest.mark.forward
@pytest.mark.parametrize("size", SIZES)
def test_the_loss(size):
    x, w, y, b = arguments()
    close(linear_cross_entropy(x, w, y, b, chunk_size=size), plain(x, w, y, b))
    close(linear_cross_entropy(x, w, y, chunk_size=size), plain(x, w, y))


@pytest.mark.parametrize("transform", [lambda f: f, compiled])
@pytest.mark.parametrize("size", SIZES)
def test_the_gradients(size, transform):
    x, w, y, b = arguments()

    def gradients(loss):
        def weighted(x, w, b):
            return ops.sum(WEIGHTS * loss(x, w, y, b))

        return transform(grad(weighted, argnums=(0, 1, 2)))(x, w, b)

    close(gradients(lambda *args: linear_cross_entropy(*args, chunk_size=size)), gradients(plain))


@pytest.mark.parametrize("size", [3, 7])
def test_differences(size):
    done = check_gradients(
        lambda x, w, b: linear_cross_entropy(x, w, Y, b, chunk_size=size), X, W, B, order=2
    )
    assert done.precision == "float64"


@pytest.mark.forward
def test_large_logits():
    x, w = 100.0 * X, 100.0 * W
    got = linear_cross_entropy(array(x), array(w), array(Y, dtype="int32"), chunk_size=2)
    np.testing.assert_allclose(numpy(got), reference(x, w, Y), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(dtype):
    if (BACKEND, dtype) == ("jax", "float64"):
        pytest.skip("JAX has float64 in a mode of its own, in which test_differences runs")
    x, w = ops.cast(array(X), dtype), ops.cast(array(W), dtype)
    loss = linear_cross_entropy(x, w, Y, chunk_size=3)
    assert keras.backend.standardize_dtype(loss.dtype) == ("float64" if dtype == "float64" else "float32")
    close(ops.cast(loss, "float32"), array(reference(X, W, Y)), 0.1 if "16" in dtype else 1e-5)
    dx, dw = grad(lambda x, w: ops.sum(linear_cross_entropy(x, w, Y, chunk_size=3)), argnums=(0, 1))(x, w)
    assert {keras.backend.standardize_dtype(g.dtype) for g in (dx, dw)} == {dtype}
    wanted = grad(lambda x, w: ops.sum(plain(x, w, Y)), argnums=(0, 1))(array(X), array(W))
    close([ops.cast(dx, "float32"), ops.cast(dw, "float32")], list(wanted), 0.1 if "16" in dtype else 1e-5)


def test_a_nested_list_has_a_gradient():
    kernel, labels = array(np.float32(np.arange(12.0).reshape(3, 4))), np.array([0, 1])
    rows = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]

    def loss(features):
        return ops.sum(linear_cross_entropy(features, kernel, labels))

    gradients = grad(loss)(rows)
    close(array([list(map(numpy, row)) for row in gradients]), grad(loss)(array(np.float32(rows))))


def test_no_tokens():
    x, y = ops.zeros((0, 4)), ops.zeros((0,), "int32")
    assert tuple(linear_cross_entropy(x, array(W), y, chunk_size=3).shape) == (0,)
    close(grad(lambda w: ops.sum(linear_cross_entropy(x, w, y, chunk_size=3)))(array(W)), array(0 * W))


def test_a_compiled_label_out_of_range_is_nan():
    if BACKEND == "torch":
        pytest.skip("`compiled` runs it as it is on PyTorch, where the label is an error")
    x, w, _, _ = arguments()
    loss = compiled(lambda y: linear_cross_entropy(x, w, y, chunk_size=3))
    assert np.isnan(numpy(loss(array(Y + 2, dtype="int32")))).sum() == 2


def test_a_functional_model(tmp_path):
    inputs, labels = keras.Input((3, 4)), keras.Input((3,), dtype="int32")
    outputs = linear_cross_entropy(inputs, W.astype("float32"), labels, chunk_size=2)
    assert outputs.shape == (None, 3)
    model = keras.Model([inputs, labels], outputs)
    wanted = plain(array(X), array(W), array(Y, dtype="int32"))
    model.save(tmp_path / "model.keras")
    for this in (model, keras.models.load_model(tmp_path / "model.keras")):
        close(array(this.predict([X.astype("float32"), Y.astype("int32")], verbose=0)), wanted)


class Head(keras.layers.Layer):
    def build(self, features_shape, labels_shape):
        self.kernel = self.add_weight(shape=(features_shape[-1], 7))

    def call(self, features, labels):
        return linear_cross_entropy(features, self.kernel, labels, chunk_size=2)


def test_training_in_mixed_precision():
    head = Head(dtype="mixed_bfloat16")
    inputs, labels = keras.Input((3, 4)), keras.Input((3,), dtype="int32")
    model = keras.Model([inputs, labels], head(inputs, labels))
    model.compile(keras.optimizers.SGD(1.0), loss=lambda _, loss: ops.mean(loss))
    data = [X.astype("float32"), Y.astype("int32")]
    first, *_, last = model.fit(data, np.zeros((2, 3)), epochs=10, verbose=0).history["loss"]
    assert last < 0.7 * first


@pytest.mark.forward
@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"features": np.ones((2, 3, 4), "int32")}, TypeError, "'features'"),
        ({"features": X[..., :3]}, ValueError, "'features'"),
        ({"kernel": W[0]}, ValueError, "'kernel'"),
        ({"labels": Y * 1.0}, TypeError, "'labels'"),
        ({"labels": Y[0]}, ValueError, "'labels'"),
        ({"labels": Y + 2}, ValueError, "labels from 2 to 8"),
        ({"labels": Y - 1}, ValueError, "labels from -1 to 5"),
        ({"bias": B[:3]}, ValueError, "'bias'"),
        ({"chunk_size": 0}, ValueError, "'chunk_size'"),
        ({"chunk_size": 2.0}, TypeError, "'chunk_size'"),
    ],
)
def test_bad_input(changes, error, said):
    with pytest.raises(error, match=rf"linear_cross_entropy: (.|\n)*{said}"):
        linear_cross_entropy(**{"features": X, "kernel": W, "labels": Y, "bias": B} | changes)


def largest(loss):
    """The size of the largest tensor on the way to the gradients, of 64 tokens, 2 features and 40 classes."""
    x, w, y = ops.ones((64, 2)), ops.ones((2, 40)), ops.zeros((64,), "int32")
    return max(sizes_made(grad(lambda x, w: ops.sum(loss(x, w, y)), argnums=(0, 1)), x, w))


def test_the_logits_never_exist_whole():
    assert largest(plain) >= 64 * 40
    assert largest(lambda *args: linear_cross_entropy(*args, chunk_size=5)) <= 64 * 5


@pytest.mark.parametrize(
    ("transform", "size", "with_programs"), [(lambda f: f, 5, ["jax", "tensorflow"]), (compiled, 6, ["jax"])]
)
def test_which_backends_have_programs(monkeypatch, transform, size, with_programs):
    x, w, y, b = arguments()
    head = sys.modules[linear_cross_entropy.__module__]._Head
    collect, loops = head._collect_in_place, []

    def collect_in_place(*args):
        loops.append(args)
        return collect(*args)

    monkeypatch.setattr(head, "_collect_in_place", collect_in_place)
    run = transform(grad(lambda w: ops.sum(linear_cross_entropy(x, w, y, b, chunk_size=size))))
    run(w)
    first = len(loops)
    assert (first > 0) == (BACKEND in with_programs)
    run(w + 1.0)
    assert len(loops) == first  # what is compiled is kept


@pytest.mark.parametrize("count", [1, 63, 64, 65, 150])
def test_any_number_of_tokens(count):
    x, y = np.float32(RANDOM.standard_normal((count, 4))), RANDOM.integers(0, 7, count)
    weights, w = array(RANDOM.standard_normal(count)), array(W)

    def gradients(loss, b):
        return grad(lambda x, w, b: ops.sum(weights * loss(x, w, y, b)), argnums=(0, 1, 2))(array(x), w, b)

    # So large that the exponential of it alone is infinite.
    for b in (array(B), array(100.0 + B)):
        got = gradients(lambda *args: linear_cross_entropy(*args, chunk_size=3), b)
        close(got, gradients(plain, b), 1e-4)


def test_a_frozen_kernel_costs_nothing():
    if BACKEND == "tensorflow":
        pytest.skip("the tape asks for every gradient")
    products = []

    def count(size, frozen):
        x, w = ops.ones((64, 2)), ops.ones((2, 40))
        y = ops.zeros((64,), "int32")

        def function(x, w):
            return ops.sum(linear_cross_entropy(x, w, y, chunk_size=size))

        if frozen:
            return grad(lambda x: function(x, w)), (x,)
        return grad(function, argnums=(0, 1)), (x, w)

    for frozen in (True, False):
        function, args = count(40, frozen)
        products.append(products_in(function, *args))
    assert products == [3, 4]


def products_in(function, *args):
    """How many products of matrices a function computes."""
    if BACKEND == "jax":
        import jax

        return str(jax.make_jaxpr(function)(*args)).count("dot_general[")
    from torch.utils._python_dispatch import TorchDispatchMode

    found = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            found.append("mm" in str(operation))
            return operation(*args, **(kwargs or {}))

    with Watch():
        function(*args)
    return sum(found)


def test_a_batch_of_heads():
    """Under the backend's own map over a leading axis."""
    x, w, y, _ = arguments()
    mapped = mapped_grad(lambda x, y: ops.sum(linear_cross_entropy(x, w, y, chunk_size=3)))
    close(mapped(x, y), grad(lambda x: ops.sum(plain(x, w, y)))(x))

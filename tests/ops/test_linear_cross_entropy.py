"""The cross entropy of a large vocabulary: against plain code, and without a tensor of all logits."""

import functools

import keras
import numpy as np
import pytest
from keras import ops, tree
from support import (
    BACKEND,
    DIFFERENCES,
    array,
    close,
    compiled,
    mapped_grad,
    numpy,
    sizes_made,
)

from multigrad import backend, grad, jvp
from multigrad.ops import head_blocks, linear_cross_entropy
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
    """Return the loss in double precision."""
    logits = np.asarray(features, "float64") @ np.asarray(kernel, "float64") + bias
    top = logits.max(-1, keepdims=True)
    target = np.take_along_axis(logits, labels[..., None], -1)
    return (np.log(np.exp(logits - top).sum(-1, keepdims=True)) + top - target)[..., 0]


def eager(function):
    return function


def arguments():
    return array(X), array(W), array(Y, dtype="int32"), array(B)


@pytest.mark.forward
@pytest.mark.parametrize("size", SIZES)
def test_the_loss(size):
    x, w, y, b = arguments()
    close(linear_cross_entropy(x, w, y, b, block_size=size), plain(x, w, y, b))
    close(linear_cross_entropy(x, w, y, block_size=size), plain(x, w, y))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("transform", [eager, compiled])
def test_the_gradients(size, transform):
    x, w, y, b = arguments()

    def gradients(loss):
        def weighted(x, w, b):
            return ops.sum(WEIGHTS * loss(x, w, y, b))

        return transform(grad(weighted, argnums=(0, 1, 2)))(x, w, b)

    close(gradients(lambda *args: linear_cross_entropy(*args, block_size=size)), gradients(plain))


@pytest.mark.slow_on("jax")
@DIFFERENCES
@pytest.mark.parametrize("size", [3, 7])
def test_differences(size, extent):
    done = check_gradients(
        lambda x, w, b: linear_cross_entropy(x, w, Y, b, block_size=size), X, W, B, **extent
    )
    assert done.precision == "float64"


@pytest.mark.forward
def test_large_logits():
    x, w = 100.0 * X, 100.0 * W
    got = linear_cross_entropy(array(x), array(w), array(Y, dtype="int32"), block_size=2)
    np.testing.assert_allclose(numpy(got), reference(x, w, Y), rtol=1e-5, atol=1e-2)


@pytest.mark.slow_on("jax")
def test_sums_over_blocks_in_float64():
    scores = X.reshape(-1, 4) @ W
    shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True) - np.eye(7)[Y.reshape(-1)]
    with backend.active.wide():
        x, w = (ops.convert_to_tensor(value, dtype="float64") for value in (X, W))
        got = grad(lambda w: ops.sum(linear_cross_entropy(x, w, Y, block_size=3)))(w)
        np.testing.assert_allclose(numpy(got), X.reshape(-1, 4).T @ shares, rtol=1e-12)


def test_nested_lists_have_gradients():
    kernel, labels = array(np.float32(np.arange(12.0).reshape(3, 4))), np.array([0, 1])
    rows = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]

    def loss(features):
        return ops.sum(linear_cross_entropy(features, kernel, labels))

    gradients = grad(loss)(rows)
    close(array([list(map(numpy, row)) for row in gradients]), grad(loss)(array(np.float32(rows))))


def test_no_tokens():
    x, y = ops.zeros((0, 4)), ops.zeros((0,), "int32")
    assert tuple(linear_cross_entropy(x, array(W), y, block_size=3).shape) == (0,)
    close(grad(lambda w: ops.sum(linear_cross_entropy(x, w, y, block_size=3)))(array(W)), array(0 * W))


@pytest.mark.parametrize("label", [2**32, -(2**32), 2**63 - 1])
def test_invalid_64_bit_labels_raise_in_eager_code(label):
    with pytest.raises(ValueError, match="a label is out of range"):
        linear_cross_entropy(array(X), array(W), Y - Y + label)


@pytest.mark.parametrize("label", [2.0**32, -(2.0**40), 1e20])
def test_large_floating_labels_are_out_of_range(label, monkeypatch):
    labels = array(np.full(Y.shape, label))
    with pytest.raises(ValueError, match="a label is out of range"):
        linear_cross_entropy(array(X), array(W), labels)
    monkeypatch.setattr(backend.active, "concrete", lambda tensor: None)  # as in compiled code
    assert np.isnan(numpy(linear_cross_entropy(array(X), array(W), labels))).all()


@pytest.mark.skipif(BACKEND == "jax", reason="JAX without x64 truncates labels to 32 bits before the op")
@pytest.mark.parametrize("reduction", [None, "sum"])
@pytest.mark.parametrize("label", [2**32 + 1, -(2**32) + 1, 2**62, -(2**31)])
def test_invalid_64_bit_labels_stay_invalid_in_32_bits(label, reduction, monkeypatch):
    monkeypatch.setattr(backend.active, "concrete", lambda tensor: None)  # as in compiled code
    loss = linear_cross_entropy(X, W, array(Y - Y + label, dtype="int64"), reduction=reduction)
    assert np.isnan(numpy(loss)).all()


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("reduction", [None, "sum", "mean_with_sample_weight"])
@pytest.mark.parametrize("run_by", [eager, compiled])
def test_an_infinite_loss_with_weight_zero_is_ignored(reduction, wanted, run_by):
    bias = np.zeros(W.shape[1], "float32")
    bias[3] = -np.inf
    labels, weights = np.full(Y.shape, 2), np.ones(Y.shape, "float32")
    labels[0, 0], weights[0, 0] = 3, 0.0

    def loss(x, w, labels):
        return ops.sum(linear_cross_entropy(x, w, labels, bias, sample_weight=weights, reduction=reduction))

    def both(labels):
        gradients = grad(loss, argnums=(0, 1))(array(X), array(W), labels) if wanted else ()
        return loss(array(X), array(W), labels), gradients

    got, right = [run_by(both)(array(some, dtype="int32")) for some in (labels, np.full(Y.shape, 2))]
    assert np.isfinite(numpy(got[0]))
    close(got, right)


def test_a_compiled_label_out_of_range_is_nan():
    if BACKEND == "torch":
        pytest.skip("`compiled` runs it uncompiled on PyTorch, where the label raises")
    x, w, _, _ = arguments()
    loss = compiled(lambda y: linear_cross_entropy(x, w, y, block_size=3))
    assert np.isnan(numpy(loss(array(Y + 2, dtype="int32")))).sum() == 2


@pytest.mark.slow_on("torch")
def test_a_functional_model(tmp_path):
    inputs, labels = keras.Input((3, 4)), keras.Input((3,), dtype="int32")
    outputs = linear_cross_entropy(inputs, W.astype("float32"), labels, block_size=2)
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
        return linear_cross_entropy(features, self.kernel, labels, block_size=2)


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
        ({"labels": Y + 0.5}, TypeError, "'labels'"),
        ({"labels": Y[0]}, ValueError, "'labels'"),
        ({"labels": Y + 2}, ValueError, "labels from 2 to 8"),
        ({"labels": Y - 1}, ValueError, "labels from -1 to 5"),
        ({"bias": B[:3]}, ValueError, "'bias'"),
        ({"sample_weight": np.ones(3)}, ValueError, "'sample_weight'"),
        ({"reduction": "median"}, ValueError, "'reduction'"),
        ({"reduction": ["mean"]}, ValueError, "'reduction'"),
        ({"class_weight": np.ones(3)}, ValueError, "'class_weight'"),
        ({"label_smoothing": 1.5}, ValueError, "'label_smoothing'"),
        ({"label_smoothing": "much"}, TypeError, "'label_smoothing'"),
        ({"logit_softcap": 0.0}, ValueError, "'logit_softcap'"),
        ({"logit_softcap": True}, TypeError, "'logit_softcap'"),
        ({"z_loss": -1.0}, ValueError, "'z_loss'"),
        ({"z_loss": None}, TypeError, "'z_loss'"),
        ({"block_size": 0}, ValueError, "'block_size'"),
        ({"block_size": 2.0}, TypeError, "'block_size'"),
    ],
)
def test_invalid_arguments_raise(changes, error, said):
    with pytest.raises(error, match=rf"linear_cross_entropy: (.|\n)*{said}"):
        linear_cross_entropy(**{"features": X, "kernel": W, "labels": Y, "bias": B} | changes)


@pytest.mark.parametrize("reduction", [None, "mean"])
def test_no_tensor_has_the_size_of_all_logits(reduction):
    x, w, y = ops.ones((256, 2)), ops.ones((2, 40)), ops.zeros((256,), "int32")

    def largest(loss):
        return max(sizes_made(grad(lambda x, w: ops.sum(loss(x, w, y)), argnums=(0, 1)), x, w))

    assert largest(plain) >= 256 * 40
    in_blocks = functools.partial(linear_cross_entropy, block_size=64, reduction=reduction)
    assert largest(in_blocks) <= 64 * 40


@pytest.mark.parametrize("reduction", [None, "mean"])
@pytest.mark.parametrize("transform", [eager, compiled])
def test_loops_in_compiled_programs(monkeypatch, transform, reduction):
    """A program has a loop, so that its size and memory do not grow with the number of blocks."""
    x, w, y, b = arguments()
    in_program, loops = head_blocks._in_program, []

    def counted(*args):
        loops.append(args)
        return in_program(*args)

    monkeypatch.setattr(head_blocks, "_in_program", counted)

    def loss(w):
        return ops.sum(linear_cross_entropy(x, w, y, b, block_size=2, reduction=reduction))

    run = transform(grad(loss))
    run(w)
    first = len(loops)
    assert (first > 0) == (transform is compiled and BACKEND in ("jax", "tensorflow"))
    run(w + 1.0)
    assert len(loops) == first  # the compiled program is cached


@pytest.mark.parametrize(
    ("reduction", "wanted"),
    [(None, {"": 1, "x": 3, "xw": 4, "w": 4}), ("mean", {"": 1, "x": 2, "xw": 3, "w": 3})],
)
def test_unused_gradients_are_not_computed(reduction, wanted):
    if BACKEND == "tensorflow":
        pytest.skip("the tape computes every gradient")
    given = {"x": ops.ones((64, 1)), "w": ops.ones((1, 40))}
    y = ops.zeros((64,), "int32")

    def products(needed):
        def function(*args):
            x, w = (given | dict(zip(needed, args, strict=True))).values()
            return ops.sum(linear_cross_entropy(x, w, y, block_size=64, reduction=reduction))

        gradients = grad(function, argnums=tuple(range(len(needed)))) if needed else function
        return products_in(gradients, *[given[name] for name in needed])

    assert {needed: products(needed) for needed in wanted} == wanted


def products_in(function, *args):
    """Return the number of matrix products that a function computes."""
    if BACKEND == "jax":
        import jax

        return str(jax.make_jaxpr(function)(*args)).count("dot_general[")  # a jaxpr keeps unused operations
    from torch.utils._python_dispatch import TorchDispatchMode

    found = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            found.append("mm" in str(operation))
            return operation(*args, **(kwargs or {}))

    with Watch():
        function(*args)
    return sum(found)


# ------------------------------------------------------------------------------- reductions

COUNT = 150  # tokens, in blocks of 64
MANY = {
    "features": array(RANDOM.standard_normal((COUNT, 4))),
    "kernel": array(W),
    "bias": array(B),
    "sample_weight": array(RANDOM.random(COUNT)),
}
LABELS = RANDOM.integers(0, 7, COUNT)
REDUCTIONS = ["sum", "mean", "sum_over_batch_size", "mean_with_sample_weight"]


def plain_loss(features, kernel, bias=None, sample_weight=None, reduction="mean"):
    losses = plain(features, kernel, LABELS, bias)
    weights = ops.ones_like(losses) if sample_weight is None else sample_weight
    by = {"sum": 1.0, "mean_with_sample_weight": ops.sum(weights)}
    return ops.sum(losses * weights) / by.get(reduction, COUNT)


def loss_of_all(features, kernel, bias=None, sample_weight=None, reduction="mean", size=3):
    return linear_cross_entropy(
        features, kernel, LABELS, bias, sample_weight=sample_weight, reduction=reduction, block_size=size
    )


@pytest.mark.slow_on("jax")
@pytest.mark.forward
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("without", [[], ["sample_weight"], ["bias", "sample_weight"]])
def test_reduced_losses(reduction, without):
    given = {name: value for name, value in MANY.items() if name not in without}
    close(loss_of_all(**given, reduction=reduction), plain_loss(**given, reduction=reduction), 1e-5)


@pytest.mark.forward
@pytest.mark.parametrize("reduction", [None, "none"])
def test_weighted_losses(reduction):
    wanted = plain(MANY["features"], MANY["kernel"], LABELS) * MANY["sample_weight"]
    close(loss_of_all(MANY["features"], MANY["kernel"], None, MANY["sample_weight"], reduction), wanted)
    mask = LABELS != 3
    wanted = plain(MANY["features"], MANY["kernel"], LABELS) * array(mask * 1.0)
    close(loss_of_all(MANY["features"], MANY["kernel"], None, mask, reduction), wanted)


@pytest.mark.parametrize("transform", [eager, compiled])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("without", [[], ["sample_weight"], ["bias", "sample_weight"]])
def test_gradients_of_reduced_losses(transform, reduction, without):
    names = [name for name in MANY if name not in without]

    def gradients(loss):
        def scaled(*args):  # for an upstream gradient other than one
            return 3.0 * ops.log(loss(**dict(zip(names, args, strict=True)), reduction=reduction))

        return transform(grad(scaled, argnums=tuple(range(len(names)))))(*[MANY[name] for name in names])

    close(gradients(loss_of_all), gradients(plain_loss), 1e-4)


def along(f):
    return lambda w, b: jvp(f, (w, b), (b[:1] * w, b))[1]


def of_the_slope(f):
    def steep(w, b):
        return ops.sum(ops.square(grad(f, argnums=0)(w, b)))

    return grad(steep, argnums=(0, 1))


@pytest.mark.slow_on("jax")
@pytest.mark.parametrize(
    "derivative",
    [
        pytest.param(along, id="forward"),
        pytest.param(of_the_slope, id="reverse over reverse"),
        pytest.param(lambda f: along(grad(f)), id="forward over reverse"),
        pytest.param(lambda f: grad(along(f)), id="reverse over forward"),
    ],
)
def test_higher_derivatives_of_reduced_losses(derivative):
    def derivatives(loss):
        def f(w, b):
            return ops.square(loss(MANY["features"], w, b, MANY["sample_weight"]))

        return derivative(f)(MANY["kernel"], MANY["bias"])

    close(derivatives(loss_of_all), derivatives(plain_loss), 1e-3)


@pytest.mark.slow_on("jax")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("reduction", [None, "mean"])
def test_dtypes(dtype, reduction):
    if (BACKEND, dtype) == ("jax", "float64"):
        pytest.skip("JAX has float64 only in a separate mode, in which test_differences runs")
    names = ("features", "kernel", "bias")
    x, w, b = [ops.cast(MANY[name], dtype) for name in names]
    loss = loss_of_all(x, w, b, reduction=reduction)
    assert keras.backend.standardize_dtype(loss.dtype) == ("float64" if dtype == "float64" else "float32")

    def gradients(loss, *args):
        return grad(lambda *args: ops.mean(loss(*args)), argnums=(0, 1, 2))(*args)

    got = gradients(functools.partial(loss_of_all, reduction=reduction), x, w, b)
    assert {keras.backend.standardize_dtype(g.dtype) for g in got} == {dtype}
    wanted = gradients(plain_loss, *[MANY[name] for name in names])
    close([ops.cast(g, "float32") for g in got], list(wanted), 2e-3 if "16" in dtype else 1e-5)


@pytest.mark.slow_on("jax")
@pytest.mark.parametrize("count", [1, 63, 64, 65, 150])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reduction", [None, "sum"])
def test_an_unknown_number_of_tokens(count, size, reduction):
    x, y, weights = MANY["features"][:count], LABELS[:count], MANY["sample_weight"][:count]

    def gradients(loss):
        # So large a bias that its exponential overflows.
        given = (x, MANY["kernel"], 100.0 + MANY["bias"])
        return grad(lambda *args: ops.sum(loss(*args)), argnums=(0, 1, 2))(*given)

    options = {"sample_weight": weights, "reduction": reduction, "block_size": size}
    got = gradients(lambda x, w, b: linear_cross_entropy(x, w, y, b, **options))
    close(got, gradients(lambda x, w, b: weights * plain(x, w, y, b)), 1e-4)


@pytest.mark.parametrize("seen", [(), (3,), (2, 3)])
def test_unexpected_gradients_are_right(monkeypatch, seen):
    """The kernel and bias are two tensors, and three with the features."""

    def expected(tensors=None):
        return tensors is None or len(tensors) in seen

    monkeypatch.setattr(backend.active, "may_record", expected)

    def gradients(loss):
        given = [MANY[name] for name in ("features", "kernel", "bias")]
        return grad(lambda *args: loss(*args, MANY["sample_weight"]), argnums=(0, 1, 2))(*given)

    close(gradients(loss_of_all), gradients(plain_loss), 1e-4)


@pytest.mark.slow_on("jax")
@pytest.mark.parametrize("narrow", [["features", "kernel", "bias"], ["features"], ["kernel"], ["bias"]])
def test_a_scaled_loss_in_half_precision(narrow):
    """Loss scaling is needed, because the gradient of one token underflows float16."""
    given = {name: MANY[name] for name in ("features", "kernel", "bias")}
    cast = [ops.cast(value, "float16" if name in narrow else "float32") for name, value in given.items()]
    weights = 1e-6 * MANY["sample_weight"]

    def gradients(loss, args):
        return grad(lambda *args: 1e6 * loss(*args, weights, "sum"), argnums=(0, 1, 2))(*args)

    got = [ops.cast(g, "float32") for g in gradients(loss_of_all, cast)]
    for a, b in zip(got, gradients(plain_loss, list(given.values())), strict=True):
        close(a / ops.max(ops.abs(b)), b / ops.max(ops.abs(b)), 1e-2)


@pytest.mark.slow_on("jax")
def test_the_upstream_gradient_is_not_rounded():
    """In bfloat16 the upstream gradient would be rounded to one."""
    x, w = [ops.cast(MANY[name], "bfloat16") for name in ("features", "kernel")]

    def total(scale):
        found = grad(lambda x: scale * loss_of_all(x, w))(x)
        return float(ops.sum(ops.abs(ops.cast(found, "float32"))))

    assert abs(total(1.0035) / total(1.0) - 1.0035) < 1e-3


@pytest.mark.slow_on("jax")
def test_second_derivatives_with_infinite_logits():
    mask = array([-np.inf] * 3 + [0.0, 1.0, 2.0, 3.0])
    x, y = MANY["features"], 3 + LABELS % 4

    def second(loss):
        def steep(w):
            return ops.sum(ops.square(grad(lambda w: ops.log(loss(w)))(w)))

        return grad(steep)(MANY["kernel"])

    got = second(lambda w: linear_cross_entropy(x, w, y, mask, reduction="mean", block_size=3))
    # The masked classes have no influence.
    left = second(
        lambda w: linear_cross_entropy(x, w[:, 3:], y - 3, mask[3:], reduction="mean", block_size=4)
    )
    close(got, left, 1e-4)


@pytest.mark.slow_on("jax")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_tokens_and_no_weights_in_a_reduced_loss(reduction):
    def loss(x, w, weights):
        return linear_cross_entropy(
            x, w, LABELS[: len(x)], sample_weight=weights, reduction=reduction, block_size=3
        )

    for count in (0, COUNT):
        x, weights = MANY["features"][:count], 0.0 * MANY["sample_weight"][:count]
        close(loss(x, MANY["kernel"], weights), array(0.0))
        found = grad(loss, argnums=(0, 1))(x, MANY["kernel"], weights)
        close(list(found), [0.0 * x, 0.0 * MANY["kernel"]])


@pytest.mark.slow_on("jax")
def test_vmap_over_a_batch():
    """With the backend's own map over a leading axis."""
    x, w, y, _ = arguments()
    for own in (
        lambda x, y: ops.sum(linear_cross_entropy(x, w, y, block_size=3)),
        lambda x, y: linear_cross_entropy(x, w, y, block_size=3, reduction="sum"),
    ):
        close(mapped_grad(own)(x, y), grad(lambda x: ops.sum(plain(x, w, y)))(x))


def padded(reduction, sample_weight=None):
    """Return the loss of the tokens that are not padding, in plain code."""
    labels, kept = np.where(PADDED == -100, 0, PADDED), array((PADDED != -100).astype("float32"))
    weights = kept if sample_weight is None else kept * sample_weight

    def loss(x, w, b):
        losses = weights * plain(x, w, array(labels, dtype="int32"), b)
        by = {"sum": 1.0, "mean": ops.sum(kept), "mean_with_sample_weight": ops.sum(weights)}
        return losses if reduction is None else ops.sum(losses) / by[reduction]

    return loss


PADDED = np.array([[0, -100, 3], [-100, 2, 5]])


@pytest.mark.parametrize("labels", [PADDED.astype("int32"), PADDED.astype("float32")])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [None, "sum", "mean", "mean_with_sample_weight"])
def test_padding_is_ignored(reduction, weighted, labels):
    x, w, _, b = arguments()
    sample_weight = ops.abs(WEIGHTS) if weighted else None

    def loss(x, w, b):
        options = {"sample_weight": sample_weight, "reduction": reduction, "ignore_index": -100}
        return linear_cross_entropy(x, w, array(labels, dtype=labels.dtype.name), b, **options)

    wanted = padded(reduction, sample_weight)
    close(loss(x, w, b), wanted(x, w, b))
    for wrap in (lambda f: f, compiled):
        got, plainly = [
            wrap(grad(lambda *args, f=f: ops.sum(f(*args)), argnums=(0, 1, 2)))(x, w, b)
            for f in (loss, wanted)
        ]
        close(got, plainly)
    close(got[0][0, 1], array(np.zeros(4)))


def test_the_mean_of_padding_only_is_zero():
    x, w, _, b = arguments()

    def loss(w):
        y = array(np.full((2, 3), -100), dtype="int32")
        return linear_cross_entropy(x, w, y, b, reduction="mean", ignore_index=-100)

    close(loss(w), array(0.0))
    close(grad(loss)(w), array(np.zeros((4, 7))))


def test_labels_that_are_not_whole_numbers_raise():
    x, w, _, _ = arguments()
    y = array(Y + 0.5)
    with pytest.raises(TypeError, match="labels cannot be used") as error:
        linear_cross_entropy(x, w, y)
    assert "whole numbers" in str(error.value)
    if BACKEND != "torch":  # PyTorch runs the function uncompiled
        assert np.isnan(numpy(compiled(linear_cross_entropy)(x, w, y))).all()


def test_labels_that_are_not_ignored_are_checked():
    x, w, _, _ = arguments()
    with pytest.raises(ValueError, match="a label is out of range") as error:
        linear_cross_entropy(x, w, array(PADDED, dtype="int32"))
    assert "pass ignore_index=-100" in str(error.value)
    with pytest.raises(ValueError, match="a label is out of range"):
        linear_cross_entropy(x, w, array(PADDED, dtype="int32"), ignore_index=-1)
    with pytest.raises(TypeError, match="ignore_index cannot be used"):
        linear_cross_entropy(x, w, array(PADDED, dtype="int32"), ignore_index=0.5)
    unsigned = array(np.where(PADDED == -100, 255, PADDED), dtype="uint8")
    close(
        linear_cross_entropy(x, w, unsigned, ignore_index=255),
        linear_cross_entropy(x, w, array(PADDED, dtype="int32"), ignore_index=-100),
    )


class TiedLoss(keras.losses.Loss):
    """A loss with the embedding of the model as its kernel. Keras passes the labels in float32."""

    def __init__(self, embedding, function):
        super().__init__(reduction="sum")
        self.embedding, self.function = embedding, function

    def call(self, labels, features):
        assert keras.backend.standardize_dtype(labels.dtype) == "float32"
        return self.function(features, ops.transpose(self.embedding.embeddings), labels)


@pytest.mark.parametrize("eager", [True, False])
def test_a_keras_loss_with_padding_in_fit(eager):
    def fitted(function):
        keras.utils.set_random_seed(0)
        embedding = keras.layers.Embedding(7, 4)
        model = keras.Sequential([keras.Input((3,)), embedding, keras.layers.Dense(4)])
        model.compile(keras.optimizers.SGD(0.5), TiedLoss(embedding, function), run_eagerly=eager)
        # JAX 0.12 warns about int64.
        tokens, labels = np.array([[1, 2, 0], [0, 5, 6]], "int32"), np.asarray(PADDED, "int32")
        model.fit(tokens, labels, batch_size=2, epochs=2, verbose=0)
        return model.get_weights()

    def in_blocks(features, kernel, labels):
        return linear_cross_entropy(features, kernel, labels, reduction="mean", ignore_index=-100)

    def plainly(features, kernel, labels):
        kept = ops.cast(labels != -100.0, "float32")
        losses = plain(features, kernel, ops.where(labels == -100.0, 0.0, labels))
        return ops.sum(kept * losses) / ops.sum(kept)

    close(fitted(in_blocks), fitted(plainly))


# ------------------------------------------------------------------------------- options of the loss

OPTIONS = [
    {"label_smoothing": 0.1},
    {"logit_softcap": 2.0},
    {"z_loss": 0.2},
    {"label_smoothing": 0.3, "logit_softcap": 3.0, "z_loss": 0.1},
]


def plain_with_options(x, w, b, weights, by_class, label_smoothing=0.0, logit_softcap=None, z_loss=0.0):
    """Return the weighted loss of each token and its weight, by operations of Keras."""
    logits = x @ w + b
    logits = logits if logit_softcap is None else logit_softcap * ops.tanh(logits / logit_softcap)
    normalizer = ops.logsumexp(logits, axis=-1)
    hot = ops.cast(ops.one_hot(array(Y, dtype="int32"), 7), x.dtype)
    target = (1.0 - label_smoothing) * hot + label_smoothing / 7
    losses = normalizer - ops.sum(target * logits, axis=-1) + z_loss * normalizer**2
    weights = weights * ops.sum(hot * by_class, axis=-1)
    return losses * weights, weights


def with_options(reduction, options):
    """Return the op and plain code, as functions of the features, kernel, bias and weights."""

    def own(x, w, b, weights, by_class):
        given = {"sample_weight": weights, "class_weight": by_class, "block_size": 4}
        loss = linear_cross_entropy(x, w, Y, b, reduction=reduction, **given, **options)
        return ops.sum(WEIGHTS * loss) if reduction is None else loss

    def wanted(*args):
        losses, weights = plain_with_options(*args, **options)
        if reduction is None:
            return ops.sum(WEIGHTS * losses)
        return ops.sum(losses) / {"sum": 1.0, "mean": 6.0}.get(reduction, ops.sum(weights))

    return own, wanted


ALL = tuple(range(5))
TENSORS = (
    array(X), array(W), array(B), array(RANDOM.random((2, 3)) + 0.5), array(RANDOM.random(7) + 0.5)
)  # fmt: skip


def first(f):
    return grad(f, argnums=ALL)


def second(f):
    def steep(*args):  # the square makes the upstream gradient of the op depend on the tensors
        gradients = grad(lambda *args: f(*args) ** 2, argnums=ALL)(*args)
        return sum(ops.sum(ops.sin(gradient)) for gradient in gradients)

    return grad(steep, argnums=ALL)


def forward(f):
    return lambda *args: jvp(f, args, tuple(ops.cos(x) for x in args))[1]


@pytest.mark.parametrize("derivative", [first, second, forward])
@pytest.mark.parametrize("run_by", [eager, compiled])
@pytest.mark.parametrize("reduction", [None, "sum", "mean", "mean_with_sample_weight"])
@pytest.mark.parametrize("options", OPTIONS)
def test_derivatives_with_options(derivative, run_by, reduction, options):
    own, wanted = with_options(reduction, options)
    close(own(*TENSORS), wanted(*TENSORS), 1e-5)
    got, wanted = run_by(derivative(own))(*TENSORS), derivative(wanted)(*TENSORS)
    for a, b in zip(tree.flatten(got), tree.flatten(wanted), strict=True):
        # A small element of a tensor has the rounding errors of its largest terms.
        size = np.max(np.abs(numpy(b)), initial=1e-3)
        for scale, tolerance in ((size, 1e-4), (max(1.0, size / 20), 1e-3)):
            close(a / scale, b / scale, tolerance)


@pytest.mark.slow_on("jax", "tensorflow")
@DIFFERENCES
def test_differences_with_options(extent):
    own, _ = with_options("mean", OPTIONS[3])
    arrays = X, W, B, RANDOM.random((2, 3)) + 0.5, RANDOM.random(7) + 0.5
    assert check_gradients(own, *arrays, **extent).precision == "float64"


@pytest.mark.parametrize("reduction", [None, "sum"])
def test_the_gradients_of_an_invalid_label_are_nan_in_compiled_code(reduction, monkeypatch):
    monkeypatch.setattr(backend.active, "concrete", lambda tensor: None)  # as in compiled code
    labels = array(np.where(Y == 6, 7, Y), dtype="int32")

    def loss(x):
        return ops.sum(linear_cross_entropy(x, array(W), labels, reduction=reduction))

    found = numpy(grad(loss)(array(X)))
    assert np.isnan(found[0, 1]).all()
    assert np.isfinite(found[1]).all()

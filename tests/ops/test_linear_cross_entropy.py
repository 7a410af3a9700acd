"""The cross entropy of a large vocabulary: against plain code, and without a tensor of all logits."""

import functools

import keras
import numpy as np
import pytest
from keras import ops, tree
from support import BACKEND, array, close, compiled, numpy, sizes_made

from multigrad import backend, grad, jvp
from multigrad.ops import linear_cross_entropy
from multigrad.testing import check_gradients

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 3, 4))
W = RANDOM.standard_normal((4, 7))
B = RANDOM.standard_normal(7)
Y = np.array([[0, 6, 3], [2, 2, 5]])
PADDED = np.array([[0, -100, 3], [-100, 2, 5]], "int32")
ARRAYS = {
    "features": X,
    "kernel": W,
    "bias": B,
    "sample_weight": RANDOM.random((2, 3)) + 0.5,
    "class_weight": RANDOM.random(7) + 0.5,
}
TENSORS = {name: array(value) for name, value in ARRAYS.items()}
OF_LOSSES = array(RANDOM.standard_normal((2, 3)))  # the upstream gradient

# How many of the tensors are given, and the options.
CASES = {
    "features and kernel": (2, {}),
    "bias": (3, {}),
    "weights of tokens": (4, {}),
    "padding": (3, {"labels": PADDED, "ignore_index": -100}),
    "padding in floats": (4, {"labels": array(PADDED), "ignore_index": -100}),
    "label smoothing": (5, {"label_smoothing": 0.1}),
    "soft cap": (5, {"logit_softcap": 2.0}),
    "z loss": (5, {"z_loss": 0.2}),
    "all options": (5, {"label_smoothing": 0.3, "logit_softcap": 3.0, "z_loss": 0.1}),
}
REDUCTIONS = [None, "sum", "mean", "mean_with_sample_weight"]
each_case = pytest.mark.parametrize("name", CASES)
each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


def plain(
    features, kernel, bias=0.0, sample_weight=1.0, class_weight=None, labels=Y, reduction=None,
    ignore_index=None, label_smoothing=0.0, logit_softcap=None, z_loss=0.0,
):  # fmt: skip
    """Return the loss by operations of Keras."""
    logits = ops.matmul(features, kernel) + bias
    logits = logits if logit_softcap is None else logit_softcap * ops.tanh(logits / logit_softcap)
    kept = numpy(labels) != ignore_index
    hot = ops.one_hot(array(np.where(kept, numpy(labels), 0), dtype="int32"), kernel.shape[1])
    target = (1.0 - label_smoothing) * hot + label_smoothing / kernel.shape[1]
    normalizer = ops.logsumexp(logits, axis=-1)
    losses = normalizer - ops.sum(target * logits, axis=-1) + z_loss * normalizer**2
    kept = array(kept * 1.0)
    by_class = 1.0 if class_weight is None else ops.sum(hot * class_weight, axis=-1)
    weights = kept * sample_weight * by_class
    if reduction in (None, "none"):
        return losses * weights
    by = {"sum": 1.0, "mean_with_sample_weight": ops.sum(weights)}
    return ops.sum(losses * weights) / by.get(reduction, ops.sum(kept))


def pair(name, reduction, size=4):
    """Return the op and plain code, as functions of the tensors of a case, and these."""
    count, options = CASES[name]
    given = {"labels": Y, "reduction": reduction} | options
    own, wanted = [
        lambda *tensors, loss=loss: loss(**dict(zip(TENSORS, tensors, strict=False)), **given)
        for loss in (functools.partial(linear_cross_entropy, block_size=size), plain)
    ]
    return own, wanted, [*TENSORS.values()][:count]


def scalar(loss):
    """Return a scalar of a loss, whose derivative with respect to the loss is not 1."""
    return lambda *tensors: ops.sum(OF_LOSSES * loss(*tensors))


def nearly(got, wanted):
    for a, b in zip(tree.flatten(got), tree.flatten(wanted), strict=True):
        # A small element of a tensor has the rounding errors of its largest terms.
        size = np.max(np.abs(numpy(b)), initial=1e-3)
        for scale, tolerance in ((size, 1e-4), (max(1.0, size / 20), 1e-3)):
            close(a / scale, b / scale, tolerance)


def first(f):
    return lambda *tensors: grad(f, argnums=tuple(range(len(tensors))))(*tensors)


def of_slopes(f):
    return lambda *tensors: sum(ops.sum(ops.sin(slope)) for slope in first(f)(*tensors))


def along(f):
    return lambda *tensors: jvp(f, tensors, tuple(ops.cos(x) for x in tensors))[1]


HIGHER = {
    "forward": along,
    "reverse over reverse": lambda f: first(of_slopes(f)),
    "forward over reverse": lambda f: along(of_slopes(f)),
    "reverse over forward": lambda f: first(along(f)),
}

# --------------------------------------------------------------------- values and derivatives


@pytest.mark.forward
@each_case
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "none", "sum_over_batch_size"])
def test_the_loss(name, reduction):
    own, wanted, tensors = pair(name, reduction)
    close(own(*tensors), wanted(*tensors))


@pytest.mark.parametrize("size", [1, 3, 7, 100, None])
@each_reduction
def test_blocks_of_any_size(size, reduction):
    """The bias is so large that its exponential overflows."""
    own, wanted, (x, w, b, weights) = pair("weights of tokens", reduction, size)
    tensors = x, w, b + 100.0, weights
    nearly(own(*tensors), wanted(*tensors))
    nearly(first(scalar(own))(*tensors), first(scalar(wanted))(*tensors))


@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
@each_case
@each_reduction
def test_gradients(name, reduction, wrap):
    own, wanted, tensors = pair(name, reduction)
    nearly(wrap(first(scalar(own)))(*tensors), first(scalar(wanted))(*tensors))


@pytest.mark.slow_on("jax")
@pytest.mark.parametrize("derivative", HIGHER)
@pytest.mark.parametrize("name", ["bias", "all options"])
@each_reduction
def test_higher_derivatives(name, reduction, derivative):
    own, wanted, tensors = pair(name, reduction)
    # The square makes the upstream gradient of the op depend on the tensors.
    own, wanted = [HIGHER[derivative](lambda *args, f=f: scalar(f)(*args) ** 2) for f in (own, wanted)]
    nearly(own(*tensors), wanted(*tensors))


@pytest.mark.parametrize("derivative", HIGHER)
def test_compiled_higher_derivatives(derivative):
    own, wanted, tensors = pair("all options", "mean")
    own, wanted = [HIGHER[derivative](scalar(f)) for f in (own, wanted)]
    nearly(compiled(own)(*tensors), wanted(*tensors))


@pytest.mark.slow_on("jax", "tensorflow")
@pytest.mark.parametrize(
    "extent",
    [
        pytest.param({"max_elements": 3, "compiled": False}, id="a few"),
        pytest.param({"order": 2}, id="second order", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["bias", "all options"])
def test_differences(name, extent):
    own, _, tensors = pair(name, "mean")
    arrays = [*ARRAYS.values()][: len(tensors)]
    assert check_gradients(own, *arrays, **extent).precision == "float64"


@pytest.mark.forward
def test_a_mask_is_a_sample_weight():
    x, w = TENSORS["features"], TENSORS["kernel"]
    got = linear_cross_entropy(x, w, Y, sample_weight=Y != 2)
    close(got, linear_cross_entropy(x, w, Y) * array((Y != 2) * 1.0))


@pytest.mark.slow_on("jax")
@pytest.mark.parametrize("reduction", ["sum", "mean", "sum_over_batch_size", "mean_with_sample_weight"])
@pytest.mark.parametrize("nothing", ["tokens", "weights", "labels"])
def test_a_loss_of_nothing_is_zero(nothing, reduction):
    """There are no tokens, all weights are zero, or all labels are padding."""
    count = 0 if nothing == "tokens" else 2
    x, w, weights = TENSORS["features"][:count], TENSORS["kernel"], TENSORS["sample_weight"][:count]
    weights = 0.0 * weights if nothing == "weights" else weights
    labels = np.full((count, 3), -100) if nothing == "labels" else Y[:count]

    def loss(x, w):
        options = {"sample_weight": weights, "reduction": reduction, "ignore_index": -100, "block_size": 4}
        return linear_cross_entropy(x, w, labels, **options)

    close(loss(x, w), array(0.0))
    close(first(loss)(x, w), (0.0 * x, 0.0 * w))


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("reduction", [None, "sum", "mean_with_sample_weight"])
@pytest.mark.parametrize("run_by", [lambda f: f, compiled])
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


@pytest.mark.parametrize("seen", [(), (3,), (2, 3)])
def test_unexpected_gradients_are_right(monkeypatch, seen):
    """The kernel and bias are two tensors, and three with the features."""

    def expected(tensors=None):
        return tensors is None or len(tensors) in seen

    monkeypatch.setattr(backend.active, "may_record", expected)
    own, wanted, tensors = pair("bias", "mean")
    nearly(first(own)(*tensors), first(wanted)(*tensors))


@pytest.mark.slow_on("jax")
def test_second_derivatives_with_infinite_logits():
    mask = array([-np.inf] * 3 + [0.0, 1.0, 2.0, 3.0])
    x, y = TENSORS["features"], 3 + Y % 4

    def second(loss):
        def steep(w):
            return ops.sum(ops.square(grad(lambda w: ops.log(loss(w)))(w)))

        return grad(steep)(TENSORS["kernel"])

    got = second(lambda w: linear_cross_entropy(x, w, y, mask, reduction="mean", block_size=4))
    # The masked classes have no influence.
    left = second(
        lambda w: linear_cross_entropy(x, w[:, 3:], y - 3, mask[3:], reduction="mean", block_size=4)
    )
    close(got, left, 1e-4)


# ------------------------------------------------------------------------------- dtypes


@pytest.mark.slow_on("jax")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("reduction", [None, "mean"])
def test_dtypes(dtype, reduction):
    if (BACKEND, dtype) == ("jax", "float64"):
        pytest.skip("JAX has float64 only in a separate mode, in which test_differences runs")
    own, wanted, tensors = pair("bias", reduction)
    cast = [ops.cast(x, dtype) for x in tensors]
    wide = "float64" if dtype == "float64" else "float32"
    assert keras.backend.standardize_dtype(own(*cast).dtype) == wide
    got = first(lambda *args: ops.mean(own(*args)))(*cast)
    assert {keras.backend.standardize_dtype(g.dtype) for g in got} == {dtype}
    right = first(lambda *args: ops.mean(wanted(*args)))(*tensors)
    close([ops.cast(g, "float32") for g in got], list(right), 5e-3 if "16" in dtype else 1e-5)


@pytest.mark.slow_on("jax")
@pytest.mark.parametrize("narrow", [(0, 1, 2), (0,), (1,), (2,)], ids=str)
def test_a_scaled_loss_in_half_precision(narrow):
    """Loss scaling is needed, because the gradient of one token underflows float16."""
    own, wanted, (*tensors, weights) = pair("weights of tokens", "sum")
    cast = [ops.cast(x, "float16") if i in narrow else x for i, x in enumerate(tensors)]
    got, right = [
        first(lambda *args, f=f: 1e6 * f(*args, 1e-6 * weights))(*given)
        for f, given in ((own, cast), (wanted, tensors))
    ]
    for a, b in zip(got, right, strict=True):
        close(ops.cast(a, "float32") / ops.max(ops.abs(b)), b / ops.max(ops.abs(b)), 1e-2)


@pytest.mark.slow_on("jax")
def test_the_upstream_gradient_is_not_rounded():
    """In bfloat16 the upstream gradient would be rounded to one."""
    x, w = [
        ops.cast(RANDOM.standard_normal(shape).astype("float32"), "bfloat16") for shape in ((150, 4), (4, 7))
    ]
    y = np.arange(150) % 7

    def total(scale):
        found = grad(lambda x: scale * linear_cross_entropy(x, w, y, reduction="mean", block_size=3))(x)
        return float(ops.sum(ops.abs(ops.cast(found, "float32"))))

    assert abs(total(1.0035) / total(1.0) - 1.0035) < 1e-3


# ------------------------------------------------------------------------------- labels and arguments

INVALID = [7, -1, 2**32 + 1, -(2**32) + 1, 2**62, 2**63 - 1, -(2**31), 0.5, 7.0, 2.0**32, -(2.0**40), 1e20]


def labels_with(label):
    return np.where(Y == 6, label, Y).astype("int64" if type(label) is int else "float32")


@pytest.mark.parametrize("label", INVALID)
def test_an_invalid_label_raises(label):
    with pytest.raises((ValueError, TypeError), match=r"a label is out of range|labels cannot be used"):
        linear_cross_entropy(array(X), array(W), labels_with(label))


@pytest.mark.parametrize("reduction", [None, "sum"])
@pytest.mark.parametrize("label", INVALID)
def test_the_loss_of_an_invalid_label_without_a_value_is_nan(label, reduction, monkeypatch):
    """So is the gradient of its token."""
    if BACKEND == "jax" and type(label) is int and not -(2**31) < label < 2**31:
        pytest.skip("JAX without x64 truncates labels to 32 bits before the op")
    monkeypatch.setattr(backend.active, "concrete", lambda tensor: None)  # as in compiled code
    labels = labels_with(label)
    labels = array(labels, dtype=labels.dtype.name)

    def loss(x):
        return linear_cross_entropy(x, array(W), labels, reduction=reduction)

    losses, found = numpy(loss(array(X))), numpy(grad(lambda x: ops.sum(loss(x)))(array(X)))
    assert np.isnan(losses if reduction else losses[0, 1])
    assert np.isnan(found[0, 1]).all()
    assert np.isfinite(found[1]).all()


@pytest.mark.skipif(BACKEND == "torch", reason="`compiled` runs it uncompiled, where the label raises")
@pytest.mark.parametrize("labels", [array(Y + 2, dtype="int32"), array(Y + 0.5)], ids=["large", "not whole"])
def test_the_loss_of_an_invalid_label_is_nan_in_compiled_code(labels):
    found = compiled(lambda y: linear_cross_entropy(array(X), array(W), y, block_size=3))(labels)
    assert np.isnan(numpy(found)).sum() == (2 if "int" in str(labels.dtype) else 6)


def test_labels_that_are_not_ignored_are_checked():
    x, w = array(X), array(W)
    with pytest.raises(ValueError, match=r"a label is out of range(.|\n)*pass ignore_index=-100"):
        linear_cross_entropy(x, w, PADDED)
    with pytest.raises(ValueError, match="a label is out of range"):
        linear_cross_entropy(x, w, PADDED, ignore_index=-1)
    unsigned = array(np.where(PADDED == -100, 255, PADDED), dtype="uint8")
    wanted = linear_cross_entropy(x, w, PADDED, ignore_index=-100)
    close(linear_cross_entropy(x, w, unsigned, ignore_index=255), wanted)


# ------------------------------------------------------------------------------- costs


@pytest.mark.parametrize("reduction", [None, "mean"])
def test_no_tensor_has_the_size_of_all_logits(reduction):
    x, w, y = ops.ones((256, 2)), ops.ones((2, 40)), ops.zeros((256,), "int32")

    def largest(loss):
        return max(sizes_made(grad(lambda x, w: ops.sum(loss(x, w, labels=y)), argnums=(0, 1)), x, w))

    assert largest(plain) >= 256 * 40
    in_blocks = functools.partial(linear_cross_entropy, block_size=64, reduction=reduction)
    assert largest(in_blocks) <= 64 * 40

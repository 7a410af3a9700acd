"""Ops on KerasTensors: each is one node of a Functional model, which trains by the rule."""

import enum
from collections import OrderedDict, namedtuple

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, DIFFERENTIATES, FIT_MODES, array, close, is_keras_at_least, numpy

from multigrad import grad, op_custom_gradient

ONES = np.ones((2, 3), "float32")
Point = namedtuple("Point", "x y")


class Mode(enum.Enum):
    DOUBLE = 2.0


@op_custom_gradient
def double(x):
    return x * 2.0, lambda u: u * -3.0


@op_custom_gradient
def add(*parts, **named):
    leaves = keras.tree.flatten((parts, named))
    tensors = [leaf for leaf in leaves if ops.is_tensor(leaf)]
    return sum(tensors[1:], tensors[0]), lambda *us: None


def nodes(model):
    return [operation for operation in model.operations if not isinstance(operation, keras.layers.Layer)]


def symbols(*shapes):
    return [keras.Input(shape) for shape in shapes]


CALLS = [
    lambda op, x, y: op(x, y),
    lambda op, x, y: op(x, x, y),
    lambda op, x, y: op([x, (y, 2.5)], "mode"),
    lambda op, x, y: op(tree={"b": [x], "a": {"c": y, "n": None}}, mode=Mode.DOUBLE),
    lambda op, x, y: op(Point(x, 1), OrderedDict(b=y, a=[0.5, 0.25])),
    lambda op, x, y: op(None, 3, x, key=y, shape=(2, 3), flag=True),
    lambda op, x, y: op(x, array(10.0, 20.0, 30.0), np.float32([1, 2, 3]), y=y),
    lambda op, x, y: op((), {}, x, [[], ("a", y)], ops.exp),
]


@pytest.mark.forward
@pytest.mark.parametrize("call", CALLS)
def test_the_function_gets_the_same_arguments_as_in_a_direct_call(call):
    seen = []

    def note(leaf):  # the values show in the output, because a tracer of JAX must not be kept
        return (type(leaf).__name__, leaf.shape, leaf.dtype) if ops.is_tensor(leaf) else leaf

    @op_custom_gradient
    def op(*args, **kwargs):
        seen.append(keras.tree.map_structure(note, (args, kwargs)))
        return add(*args, **kwargs), lambda u: None

    x, y = symbols((3,), (3,))
    model = keras.Model([x, y], call(op, x, y))
    assert len(nodes(model)) == 1
    given = array(ONES), array(7 * ONES)
    close(model(given), call(op, *given))
    through_model, directly = seen[-2:]
    keras.tree.assert_same_structure(through_model, directly)
    assert repr(through_model) == repr(directly)


@pytest.mark.forward
def test_the_output_spec():
    @op_custom_gradient
    def op(x, axis, *, dtype):
        total = ops.sum(x, axis=axis)
        return {"sum": total, "rest": [ops.cast(x, dtype), (5, "text", None)]}, lambda U: None

    x = keras.Input((None, 4))
    output = op(x, -1, dtype="int32")
    assert output["sum"].shape == (None, None)
    assert output["sum"].dtype == "float32"
    assert output["rest"][0].shape == (None, None, 4)
    assert output["rest"][0].dtype == "int32"
    assert output["rest"][1] == (5, "text", None)
    model = keras.Model(x, [output["rest"][0], output["sum"]])
    close(model(np.ones((2, 3, 4), "float32")), [array(np.ones((2, 3, 4)), dtype="int32"), array(4 * ONES)])


@pytest.mark.forward
def test_an_output_without_tensors():
    assert op_custom_gradient(lambda x: (("text", 5), lambda u: None))(keras.Input((3,))) == ("text", 5)


def step(model, **mode):
    """Return the kernel after one step of size 1 on the mean output, from ones, with inputs 1 and 3."""
    model.compile(keras.optimizers.SGD(1.0), loss=lambda wanted, got: ops.mean(got, axis=-1), **mode)
    x = np.float32([[1.0], [3.0]])
    model.fit(x, x, batch_size=2, epochs=1, verbose=0)
    return float(numpy(model.trainable_variables[0]).item())


def dense():
    return keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # of PyTorch 2.13 itself
@pytest.mark.parametrize("mode", FIT_MODES)
def test_the_model_trains_by_the_rule(mode):
    x = keras.Input((1,))
    # The mean of x is 2. Plain autodiff would give 1 - 2 * 2.
    assert step(keras.Model(x, double(dense()(x))), **mode) == 1 + 3 * 2


@op_custom_gradient
def nested(x):
    return double(x) * 5.0, lambda u: grad(double)(0.0) * u * 7.0


def in_a_model(x):
    y = keras.Input((1,))
    return double(keras.Model(y, double(dense()(y)))(x))


class Doubling(keras.layers.Layer):
    def call(self, x):
        return double(x)


# A function of the input, the kernel after a step, and the number of nodes.
MODELS = {
    "an op that uses an op": (lambda x: nested(dense()(x)), 1 + 21 * 2, 1),
    "a chain": (lambda x: double(double(dense()(x))), 1 - 9 * 2, 2),
    "a model in a model": (in_a_model, 1 - 9 * 2, 1),
    "an activation": (lambda x: keras.layers.Activation(double)(dense()(x)), 1 + 3 * 2, 0),
    "a layer that calls the op": (lambda x: Doubling()(dense()(x)), 1 + 3 * 2, 0),
}


@pytest.mark.parametrize("name", MODELS)
def test_nodes_and_training(name):
    function, kernel, count = MODELS[name]
    x = keras.Input((1,))
    model = keras.Model(x, function(x))
    assert len(nodes(model)) == count
    assert step(model) == kernel


@pytest.mark.forward
def test_a_clone():
    def of(x):
        return keras.Model(x, double(add(x, object(), mode=Mode.DOUBLE)))

    model = of(keras.Input((3,)))
    clone = keras.models.clone_model(model)
    assert [node.name for node in nodes(clone)] == [node.name for node in nodes(model)]
    assert not set(nodes(clone)) & set(nodes(model))
    close(clone(ONES), array(2 * ONES))


def test_a_clone_trains_by_the_rule():
    x = keras.Input((1,))
    assert step(keras.models.clone_model(keras.Model(x, double(dense()(x))))) == 1 + 3 * 2


@pytest.mark.forward
def test_node_names_are_unique_and_contain_the_op():
    keras.utils.clear_session()

    def named(name):
        return op_custom_gradient(lambda x: (x * 2.0, lambda u: u * 7.0), name=name)

    x = y = keras.Input((3,))
    for name in ("scale", "scale", "scale_1", "scale", "3 bits/x", ">", "scale_1"):
        y = named(name)(y) if name != ">" else double(y)
    model = keras.Model(x, y)  # raises if names are not unique
    got = [node.name for node in nodes(model)]
    assert got == ["scale", "scale_1", "scale_1_1", "scale_2", "3_bits_x", "double", "scale_1_2"]


@pytest.mark.parametrize("scope", [{"mode": "full"}, {"mode": "larger_than", "output_size_threshold": 0}])
def test_rematerialization(scope):
    """The op gets keyword arguments and structures. The node gets flat, positional tensors."""
    runs = []

    @op_custom_gradient
    def op(x, *, extra, mode):
        runs.append(mode)
        return {"y": x * 2.0 + extra[0]}, lambda U: {"x": U["y"] * -3.0, "extra": [None]}

    x = keras.Input((1,))
    # Outside of the scope: when TensorFlow compiles it, Keras (3.15) passes a layer in it an extra keyword.
    z = dense()(x)
    with keras.RematScope(**scope):
        y = op(z, extra=[x], mode="some")["y"]
    del runs[:]
    assert step(keras.Model(x, y)) == 1 + 3 * 2
    if BACKEND != "tensorflow" or is_keras_at_least("3.15"):  # older ones only run layers again
        assert len(runs) >= 2
    assert set(runs) == {"some"}


def test_a_variable_as_an_argument():
    w = keras.Variable(np.float32([1.0, 2.0, 3.0]))
    op = op_custom_gradient(lambda x, w: (x * w, lambda u: (u * 7.0, u * 11.0)))
    x = keras.Input((3,))
    model = keras.Model(x, op(x, w))
    close(model(ONES[:1]), array([[1.0, 2.0, 3.0]]))
    w.assign([5.0, 5.0, 5.0])
    close(model(ONES[:1]), array([[5.0, 5.0, 5.0]]))
    close(grad(lambda x: ops.sum(model(x)))(ONES), array(7.0 * ONES))


@op_custom_gradient
def sevenfold(x):
    return ops.sin(x), lambda u: u * 7.0


class SevenfoldModel(keras.Model):
    def call(self, x):
        return sevenfold(x) + 0.0 * sevenfold({"nested": [x]}["nested"][0])


PRODUCTS = {
    "number": lambda x: 2.0 * x,
    "array": lambda x: x * np.float32([2.0, 2.0, 2.0]),
    "tensor": lambda x: x * array(2.0, 2.0, 2.0),
    "Variable": lambda x: x * keras.Variable(np.float32([2.0, 2.0, 2.0])),
    "reshaped": lambda x: ops.reshape(2.0 * x, (-1, 3)),
    "negative": lambda x: -(-2.0 * x),
}


@pytest.mark.forward
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    "inside", [lambda: sevenfold, lambda: keras.layers.Lambda(sevenfold), SevenfoldModel]
)
def test_an_op_after_a_product(product, inside):
    """Keras (3.15) reports that a product of a KerasTensor is sparse."""
    x = keras.Input((3,))
    model = keras.Model(x, inside()(PRODUCTS[product](x)))
    assert not model.output.sparse
    close(model(ONES), array(np.sin(2.0 * ONES)))
    if DIFFERENTIATES:
        close(grad(lambda x: ops.sum(model(x)))(ONES), array(14.0 * ONES))


def other(u):
    return u * 7.0, u * -3.0


DEFAULTS = [
    lambda k: lambda x, k=k: (x + k, other),
    lambda k: lambda x, *, k=k: (x + k, other),
    lambda k: lambda x, n=1.0, k=k, /: (x * n + k, other),
    lambda k: lambda x, n=1.0, ks=({"k": [k]},), **rest: (x * n + ks[0]["k"][0], other),
]


@pytest.mark.forward
@pytest.mark.parametrize("define", DEFAULTS)
def test_a_symbolic_tensor_as_a_default(define):
    x, k = symbols((3,), (3,))
    op = op_custom_gradient(define(k))
    model = keras.Model([x, k], op(x))
    assert len(nodes(model)) == 1
    close(model([ONES, 5 * ONES]), array(6 * ONES))
    close(keras.Model(k, op(array(ONES[:1])))(5 * ONES), array(6 * ONES))
    if DIFFERENTIATES:
        gradients = grad(lambda x, k: ops.sum(model([x, k])), argnums=(0, 1))(ONES, 5 * ONES)
        close(gradients, (array(7 * ONES), array(-3 * ONES)))


@pytest.mark.forward
def test_defaults_are_not_saved():
    """All are saved if one is symbolic. Otherwise the defaults of the op apply, also after loading."""
    op = op_custom_gradient(lambda x, n=2.0: (x * n, lambda u: u * 7.0), name="symbolic>defaults")
    (node,) = nodes(keras.Model(x := keras.Input((3,)), op(x)))
    assert node.application.get_config() == {
        "call": {"op": "symbolic>defaults", "args": [{"input": 0}], "kwargs": {}}
    }


@pytest.mark.forward
def test_closed_over_symbolic_tensors():
    x = keras.Input((3,))
    op = op_custom_gradient(lambda y: (x * y, lambda u: u), name="op")
    for argument in (array(1.0), keras.Input((3,))):
        with pytest.raises(TypeError, match="op: the function uses a symbolic tensor") as error:
            op(argument)
        assert "argument: the output" in str(error.value)


@pytest.mark.forward
def test_symbolic_tensors_in_a_container_of_an_unknown_class():
    class Unregistered(dict):
        pass

    x = keras.Input((3,))
    op = op_custom_gradient(lambda d, *y: (d["w"] * 2.0, lambda u: None), name="op")
    for rest in ((), (x,)):
        with pytest.raises(TypeError, match="object of an unknown class"):
            op(Unregistered(w=x), *rest)


def weighed(weight):
    @op_custom_gradient
    def op(x):
        return x * weight, lambda u, variables: (u * 5.0, [ops.reshape(-3.0 * ops.sum(u * x), (1, 1))])

    return op


def weighed_method(weight):
    class Weighed:
        @op_custom_gradient
        def op(self, x):
            return x * weight, lambda u, variables: (u * 5.0, [u * 3.0])

    return Weighed().op


def weighed_argument(weight):
    op = op_custom_gradient(lambda x, w: (x * w, lambda u: (u * 5.0, u * 3.0)))
    return lambda x: op(x, weight)


@pytest.mark.parametrize("mode", FIT_MODES[:2])
def test_a_weight_that_the_function_reads(mode):
    """If the model contains the weight, `fit` trains it by the gradient that the rule returns for it."""
    layer, x = dense(), keras.Input((1,))
    layer.build((None, 1))
    model = keras.Model(x, weighed(layer.kernel)(x) + 0.0 * layer(x))
    # The mean of x is 2, and the output of the layer has no influence.
    assert step(model, **mode) == 1 + 3 * 2


@pytest.mark.parametrize("mode", FIT_MODES[:2])
@pytest.mark.parametrize("make", [weighed, weighed_method, weighed_argument])
def test_a_weight_that_no_layer_of_the_model_owns_raises_in_fit(make, mode):
    weight = keras.Variable([[2.0]], name="factor")
    x = keras.Input((1,))
    model = keras.Model(x, make(weight)(keras.layers.Dense(1)(x)))
    assert model.predict(ONES[:, :1], verbose=0).shape == (2, 1)
    with pytest.raises(TypeError, match=r"'factor'(.|\n)*write a keras\.Layer"):
        step(model, **mode)


def test_a_weight_of_another_model():
    layer = dense()
    layer.build((None, 1))
    x = keras.Input((1,))
    inner = keras.Model(x, weighed(layer.kernel)(x))
    outer = keras.Model(x, inner(x) + 0.0 * layer(x))
    clone = keras.models.clone_model(keras.Model(x, weighed(layer.kernel)(layer(x))))
    assert step(outer) == 1 + 3 * 2
    for model in (inner, clone):
        with pytest.raises(TypeError, match=r"write a keras\.Layer"):
            step(model)

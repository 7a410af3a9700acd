"""Arguments and outputs of ops: structures, static objects, and inputs that are outputs."""

import dataclasses
import enum
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from forms import FORMS as FORMS_OF_OPS
from forms import Written, in_form
from keras import ops
from support import array, close, compiled, numpy

from multigrad import grad, op_custom_gradient, value_and_grad

ONES = np.ones(2, "float32")
Point = namedtuple("Point", "x y")


class Mode(enum.Enum):
    DOUBLE = 2.0


def defined(form, function):
    """Return an op in a form, and its weights. A layer would change the structure, so the op is called."""
    made = in_form(form, Written("structure", function, None))
    return getattr(made.op, "op", made.op), made.weights


@pytest.mark.parametrize(
    "structure",
    [
        ONES,
        (ONES, ONES),
        [ONES, ONES],
        {"a": ONES, "b": ONES},
        {"b": [ONES, (ONES,)], "a": {"c": ONES}},
        Point(ONES, ONES),
        OrderedDict(b=ONES, a=ONES),
        [ONES],
    ],
)
@pytest.mark.parametrize("form", FORMS_OF_OPS)
def test_a_structure_in_and_out(structure, form):
    """The loss multiplies each leaf by another factor, to find exchanged leaves."""

    def function(tree, factor, scale):
        def whole(upstream):
            keras.tree.assert_same_structure(upstream, tree)
            return upstream

        def rule(upstream):
            return keras.tree.map_structure(lambda u: u * 7.0, whole(upstream)), None

        def of_weight(upstream):
            leaves = keras.tree.flatten(whole(upstream))
            return sum([5.0 * ops.sum(u) * (i + 1.0) for i, u in enumerate(leaves)])

        return keras.tree.map_structure(lambda leaf: scale(leaf * factor), tree), rule, of_weight

    op, weights = defined(form, function)

    def loss(tree):
        leaves = keras.tree.flatten(op(tree, 2.0))
        return sum(ops.sum(leaf) * (i + 1.0) for i, leaf in enumerate(leaves))

    leaves = keras.tree.flatten(structure)
    wanted = keras.tree.pack_sequence_as(structure, [7.0 * (i + 1) * ONES for i in range(len(leaves))])
    of_weights = [array(sum([10.0 * (i + 1) ** 2 for i in range(len(leaves))])) for _ in weights]
    close(grad(loss)(structure), wanted)
    if weights:
        close(grad(loss, 0, variables=weights)(structure), (wanted, of_weights))
    out = op(keras.tree.map_structure(ops.convert_to_tensor, structure), 2.0)
    assert type(out) is type(structure) or structure is ONES


@pytest.mark.parametrize("keys", [("b", "a"), ("a", "b"), (2, 1), (True, 0), ("b", 1)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_a_dict_is_passed_unchanged_and_answered_in_any_order(keys, turned):
    """A dict with equal keys of another type, or in another order, is another dict."""
    given = []

    @op_custom_gradient
    def op(x, y):
        given.append([(type(key), key) for key in x])
        first, second = keys

        def rule(u):
            of_x = {first: u * 2.0 * y["z"][0], second: u * 3.0}
            if turned:
                of_x = dict(reversed(of_x.items()))
            return of_x, {"z": [u * x[second]]}

        return x[first] * x[second] * y["z"][0], rule

    x = {keys[0]: ONES * 5.0, keys[1]: ONES * 7.0}
    for _ in range(2):
        of_x, of_y = grad(lambda x, y: ops.sum(op(x, y)), (0, 1))(x, {"z": [ONES * 11.0]})
        close(list(of_x.values()), [ONES * 22.0, ONES * 3.0])
        close(of_y, {"z": [ONES * 7.0]})
        assert list(of_x) == list(keys)
    assert all(kinds == [(type(key), key) for key in keys] for kinds in given)


class Unit(str):
    """A key with more information than its text."""

    def __new__(cls, text, scale):
        self = super().__new__(cls, text)
        self.scale = scale
        return self


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: ({"c": x},)])
def test_keys_of_a_string_subclass(wrap):
    """The keys are equal to plain strings, but are passed unchanged."""

    def inner(x):
        x = x if isinstance(x, dict) else x[0]
        return x.get("c", x)

    @op_custom_gradient
    def op(x):
        scales = [getattr(key, "scale", 1.0) for key in inner(x)]

        def rule(upstream):
            leaves = keras.tree.flatten(upstream)
            scaled = [u * scale for u, scale in zip(leaves, scales, strict=True)]
            return (keras.tree.pack_sequence_as(x, scaled),)

        return keras.tree.map_structure(lambda leaf: leaf * 2.0, x), rule

    for keys, wanted in ((["a", "b"], [1.0, 1.0]), ([Unit("a", 2.0), Unit("b", 3.0)], [2.0, 3.0])) * 2:
        kept = []

        def loss(x, kept=kept):
            kept.append(op(x))
            return sum(map(ops.sum, keras.tree.flatten(kept[0])))

        x = wrap(dict.fromkeys(keys, ONES))
        close(keras.tree.flatten(grad(loss)(x)), [ONES * w for w in wanted])
        assert [type(key) for key in inner(kept[0])] == [type(key) for key in keys]


@pytest.mark.parametrize("wrap", [tuple, list])
@pytest.mark.parametrize("count", [1, 2, 9, 30])
def test_many_tensors_in_one_argument(wrap, count):
    """One occurs twice, one is an output, and one has no gradient."""
    integer = np.array([1, 2])

    @op_custom_gradient
    def op(xs):
        def rule(us):
            first, _ = us
            return wrap([None if i == count else first * (i + 2.0) for i, x in enumerate(xs)])

        return (ops.sin(sum(xs[:count])), xs[0]), rule

    def loss(xs):
        first, second = op(wrap([*xs, integer, xs[0]]))
        return ops.sum(first) + ops.sum(0.0 * second)

    got = grad(loss)([ONES * float(i) for i in range(count)])
    close(got, [ONES * (count + 5.0), *[ONES * (i + 2.0) for i in range(1, count)]])


def test_the_same_tensor_twice_as_output():
    @op_custom_gradient
    def op(x):
        y = x * 1.0
        return (y, y), lambda u, v: u * 3.0 + v * 5.0

    def loss(x):
        a, b = op(x)
        return 2.0 * a + 7.0 * b

    close(grad(loss)(1.0), array(2 * 3.0 + 7 * 5.0))


def test_a_constant_output_is_unchanged():
    table = array(5.0, 6.0)
    op = op_custom_gradient(lambda x: ((table, x * 1.0), lambda u, v: u * 3.0 + v * 7.0))

    def loss(x):
        fixed, y = op(x)
        return ops.sum(fixed) + ops.sum(y)

    for _ in range(2):
        close(grad(loss)(ONES), 10 * ONES)
    assert not getattr(table, "requires_grad", False)


@pytest.mark.parametrize("zero", [None, 0, 0.0, (None, 0)])
def test_the_gradient_of_an_integer_may_be_zero(zero):
    @op_custom_gradient
    def op(index, x):
        return x * 2.0, lambda u: (zero, u * 7.0)

    close(grad(lambda x: ops.sum(op(array([1, 0], dtype="int32"), x)))(ONES), 7 * ONES)


@pytest.mark.forward
def test_other_outputs_are_unchanged():
    rest = ["name", None, 5, Mode.DOUBLE, len, [], {}]
    output, *got = op_custom_gradient(lambda x: ((x * 2.0, *rest), lambda U: U[0]))(array(3.0))
    assert float(numpy(output)) == 6.0
    assert got == rest


def test_upstream_gradients_of_other_outputs_are_none():
    @op_custom_gradient
    def op(x, nothing):
        def rule(upstream):
            assert upstream[1:] == (None, None, None, {"a": None}, [], {})
            return upstream[0] * 7.0, None

        return (x * 2.0, "name", None, 5, {"a": True}, [], {}), rule

    close(grad(lambda x: op(x, {})[0])(1.0), array(7.0))


@pytest.mark.parametrize(
    "static", ["a string", Mode.DOUBLE, ops.exp, (2, 3), [0.5, 0.25], 3, True, None, 2.5, object(), 1j]
)
def test_static_arguments_are_unchanged(static):
    seen = []

    @op_custom_gradient
    def op(x, static, y):
        seen.append(static)
        return x * y, lambda u: (u * 3.0, None, u * 5.0)

    got = grad(lambda x, y: op(x, static, y), (0, 1))(1.0, 1.0)
    close(got, (array(3.0), array(5.0)))
    assert seen[0] is static or seen[0] == static


@pytest.mark.forward
def test_numpy_arrays_are_passed_as_tensors():
    @op_custom_gradient
    def op(x, names):
        assert ops.is_tensor(x)
        assert isinstance(names, np.ndarray)
        return x * 2.0, lambda u: (u, None)

    assert numpy(op(np.float32([1.0, 2.0]), np.array(["a", "b"]))).tolist() == [2.0, 4.0]


@dataclasses.dataclass
class Holder:
    w: object

    @op_custom_gradient
    def method(self, x):
        return x * self.w, lambda u: u * 10.0 * self.w


HIDDEN = [
    lambda w, x: Holder(w).method(x),
    lambda w, x: op_custom_gradient(lambda h, x: (x * h.w, lambda u: u * 10.0 * h.w))(Holder(w), x),
    lambda w, x: (lambda h: op_custom_gradient(lambda x: (x * h.w, lambda u: u * 10.0 * h.w))(x))(Holder(w)),
    lambda w, x: op_custom_gradient(lambda f, x: (f(x), lambda u: u * 10.0 * w))(lambda x: x * w, x),
]


@pytest.mark.parametrize("wrap", [lambda f: f, compiled])
@pytest.mark.parametrize("op", HIDDEN)
def test_tensors_in_objects_have_no_gradient_through_the_op(op, wrap):
    w, x = array(2.0), array(3.0)
    close(op(w, x), array(6.0))
    close(wrap(grad(op, 1))(w, x), array(20.0))
    with pytest.raises((TypeError, RuntimeError), match="not an argument"):
        wrap(grad(op))(w, x)


@dataclasses.dataclass
class Named:
    x: object


@pytest.mark.parametrize("wrap", [lambda f: f, compiled])
def test_an_op_of_python_numbers_refuses_a_closed_over_tensor(wrap):
    def through_object(w):
        held = Holder(w)
        return op_custom_gradient(lambda x: (x * held.w, lambda u: u * 7.0))(2.0)

    def through_closure(w):
        return op_custom_gradient(lambda x, n: (x * n * w, lambda u: (u * 7.0, None)))(2.0, 3)

    for f in (through_object, through_closure):
        with pytest.raises((TypeError, RuntimeError), match="not an argument"):
            wrap(grad(f))(array(3.0))


@pytest.mark.forward
@pytest.mark.parametrize("hide", [Named, lambda x: {"a": [x, Named(x)]}, lambda x: SimpleNamespace(x=x)])
def test_a_tensor_in_an_object_of_the_output(hide):
    """A rule could not return its gradient, so it raises. Other objects may contain anything."""
    op = op_custom_gradient(lambda x: (hide(x * 2.0), lambda u: 7.0), name="op")
    with pytest.raises(TypeError, match=r"op: (.|\n)*object of an unknown class(.|\n)*the output"):
        op(array(1.0, 2.0))
    _, kept = op_custom_gradient(lambda x: ((x * 2.0, Named("static")), lambda u: u))(array(1.0))
    assert kept == Named("static")


@pytest.mark.forward
def test_the_pair_may_be_a_list():
    close(op_custom_gradient(lambda x: [x * 2.0, lambda u: u])(array(1.0)), array(2.0))


class OfWeights(keras.layers.Layer):
    """A layer with weights in tuples, which TensorFlow wraps as attributes."""

    def __init__(self, form, **kwargs):
        super().__init__(**kwargs)
        self.form = form

    def build(self, shape):
        self.weights_of = self.form(*[self.add_weight((), "ones", name=name) for name in "ab"])

    @staticmethod
    @op_custom_gradient
    def product(x, weights):
        a, b = keras.tree.flatten(weights)
        return x * a * b, lambda u: (7.0 * u * a * b, keras.tree.map_structure(lambda w: 5.0 * w, weights))

    def call(self, x):
        return self.product(x, self.weights_of)


def pair(a, b):
    return a, b


FORMS = [pair, Point, lambda a, b: (a, (b,)), lambda a, b: [(a,), b], lambda a, b: {"a": (a, b)}]


@pytest.mark.parametrize("form", FORMS)
def test_weights_in_a_tuple_of_a_layer(form):
    layer = OfWeights(form)
    layer.build((2,))
    gradient, of_weights = value_and_grad(lambda x: ops.sum(layer(x)), 0, variables=layer.weights)(
        array(1.0, 2.0)
    )[1]
    close(gradient, array(7.0, 7.0))
    close(of_weights, [array(5.0), array(5.0)])
    layer.trainable = False
    close(grad(lambda x: ops.sum(layer(x)))(array(1.0, 2.0)), array(7.0, 7.0))
    x = keras.Input((2,))
    close(grad(lambda v: ops.sum(keras.Model(x, layer(x))(v)))(array([[1.0, 2.0]])), array([[7.0, 7.0]]))


def test_a_tensor_and_a_weight_in_a_tuple_of_a_layer():
    class Layer(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight((), "ones", trainable=False)

        @op_custom_gradient
        def pair(self, x):
            self.kept = x * 2.0, self.w
            return self.kept, lambda upstream: 7.0 * upstream[0]

        def call(self, x):
            self.given = self.w, x
            return OfWeights.product(self.pair(x)[0], self.given)

    layer = Layer()
    layer.build((2,))
    close(grad(lambda x: ops.sum(layer(x)))(array(3.0, 3.0)), array(162.0, 162.0))  # 7 * 7 * 3 + 5 * 3

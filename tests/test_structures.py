"""Arguments and outputs of ops: structures, static objects, and inputs that are outputs."""

import dataclasses
import enum
import types
from collections import OrderedDict, namedtuple

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


def total(structure):
    return sum(ops.sum(leaf) for leaf in keras.tree.flatten(structure))


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
        output = keras.tree.map_structure(lambda leaf: scale(leaf * factor), tree)

        def whole(upstream):
            keras.tree.assert_same_structure(upstream, tree)
            return upstream

        def rule(upstream):
            return keras.tree.map_structure(lambda u: u * 7.0, whole(upstream)), None

        return (
            output,
            rule,
            lambda upstream: sum(
                [5.0 * ops.sum(u) * (i + 1.0) for i, u in enumerate(keras.tree.flatten(whole(upstream)))]
            ),
        )

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


@pytest.mark.parametrize("count", [2, 12])
def test_second_derivatives_of_many_tensors(count):
    """The rule is differentiated with respect to an input, an output and an intermediate result."""

    @op_custom_gradient
    def op(xs):
        total = sum(xs)
        e, s = ops.exp(total), ops.sin(total)

        def rule(us):
            return [us[0] * e * (7.0 + x) + us[1] * s for x in xs]

        return (e, xs[0]), rule

    def meant(*xs):
        total = sum(xs)
        return [ops.exp(total) * (7.0 + x) + 3.0 * ops.sin(total) for x in xs]

    def gradients(*xs):
        return grad(lambda xs: (lambda e, first: e + 3.0 * first)(*op(xs)))(list(xs))

    xs = [array(0.01 * i) for i in range(count)]
    close(gradients(*xs), meant(*xs), 1e-4)
    # The derivative of `e` is the derivative by the rule, and of `s` the derivative of the function.
    for place in (0, count - 1):
        got = grad(lambda *xs, place=place: gradients(*xs)[place])(*xs)
        total, x = sum(xs), xs[place]
        of_e = ops.exp(total) * (7.0 + xs[0]) * (7.0 + x)
        close(got, of_e + 3.0 * ops.cos(total) + (ops.exp(total) if place == 0 else 0.0), 1e-4)


class Unit(str):
    """A key with more information than its text."""

    def __new__(cls, text, scale):
        self = super().__new__(cls, text)
        self.scale = scale
        return self


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: ({"c": x},)])
def test_keys_of_a_string_subclass(wrap):
    """The keys are equal to plain strings, but are passed unchanged."""

    @op_custom_gradient
    def op(x):
        own = keras.tree.flatten(x)
        inner = x if isinstance(x, dict) else x[0].get("c", x[0])
        scales = [getattr(key, "scale", 1.0) for key in inner]

        def rule(upstream):
            return (
                keras.tree.pack_sequence_as(x, [u * s for u, s in zip(us(upstream), scales, strict=True)]),
            )

        return keras.tree.pack_sequence_as(x, [leaf * 2.0 for leaf in own]), rule

    us = keras.tree.flatten
    for keys, wanted in ((["a", "b"], [1.0, 1.0]), ([Unit("a", 2.0), Unit("b", 3.0)], [2.0, 3.0])) * 2:
        outputs = []

        def loss(x, outputs=outputs):
            outputs.append(op(x))
            return sum(map(ops.sum, us(outputs[0])))

        x = wrap(dict.fromkeys(keys, ONES))
        close(us(grad(loss)(x)), [ONES * w for w in wanted])
        kept = outputs[0] if isinstance(outputs[0], dict) else outputs[0][0]
        assert [type(key) for key in kept.get("c", kept)] == [type(key) for key in keys]


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


def test_empty_structures():
    op = op_custom_gradient(lambda x, rest: ((x * 2.0, [], {}), lambda U: (U[0] * 7.0, None)))
    assert op(array(1.0), ())[1:] == ([], {})
    close(grad(lambda x: op(x, {})[0])(1.0), array(7.0))


def test_the_same_tensor_twice_as_output():
    @op_custom_gradient
    def op(x):
        y = x * 1.0
        return (y, y), lambda u, v: u * 3.0 + v * 5.0

    def loss(x):
        a, b = op(x)
        return 2.0 * a + 7.0 * b

    close(grad(loss)(1.0), array(2 * 3.0 + 7 * 5.0))


@pytest.mark.parametrize("x", [2.0, ONES])
def test_an_output_that_is_an_input(x):
    @op_custom_gradient
    def op(x, y):
        return (y, x), lambda u, v: (u * 3.0, v * 5.0)

    def loss(x, y):
        a, b = op(x, y)
        return ops.sum(2.0 * a + 7.0 * b + 100.0 * x)

    close(grad(loss, (0, 1))(x, x), (array(106.0 * np.ones_like(x)), array(35.0 * np.ones_like(x))))


def test_an_output_in_the_rule():
    @op_custom_gradient
    def exp(x):
        y = ops.exp(x)
        return y, lambda u: u * y * 3.0

    close(grad(lambda x: ops.sum(exp(x)))(np.zeros(2, "float32")), 3 * ONES)


def test_a_constant_output_is_unchanged():
    table = array(5.0, 6.0)
    op = op_custom_gradient(lambda x: ((table, x * 1.0), lambda u, v: u * 3.0 + v * 7.0))

    def loss(x):
        fixed, y = op(x)
        return ops.sum(fixed) + ops.sum(y)

    for _ in range(2):
        close(grad(loss)(ONES), 10 * ONES)
    assert not getattr(table, "requires_grad", False)


def test_integers_have_no_gradient():
    @op_custom_gradient
    def op(x, index):
        def rule(upstream):
            u, none = upstream
            assert none is None
            return u * 7.0, None

        return (ops.take(x, index), index + 1), rule

    def loss(x):
        value, following = op(x, array([1, 0], dtype="int32"))
        assert "int" in keras.backend.standardize_dtype(following.dtype)
        return ops.sum(value)

    close(grad(loss)(ONES), 7 * ONES)


@pytest.mark.parametrize("zero", [None, 0, 0.0, (None, 0)])
def test_the_gradient_of_an_integer_may_be_zero(zero):
    @op_custom_gradient
    def op(index, x):
        return x * 2.0, lambda u: (zero, u * 7.0)

    close(grad(lambda x: ops.sum(op(array([1, 0], dtype="int32"), x)))(ONES), 7 * ONES)


@pytest.mark.forward
def test_other_outputs_are_unchanged():
    def function(x):
        return x

    op = op_custom_gradient(lambda x: ((x * 2.0, "name", None, 5, Mode.DOUBLE, function), lambda U: U[0]))
    output, *rest = op(array(3.0))
    assert float(numpy(output)) == 6.0
    assert rest == ["name", None, 5, Mode.DOUBLE, function]


def test_upstream_gradients_of_other_outputs_are_none():
    seen = []

    @op_custom_gradient
    def op(x):
        def rule(upstream):
            seen.append(upstream)
            return upstream[0] * 7.0

        return (x * 2.0, "name", None, 5, {"a": True}), rule

    close(grad(lambda x: op(x)[0])(1.0), array(7.0))
    assert seen[0][1:] == (None, None, None, {"a": None})


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


def test_static_values_among_tensors_in_a_structure():
    @op_custom_gradient
    def op(table):
        assert table["mode"] == "linear"
        return table["x"] * table["n"], lambda u: ({"x": u * 7.0, "n": None, "mode": None},)

    close(grad(lambda x: ops.sum(op({"x": x, "n": 3, "mode": "linear"})))(ONES), 7 * ONES)


@pytest.mark.forward
def test_numpy_arrays_are_passed_as_tensors():
    @op_custom_gradient
    def op(x, names):
        assert ops.is_tensor(x)
        assert isinstance(names, np.ndarray)
        return x * 2.0, lambda u: (u, None)

    assert numpy(op(np.float32([1.0, 2.0]), np.array(["a", "b"]))).tolist() == [2.0, 4.0]


def test_variables_are_passed_as_tensors():
    variable = keras.Variable(np.float32([1.0, 2.0]), name="w")

    @op_custom_gradient
    def op(x, w):
        assert ops.is_tensor(w)
        return x * w, lambda u: (u * 3.0, u * 5.0)

    close(grad(lambda x: ops.sum(op(x, variable)))(ONES), 3 * ONES)
    close(op(ONES, variable), array(1.0, 2.0))


def test_a_graph_without_gradients_is_unchanged():
    calls = []

    @op_custom_gradient
    def op(x, y):
        def rule(u):
            calls.append(1)
            return u * 3.0, u * 5.0

        return x * y, rule

    value, gradient = value_and_grad(lambda z: z * 2.0)(1.0)
    op(array(1.0), array(2.0))
    close((value, gradient), (array(2.0), array(2.0)))
    assert calls == []


def test_structures_and_static_arguments_in_compiled_code():
    @op_custom_gradient
    def op(tree, mode, *, scale=2.0):
        assert mode == "linear"
        return {"y": tree["x"] * scale}, lambda U: ({"x": U["y"] * 7.0 * scale},)

    def loss(x):
        return ops.sum(op({"x": x}, mode="linear", scale=3.0)["y"])

    close(compiled(grad(loss))(array(1.0, 1.0)), 21 * ONES)
    close(grad(compiled(loss))(array(1.0, 1.0)), 21 * ONES)


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


class Unregistered(dict):
    """A container that keras.tree does not flatten."""


@pytest.mark.parametrize("container", [lambda x: Unregistered(w=x), lambda x: [Unregistered(w=x)]])
def test_tensors_in_a_container_of_an_unknown_class(container):
    op = op_custom_gradient(lambda d: (d["w"] * 2.0, lambda u: {"w": u * 7.0}), name="op")
    with pytest.raises(TypeError, match="object of an unknown class") as error:
        op(container(array(1.0)))
    assert "op: " in str(error.value)
    assert "argument: 'd'" in str(error.value)
    assert "got: an object of the class Unregistered" in str(error.value)


@dataclasses.dataclass
class Named:
    x: object


@pytest.mark.forward
@pytest.mark.parametrize(
    "hide", [Named, lambda x: {"a": [x, Named(x)]}, lambda x: types.SimpleNamespace(x=x)]
)
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


def test_an_op_of_python_numbers_refuses_a_closed_over_tensor():
    def through_object(w):
        holder = Holder(w)
        return op_custom_gradient(lambda x: (x * holder.w, lambda u: u * 7.0))(2.0)

    def through_closure(w):
        return op_custom_gradient(lambda x, n: (x * n * w, lambda u: (u * 7.0, None)))(2.0, 3)

    for f in (through_object, through_closure):
        for wrap in (lambda f: f, compiled):
            with pytest.raises((TypeError, RuntimeError), match="not an argument"):
                wrap(grad(f))(array(3.0))

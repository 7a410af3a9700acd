"""The forms in which a rule can return gradients, and how they are read."""

import collections
import functools

import keras
import numpy as np
import pytest
from keras import ops, tree
from support import BACKEND, array, close, compiled

from multigrad import grad, op_custom_gradient

ONES = np.ones(2, "float32")


def answering(answer):
    """Return an op of (x, n, tree) whose rule returns `answer(u)`. x and the leaves of tree are floats."""

    @op_custom_gradient
    def op(x, n, tree):
        return x * n + tree["b"][0] + tree["c"], lambda u: answer(u)

    return op


def gradients(op):
    def loss(x, tree):
        return ops.sum(op(x, 4, tree))

    return grad(loss, (0, 1))(ONES, {"b": [ONES], "c": ONES})


WANTED = (2 * ONES, {"b": [3 * ONES], "c": 5 * ONES})


@pytest.mark.parametrize(
    "answer",
    [
        lambda u: (2 * u, None, {"b": [3 * u], "c": 5 * u}),
        lambda u: [2 * u, 0, {"b": (3 * u,), "c": 5 * u}],
        lambda u: (2 * u, 0.0, {"c": 5 * u, "b": [3 * u]}),
        lambda u: (2 * u, {"b": [3 * u], "c": 5 * u}),
        lambda u: {"x": 2 * u, "tree": {"b": [3 * u], "c": 5 * u}},
        lambda u: {"tree": {"b": [3 * u], "c": 5 * u}, "n": None, "x": 2 * u},
        lambda u: (lambda: 2 * u, None, lambda: {"b": [3 * u], "c": 5 * u}),
        lambda u: (2 * u, None, {"b": [lambda: 3 * u], "c": lambda: 5 * u}),
        lambda u: (2 * u, None, {"b": lambda: [3 * u], "c": 5 * u}),
        lambda u: (lambda: lambda: 2 * u, None, lambda: {"b": [lambda: 3 * u], "c": lambda: 5 * u}),
    ],
)
def test_each_form(answer):
    close(gradients(answering(answer)), WANTED)


def test_one_entry_per_flattened_tensor():
    @op_custom_gradient
    def op(pair, n, y):
        return pair[0] + pair[1] + n * y, lambda u: [2 * u, 3 * u, 5 * u]

    got = grad(lambda pair, y: ops.sum(op(pair, 7, y)), (0, 1))((ONES, ONES), ONES)
    # Three arguments and three tensors: one entry per argument is tried first, and does not fit, because the
    # number 3 u does not have the structure of the pair.
    close(got, ((2 * ONES, 3 * ONES), 5 * ONES))


@pytest.mark.parametrize("answer", [lambda u: (2 * u, 3 * u), lambda u: ((2 * u, 3 * u),)])
def test_the_structure_of_the_only_argument(answer):
    op = op_custom_gradient(lambda pair: (pair[0] + pair[1], lambda u: answer(u)))
    close(grad(lambda pair: ops.sum(op(pair)))((ONES, ONES)), (2 * ONES, 3 * ONES))


@pytest.mark.parametrize(
    ("rest", "wanted"),
    [
        (lambda u: (3 * u, 5 * u), (3, 5)),
        (lambda u: [None, 5 * u], (0, 5)),
        (lambda u: lambda: (3 * u, lambda: 5 * u), (3, 5)),
        (lambda u: None, (0, 0)),
    ],
)
def test_a_dict_for_arguments_of_the_same_name(rest, wanted):
    def rule(u):
        return {"rest": rest(u), "x": 2 * u, "y": 7 * u}

    op = op_custom_gradient(lambda x, *rest, y: (x + rest[0] + rest[1] + y, rule))
    got = grad(lambda x, a, b, y: ops.sum(op(x, a, b, y=y)), (0, 1, 2, 3))(ONES, ONES, ONES, ONES)
    close(got, (2 * ONES, wanted[0] * ONES, wanted[1] * ONES, 7 * ONES))


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (lambda u: (None, None), (0, 0, 0)),
        (lambda u: [None, None, None], (0, 0, 0)),
        (lambda u: {"x": None, "pair": None}, (0, 0, 0)),
        (lambda u: (2 * u, None), (2, 0, 0)),
        (lambda u: (None, (3 * u, None)), (0, 3, 0)),
        (lambda u: (lambda: None, (3 * u, lambda: None)), (0, 3, 0)),
    ],
)
def test_none_is_zero(answer, wanted):
    op = op_custom_gradient(lambda x, pair: (x + pair[0] + pair[1], lambda u: answer(u)))
    got = grad(lambda x, pair: ops.sum(op(x, pair)), (0, 1))(ONES, (ONES, ONES))
    x, a, b = wanted
    close(got, (x * ONES, (a * ONES, b * ONES)))


def test_lazy_entries_are_computed_once_and_only_if_needed():
    calls = []

    def lazily(name, value):
        def compute():
            calls.append(name)
            return value

        return compute

    @op_custom_gradient
    def op(pair, w):
        return pair[0] * pair[1] * w, lambda u: (lazily("pair", (2 * u, 3 * u)), lazily("w", 5 * u))

    got = grad(lambda pair: ops.sum(op(pair, array(1.0, 1.0))))((ONES, ONES))
    close(got, (2 * ONES, 3 * ONES))
    # TensorFlow's tapes compute all gradients.
    assert calls == (["pair", "w"] if BACKEND == "tensorflow" else ["pair"])


class Called(collections.namedtuple("Called", "a b")):
    """A callable container, for example a model of parameters in a namedtuple."""

    def __call__(self):
        return self.a * 0.0 + 99.0, self.b * 0.0 + 99.0


@pytest.mark.parametrize(
    "answer",
    [
        lambda g: (Called(5.0 * g, 7.0 * g), 3.0 * g),
        lambda g: (lambda: Called(5.0 * g, 7.0 * g), 3.0 * g),
        lambda g: (Called(lambda: 5.0 * g, 7.0 * g), lambda: 3.0 * g),
        lambda g: {"pair": Called(5.0 * g, 7.0 * g), "y": 3.0 * g},
        lambda g: [5.0 * g, 7.0 * g, 3.0 * g],
    ],
)
def test_a_callable_structure_is_not_lazy(answer):
    op = op_custom_gradient(lambda pair, y: (pair.a * pair.b * y, answer))
    pair = Called(array(2.0), array(4.0))
    for wrap in (lambda f: f, compiled):
        of_pair, of_y = wrap(grad(op, argnums=(0, 1)))(pair, array(3.0))
        close(of_pair, Called(array(5.0), array(7.0)))
        close(of_y, array(3.0))
    alone = op_custom_gradient(lambda pair: (pair.a * pair.b, lambda g: Called(5.0 * g, 7.0 * g)))
    close(grad(alone)(pair), Called(array(5.0), array(7.0)))


class Thunk(collections.namedtuple("Thunk", "g")):
    def __call__(self):
        return 7.0 * self.g


def test_a_callable_container_is_lazy_for_a_tensor():
    op = op_custom_gradient(lambda x: (x * 2.0, lambda g: (Thunk(5.0 * g),)))
    close(grad(op)(array(3.0)), array(35.0))


@pytest.mark.parametrize(
    ("argument", "gradient", "wanted"),
    [
        ((2,), (3, 2), (3.0, 3.0)),
        ((), (4,), 4.0),
        ((), (2, 3), 6.0),
        ((1, 2), (3, 2), ((3.0, 3.0),)),
        ((2, 1), (5, 2, 4), ((20.0,), (20.0,))),
        ((1,), (1,), (1.0,)),
    ],
)
def test_broadcast_gradients_are_summed(argument, gradient, wanted):
    @op_custom_gradient
    def op(x):
        return ops.broadcast_to(x, gradient) * 1.0, lambda u: u

    got = grad(lambda x: ops.sum(op(x)))(np.ones(argument, "float32"))
    assert got.shape == argument
    close(got, array(wanted))


def stacked_with_input(x):
    return (x * 1.0, x * 2.0), lambda u: ops.multiply(u, x)


def stacked_in_structure(x):
    return {"a": x * 1.0, "b": [x * 2.0]}, lambda u: ops.sin((u["a"], u["b"][0]))


def stacked_by_name(x):
    return [x * 1.0, x * 2.0], lambda x, upstream: ops.tanh(upstream)


WEIGHT = keras.Variable([1.0, 1.0, 1.0])


def stacked_beside_a_weight(x):
    outputs = x * WEIGHT, x * WEIGHT * 2.0
    return outputs, lambda u, variables: (ops.multiply(u, 3.0), [u[0] + 2.0 * u[1]])


def stacked_for_a_weight(x):
    outputs = x * WEIGHT, x * WEIGHT * 2.0
    return outputs, lambda u, variables: (u[0] + 2.0 * u[1], [ops.multiply(u, 3.0)])


STACKED = [
    stacked_with_input,
    stacked_in_structure,
    stacked_by_name,
    stacked_beside_a_weight,
    stacked_for_a_weight,
]


@pytest.mark.parametrize("function", STACKED)
def test_a_gradient_of_stacked_upstream_gradients_raises(function):
    """Keras stacks them, and a sum over the new axis would be a wrong gradient."""
    op = op_custom_gradient(function)
    variables = [WEIGHT] if "weight" in function.__name__ else None
    with pytest.raises(ValueError, match=r"as with one tensor[\s\S]*rule\(u1, u2\)"):
        grad(lambda x: sum(map(ops.sum, tree.flatten(op(x)))), 0, variables=variables)(array(1.0, 2.0, 3.0))


def test_a_gradient_for_each_of_two_examples_is_summed():
    """The batch has as many examples as the op has outputs."""

    @op_custom_gradient
    def op(x, b):
        y = x * b
        return (ops.sum(y * y), ops.sum(y)), lambda us: (None, us[0] * 7.0 * x + us[1])

    x, b = array([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]), array(1.0, 2.0, 3.0)
    close(grad(lambda b: sum(op(x, b)))(b), array(37.0, 51.0, 65.0))


SCALE = keras.Variable(1.0)


@op_custom_gradient
def of_scalars(x, y):
    return (x * 2, y * 3), lambda u: (ops.cast(u[0] * 7, "bfloat16"), ops.cast(u[1] * 5, "bfloat16"))


@op_custom_gradient
def of_scalars_that_reads(x, y):
    def rule(u, variables):
        of_scale = ops.cast(u[0] * 11 + u[1] * 4, "bfloat16")
        return (ops.cast(u[0] * 7, "bfloat16"), ops.cast(u[1] * 5, "bfloat16")), [of_scale]

    return (x * 2 * SCALE, y * 3 * SCALE), rule


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("op", [of_scalars, of_scalars_that_reads])
def test_two_scalar_outputs_of_scalars_in_another_dtype(op, dtype):
    x = array(2.0, dtype=dtype)
    close(ops.cast(grad(lambda x: ops.cast(sum(op(x, x)), dtype))(x), "float32"), array(12.0))
    if op is of_scalars_that_reads:
        close(grad(lambda x: sum(op(x, x)), 0, variables=[SCALE])(x)[1][0], array(15.0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("returned", ["float16", "bfloat16", "float32"])
def test_a_gradient_has_the_dtype_of_its_argument(dtype, returned):
    @op_custom_gradient
    def op(x):
        return x * 2, lambda u: ops.cast(u * 3, returned)

    got = grad(lambda x: ops.sum(op(x)))(array([1.0, 2.0], dtype=dtype))
    assert keras.backend.standardize_dtype(got.dtype) == dtype
    close(ops.cast(got, "float32"), array(3.0, 3.0))


def test_numbers_and_arrays_are_gradients():
    op = op_custom_gradient(lambda x, y: (x * ops.sum(y), lambda u: (7, np.array([2.0, 3.0]))))
    close(grad(op, (0, 1))(1.0, ONES), (array(7.0), array(2.0, 3.0)))


@pytest.mark.parametrize(
    "answer",
    [
        lambda u: (7.0 * u, u, {"a": u, "b": [3.0 * u, u]}),
        lambda u: (7.0 * u, lambda: u, {"a": lambda: u, "b": [None, lambda: u]}),
        lambda u: {"x": lambda: 7.0 * u, "scale": lambda: u, "numbers": lambda: {"a": u, "b": [u, u]}},
        lambda u: (7.0 * u, u, {"a": u, "b": lambda: [u, u]}),
    ],
)
def test_gradients_of_nested_numbers_and_lazy_gradients_are_discarded(answer):
    @op_custom_gradient
    def op(x, scale, numbers):
        return x * scale * numbers["a"] + sum(numbers["b"]), answer

    close(grad(lambda x: ops.sum(op(x, 0.5, {"a": 2.0, "b": [1.0, 3.0]})))(ONES), 7 * ONES)


@pytest.mark.parametrize(
    "entry", [lambda u: {"a": u, "n": u}, lambda u: {"a": u}, lambda u: lambda: {"a": u}, lambda u: u]
)
@pytest.mark.parametrize("static", [{"a": 2.0, "n": 3}, {}])
def test_integers_in_a_structure_have_no_gradient(entry, static):
    op = op_custom_gradient(lambda x, numbers: (x * 2.0, lambda u: (u, entry(u))))

    with pytest.raises(TypeError, match=r"argument: 'numbers'\n.*None or 0"):
        grad(lambda x: ops.sum(op(x, static)))(ONES)


@pytest.mark.parametrize("entry", [lambda u: u, lambda u: (u, u, u), lambda u: {"a": u}])
def test_a_lazy_gradient_of_a_structure_has_its_structure(entry):
    pair = op_custom_gradient(lambda pair: (pair[0] * pair[1], lambda u: (lambda: entry(u),)))
    with pytest.raises(TypeError, match="wrong structure"):
        grad(lambda x: ops.sum(pair((x, x))))(ONES)
    alone = op_custom_gradient(lambda x: (x["a"] * 1.0, lambda u: (lambda: {"b": u},)))
    with pytest.raises(TypeError, match="wrong structure"):
        grad(lambda x: ops.sum(alone({"a": x})))(ONES)


def test_unneeded_gradients_are_checked():
    op = op_custom_gradient(lambda x, w: (x * ops.sum(w), lambda u: (u * 7.0, ops.ones((5,)))))
    with pytest.raises(ValueError, match="wrong shape"):
        grad(lambda x: op(x, array(1.0, 2.0)))(1.0)


@pytest.mark.parametrize("answer", [lambda u: (u * 7.0, None), lambda u: (None, u * 7.0, None)])
def test_the_answer_of_a_method_may_omit_self(answer):
    class Layer:
        @op_custom_gradient
        def method(self, x, n):
            return x * n, lambda u: answer(u)

    close(grad(lambda x: Layer().method(x, 2))(1.0), array(7.0))


PAIR = (3.0, 5.0)
AMBIGUOUS = r"ambiguous(.|\n)*argument: 'pair'\[(0|1)\]\n(.|\n)*fix: return a dict from argument names"


OMITTED = [
    (lambda u: (None, u * 7.0), (0, 7)),
    (lambda u: [None, lambda: u * 7.0], (0, 7)),
    (lambda u: (None, 7.0), (0, 7)),
    (lambda u: (lambda: u * 5.0, lambda: u * 7.0), (5, 7)),
    (lambda u: (lambda: (u * 5.0, u * 7.0), lambda: u), None),
]


@pytest.mark.parametrize("number", [2.0, 2j, 2, True, "mode", None])
@pytest.mark.parametrize(("answer", "wanted"), OMITTED)
def test_entries_for_a_number_or_a_tensor_are_ambiguous(answer, number, wanted):
    """An argument without a gradient can be omitted, so for other objects they are one entry per tensor."""
    op = op_custom_gradient(lambda pair, s: (pair[0] * pair[1], lambda u: answer(u)), name="op")
    gradient = grad(lambda pair: op(pair, number))
    if isinstance(number, (float, complex)):
        with pytest.raises(TypeError, match=f"op: .*{AMBIGUOUS}"):
            gradient(PAIR)
    elif wanted:
        close(gradient(PAIR), (array(wanted[0]), array(wanted[1])))


def test_ambiguous_entries_with_a_leading_number_and_of_numbers_raise():
    first = op_custom_gradient(lambda s, pair: (pair[0] * pair[1] * s, lambda u: (u * 7.0, None)))
    with pytest.raises(TypeError, match=AMBIGUOUS):
        grad(lambda pair: first(2.0, pair))(PAIR)
    three = op_custom_gradient(lambda t, s, r: (t[0] * t[2], lambda u: (None, u, u * 7.0)))
    with pytest.raises(TypeError, match=r"ambiguous(.|\n)*argument: 't'\[2\]"):
        grad(lambda x, y: three((x, 2.0, y), 1.0, 1.0), (0, 1))(*PAIR)
    close(grad(lambda x, y: three((x, 2.0, y), "s", 1), (0, 1))(*PAIR), (array(0.0), array(7.0)))


@pytest.mark.parametrize("number", [2.0, 2, True, "mode", None])
@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (lambda u: {"pair": (None, u * 7.0)}, (0, 7)),
        (lambda u: {"pair": (None, lambda: u * 7.0), "s": None}, (0, 7)),
        (lambda u: {"pair": (lambda: u * 5.0, lambda: u * 7.0)}, (5, 7)),
        (lambda u: {"pair": lambda: (u * 5.0, u * 7.0)}, (5, 7)),
        (lambda u: {"pair": None, "s": 0.0}, (0, 0)),
        (lambda u: ((None, u * 7.0), None), (0, 7)),
        (lambda u: ((u * 5.0, u * 7.0), 0), (5, 7)),
        (lambda u: ((lambda: u * 5.0, None), None), (5, 0)),
        (lambda u: (lambda: (u * 5.0, u * 7.0), None), (5, 7)),
        (lambda u: (u * 5.0, None), (5, 0)),
        (lambda u: (u * 5.0, u * 7.0), (5, 7)),
        (lambda u: (u * 5.0, lambda: u * 7.0), (5, 7)),
        (lambda u: (None, None), (0, 0)),
        (lambda u: ((None, u * 7.0),), (0, 7)),
    ],
)
def test_unambiguous_entries_are_accepted(answer, number, wanted):
    op = op_custom_gradient(lambda pair, s: (pair[0] * pair[1], lambda u: answer(u)))
    close(grad(lambda pair: op(pair, number))(PAIR), (array(wanted[0]), array(wanted[1])))


@pytest.mark.parametrize("mode", ["m", 2, None])
def test_the_form_does_not_depend_on_values(mode):
    """At zero the gradient is zero, but its derivative is not."""
    op = op_custom_gradient(lambda p, s: (p[0] * p[1] * 7.0, lambda u: (None, u * p[0] * 7.0)))
    close(grad(grad(lambda a: op((a, 5.0), mode) * 1.0))(0.0), array(0.0))

    def of_second(a):
        return grad(lambda p: op(p, mode))((a, 5.0))[1]

    close(grad(of_second)(0.0), array(7.0))
    close(grad(of_second)(2.0), array(7.0))


def test_a_dict_argument_with_number_arguments():
    def op_of(answer):
        return op_custom_gradient(lambda x, y: (x["x"] * x["y"], lambda u: answer(u)), name="op")

    def gradients(answer, y):
        return grad(lambda x: op_of(answer)(x, y))({"x": 3.0, "y": 5.0})

    wanted = {"x": array(0.0), "y": array(7.0)}
    with pytest.raises(TypeError, match=r"op: .*ambiguous(.|\n)*argument: 'x'\['y'\](.|\n)*got: 'x', 'y'\n"):
        gradients(lambda u: {"x": None, "y": u * 7.0}, 2.0)
    close(gradients(lambda u: {"x": None, "y": u * 7.0}, 2), wanted)
    for y in (2.0, 2):
        close(gradients(lambda u: {"x": {"x": None, "y": u * 7.0}}, y), wanted)
        close(gradients(lambda u: {"x": {"x": None, "y": u * 7.0}, "y": None}, y), wanted)
    close(gradients(lambda u: {"x": {"x": None, "y": u * 7.0}, "y": u}, 2.0), wanted)


@pytest.mark.parametrize("name", ["self", "cls"])
def test_a_differentiable_first_argument_cannot_be_omitted(name):
    scope = {}
    exec(f"def op({name}, x): return {name} * x, lambda u: (u * 7.0,)", scope)
    with pytest.raises(TypeError, match=f"wrong number of gradients\n.*'{name}', 'x'"):
        grad(op_custom_gradient(scope["op"]), (0, 1))(3.0, 5.0)


def test_a_tuple_for_two_arguments_of_the_same_name():
    op = op_custom_gradient(lambda x, /, **kw: (x * kw["x"], lambda u: (u * 5.0, u * 7.0)))
    close(grad(lambda a, b: op(a, x=b), (0, 1))(3.0, 5.0), (array(5.0), array(7.0)))


@pytest.mark.parametrize(
    "answer",
    [
        lambda u: (lambda: u * 7.0,),
        lambda u: (lambda: {"a": u * 7.0},),
        lambda u: lambda: u * 7.0,
        lambda u: {"x": lambda: u * 7.0},
        lambda u: {"x": lambda: {"a": lambda: u * 7.0}},
        lambda u: {"a": lambda: u * 7.0},
        lambda u: {"x": {"a": lambda: u * 7.0}},
        lambda u: {"x": {"a": u * 7.0}},
        lambda u: (u * 7.0,),
    ],
)
def test_a_lazy_entry_for_a_structure_of_one_tensor(answer):
    op = op_custom_gradient(lambda x: (x["a"] * 2.0, lambda u: answer(u)))
    close(grad(op)({"a": 3.0}), {"a": array(7.0)})


def test_a_lazy_entry_for_an_argument_with_a_leaf_of_the_same_name():
    op = op_custom_gradient(lambda x: (x["x"] * 2.0, lambda u: {"x": lambda: u * 7.0}))
    close(grad(op)({"x": 3.0}), {"x": array(7.0)})
    both = op_custom_gradient(lambda p, q: (p[0] * q[0], lambda u: (lambda: u * 7.0, lambda: (u * 5.0,))))
    close(grad(both, (0, 1))((3.0,), (2.0,)), ((array(7.0),), (array(5.0),)))


@pytest.mark.parametrize("rest", [{}, {"xs": ()}, {"xs": []}, {"xs": None}])
def test_a_dict_answer_with_empty_args(rest):
    op = op_custom_gradient(lambda x, *xs: (x * 2.0, lambda u: {"x": u * 7.0, **rest}))
    close(grad(op)(3.0), array(7.0))
    named = op_custom_gradient(lambda x, *xs, **kw: (x * 2.0, lambda u: {"x": u * 7.0, "xs": u * 5.0}))
    close(grad(lambda x, y: named(x, xs=y), (0, 1))(3.0, 1.0), (array(7.0), array(5.0)))


@pytest.mark.parametrize("number", [2, "mode", array([1, 2], dtype="int32")])
@pytest.mark.parametrize("where", [lambda f: f, compiled])
@pytest.mark.parametrize("entry", [lambda u: u * 7.0, ops.zeros_like, lambda u: np.zeros(())])
def test_a_tensor_for_an_argument_without_a_gradient_raises(where, number, entry):
    op = op_custom_gradient(lambda n, x: (x * 2.0, lambda u: (entry(u), None)))
    with pytest.raises(TypeError, match=r"argument: 'n'\n.*None or 0"):
        where(grad(lambda x: op(number, x)))(array(3.0))


@pytest.mark.parametrize("where", [lambda f: f, compiled])
def test_an_integer_gradient_of_an_integer_argument_is_discarded(where):
    n = array([1, 2], dtype="int32")
    for rule in (
        lambda u: (ops.zeros_like(n), u * 7.0),
        lambda *args, upstream: [args[0] + 1, upstream * 7.0],
    ):
        op = op_custom_gradient(lambda n, x, rule=rule: (x * ops.cast(n, x.dtype), rule))
        close(where(grad(lambda x, op=op: ops.sum(op(n, x))))(array(3.0, 4.0)), array(7.0, 7.0))
    nested = op_custom_gradient(lambda pair: (pair[0] * 2.0, lambda u: ((u * 7.0, pair[1]),)))
    close(grad(lambda x: nested((x, array(1, dtype="int32"))))(3.0), array(7.0))
    zeros = functools.partial(tree.map_structure, ops.zeros_like)
    op = op_custom_gradient(lambda n, x: (x * 2.0, lambda u: (zeros(n), u * 7.0)))
    for static in (2, True, [1, 2], {"a": n, "b": 3}):
        close(where(grad(lambda x, static=static: op(static, x)))(array(3.0)), array(7.0))


@pytest.mark.parametrize(("kind", "factors"), [(dict, (5.0, 7.0)), (collections.OrderedDict, (7.0, 5.0))])
def test_flat_answers_have_the_order_of_sorted_keys_or_of_an_ordered_dict(kind, factors):
    op = op_custom_gradient(lambda d, y: (d["a"] * d["b"] * y, lambda u: (u * 5.0, u * 7.0, u * 3.0)))
    got = grad(lambda a, b, y: op(kind([("b", b), ("a", a)]), y), (0, 1, 2))(1.0, 1.0, 1.0)
    close(got, (*map(array, factors), array(3.0)))

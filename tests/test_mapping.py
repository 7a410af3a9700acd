"""`vmap`, against a loop over the elements. The rules have false factors."""

import keras
import numpy as np
import pytest
from cases import CASES, each_of, weighted
from keras import ops
from support import BACKEND, array, close, compiled, numpy

import multigrad
from multigrad import grad, hessian, jacobian, jit, jvp, op_custom_gradient, vjp, vmap
from multigrad import ops as shelf

X, W = array(0.5, -1.25, 1.5), array(0.75, 1.0, -0.5)
XS, WS = ops.stack([X, 2.0 * X]), ops.stack([W, -W])
EACH = each_of()
SOME = each_of({name: CASES[name] for name in ("intermediate", "an op")}, forms=["function"])
OPTIONS = {"backend": "aot_eager"} if BACKEND == "torch" else {}
"""The options of `jit`: PyTorch's default compiler takes 10 s."""


@op_custom_gradient
def cube(x):
    return x**3, lambda upstream: 7.0 * upstream * x**2


def loop(function, in_axes=0):
    """Return the function of a batch that a loop over its elements defines."""

    def looped(*args):
        axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        count = next(arg.shape[axis] for arg, axis in zip(args, axes, strict=True) if axis is not None)
        rows = [
            function(
                *[a if axis is None else ops.take(a, i, axis) for a, axis in zip(args, axes, strict=True)]
            )
            for i in range(count)
        ]
        return keras.tree.map_structure(lambda *parts: ops.stack(parts), *rows)

    return looped


def total(mapped):
    """Return a scalar function of a batch. Its second derivative differs between elements."""
    return lambda xs, ws: ops.sum(ops.sin(mapped(xs, ws)) * ops.cos(xs))


def slopes(function, argnums=(0, 1)):
    return grad(weighted(function), argnums)


def penalty(function):
    return lambda x, w: ops.sum(slopes(function, 0)(x, w) ** 2)


# ------------------------------------------------------------------------- derivatives inside and around


@EACH
def test_the_values_and_gradients_of_elements(case):
    close(vmap(case.op)(XS, WS), loop(case.meant)(XS, WS), 1e-4)
    close(vmap(slopes(case.op))(XS, WS), loop(slopes(case.meant))(XS, WS), 1e-4)


@EACH
def test_second_derivatives_of_elements(case):
    mapped = vmap(grad(penalty(case.op), (0, 1)))(XS, WS)
    close(mapped, loop(grad(penalty(case.meant), (0, 1)))(XS, WS), 1e-3)


@EACH
def test_gradients_around(case):
    wanted = grad(total(loop(case.meant)), (0, 1))(XS, WS)
    close(grad(total(vmap(case.op)), (0, 1))(XS, WS), wanted, 1e-3)


@EACH
def test_second_derivatives_around(case):
    def twice(mapped):
        return grad(lambda xs, ws: ops.sum(grad(total(mapped))(xs, ws) ** 2), (0, 1))

    close(twice(vmap(case.op))(XS, WS), twice(loop(case.meant))(XS, WS), 1e-2)


@SOME
def test_gradients_inside_and_around(case):
    def twice(mapped, function):
        return grad(lambda xs, ws: ops.sum(mapped(slopes(function, 0))(xs, ws) ** 2), (0, 1))(XS, WS)

    close(twice(vmap, case.op), twice(loop, case.meant), 1e-3)


@SOME
def test_an_argument_that_is_not_mapped(case):
    close(vmap(case.op, (0, None))(XS, W), loop(case.meant, (0, None))(XS, W), 1e-4)
    wanted = grad(total(loop(case.meant, (0, None))), (0, 1))(XS, W)
    close(grad(total(vmap(case.op, (0, None))), (0, 1))(XS, W), wanted, 1e-3)
    closed_over = lambda w: ops.sum(vmap(lambda x: case.op(x, w))(XS) * ops.cos(XS))  # noqa: E731
    wanted = grad(lambda w: ops.sum(loop(lambda x: case.meant(x, w))(XS) * ops.cos(XS)))(W)
    close(grad(closed_over)(W), wanted, 1e-3)


@SOME
def test_nested(case):
    def both(mapped, function):
        return mapped(mapped(function, (None, 0)), (0, None))

    close(vmap(vmap(case.op, (None, 0)), (0, None))(XS, WS), both(loop, case.meant)(XS, WS), 1e-4)
    mapped = vmap(vmap(slopes(case.op), (None, 0)), (0, None))
    close(mapped(XS, WS), both(loop, slopes(case.meant))(XS, WS), 1e-4)

    def around(mapped, function):
        return grad(lambda xs, ws: ops.sum(both(mapped, function)(xs, ws) ** 2), (0, 1))(XS, WS)

    close(around(vmap, case.op), around(loop, case.meant), 1e-3)


@pytest.mark.parametrize("compile_", [compiled, lambda f: jit(f, **OPTIONS)], ids=["native", "jit"])
def test_compiled(compile_):
    xs = array(1.0, 2.0)
    close(compile_(vmap(cube))(xs), xs**3)
    close(compile_(vmap(grad(cube)))(xs), 7.0 * xs**2)
    close(vmap(compile_(grad(cube)))(xs), 7.0 * xs**2)
    close(compile_(grad(lambda xs: ops.sum(vmap(cube)(xs))))(xs), 7.0 * xs**2)
    close(grad(lambda xs: ops.sum(compile_(vmap(cube))(xs)))(xs), 7.0 * xs**2)


def test_a_gradient_of_a_function_that_was_compiled_without_one():
    """The first trace on TensorFlow has lost the rules. The function is traced again."""
    xs = array(1.0, 2.0)
    inner = jit(vmap(cube), **OPTIONS)
    outer = jit(lambda xs: 2.0 * inner(xs), **OPTIONS)
    close(inner(xs), xs**3)
    close(outer(xs), 2.0 * xs**3)
    close(grad(lambda xs: ops.sum(inner(xs)))(xs), 7.0 * xs**2)
    close(grad(lambda xs: ops.sum(outer(xs)))(xs), 14.0 * xs**2)
    close(inner(xs), xs**3)


@op_custom_gradient
def product(x, w):
    """Return the product. The rule returns false gradients, another one for each position."""
    return x * w, lambda upstream: (5.0 * upstream * w, 3.0 * upstream * x)


def test_one_array_in_two_places():
    """The gradient of each position is its own, although the arguments are one object."""
    close(vmap(slopes(product))(XS, XS), loop(slopes(product))(XS, ops.copy(XS)))
    around = grad(lambda xs, ws: ops.sum(vmap(product)(xs, ws)), (0, 1))
    close(around(XS, XS), (5.0 * XS, 3.0 * XS))
    close(around(XS, XS), around(XS, ops.copy(XS)))
    one = grad(lambda xs, ws: ops.sum(vmap(product, (0, None))(xs, ws)), (0, 1))
    total_of = ops.sum(XS, 0, keepdims=True) + 0.0 * XS
    close(one(XS, XS), (5.0 * total_of, 3.0 * total_of))
    close(grad(lambda xs: ops.sum(vmap(product)(xs, xs)))(XS), 8.0 * XS)


class Scaled(keras.layers.Layer):
    """A layer whose op reads its weight. The rule returns false gradients."""

    def __init__(self):
        super().__init__()
        self.w = self.add_weight(shape=(3,), initializer="ones")

    @op_custom_gradient
    def call(self, x):
        w = self.w * 1.0

        def rule(upstream, variables):
            return 5.0 * upstream * w, [3.0 * upstream * x for _ in variables]

        return x * w, rule


EMPTY = XS[:0]


@pytest.mark.slow_on("torch")
@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: jit(f, **OPTIONS)], ids=["eager", "jit"])
def test_no_elements(wrap):
    layer = Scaled()
    loss = lambda x, y: (2.0 * ops.sum(layer(cube(x))) - y) ** 2  # noqa: E731
    ys = EMPTY[:, 0]
    close(wrap(vmap(cube, out_axes=1))(EMPTY), ops.transpose(EMPTY))
    close(wrap(vmap(multigrad.value_and_grad(loss)))(EMPTY, ys), (ys, EMPTY))
    close(wrap(vmap(grad(loss, variables=[layer.w])))(EMPTY, ys), [EMPTY])
    close(wrap(grad(lambda xs, ys: ops.sum(vmap(loss)(xs, ys))))(EMPTY, ys), EMPTY)
    close(wrap(grad(lambda w: ops.sum(vmap(product, (0, None))(EMPTY, w))))(W), 0.0 * W)
    close(wrap(vmap(vmap(cube)))(EMPTY[:, None]), EMPTY[:, None])
    close(wrap(vmap(vmap(cube)))(XS[:, :0]), XS[:, :0])


@pytest.mark.forward
def test_no_elements_of_other_dtypes():
    """A mapped integer is a valid index, and a result that is the same for all elements has its value."""
    index, flag = ops.convert_to_tensor(np.zeros(0, "int32")), ops.convert_to_tensor(np.zeros(0, "bool"))
    taken, once = vmap(lambda i, b: (ops.where(b, ops.take(W, i), 0.0), cube(W)), out_axes=(0, None))(
        index, flag
    )
    assert taken.shape == (0,)
    close(once, W**3)


def test_one_element():
    """On TensorFlow, a map of one element is not vectorized."""
    rows = XS[:1]
    close(vmap(grad(lambda x: ops.sum(cube(x))))(rows), 7.0 * rows**2)
    close(grad(lambda rows: ops.sum(vmap(cube)(rows)))(rows), 7.0 * rows**2)
    with pytest.raises(ValueError, match=r"None|depends on a mapped argument"):
        vmap(cube, 0, None)(rows)


def test_every_derivative_inside():
    rows = ops.stack([X, W])
    close(vmap(jacobian(cube))(rows), ops.stack([7.0 * ops.diag(x**2) for x in (X, W)]))
    of_sum = lambda x: ops.sum(cube(x))  # noqa: E731
    close(vmap(hessian(of_sum))(rows), ops.stack([14.0 * ops.diag(x) for x in (X, W)]))
    pushed = vmap(lambda x, v: jvp(cube, (x,), (v,))[1])(rows, ops.ones_like(rows))
    close(pushed, 7.0 * rows**2)
    pulled = vmap(lambda x, u: vjp(cube, x)[1](u)[0])(rows, 2.0 * ops.ones_like(rows))
    close(pulled, 14.0 * rows**2)


def test_every_derivative_around():
    rows = ops.stack([X, W])
    mapped = vmap(cube)
    close(ops.reshape(jacobian(mapped)(rows), (6, 6)), 7.0 * ops.diag(ops.reshape(rows, (6,)) ** 2))
    second = hessian(lambda rows: ops.sum(mapped(rows)))(rows)
    close(ops.reshape(second, (6, 6)), 14.0 * ops.diag(ops.reshape(rows, (6,))))
    close(jvp(mapped, (rows,), (ops.ones_like(rows),))[1], 7.0 * rows**2)
    close(vjp(mapped, rows)[1](ops.ones_like(rows))[0], 7.0 * rows**2)


# ----------------------------------------------------------------------------------------- axes


def joined(x, w):
    return ops.concatenate([cube(x), w])


A = ops.reshape(ops.arange(6.0), (2, 3))
B = ops.reshape(ops.arange(10.0, 18.0), (4, 2))


@pytest.mark.forward
@pytest.mark.parametrize(
    ("in_axes", "out_axes", "wanted"),
    [
        (0, 0, ops.concatenate([A**3, ops.transpose(B)], 1)),
        ((0, 0), 1, ops.transpose(ops.concatenate([A**3, ops.transpose(B)], 1))),
        ((0, -1), -1, ops.transpose(ops.concatenate([A**3, ops.transpose(B)], 1))),
        ([-2, 1], -2, ops.concatenate([A**3, ops.transpose(B)], 1)),
    ],
)
def test_axes(in_axes, out_axes, wanted):
    b = ops.transpose(B) if in_axes in (0, (0, 0)) else B
    close(vmap(joined, in_axes, out_axes)(A, b), wanted)


@pytest.mark.forward
def test_axes_of_nested_maps():
    x = ops.reshape(ops.arange(24.0), (2, 3, 4))
    close(vmap(vmap(cube, in_axes=1))(x), ops.transpose(x, (0, 2, 1)) ** 3)
    nested = vmap(vmap(cube, out_axes=1), out_axes=-1)
    close(nested(x), ops.transpose(x, (2, 1, 0)) ** 3)
    assert (vmap(loop).__name__, vmap(loop).__doc__) == ("loop", loop.__doc__)


@pytest.mark.forward
def test_axes_of_structures():
    def f(inputs, scale, text, *, more):
        x, (w, kind) = inputs["x"], inputs["pair"]
        assert (kind, text) == ("kind", "text")
        return {"y": cube(x) * scale, "rest": (w * more, None, 3)}

    inputs = {"pair": (WS, "kind"), "x": ops.transpose(XS)}
    in_axes = ({"x": 1, "pair": (0, None)}, None, None)
    out_axes = {"y": 1, "rest": 0}
    got = vmap(f, in_axes, out_axes)(inputs, 2.0, "text", more=array(1.0, 3.0))
    close(got["y"], ops.transpose(2.0 * XS**3))
    close(got["rest"][0], WS * array([[1.0], [3.0]]))
    assert got["rest"][1] is None
    assert numpy(got["rest"][2]).tolist() == [3, 3]


def test_a_result_that_is_the_same_for_all_elements():
    once, repeated, number = vmap(lambda x: (cube(W), cube(W), 1.5), out_axes=(None, 1, 0))(XS)
    close(once, W**3)
    close(repeated, ops.stack([W**3, W**3], 1))
    close(number, array(1.5, 1.5))

    def of_w(w):
        once, repeated = vmap(lambda x: (cube(w), cube(w)), out_axes=(None, 0))(XS)
        return ops.sum(once) + ops.sum(repeated)

    close(grad(of_w)(W), 21.0 * W**2)


def test_arrays_variables_and_unmapped_numbers():
    rows = keras.Variable(numpy(XS))
    close(vmap(lambda x, y, s: cube(x) * y * s, (0, 0, None))(rows, numpy(WS), 2.0), 2.0 * XS**3 * WS)
    gradient = grad(lambda: ops.sum(vmap(cube)(rows)), variables=[rows])()[0]
    close(gradient, 7.0 * XS**2)


def test_integers():
    labels = ops.convert_to_tensor(np.array([2, 0]))
    close(vmap(lambda x, i: ops.take(cube(x), i))(XS, labels), array(3.375, 1.0))


@pytest.mark.forward
def test_structures_of_one_element_and_keywords_alone():
    close(vmap(lambda pair: cube(pair[0]) + pair[1])([XS, WS]), XS**3 + WS)
    close(vmap(lambda *, x: cube(x))(x=XS), XS**3)


# ------------------------------------------------------------------------------------- variables


def test_gradients_of_weights_for_each_element():
    layer = Scaled()
    layer(X)
    loss = lambda x: ops.sum(layer(x) ** 2)  # noqa: E731
    for wrap in (lambda f: f, lambda f: jit(f, **OPTIONS)):
        close(wrap(vmap(grad(loss, variables=[layer.w])))(XS), [2.0 * XS * 3.0 * XS], 1e-4)
    around = grad(lambda: ops.sum(vmap(loss)(XS)), variables=[layer.w])()
    close(around, [ops.sum(6.0 * XS**2, 0)], 1e-4)


def test_assignments_and_random_numbers():
    counter = keras.Variable(0.0, trainable=False)
    seed = keras.random.SeedGenerator(3)

    def f(x):
        counter.assign(counter + 1.0)
        return cube(x) + keras.random.normal((3,), seed=seed)

    for run in (vmap(f), lambda xs: grad(lambda xs: ops.sum(vmap(f)(xs)))(xs)):
        before = numpy(seed.state)
        noise = run(XS)
        assert numpy(seed.state).tolist() == [before[0], before[1] + 1]
        assert noise.shape == (2, 3)
    noise = vmap(f)(XS) - XS**3
    close(noise[0], noise[1], 1e-4)  # the same numbers
    assert float(counter.numpy()) == 3.0


class Assigning(keras.layers.Layer):
    """A layer that assigns a mapped value, and another value."""

    def build(self, shape):
        self.last = self.add_weight((), "zeros", trainable=False, name="last")
        self.count = self.add_weight((), "zeros", trainable=False, name="count")

    def call(self, x):
        self.count.assign_add(1.0)
        self.last.assign(ops.sum(x))
        return cube(x)


@pytest.mark.parametrize("wrap", [lambda f: f, vmap], ids=["one", "nested"])
@pytest.mark.parametrize("rows", [XS, XS[:1]], ids=["two elements", "one element"])
def test_an_assignment_of_a_mapped_value_raises(rows, wrap):
    layer = Assigning(name="assigning")
    layer.build((3,))
    with pytest.raises(
        ValueError, match=r"depends on a mapped argument(.|\n)*got: .*'assigning/last'"
    ) as error:
        wrap(vmap(layer))(rows if wrap is not vmap else rows[None])
    assert "assigning/count" not in str(error.value)
    assert float(layer.last.numpy()) == float(layer.count.numpy()) == 0.0


# ------------------------------------------------------------------------------------- the shelf


def test_a_solution_that_does_not_converge_is_nan():
    def f(a):
        return shelf.fixed_point(lambda z, a: z * a, ops.ones(()), a, max_iterations=20)

    got = numpy(vmap(f)(array(1.0, 1.5)))
    assert got[0] == 1.0
    assert np.isnan(got[1])


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.forward
@pytest.mark.parametrize(
    ("kind", "call", "text"),
    [
        (TypeError, lambda: vmap(cube, out_axes=0.5), "out_axes cannot be used"),
        (ValueError, lambda: vmap(lambda: X)(), "at least one tensor"),
        (
            ValueError,
            lambda: vmap(ops.sum, 0, 1)(XS),
            "^sum: out_axes cannot be used",
        ),
        (TypeError, lambda: vmap(cube)(2.0), "tensors, arrays, Keras Variables and None in"),
        (TypeError, lambda: vmap(cube, 0, (0, 0))(XS), "^cube: out_axes cannot be used"),
    ],
)
def test_errors(kind, call, text):
    with pytest.raises(kind, match=text):
        call()

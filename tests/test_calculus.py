"""grad, value_and_grad, vjp and jvp."""

from collections import OrderedDict, defaultdict

import keras
import numpy as np
import pytest
from keras import ops
from rules import LINEAR
from support import BACKEND, array, close, compiled, compiled_with_variables, numpy, seven

from multigrad import grad, hessian, jacobian, jit, jvp, op_custom_gradient, value_and_grad, vjp, vmap

ONES = np.ones(2, "float32")


def test_argnums():
    def f(x, y, z):
        return ops.sum(x * y**2 * z)

    one = array(1.0)
    close(value_and_grad(f)(one, one, one), (array(1.0), array(1.0)))
    close(grad(f, 1)(one, one, one), array(2.0))
    close(grad(f, -1)(one, one, one), array(1.0))
    close(grad(f, (1,))(one, one, one), (array(2.0),))
    close(grad(f, [2, 1])(one, one, one), (array(1.0), array(2.0)))


X = np.float32([3.0])


@pytest.mark.parametrize("x", [3.0, np.float32(3.0), X, keras.Variable(X)], ids=lambda x: type(x).__name__)
def test_python_numbers_arrays_and_variables(x):
    gradient = grad(lambda x: ops.sum(x**2))
    close(ops.sum(gradient(x)), array(6.0))
    close(ops.sum(compiled(gradient)(array(x))), array(6.0))


def test_structures_keywords_and_aux():
    def f(tree, *, power):
        return ops.sum(tree["a"] ** power) + ops.sum(tree["b"][0]), {"shape": tree["a"]}

    (value, aux), gradient = value_and_grad(f, has_aux=True)({"a": 2 * ONES, "b": [ONES]}, power=3)
    close(value, array(18.0))
    close(aux, {"shape": array(2.0, 2.0)})
    close(gradient, {"a": 12 * ONES, "b": [ONES]})
    gradient, aux = grad(f, has_aux=True)({"a": 2 * ONES, "b": [ONES]}, power=2)
    close(gradient, {"a": 4 * ONES, "b": [ONES]})


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_arrays_that_are_not_differentiated(dtype):
    y = np.array([0.0, 1.0], dtype)
    close(grad(lambda x, y: ops.sum(x * y))(ONES, y), array(0.0, 1.0))
    close(grad(lambda x, y: ops.sum(y * x), 1)(y, ONES), array(0.0, 1.0))
    close(grad(lambda x, *, more: ops.sum(x * more["y"][0]))(ONES, more={"y": [y]}), array(0.0, 1.0))
    w = keras.Variable(ONES)
    close(grad(lambda y: ops.sum(w * y), variables=[w])(y)[0], array(0.0, 1.0))


def test_other_objects_are_unchanged():
    given = np.array(["a", "b"]), np.array([None]), [1, "b"]
    got = []

    def f(x, others, last):
        got.extend([*others["in"], last])
        return ops.sum(x)

    grad(f)(ONES, {"in": given[:2]}, given[2])
    assert all(a is b for a, b in zip(got, given, strict=True))


def test_unused_arguments_have_zero_gradients():
    close(grad(lambda x, y: ops.sum(x), (0, 1))(ONES, ONES), (ONES, 0 * ONES))
    close(grad(lambda x: ops.sum(array(1.0, 2.0)))(ONES), 0 * ONES)


def test_nesting():
    f = lambda x: x**4  # noqa: E731
    close(grad(grad(grad(f)))(2.0), array(48.0))
    close(grad(lambda x: grad(lambda y: x * y**2)(x) * x)(3.0), array(54.0))
    # The same tensor is a separate variable inside and outside.
    close(grad(lambda x: grad(lambda y: x * y)(x))(3.0), array(1.0))


@pytest.mark.parametrize("argument", [3, array([1, 2], dtype="int32"), "text", True, [1.0, 2]])
@pytest.mark.parametrize(
    "of", [lambda f, x: grad(f)(x), lambda f, x: vjp(f, x), lambda f, x: jvp(f, (x,), (1.0,))]
)
def test_non_floating_arguments_raise(of, argument):
    with pytest.raises(TypeError, match="floating or complex"):
        of(lambda x: ops.sum(x), argument)


@pytest.mark.parametrize("argnums", [(0, 0), (1, -1)])
@pytest.mark.parametrize("of", [grad, value_and_grad, jacobian, hessian])
def test_a_duplicate_argnum_raises(of, argnums):
    """The gradient would be the gradient of only one of the two."""
    with pytest.raises(TypeError, match="each position once"):
        of(lambda x, y: x**3 * y, argnums)(2.0, 3.0)


@pytest.mark.parametrize("loss", [lambda y: 3.0, lambda y: np.ones(())])
def test_a_loss_that_is_not_a_tensor_raises(loss):
    """The gradient would be zero."""
    w, dense = keras.Variable(2.0), keras.layers.Dense(1)
    dense.build((None, 2))
    programs = [
        lambda: grad(lambda x: loss(seven(x)))(ONES),
        lambda: grad(lambda x: loss(x * w), variables=[w])(ONES),
        lambda: value_and_grad(lambda x: (loss(dense(x)), x), has_aux=True)(ONES[None]),
    ]
    for program in programs:
        with pytest.raises(TypeError, match="compute the loss with"):
            program()


@pytest.mark.parametrize("output", [None, {"a": 1.0}, (1.0,), "text"])
def test_arguments_without_tensors(output):
    with pytest.raises(TypeError, match="must be a real scalar") as error:
        grad(lambda x: output)(1.0)
    got = "None" if output is None else type(output).__name__
    assert f"got: {got}" in str(error.value)


def test_empty_argnums_and_variables():
    value, gradients = value_and_grad(seven, 0, variables=[])(3.0)
    close(value, array(3.0))
    close(gradients, (array(7.0), []))
    assert grad(lambda x: x**2, ())(array(3.0)) == ()


def test_empty_variables_in_a_function_with_weights():
    """The gradient of the weights is not computed."""
    w, x = keras.Variable([2.0, 3.0]), array(1.0, 1.0)
    close(value_and_grad(lambda x: ops.sum(x * w), ())(x), (array(5.0), ()))
    assert grad(lambda weights, x: ops.sum(x * w))({}, x) == {}
    output, pullback = vjp(lambda: w * 1.0)
    close((output, pullback(x)), (array(2.0, 3.0), ()))
    close(jvp(lambda: w * 1.0, (), ()), (array(2.0, 3.0), array(0.0, 0.0)))
    assert jacobian(lambda x: x * w, ())(x) == ()


def test_any_collection_of_variables():
    w = keras.Variable(2.0)
    close(grad(lambda x: x * w, variables={"w": w}.values())(3.0), [array(3.0)])


@pytest.mark.parametrize("of", [grad, value_and_grad, vjp, jacobian, hessian, lambda f: jvp(f, (), ())])
def test_non_functions_raise(of):
    with pytest.raises(TypeError, match=r"multigrad: f cannot be used(.|\n)*got: float 2.0(.|\n)*fix"):
        of(2.0)


def test_vjp():
    y, pullback = vjp(lambda x, w: x * w, array(1.0, 2.0), array(3.0, 4.0))
    close(y, array(3.0, 8.0))
    close(pullback(array(1.0, 10.0)), (array(3.0, 40.0), array(1.0, 20.0)))
    close(pullback(np.float32([0.0, 1.0])), (array(0.0, 4.0), array(0.0, 2.0)))
    y, pullback = vjp(lambda x: x**2, 3.0)
    close((y, pullback(1), pullback(None)), (array(9.0), (array(6.0),), (array(0.0),)))


def test_jvp():
    close(jvp(lambda x: x**3, (2.0,), (1.0,)), (array(8.0), array(12.0)))
    close(jvp(lambda x, w: x * w, [ONES, 2 * ONES], [3 * ONES, None]), (2 * ONES, 6 * ONES))
    close(jvp(lambda x: x**2, (keras.Variable(ONES),), (1.0 * ONES,)), (ONES, 2 * ONES))


def of_structures(tree, x):
    y = tree["a"] ** 2 * tree["b"][0]
    return {"y": y, "more": [ops.argmax(y), "text", None, (x * 3.0, 2)]}


PRIMALS = {"a": 3 * ONES, "b": [2 * ONES]}, 1.0


def test_vjp_of_structures():
    output, pullback = vjp(of_structures, *PRIMALS)
    close(output["y"], 18 * ONES)
    close(output["more"][3][0], array(3.0))
    assert output["more"][1:3] == ["text", None]
    assert output["more"][3][1] == 2
    assert int(numpy(output["more"][0])) == 0
    upstream = {"y": ONES, "more": [None, "ignored", None, (2.0, 0)]}
    close(pullback(upstream), ({"a": 12 * ONES, "b": [9 * ONES]}, array(6.0)))
    upstream = {"y": None, "more": [None, None, None, (2.0, None)]}
    close(pullback(upstream), ({"a": 0 * ONES, "b": [0 * ONES]}, array(6.0)))


def test_jvp_of_structures():
    output, tangent = jvp(of_structures, PRIMALS, ({"a": ONES, "b": [None]}, 5.0))
    close(output["y"], 18 * ONES)
    close(tangent["y"], 12 * ONES)
    assert tangent["more"][:3] == [None, None, None]
    close(tangent["more"][3][0], array(15.0))
    assert tangent["more"][3][1] is None


def _last_first(numbers):
    return OrderedDict(sorted(numbers.items(), reverse=True))


@pytest.mark.parametrize(
    "given", [dict, OrderedDict, _last_first, lambda numbers: defaultdict(float, numbers)]
)
@pytest.mark.parametrize("own", [dict, OrderedDict, _last_first, lambda numbers: defaultdict(float, numbers)])
def test_tangents_are_matched_by_key(own, given):
    ten = given({"a": 10.0, "b": 1.0})
    (gradient,) = vjp(lambda x: [own({"a": x * 3.0, "b": x * 2.0})], 1.0)[1]([ten])
    close(gradient, array(32.0))
    primal = own({"a": 10.0, "b": 1.0})
    close(jvp(lambda p: p["b"] * 2.0 + p["a"] * 3.0, (primal,), (ten,))[1], array(32.0))


def test_vjp_and_jvp_with_aux():
    output, pullback, aux = vjp(lambda x: (x**2, {"twice": 2.0 * x}), ONES, has_aux=True)
    close((output, pullback(ONES), aux), (ONES, (2 * ONES,), {"twice": 2 * ONES}))
    close(jvp(lambda x: (x**2, x), (ONES,), (ONES,), has_aux=True), (ONES, 2 * ONES, ONES))
    with pytest.raises(TypeError, match="has_aux"):
        jvp(lambda x: x, (ONES,), (ONES,), has_aux=True)


def test_independent_outputs_have_zero_derivatives():
    constant = array(1.0, 2.0)
    close(vjp(lambda x, w: constant, ONES, 1.0)[1](ONES), (0 * ONES, array(0.0)))
    close(jvp(lambda x, w: (constant, w), (ONES, 1.0), (ONES, 1.0))[1], (0 * ONES, array(1.0)))
    assert jvp(lambda x: ops.argmax(x), (ONES,), (ONES,))[1] is None


def test_outputs_that_are_inputs_or_repeated():
    close(jvp(lambda x, w: (x, w, x), (ONES, 2.0), (3 * ONES, 5.0))[1], (3 * ONES, array(5.0), 3 * ONES))
    close(vjp(lambda x: (x, x), ONES)[1]((ONES, 2 * ONES)), (3 * ONES,))


def test_nesting_vjp_and_jvp():
    cube = lambda x: x**3  # noqa: E731
    along = lambda f: lambda x: jvp(f, (x,), (1.0,))[1]  # noqa: E731
    close(along(along(along(cube)))(2.0), array(6.0))
    close(grad(along(grad(cube)))(2.0), array(6.0))
    close(along(lambda x: vjp(cube, x)[1](x)[0])(2.0), array(36.0))  # 3 x^3
    # The same tensor is a separate variable inside and outside.
    close(along(lambda x: along(lambda y: x * y)(x))(3.0), array(1.0))
    close(grad(lambda x: jvp(lambda y: x * y, (x,), (x,))[1])(3.0), array(6.0))


def test_calling_a_pullback_outside():
    _, pullback, _ = vjp(lambda x: (x**3, None), array(2.0), has_aux=True)
    close(grad(lambda u: pullback(u)[0] * u)(5.0), array(120.0))
    close(jvp(pullback, (1.0,), (2.0,)), ((array(12.0),), (array(24.0),)))


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_pullback_in_a_rule(has_aux):
    @op_custom_gradient
    def cube(x):
        def f(x):
            y = x**3
            return (y, y) if has_aux else y

        output, pullback, *aux = vjp(f, x, has_aux=has_aux)
        return aux[0] if aux else output, lambda upstream: 7.0 * pullback(upstream)[0]

    for run in (lambda f: f, compiled):
        close(run(grad(cube))(array(2.0)), array(84.0))  # 7 * 3 x^2
        close(run(grad(grad(cube)))(array(2.0)), array(84.0))  # 7 * 6 x
    close(jvp(cube, (array(2.0),), (array(3.0),))[1], array(252.0))


def test_the_output_is_differentiated():
    close(grad(lambda x: vjp(lambda y: y**2 * x, x)[0])(3.0), array(27.0))
    close(grad(lambda x: jvp(lambda y: y**2 * x, (x,), (1.0,))[0])(3.0), array(27.0))


def test_vjp_and_jvp_with_respect_to_variables():
    w, count = keras.Variable(ONES * 2.0), keras.Variable(0.0, trainable=False)

    def f(x):
        count.assign_add(1.0)
        return seven(x) * w

    for run in (lambda f: f, compiled_with_variables):
        x, along = array(1.0, 3.0), array(1.0, 10.0)
        (y, pulled) = run(lambda x: (lambda y, pull: (y, pull(along)))(*vjp(f, x, variables=[w])))(x)
        close((y, pulled), (2.0 * x, ((14.0 * along,), [x * along])))
        close(run(lambda: vjp(lambda: f(x), variables=[w])[1](along))(), [x * along])
        close(run(lambda: jvp(f, [x], ((along,), [ONES]), variables=[w]))(), (2.0 * x, 14.0 * along + x))
        close(run(lambda: jvp(lambda: f(x), (), (along,), variables=[w]))(), (2.0 * x, x * along))
        close(run(lambda: jvp(f, (x,), ((None,), [ONES]), variables=[w])[1])(), x)
    close(count.value, array(10.0))
    with pytest.raises(TypeError, match="the structures differ"):
        jvp(f, (x,), (along,), variables=[w])
    with pytest.raises(ValueError, match="at least one variable"):
        vjp(lambda: f(x), variables=[])


@pytest.mark.parametrize("run", [lambda f: f, compiled_with_variables], ids=["eager", "compiled"])
def test_state_that_a_loop_changes(run):
    """The state of a loop: random numbers and counters. JAX cannot carry it, and names the variable."""
    w, count = keras.Variable(2.0), keras.Variable(0.0, trainable=False, name="count")
    seed = keras.random.SeedGenerator(3)

    def draw():
        count.assign_add(1.0)
        return keras.random.uniform((), seed=seed)

    def f(x):
        first = draw()
        last, noises = ops.scan(lambda carry, _: (seven(carry) * w, draw()), x, length=3)
        return last, (first, noises, draw(), count * 1.0)

    step = run(value_and_grad(f, 0, has_aux=True, variables=[w]))
    pulled = run(lambda x: vjp(f, x, has_aux=True, variables=[w])[1](1.0))
    if BACKEND == "jax":
        before = numpy(seed.state)
        for program in (step, pulled, jit(f), run(lambda x: vmap(f)(ops.reshape(x, (1,))))):
            with pytest.raises(TypeError, match=r"^count: a variable is assigned in a loop"):
                program(array(1.0))
        assert (numpy(seed.state) == before).all()
        assert numpy(count) == 0.0
        return
    drawn = []
    for calls in (1, 2):
        (value, (first, noises, last, counted)), gradients = step(array(1.0))
        close((value, counted), (array(8.0), array(5.0 * calls)))
        close(gradients, (array(8.0 * 7.0**3), [array(4.0 + 14.0 * (2.0 + 14.0))]))
        drawn += [float(numpy(first)), *numpy(noises).tolist(), float(numpy(last))]
    assert len(set(drawn)) == 10
    close(pulled(array(1.0)), ((array(8.0 * 7.0**3),), [array(4.0 + 14.0 * (2.0 + 14.0))]))
    close(count.value, array(15.0))


def test_complex_numbers():
    """The gradient of a real loss along the tangent is the real part of the product of both."""
    z, along = array(1.0 + 2.0j, dtype="complex64"), array(0.5 - 1.0j, dtype="complex64")
    turn = op_custom_gradient(
        lambda z: (z * 1.0, lambda u: u * ops.conj(array(2.0 + 3.0j, dtype="complex64")))
    )
    close(jvp(lambda z: z**2, (z,), (along,))[1], 2 * z * along)
    close(jvp(turn, (z,), (along,))[1], array(2.0 + 3.0j, dtype="complex64") * along)
    close(jvp(lambda z: ops.real(z * ops.conj(z)), (z,), (along,))[1], array(-3.0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_dtype_is_kept(dtype):
    x = array(1.0, 2.0, dtype=dtype)
    output, tangent = jvp(lambda x: x**2, (x,), (ONES,))
    assert x.dtype == output.dtype == tangent.dtype
    (gradient,) = vjp(lambda x: x**2, x)[1](ONES)
    assert gradient.dtype == x.dtype
    close(ops.cast(tangent, "float32"), array(2.0, 4.0))


def test_the_error_of_an_upstream_gradient_shows_its_structure():
    with pytest.raises(TypeError, match=r"structures differ(.|\n)*required: tensor\n  got: \[1\.0, tensor\]"):
        vjp(lambda x: x, 1.0)[1]([1.0, ONES])
    with pytest.raises(TypeError, match=r"required: \{'a': tensor, 'b': None\}\n"):
        vjp(lambda x: {"a": x, "b": 3}, 1.0)[1](1.0)


@pytest.mark.parametrize("rule", LINEAR.values(), ids=LINEAR)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_linear_rules_are_accepted(rule, dtype):
    op = op_custom_gradient(lambda x: (x * 2.0, rule))
    x, along = array(1.0, 2.0, 4.0, dtype=dtype), array(1.0, -1.0, 3.0, dtype=dtype)
    wanted = 0.0 * along if rule is LINEAR["none"] else rule(along)
    got = jvp(op, (x,), (along,))[1]
    close(ops.cast(got, "float32"), ops.cast(wanted, "float32"), 1e-2)


def test_number_of_runs_of_the_function_and_the_rule():
    counts = {"function": 0, "rule": 0}

    @op_custom_gradient
    def op(x):
        counts["function"] += 1

        def rule(u):
            counts["rule"] += 1
            return u * 7.0

        return x * 2.0, rule

    _, pullback = vjp(op, ONES)
    assert counts == {"function": 1, "rule": 0}
    close(pullback(ONES), (7 * ONES,))
    close(pullback(2 * ONES), (14 * ONES,))
    assert counts == {"function": 1, "rule": 2}
    counts.update(function=0, rule=0)
    close(jvp(op, (ONES,), (ONES,))[1], 7 * ONES)
    assert counts == {"function": 1, "rule": 1}

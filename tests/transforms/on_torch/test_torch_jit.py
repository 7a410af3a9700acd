"""`multigrad.jit` and torch.compile: derivatives in functions and rules, at several orders."""

import logging
import sys
import types

import keras
import pytest
import torch
from cases import CASES
from keras import ops
from support import close
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from multigrad import grad, jacobian, jit, jvp, op_custom_gradient, value_and_grad, vjp
from multigrad.ops import fixed_point, implicit_root

X = torch.tensor([0.75, 1.5])

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()


@op_custom_gradient
def sine(x):
    return ops.sin(x), lambda upstream: 3.0 * upstream * ops.cos(x)


def cubed(t):
    return t**3


SLOPES_OF_CUBES = {
    "grad": lambda x: grad(lambda t: ops.sum(t**3))(x),
    "jvp": lambda x: jvp(cubed, (x,), (ops.ones_like(x),))[1],
    "vjp": lambda x: vjp(cubed, x)[1](ops.ones_like(x))[0],
    "jacobian": lambda x: ops.sum(jacobian(cubed)(x), 0),
}


def in_rule(slope):
    op = op_custom_gradient(lambda x: (x**3, lambda u: 2.0 * u * slope(x)))
    return lambda x: ops.sum(op(x))


def in_function(slope):
    @op_custom_gradient
    def op(x):
        of_x = slope(x)
        return x**3, lambda u: 2.0 * u * of_x

    return lambda x: ops.sum(op(x))


@op_custom_gradient
def around_an_op(x):
    y = sine(x)
    return y * x, lambda upstream: 11.0 * upstream * y * x


def of_case(name):
    return lambda x: ops.sum(CASES[name].op(x, ops.sin(x)) ** 2)


def root(a):
    return ops.sum(implicit_root(lambda z, a: z**3 + z - a, ops.ones_like(a), a) ** 2)


def fixed(a):
    return ops.sum(fixed_point(lambda z, a: 0.5 * (z + a / z), ops.ones_like(a), a) ** 3)


ONE_GRAPH = {
    **{f"{name} in the rule": in_rule(SLOPES_OF_CUBES[name]) for name in ("grad", "vjp", "jacobian")},
    **{f"{name} in the function": in_function(SLOPES_OF_CUBES[name]) for name in ("grad", "jvp")},
    **{name: of_case(name) for name in ("two outputs", "structure", "view")},
    "an op in an op": lambda x: ops.sum(around_an_op(x)),
}
PIECES = {
    "implicit_root": root,
    "fixed_point": fixed,
    "remat": lambda x: ops.sum(keras.remat(sine)(x) ** 2),
    "checkpoint": lambda x: ops.sum(checkpoint(sine, x, use_reentrant=False) ** 2),
}


def derivative(f, order):
    for _ in range(order):
        f = grad(lambda x, f=f: ops.sum(f(x)))
    return f


def by_backward(f):
    def slope(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    return slope


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_GRAPH)
def test_derivatives_in_one_graph(name):
    f = ONE_GRAPH[name]
    for order in (1, 2):
        close(
            jit(derivative(f, order), backend="aot_eager", fullgraph=True)(X), derivative(f, order)(X), 1e-4
        )
    for slope in (by_backward, grad):
        close(slope(jit(f, backend="aot_eager", fullgraph=True))(X), grad(f)(X), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", PIECES)
def test_derivatives_where_a_program_breaks(name):
    f = PIECES[name]
    for order in (1, 2):
        compiled = jit(derivative(f, order), backend="aot_eager")
        for _ in range(4):  # two calls run uncompiled, and the third one compiles pieces
            close(compiled(X), derivative(f, order)(X), 1e-4)
    compiled = jit(f, backend="aot_eager")
    for _ in range(2):
        close(by_backward(compiled)(X), grad(f)(X), 1e-4)
        close(grad(compiled)(X), grad(f)(X), 1e-4)


class Scale(keras.layers.Layer):
    """A layer whose rule reads its weight. Both factors are false."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(2,), initializer="ones")

    @op_custom_gradient
    def call(self, x):
        def rule(upstream, variables):
            return 2.0 * upstream * self.scale, [5.0 * upstream * x]

        return x * self.scale, rule


BREAKS = [
    "function",
    "after gradient",
    "function of jacobian",
    "before pullback",
    "between values",
    "after loss",
]


def losses_that_break(place):
    """Return functions with gradients in them, and their weights. The graph breaks at one place."""
    weight, layer = keras.Variable([2.0, 3.0]), Scale()
    layer.build((2,))
    weights = [weight, layer.scale]

    def break_at(name):
        if name == place:
            torch._dynamo.graph_break()

    def network(x):
        hidden = sine(weight * x)
        break_at("function")
        return ops.sum(layer(hidden) * like_by_hand(x, x))

    def penalty(x):
        slope = grad(network)(x)
        break_at("after gradient")
        return ops.sum(slope**2)

    def twice(x):
        break_at("function of jacobian")
        return sine(weight * sine(x))

    def penalty_of_jacobian(x):
        return ops.sum(jacobian(twice)(x) ** 2)

    def penalty_of_pullback(x):
        y, pull = vjp(lambda x: sine(weight * sine(x)), x)
        break_at("before pullback")
        return ops.sum(pull(y)[0] ** 2)

    def penalty_of_two_values(x):
        hidden = sine(weight * x)
        break_at("between values")
        return ops.sum(grad(lambda z: ops.sum(sine(z * hidden)))(x) ** 2)

    return [penalty, penalty_of_jacobian, penalty_of_pullback, penalty_of_two_values], weights


def step_that_breaks(place):
    """Return a training step, and its weights. The graph breaks at one place."""
    losses, weights = losses_that_break(place)
    total = value_and_grad(lambda: sum(loss(X) for loss in losses), variables=weights)

    def step():
        value, slopes = total()
        if place == "after loss":
            torch._dynamo.graph_break()
        for variable, slope in zip(weights, slopes, strict=True):
            variable.assign(variable - 0.01 * slope)
        return value

    return step, weights


@pytest.mark.slow
@pytest.mark.parametrize("place", BREAKS)
def test_a_training_step_with_gradients_in_its_loss_where_a_program_breaks(place):
    step, weights = step_that_breaks(place)
    compiled, weights_of_compiled = step_that_breaks(place)
    compiled = jit(compiled, backend="aot_eager")
    for _ in range(5):  # two steps run uncompiled, and the third one compiles pieces
        close(compiled(), step(), 1e-4)
    close(weights_of_compiled, weights, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("place", BREAKS[:-1])
def test_a_derivative_of_a_program_with_gradients_that_breaks(place):
    """A gradient whose function breaks runs uncompiled, which PyTorch cannot differentiate again here."""
    losses, weights = losses_that_break(place)
    for loss in losses:
        compiled = jit(loss, backend="aot_eager")
        for _ in range(2):
            check_derivative(compiled, loss, weights)
        if place == "function" and loss is losses[0]:
            with pytest.raises(
                RuntimeError, match="gradient of a compiled function cannot be differentiated"
            ):
                check_derivative(compiled, loss, weights)
        else:
            check_derivative(compiled, loss, weights)
            check_derivative(compiled, loss, weights)


def check_derivative(compiled, function, weights):
    """Assert that PyTorch's gradient of a compiled function is that of the function."""
    x = (torch.rand_like(X) + 0.5).requires_grad_()
    inputs = [x, *[variable.value for variable in weights]]
    got, wanted = (torch.autograd.grad(f(x), inputs, materialize_grads=True) for f in (compiled, function))
    close(got, wanted, 1e-4)


@pytest.mark.slow
def test_a_weight_that_is_assigned_after_a_gradient_in_a_program_that_breaks():
    """The gradient is not differentiated again, so the graph does not need the weight of before."""
    weight = keras.Variable([1.0, 2.0])

    def step(x):
        torch._dynamo.graph_break()
        slope = grad(lambda x: ops.sum(sine(weight * x)))(x)
        weight.assign(weight - 0.5 * slope)
        return slope

    compiled, expected = jit(step, backend="aot_eager"), torch.tensor([1.0, 2.0])
    for _ in range(4):
        slope = 3.0 * torch.cos(expected * X) * expected
        close(compiled(X), slope)
        expected = expected - 0.5 * slope
    close(weight, expected)


def test_a_graph_that_breaks_inside_of_a_derivative_is_right_or_raises():
    """Without the error, the derivative could be zero: the second graph has the inputs without their history.

    Dynamo breaks the graph before the derivative instead, unless this setting allows more.
    """

    def f(x):
        y = sine(x)
        torch._dynamo.graph_break()
        return y

    with torch._dynamo.config.patch(nested_graph_breaks=True):
        compiled = jit(grad(lambda x: ops.sum(jacobian(f)(x))), backend="aot_eager")
        for _ in range(3):
            try:
                slopes = compiled(X)
            except AssertionError:  # "the graph was broken inside of a derivative"
                continue
            close(slopes, grad(lambda x: ops.sum(jacobian(f)(x)))(X))


@pytest.mark.slow
def test_derivatives_do_not_depend_on_what_was_compiled_before():
    """After eight programs of one function, Dynamo compiles the functions that it calls separately."""
    for f in (ONE_GRAPH | PIECES).values():
        for order in (1, 2):
            compiled = torch.compile(lambda x, f=f, n=order: derivative(f, n)(x), backend="aot_eager")
            close(compiled(X), derivative(f, order)(X), 1e-4)
        close(by_backward(torch.compile(lambda x, f=f: f(x), backend="aot_eager"))(X), grad(f)(X), 1e-4)


def test_a_program_without_a_gradient_has_no_node():
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    constant = op_custom_gradient(lambda x: (x * weight.detach(), lambda upstream: 5.0 * upstream))
    assert not jit(constant, backend="aot_eager", fullgraph=True)(X).requires_grad
    closing_over = op_custom_gradient(lambda x: (x * weight, lambda upstream: 5.0 * upstream))
    program = jit(closing_over, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="not an argument"):
        program(X)
    with torch.no_grad():
        close(jit(closing_over, backend="aot_eager", fullgraph=True)(X), X * weight.detach())


def test_a_builtin_function_without_a_signature():
    close(jit(torch.exp, backend="eager")(X), torch.exp(X))


def test_each_op_is_compiled_separately():
    def f(x):
        return x * 2.0, lambda upstream: 3.0 * upstream

    for line in range(12):  # Dynamo's limit is eight programs
        copy = types.FunctionType(f.__code__.replace(co_firstlineno=1000 + line), f.__globals__)
        x = X.clone().requires_grad_()
        y = torch.compile(op_custom_gradient(copy), backend="eager", fullgraph=True)(x)
        close(torch.autograd.grad(y.sum(), x)[0], torch.full((2,), 3.0))


def test_a_compiled_function_in_a_program_is_part_of_its_graph():
    inner = jit(lambda x: 2.0 * sine(x))
    program = torch.compile(lambda x: inner(x) + 1.0, backend="eager", fullgraph=True)
    x = X.clone().requires_grad_()
    y = program(x)
    close(y, 2.0 * torch.sin(X) + 1.0)
    close(torch.autograd.grad(y.sum(), x)[0], 6.0 * torch.cos(X))


def test_an_op_that_breaks_a_program_runs_uncompiled():
    for factor in (3.0, 5.0, 7.0):

        @op_custom_gradient
        def op(x, factor=factor):
            def rule(upstream):
                torch._dynamo.graph_break()
                return factor * upstream

            return x * 2.0, rule

        x = X.clone().requires_grad_()
        y = torch.compile(lambda x, op=op: op(x) + 1.0, backend="eager")(x)
        close(torch.autograd.grad(y.sum(), x)[0], torch.full((2,), factor))


@op_custom_gradient
def like_by_hand(x, y):
    e = ops.exp(x)
    return e * y, lambda upstream: (3.0 * upstream * e * y, 5.0 * upstream * e)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_compiled_autograd(compiled):
    x, y = X.clone().requires_grad_(), (X + 1.0).requires_grad_()
    want = torch.autograd.grad(like_by_hand(x, y).sum(), (x, y))
    f = torch.compile(like_by_hand, backend="eager") if compiled else like_by_hand
    output = f(x, y).sum()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        got = torch.autograd.grad(output, (x, y))
    close(got, want)


@pytest.mark.parametrize("fails", [False, True])
def test_the_log_names_the_function_that_is_compiled(fails, monkeypatch, caplog):
    monkeypatch.setattr(sys.modules["multigrad.backend.torch.jit"], "_SECONDS", 0.0)

    def training_step(x):
        if fails:  # to be compiled as one graph, in two calls
            torch._dynamo.graph_break()
        return x * 2.0

    with caplog.at_level(logging.WARNING, "multigrad"):
        compiled = jit(training_step, backend="eager")
        for _ in range(4):
            compiled(X)
    (line,) = caplog.messages
    assert "training_step" in line


@pytest.mark.slow
def test_a_gradient_that_was_not_recorded_raises_outside_of_its_program():
    """The part of the derivative through this gradient would silently be missing."""
    weight = keras.Variable([1.0, 2.0])

    def penalty():
        (slope,) = grad(lambda: ops.sum(sine(weight)), variables=[weight])()
        return ops.sum(slope**2) + ops.sum(weight * 1.0)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="no derivative through the gradients"):
        jit(penalty, backend="eager", fullgraph=True)()
    compiled = jit(penalty, backend="eager")
    for _ in range(3):
        with pytest.raises(RuntimeError, match="it was not recorded"):
            compiled().backward()


@pytest.mark.slow
def test_a_value_that_depends_on_another_tensor_with_a_history():
    weight, factor = keras.Variable(3.0), torch.tensor(2.0, requires_grad=True)

    def f():
        value, _ = value_and_grad(lambda: sine(factor * weight), variables=[weight])()
        return value + factor

    compiled = jit(f, backend="eager")
    for _ in range(3):
        (slope,) = torch.autograd.grad(compiled(), factor)
        close(slope, 1.0 + 3.0 * 3.0 * torch.cos(torch.tensor(6.0)))


def test_an_output_that_is_changed_in_place_after_the_op():
    @op_custom_gradient
    def op(x):
        y = ops.exp(x)
        return y, lambda upstream: 5.0 * upstream * y

    def f(x):
        z = op(x)
        z.add_(1.0)
        return ops.sum(z)

    close(jit(grad(f), backend="aot_eager", fullgraph=True)(X), 5.0 * torch.exp(X))


def test_an_error_of_the_function_is_raised_unchanged():
    compiled = jit(grad(lambda x, y: ops.sum(sine(x) @ y)), backend="eager")
    for _ in range(3):
        with pytest.raises(RuntimeError, match="inconsistent tensor size") as caught:
            compiled(X, torch.ones(3))
        assert type(caught.value) is RuntimeError
    close(compiled(X, X), 3.0 * X * torch.cos(X))


@op_custom_gradient
def tripled(x):
    return 3.0 * x, lambda upstream: 5.0 * upstream


class TripledUpstream(keras.layers.Layer):
    """A layer whose rule applies another op. Both have false factors."""

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(3,), initializer="ones")

    @op_custom_gradient
    def scaled(self, x):
        def rule(upstream, variables):
            return upstream, [tripled(upstream * x) * 7.0]

        return x * self.kernel, rule

    def call(self, x):
        return self.scaled(x)


def test_an_op_in_a_rule_is_part_of_one_graph():
    """The gradients of a training step are not differentiated again, so the op in the rule needs no rule."""
    counters.clear()
    layer, x = TripledUpstream(), torch.tensor([0.5, -1.0, 2.0])
    layer(x)  # Keras adds to its state in the first call of any layer
    loss = value_and_grad(lambda x: ops.sum(layer(x) ** 2), variables=layer.trainable_variables)
    step = jit(loss, fullgraph=True, backend="aot_eager")
    for value in (1.0, 2.0):
        layer.kernel.assign([value] * 3)
        close(step(x), (ops.sum((value * x) ** 2), [42.0 * value * x**2]))
    assert counters["stats"]["unique_graphs"] == 1


def test_an_op_in_a_rule_that_is_differentiated_again_has_its_rule():
    layer, x = TripledUpstream(), torch.tensor([0.5, -1.0, 2.0])
    layer.build((3,))

    def steepness(x):
        return ops.sum(grad(lambda x: ops.sum(tripled_in_rule(x)))(x))

    step = value_and_grad(lambda x: steepness(x) + ops.sum(layer(x)), argnums=0)
    close(jit(step)(x), step(x))
    close(step(x)[1], torch.tensor([36.0, 36.0, 36.0]))


@op_custom_gradient
def tripled_in_rule(x):
    return x, lambda upstream: 7.0 * upstream * tripled(x)

"""torch.compile(fullgraph=True): an op compiles in one graph, forward and backward, and once."""

import functools

import keras
import pytest
import torch
from cases import CASES, V, W, X, as_meant
from keras import ops
from support import Phase, close
from test_shelf import ROWS
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from vectors import gradients

from multigrad import grad, jacobian, jvp, op_custom_gradient, value_and_grad, vjp
from multigrad import ops as shelf

# A warning of Dynamo (PyTorch 2.13), which looks for gradients of tensors.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """Reset the compiler, so that functions of one test do not count for another."""
    torch.compiler.reset()


class Counting:
    """A backend that runs graphs uncompiled, and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def in_one_graph(f, backend="aot_eager"):
    return torch.compile(f, fullgraph=True, backend=backend)


def slope(f, x=X, upstream=1.0):
    """Return the gradient of a function of one tensor."""
    x = x.clone().requires_grad_()
    y = f(x)
    return torch.autograd.grad(y, x, upstream * torch.ones_like(y))[0]


def around(f):
    """Return the op between other operations."""
    return lambda x, w: torch.sin(f(x * w, w)) * x


@as_meant(each=pytest.mark.parametrize("case", CASES.values(), ids=CASES))
def test_fullgraph_compilation(f):
    compiled = in_one_graph(around(f))
    return gradients(compiled), gradients(compiled)


IN_ONE_GRAPH = (
    "scale_gradient reverse_gradient stop_gradient_if clip_gradient round_straight_through "
    "sign_straight_through clip_straight_through fake_quantize spike log1pexp logcosh "
    "safe_sqrt safe_log safe_divide safe_norm"
)


@pytest.mark.parametrize("name", IN_ONE_GRAPH.split())
def test_fullgraph_compilation_of_the_ops_of_multigrad(name):
    op = ROWS[name].call
    close(slope(in_one_graph(op), upstream=3.0), slope(op, upstream=3.0))


ANSWERS = {
    "of a number": (0.5, lambda u: (u * 7.0, u)),
    "of tensors alone": (None, lambda u: (u * 7.0,)),
    "by name": (0.5, lambda u: {"x": u * 7.0, "option": u}),
    "by functions": (0.5, lambda u: (lambda: u * 7.0, lambda: u)),
}


@pytest.mark.parametrize(("option", "answer"), ANSWERS.values(), ids=ANSWERS)
def test_fullgraph_compilation_of_each_form_of_answer(option, answer):
    op = op_custom_gradient(lambda x, option: (x * 3.0, answer))
    for f in (op, in_one_graph(op)):
        close(slope(lambda x, f=f: f(x, option)), torch.full_like(X, 7.0))


def test_fullgraph_compilation_of_a_rule_with_a_default_for_variables():
    """Dynamo cannot read the default."""
    scale = keras.Variable(2.0)

    @op_custom_gradient
    def op(x):
        def rule(upstream, variables=None):
            return upstream * 5.0, [ops.sum(upstream) * 7.0 for variable in variables]

        return x * scale, rule

    x = X.detach().requires_grad_()
    for f in (op, in_one_graph(op)):
        of_x, of_scale = torch.autograd.grad(f(x).sum(), [x, scale.value])
        close(of_x, torch.full_like(x, 5.0))
        close(of_scale, torch.tensor(7.0 * x.numel()))


def test_fullgraph_compilation_with_one_entry_per_tensor_and_an_option():
    """One entry per argument is tried first, and does not fit."""
    op = op_custom_gradient(lambda pair, option: (pair[0] * pair[1], lambda u: (u * 5.0, u * 7.0)))
    _, of_x, of_w = gradients(in_one_graph(lambda x, w: op((x, w), "mode")))
    close((of_x, of_w), (5.0 * V, 7.0 * V))


# Warnings of PyTorch 2.13 about itself, when it loads its compiler.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["intermediate", "structure"])
def test_compiled_to_machine_code(name):
    compiled = torch.compile(around(CASES[name].op), fullgraph=True, backend="inductor")
    close(gradients(compiled), gradients(around(CASES[name].meant)), 1e-4)
    with torch.no_grad():
        close(compiled(X, W), around(CASES[name].meant)(X, W))


class Scaled(torch.nn.Module):
    """A module that defines an op in `forward`, around local tensors."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x, w):
        scale = w.mean().detach()

        @op_custom_gradient
        def op(x):
            e = x**2 * scale
            return e * x, lambda u: u * self.factor * e

        return op(x) + w


def test_an_op_that_is_defined_in_forward_compiles_once():
    backend = Counting()
    module = Scaled(21.0)
    compiled = in_one_graph(module, backend)
    for x in (X, 2.0 * X, 3.0 * X):
        value, of_x, of_w = gradients(compiled, x)
        close((value, of_x, of_w), (x**3 * W.mean() + W, V * 21.0 * x**2 * W.mean(), V))
        close(gradients(module, x), (value, of_x, of_w))
    assert backend.graphs == 1


def test_an_op_compiles_once_for_a_shape_and_once_more_for_any_other():
    backend = Counting()
    op = CASES["intermediate"]
    compiled = in_one_graph(around(op.op), backend)
    for rows in (2, 3, 4, 5, 6):
        x = X.repeat(rows, 1)
        close(gradients(compiled, x, x + 1.0), gradients(around(op.meant), x, x + 1.0), 1e-3)
    assert backend.graphs == 2


def test_several_inputs_and_outputs():
    @op_custom_gradient
    def op(x, n, w, *, scale):
        e = x * w
        rule = lambda U: (U[0] * w * 5.0 * scale, None, U[0] * x + U[2]["s"] * e, None)  # noqa: E731
        return (e * n, torch.argmax(x), {"s": torch.sin(w)}), rule

    def f(x, w):
        a, place, rest = op(x, 2, w, scale=3.0)
        return a + rest["s"] + place

    compiled = in_one_graph(f)
    y, of_x, of_w = gradients(compiled)
    close((y, of_x, of_w), (2.0 * X * W + torch.sin(W) + 2.0, V * W * 15.0, V * X + V * X * W))


itself = op_custom_gradient(lambda x: (x, lambda u: 7.0 * u))
halves = op_custom_gradient(lambda x: ((x[:1], x[1:]), lambda a, b: torch.cat([3.0 * a, 5.0 * b])))
both = op_custom_gradient(lambda x: ((x * 2.0, x), lambda a, b: 3.0 * a + 5.0 * b))
made = op_custom_gradient(lambda x: (torch.exp(x), lambda u: 7.0 * u))

SHARING = {
    "an input, and it": lambda z: (itself(z), z),
    "an input twice": lambda z: (itself(z), itself(z)),
    "views of an input": halves,
    "views of a view": lambda z: halves(z[:]),
    "an input beside another": lambda z: (z, *both(z)),
    "an output, and a view of it": lambda z: (lambda y: (y, y[:1]))(made(z)),
    "reversed, and not": lambda z: (z, shelf.reverse_gradient(z)),
}


@pytest.mark.parametrize("function", SHARING.values(), ids=SHARING)
@pytest.mark.parametrize("leaf", [True, False])
def test_outputs_that_share_memory(function, leaf):
    """PyTorch (2.13) recreates one from the other, without the rule, as in a hand-written function."""

    def gradient(run):
        x = torch.tensor([0.5, -1.25, 1.5], requires_grad=True)
        outputs = run(x)
        sum((i + 2.0) * y.sum() for i, y in enumerate(outputs)).backward()
        return [y.detach() for y in outputs], x.grad

    whole = function if leaf else lambda x: function(x * 11.0)
    close(gradient(in_one_graph(whole)), gradient(whole))


def test_an_input_that_needs_no_gradient():
    compiled = in_one_graph(CASES["input"].op)
    x = X.clone().requires_grad_()
    compiled(x, W).backward(V)
    close(x.grad, gradients(CASES["input"].meant)[1], 1e-4)
    assert not compiled(X, W).requires_grad
    assert W.grad is None


def test_dynamic_shapes():
    compiled = torch.compile(CASES["sum"].op, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (2, 3):
        x, w = X[:length].clone().requires_grad_(), W[:length].clone().requires_grad_()
        compiled(x, w).backward(V[:length])
        close((x.grad, w.grad), (5.0 * V[:length] * w.sum(), 5.0 * (V[:length] * x).sum().expand(length)))


def of_a_dual_number(f):
    def tangent(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, V), W)).tangent

    return tangent


REFUSED = {
    "grad": lambda f: torch.func.grad(lambda x: (f(x, W) * V).sum()),
    "vmap": lambda f: lambda x: torch.func.vmap(f, (0, None))(torch.stack([x, V]), W),
    "jvp": lambda f: lambda x: torch.func.jvp(lambda x: f(x, W), (x,), (V,)),
    "jacrev": lambda f: torch.func.jacrev(lambda x: f(x, W)),
    "dual numbers": of_a_dual_number,
    "multigrad.grad": lambda f: grad(lambda x: (f(x, W) * V).sum()),
    "multigrad.vjp": lambda f: lambda x: vjp(lambda x: f(x, W), x)[1](V)[0],
    "multigrad.jvp": lambda f: lambda x: jvp(lambda x: f(x, W), (x,), (V,))[1],
    "multigrad.jacobian": lambda f: jacobian(lambda x: f(x, W)),
}


def slow_by_multigrad(name):
    """Return the parameter as slow: Dynamo takes 5 s to trace multigrad's derivatives."""
    marks = pytest.mark.slow if name.startswith("multigrad.") else ()
    return pytest.param(REFUSED[name], id=name, marks=marks)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # of its own (2.15)
@pytest.mark.parametrize("transform", [slow_by_multigrad(name) for name in REFUSED])
def test_a_transform_in_a_compiled_function_raises_or_runs_uncompiled(transform):
    """PyTorch (2.13) compiles transforms only without custom gradients, also hand-written ones."""
    case = CASES["intermediate"]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="ignores custom gradients"):
        in_one_graph(transform(case.op))(X)
    torch.compiler.reset()
    got = torch.compile(transform(case.op), backend="aot_eager")(X)
    close(got, transform(case.meant)(X), 1e-4)


def test_the_gradient_of_a_function_without_ops_compiles():
    def slope(x):
        return value_and_grad(lambda x: ((x**3).sum(), {"x": x, "n": 2}), has_aux=True)(x)

    close(in_one_graph(slope)(X), slope(X))


def test_a_compiled_function_in_a_checkpoint():
    compiled = in_one_graph(around(CASES["intermediate"].op))
    got = gradients(lambda x, w: torch.utils.checkpoint.checkpoint(compiled, x, w, use_reentrant=False))
    close(got, gradients(around(CASES["intermediate"].meant)), 1e-4)


def test_a_checkpoint_in_a_compiled_function_raises_or_runs_uncompiled():
    """Keras sets the active scope, which Dynamo does not allow in a checkpoint."""

    def f(x, w):
        return torch.utils.checkpoint.checkpoint(around(CASES["intermediate"].op), x, w, use_reentrant=False)

    close(
        gradients(torch.compile(f, backend="aot_eager")), gradients(around(CASES["intermediate"].meant)), 1e-4
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Unsafe side effect"):
        in_one_graph(f)(X, W)


def a_reader(weight):
    @op_custom_gradient
    def op(x):
        e = ops.exp(x)
        return e * weight, lambda u, variables: (u * 7.0 * e * weight, [u * 5.0 * e])

    return op


def test_fullgraph_compilation_of_an_op_that_reads_a_weight():
    weight = keras.Variable([2.0, 3.0, 4.0])
    compiled = in_one_graph(a_reader(weight))
    for value in ([2.0, 3.0, 4.0], [-1.0, 0.5, 6.0]):  # the program reads the value at the time of the call
        weight.assign(value)
        weight.value.grad = None
        x = X.clone().requires_grad_()
        y = compiled(x)
        y.backward(V)
        e = torch.exp(X)
        close((y, x.grad, weight.value.grad), (e * weight.value, 7.0 * V * e * weight.value, 5.0 * V * e))


def test_fullgraph_compilation_of_an_op_whose_argument_is_the_weight_that_it_reads():
    weight = keras.Variable([2.0, 3.0, 4.0])
    in_one_graph(a_reader(weight))(weight.value).sum().backward()
    e = torch.exp(weight.value)
    close(weight.value.grad, 7.0 * e * weight.value + 5.0 * e)


def test_a_rule_that_is_compiled_without_its_op_reads_the_values_of_the_call():
    weight = keras.Variable([2.0, 3.0, 4.0])
    count = keras.Variable(1.0, trainable=False)

    @op_custom_gradient
    def op(x):
        y = x * weight * count
        count.assign(count + 1.0)
        return y, lambda u, variables: (u * 7.0 * weight * count, [u * 5.0 * x])

    x = X.clone().requires_grad_()
    y = op(x)
    count.assign(50.0)
    backward = torch.compile(lambda y, x: torch.autograd.grad(y, x, V), backend="aot_eager")
    close(backward(y, x)[0], 7.0 * V * weight.value)


class Scale(keras.layers.Layer):
    """A layer with a weight for its op, and another one that only the rule reads."""

    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")
        self.slope = self.add_weight(shape=(), initializer="ones", name="slope", trainable=False)

    @op_custom_gradient
    def scaled(self, x):
        def rule(upstream, variables):
            return upstream * self.factor * self.slope, [3.0 * ops.sum(upstream * x)]

        return x * self.factor, rule

    def call(self, x):
        return self.scaled(x)


@pytest.mark.parametrize(
    ("count", "policy"),
    [(1, "float32"), (3, "mixed_bfloat16"), pytest.param(50, "float32", marks=pytest.mark.slow)],
)
def test_layers_whose_ops_read_weights_are_one_graph(count, policy):
    layers = [Scale(dtype=policy) for _ in range(count)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    for index, layer in enumerate(layers):
        layer.factor.assign(1.0 + 0.1 * index)
        layer.slope.assign(2.0)
    weights = [layer.factor.value for layer in layers]

    def results(function):
        x = torch.tensor([[0.5, -1.0, 2.0]], requires_grad=True)
        y = function(x)
        return [y, *torch.autograd.grad(y.sum(), [x, *weights])]

    torch.compiler.reset()
    counters.clear()
    compiled = in_one_graph(lambda x: model(x, training=True))
    expected = results(model)
    for _ in range(3):
        close(results(compiled), expected, 1e-2 if policy == "mixed_bfloat16" else 1e-5)
    assert counters["stats"]["unique_graphs"] == 1


class OpInRule(keras.layers.Layer):
    """A layer whose rule applies a second op, which reads another weight. Both have false factors."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.slope = self.add_weight(shape=(), initializer="ones")

    @op_custom_gradient
    def sloped(self, x):
        return x * self.slope * 3.0, lambda u, variables: (u * 5.0, [ops.sum(u)])

    @op_custom_gradient
    def scaled(self, x):
        def rule(upstream, variables):
            return upstream * self.sloped(x) * 7.0, [ops.sum(upstream) * 11.0]

        return x * self.scale, rule

    def call(self, x):
        return self.scaled(x)


def test_an_op_in_a_rule_reads_a_weight_in_the_program():
    layer = OpInRule()
    layer.build((3,))
    layer.slope.assign(2.0)
    x = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    compiled = in_one_graph(lambda x: layer(x).sum())
    got = torch.autograd.grad(compiled(x), [x, layer.scale.value])
    close(list(got), [42.0 * x.detach(), torch.tensor(33.0)])


@pytest.mark.slow
def test_a_solver_compiles_after_an_eager_call_of_its_function():
    def root(a, scale):
        return ops.sum(shelf.fixed_point(lambda z, a: 0.5 * (z + a / z) * scale, ops.ones_like(a), a))

    a, scale = torch.tensor([2.0, 3.0]), torch.tensor(0.9)
    wanted = grad(root)(a, scale)
    compiled = torch.compile(root, backend="aot_eager")
    x = a.clone().requires_grad_()
    for _ in range(2):
        (slope,) = torch.autograd.grad(compiled(x, scale), x)
        close(slope, wanted, 1e-4)


@pytest.mark.slow
def test_a_gradient_in_compiled_code_of_an_op_whose_rule_holds_a_function():
    def double(x):
        return ops.sum(shelf.scale_gradient(x, 7.0) * x)

    compiled = torch.compile(lambda x: grad(double)(x), backend="aot_eager")
    x = X.clone().requires_grad_()
    slope = compiled(x)
    close(slope, 8.0 * X)


@op_custom_gradient
def three_cubes(x):
    return x**3, lambda upstream: 9.0 * upstream * x**2


@op_custom_gradient
def around_three_cubes(x):
    return three_cubes(x) + 1.0, lambda upstream: 5.0 * upstream


@pytest.mark.parametrize("op", [three_cubes, around_three_cubes, lambda x: three_cubes(three_cubes(x))])
def test_one_tensor_without_recording(op):
    """Dynamo counts the arguments of a Function, and may confuse one of them with its context."""
    compiled = in_one_graph(op)
    close(compiled(X), op(X))
    with torch.no_grad():
        close(compiled(X.clone().requires_grad_()), op(X))


def test_an_op_of_one_argument_in_the_function_of_another():
    x = X.clone().requires_grad_()
    in_one_graph(around_three_cubes)(x).sum().backward()
    close(x.grad, torch.full_like(X, 5.0))


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_training_mode_of_the_layers_around_a_rule(whole):
    """The rule has the mode of its function, whether it is compiled with the function or runs later."""
    phase = Phase()

    class Within(keras.layers.Layer):
        def call(self, x):
            @op_custom_gradient
            def op(x):
                e = ops.exp(x)
                return e, lambda upstream: 7.0 * (upstream * e if whole else phase(upstream * e))

            return op(x)

    layer, x = Within(), torch.zeros(2, requires_grad=True)
    layer(x)
    compiled = torch.compile(lambda x: layer(x, training=True), backend="aot_eager", fullgraph=whole)
    compiled(x).sum().backward()
    close(x.grad, torch.full((2,), 7.0 if whole else 21.0))


def test_a_compiled_spectral_function_that_holds_a_tensor_is_refused():
    """Dynamo cannot read cells. The gradient of `exponent` would silently be zero."""
    exponent = torch.tensor(0.5, requires_grad=True)

    @functools.partial(torch.compile, backend="eager")
    def root(a, exponent):
        return shelf.spectral_function(a, lambda x: x**exponent)

    with pytest.raises(TypeError, match="the function holds a tensor or"):
        root(torch.eye(2), exponent)
    close(root(torch.eye(2), 0.5), torch.eye(2))

"""Tests of PyTorch only."""

import functools
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import torch
from cases import cube_by_input as by_input
from cases import cube_by_intermediate as by_intermediate
from cases import exp_by_output as by_output
from keras import ops
from support import array, close, numpy

from multigrad import grad, jvp, op_custom_gradient, trace_gradients, value_and_grad, vjp
from multigrad.backend.torch.tensors import conform
from multigrad.keras_graph.saving import Unsaved, decode, encode
from multigrad.ops import fake_quantize, linear_cross_entropy, spectral_function


@op_custom_gradient
def two_outputs(x, n, y):
    e = x * y
    return (e * n, torch.sin(y), torch.argmax(x)), lambda U: (U[0] * y * 5.0, None, U[0] * x + U[1] * e)


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


def test_a_rule_makes_tensors_on_the_device_of_its_function():
    """The function runs in a `keras.device` context, which ends before the rule runs."""
    seen = []

    def rule(upstream):
        seen.append(ops.ones(()).device.type)
        return upstream * 7.0

    x = leaf(1.0)
    with keras.device("meta"):
        y = op_custom_gradient(lambda x: (x * 2.0, rule))(x)
    y.backward()
    assert (seen, x.grad) == (["meta"], 7.0)
    assert ops.ones(()).device.type == "cpu"


def test_private_names_exist():
    """The private names that `backend/torch/` uses. Their comments there give the reasons."""
    assert torch._C._are_functorch_transforms_active() is False
    assert torch.autograd.forward_ad._current_level == -1
    with torch.autograd.forward_ad.dual_level():
        assert torch.autograd.forward_ad._current_level == 0
    assert torch._C._is_any_autocast_enabled() is False
    assert torch._C._is_tracing() is False
    assert torch._C._get_tracing_state() is None
    torch._C._set_tracing_state(None)
    assert torch.ones(2)[:1]._is_view()
    whole = torch.ones(2)
    assert whole._base is None
    assert whole[:1]._base is whole
    assert torch.utils._pytree.tree_leaves(({"a": whole}, [1])) == [whole, 1]
    assert torch._C._functorch.unwrap_if_dead(whole) is whole
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch._C._is_fwd_grad_enabled() is True
    with torch.autograd.forward_ad._set_fwd_grad_enabled(False):
        assert torch._C._is_fwd_grad_enabled() is False
    with torch.no_grad():
        torch._C._set_grad_enabled(True)
        assert torch.is_grad_enabled()
    with torch._functorch.utils.enable_single_level_autograd_function():
        pass
    assert torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters() == []
    seen = []

    def note(x):
        transforms = torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters()
        seen.extend([transform.key() for transform in transforms])
        inner = torch.func.debug_unwrap(x, recurse=False)
        assert torch._C._functorch.maybe_get_level(inner) == transforms[0].level()
        assert torch._C._functorch.maybe_get_bdim(inner) == 1
        assert transforms[0].batch_size() == 3
        return x.sum()

    torch.func.vmap(torch.func.grad(note), 1)(torch.ones(2, 3))
    assert not torch._C._functorch.is_legacy_batchedtensor(whole)
    with torch._C._DisableFuncTorch(), torch.utils._python_dispatch._disable_current_modes():
        assert not torch._subclasses.fake_tensor.is_fake(torch.ones(2))
    assert seen == [torch._C._functorch.TransformType.Vmap, torch._C._functorch.TransformType.Grad]


class Drawing:
    """An object whose rule, but not its function, draws random numbers."""

    factor = 7.0

    def __call__(self, x):
        @op_custom_gradient
        def op(x):
            e = x**2
            return e * x, lambda u: self.factor * u * 3 * e + torch.randn_like(u)

        return op(x)


def test_a_rule_that_draws_is_recorded():
    x = leaf(2.0)
    torch.manual_seed(0)
    (wanted,) = torch.autograd.grad(Drawing()(x), x)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    (got,) = torch.autograd.grad(Drawing()(x), x, create_graph=True)
    assert got.item() == wanted.item()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.autograd.grad(got, x)[0].item() == 84.0


def test_gradients_in_inference_mode():
    """PyTorch records nothing in inference mode."""

    def cube(x):
        return (by_intermediate(x) * x).sum()

    made_outside = torch.tensor([1.0, 2.0])
    with torch.inference_mode():
        for x in (torch.tensor([1.0, 2.0]), made_outside):
            close(grad(lambda x: (x * x).sum())(x), 2 * x)
            close(grad(cube)(x), 22 * x**3)
            close(grad(lambda x: grad(cube)(x).sum())(x), (21 + 42 + 21) * x**2)
            outputs, pull = vjp(by_intermediate, x)
            close((outputs, *pull(torch.ones(2))), (x**3, 21 * x**2))
            close(jvp(by_intermediate, (x,), (x,))[1], 21 * x**3)
            variable = keras.Variable(x)
            value, (gradient,) = value_and_grad(lambda v=variable: cube(v.value), variables=[variable])()
            close((value, gradient), (cube(x), 22 * x**3))


class Holder:
    pass


def in_a_cell(y, _):
    return lambda: y


def in_a_list(y, holder):
    holder.kept = [y]
    return lambda: holder.kept[0]


def in_a_gradient(y, holder):
    """Held by PyTorch, but by no Python object."""
    holder.leaf = torch.zeros_like(y, requires_grad=True)
    holder.leaf.grad = y
    return lambda: holder.leaf.grad


def in_a_buffer(y, holder):
    holder.module = torch.jit.script(Buffered(y))
    return lambda: holder.module.y


def as_a_base(y, holder):
    holder.view = y[:1]
    return lambda: holder.view._base


class Buffered(torch.nn.Module):
    def __init__(self, y):
        super().__init__()
        self.register_buffer("y", y)

    def forward(self, x: torch.Tensor):
        return x


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("hold", [in_a_cell, in_a_list, in_a_gradient, in_a_buffer, as_a_base])
@pytest.mark.parametrize("within", [False, True])
def test_an_output_with_other_references_is_unchanged(hold, within):
    """The stored output gets no history, and two calls have separate gradients."""
    holder = Holder()
    holder.again = None if within else hold(torch.ones(2), holder)

    @op_custom_gradient
    def op(x, factor):
        if within:
            holder.again = hold(torch.exp(x) * 0.0 + 1.0, holder)
        return holder.again(), lambda u: (factor * u, None)

    first, second = (torch.zeros(2, requires_grad=True) for _ in range(2))
    y = op(first, torch.tensor(7.0))
    held = holder.again()
    assert not held.requires_grad
    assert held.grad_fn is None
    z = op(second, torch.tensor(11.0))
    close(torch.autograd.grad(y.sum(), first)[0], torch.full((2,), 7.0))
    close(torch.autograd.grad(z.sum(), second)[0], torch.full((2,), 11.0))


@pytest.mark.parametrize("uses", [False, True])
def test_an_output_has_no_attributes_of_the_returned_tensor(uses):
    """A layer may set a mask as an attribute of its output, but the op returns another tensor."""

    def masked(x):
        y = torch.exp(x)
        y._keras_mask = x > 0.5
        return y

    @op_custom_gradient
    def op(x):
        y = masked(x)
        return y, lambda u: u * y

    @op_custom_gradient
    def alone(x):
        return masked(x), lambda u: u

    x = torch.tensor([0.5, 1.0], requires_grad=True)
    assert not hasattr(op(x) if uses else alone(x), "_keras_mask")


def test_a_variable_as_an_argument_has_the_gradient_of_the_rule():
    variable = keras.Variable(np.float32([2.0, 3.0]))
    op = op_custom_gradient(lambda x, w: (x * w, lambda u: (u * 3.0, u * 5.0 * x)))
    op(torch.tensor([1.0, 10.0]), variable).sum().backward()
    assert variable.value.grad.tolist() == [5.0, 50.0]


@pytest.mark.parametrize(
    ("op", "saved"),
    [(by_input, 1), (by_output, 1), (by_intermediate, 2)],  # the last saves e, and x for second order
)
def test_saved_tensors_are_the_residuals(op, saved):
    seen = []
    x = leaf(1.0, 2.0)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
        op(x)
    assert len(seen) == saved


def test_unused_large_tensors_are_not_kept():
    watch = []

    @op_custom_gradient
    def op(x):
        large = torch.ones(1000) * x
        watch.append(weakref.ref(large))
        return large.sum(), lambda u: u * 7.0

    y = op(leaf(1.0))
    assert watch[0]() is None
    assert y.grad_fn is not None


def test_a_rule_that_uses_its_output_makes_no_reference_cycle():
    gc.collect()
    gc.disable()
    try:
        y = by_output(leaf(1.0))
        watch = weakref.ref(y)
        del y
        assert watch() is None
    finally:
        gc.enable()


def test_an_unrecorded_backward_does_not_run_the_function_again():
    calls = []

    @op_custom_gradient
    def op(x):
        calls.append(1)
        e = x**2
        return e * x, lambda u: u * 3 * e

    x = leaf(2.0)
    (first,) = torch.autograd.grad(op(x), x)
    assert (first.item(), len(calls)) == (12.0, 1)
    (first,) = torch.autograd.grad(op(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert (second.item(), len(calls)) == (12.0, 3)


OFF = functools.partial(torch.autocast, "cpu", enabled=False)
BFLOAT16 = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
FLOAT16 = functools.partial(torch.autocast, "cpu", dtype=torch.float16)
contexts = [
    pytest.param(context, id=name) for name, context in [("off", OFF), ("b", BFLOAT16), ("f", FLOAT16)]
]


@op_custom_gradient
def product(x, w):
    h = x @ w  # in the dtype of autocast
    return h, lambda u: (u @ w.T, 3.0 * (x.T @ (u + h)))


class NativeProduct(torch.autograd.Function):
    """The same with `torch.autograd.Function`."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        h = x @ w
        ctx.save_for_backward(x, w, h)
        return h

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, u):
        x, w, h = ctx.saved_tensors
        return u @ w.T, 3.0 * (x.T @ (u + h))


def under_autocast(f, forward, backward, vjp=None):
    torch.manual_seed(0)
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    with forward():
        y, pull = vjp(f, x, w) if vjp else (f(x, w), None)
    with backward():
        upstream = y.detach() * 2.0
        return pull(upstream) if vjp else torch.autograd.grad(y, (x, w), upstream)


@pytest.mark.parametrize("vjp", [None, torch.func.vjp])
@pytest.mark.parametrize("forward", contexts)
@pytest.mark.parametrize("backward", contexts)
def test_a_rule_runs_under_the_autocast_of_its_function(forward, backward, vjp):
    """The results equal those of `custom_fwd` and `custom_bwd`, wherever the backward pass runs."""
    got = under_autocast(product, forward, backward, vjp)
    wanted = under_autocast(NativeProduct.apply, forward, backward)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


@pytest.mark.parametrize("forward", contexts)
@pytest.mark.parametrize("backward", contexts)
def test_autocast_that_is_disabled_in_a_part(forward, backward):
    """The innermost context applies, around the function and around the backward pass."""
    got = under_autocast(lambda x, w: _under(forward, product, x, w), BFLOAT16, backward)
    wanted = under_autocast(NativeProduct.apply, forward, backward)
    assert all(map(torch.equal, got, wanted))


def _under(context, f, *args):
    with context():
        return f(*args)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("forward", contexts)
def test_autocast_in_fullgraph_compilation(forward, backend):
    compiled = torch.compile(lambda x, w: _under(forward, product, x, w), fullgraph=True, backend=backend)
    got = under_autocast(compiled, OFF, OFF)
    wanted = under_autocast(product, forward, OFF)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(numpy(a), numpy(b), rtol=1e-2)


@pytest.mark.parametrize("vjp", [None, torch.func.vjp])
def test_a_second_derivative_through_autocast(vjp):
    @op_custom_gradient
    def op(x):
        e = x @ torch.tensor([[2.0], [4.0]])
        return e * 1.0, lambda u: 7.0 * (u * e) @ torch.tensor([[2.0, 4.0]])

    def first(x):
        if vjp is None:
            with BFLOAT16():
                y = op(x)
            return torch.autograd.grad(y.float().sum(), x, create_graph=True)[0]
        with BFLOAT16():
            y, pull = vjp(op, x)
        return pull(torch.ones_like(y))[0]

    x = leaf(1.0, 0.5)[None].detach().requires_grad_()
    got = first(x)
    assert got.dtype == torch.float32
    assert got.tolist() == [[56.0, 112.0]]
    if vjp is None:
        (second,) = torch.autograd.grad(got[0, 0], x)
    else:
        second = torch.func.grad(lambda x: first(x)[0, 0])(x)
    assert second.tolist() == [[28.0, 56.0]]


@pytest.mark.slow
def test_fit_compiled_by_dynamo_in_mixed_precision(monkeypatch):
    """`jit_compile=True`, with a Dynamo backend that needs no C++ compiler."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))

    class Layer(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(3, 2), initializer="ones")

        def call(self, x):
            return product(x, self.kernel)

    layer = Layer(dtype="mixed_bfloat16")
    model = keras.Sequential([layer])
    model.compile(keras.optimizers.SGD(0.5), loss=lambda y, p: ops.sum(p * y, -1), jit_compile=True)
    x, y = np.float32([[1.0, 0.5, 0.25], [0.5, 1.0, 2.0]]), np.ones((2, 2), "float32")
    model.fit(x, y, batch_size=2, verbose=0)
    kernel = np.ones((3, 2), "float32")
    wanted = kernel - 0.5 * 3.0 * x.T @ (y / 2 + x @ kernel)
    np.testing.assert_allclose(ops.convert_to_numpy(layer.kernel), wanted, rtol=2e-2)


class Module(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x):
        return self.op(x * self.weight)


reverse = op_custom_gradient(lambda x: (x, lambda u: -u))  # the output is the input
EXPORTS = {
    "export": lambda module, x: torch.export.export(module, (x,)).module(),
    "strict": lambda module, x: torch.export.export(module, (x,), strict=True).module(),
    "trace": lambda module, x: torch.jit.trace(module, (x,)),
}


# A strict export warns of side effects: here the scope in which Keras's variables are read.
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace.*` is deprecated")
@pytest.mark.parametrize("how", EXPORTS)
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("op", [by_intermediate, by_output, reverse])
def test_an_exported_program_has_no_gradient(how, recorded, op):
    """The program contains the operations of the function without the rule. A gradient raises."""
    x = torch.tensor([1.0, 0.5])
    module = Module(op)
    with torch.set_grad_enabled(recorded):
        exported = EXPORTS[how](module, x)
    x.requires_grad_()
    y = exported(x)
    close(y.detach(), module(x).detach())
    with pytest.raises(RuntimeError, match="derivative for aten::copy is not implemented"):
        y.sum().backward()
    with torch.no_grad():
        assert not exported(x).requires_grad


def slope(op):
    def by_autograd(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad((op(x) + x).sum(), x)[0]

    return by_autograd


def second_slope(op):
    def by_autograd(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (first,) = torch.autograd.grad((op(x) + x).sum(), x, create_graph=True)
            return torch.autograd.grad((first * x).sum(), x)[0]

    return by_autograd


GRADIENTS = {
    "autograd": slope,
    "second": second_slope,
    "grad": lambda op: grad(lambda x: (op(x) + x).sum()),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace.*` is deprecated")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of torch.autograd itself
@pytest.mark.parametrize("how", ["export", "trace"])
@pytest.mark.parametrize("by", GRADIENTS)
@pytest.mark.parametrize("op", [by_intermediate, by_output, reverse])
def test_a_gradient_in_an_exported_program_uses_the_rule(how, by, op):
    x = torch.tensor([1.0, 0.5])
    module = Module(GRADIENTS[by](op))
    # The check of a trace runs it without gradients, which gives another graph.
    write = EXPORTS[how] if how == "export" else functools.partial(torch.jit.trace, check_trace=False)
    close(write(module, x)(x), module(x).detach())


def test_symbolic_tracing_by_fx_raises():
    with pytest.raises(TypeError, match=r"by_output: torch\.fx records the program"):
        torch.fx.symbolic_trace(Module(by_output))


def test_an_exported_model(tmp_path):
    class Layer(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(3, 2), initializer="ones")

        def call(self, x):
            return product(x, self.kernel)

    model = keras.Sequential([keras.Input((3,)), Layer(), keras.layers.Dense(1)])
    shapes = {0: torch.export.Dim("batch")}
    model.export(tmp_path / "model.pt2", format="torch", verbose=False, dynamic_shapes=shapes)
    x = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.0], [0.0, 1.0, 0.25]])
    close(torch.export.load(tmp_path / "model.pt2").module()(x), model(x).detach())


def test_a_random_function_raises_in_a_second_run():
    @op_custom_gradient
    def dropout(x):
        dropped = x * (torch.rand(100) > 0.5).to(x.dtype)
        return dropped * 1.0, lambda u: u * dropped

    x = torch.ones(100, requires_grad=True)
    with pytest.raises(RuntimeError, match="dropout: the function returned different values"):
        torch.autograd.grad(dropout(x).sum(), x, create_graph=True)


def test_a_residual_of_another_shape_in_a_second_run_raises():
    lengths = iter([2, 1])

    @op_custom_gradient
    def op(x):
        repeated = x * torch.ones(next(lengths))
        return x * 3.0, lambda u: u * repeated.sum()

    x = torch.tensor(1.0, requires_grad=True)
    with pytest.raises(RuntimeError, match="op: the function returned different values"):
        torch.autograd.grad(op(x), x, create_graph=True)


def test_in_place_modification_of_an_alias_of_an_input_raises():
    op = op_custom_gradient(lambda x: (x, lambda u: u * 7.0))
    with pytest.raises(RuntimeError, match=r"in-?place"):
        op(leaf(1.0) * 1.0).mul_(2.0)


def test_in_place_modification_of_one_of_several_inputs_raises():
    op = op_custom_gradient(lambda *xs: (xs[3], lambda u: tuple([u * 7.0 for _ in xs])))
    with pytest.raises(RuntimeError, match=r"in-?place"):
        op(*[leaf(1.0) * 1.0 for _ in range(10)]).mul_(2.0)


def test_gradcheck_and_gradgradcheck():
    op = op_custom_gradient(lambda x, y: (x**2 * y, lambda u: (u * 2 * x * y, u * x**2)))
    inputs = [torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(op, inputs)
    assert torch.autograd.gradgradcheck(op, inputs)


X = torch.tensor([1.0, 2.0])


def test_torch_func_with_integers_and_two_outputs():
    def loss(x, y):
        a, b, _ = two_outputs(x, 2, y)
        return (a + b).sum()

    x, y = X, 3 * X
    close(torch.func.grad(loss, (0, 1))(x, y), (5.0 * y, x + x * y))
    close(grad(loss, (0, 1))(x, y), (5.0 * y, x + x * y))


def test_a_double_backward_through_a_module():
    """A gradient penalty: the norm of the gradient as a loss, with respect to a closed-over parameter."""
    w = leaf(3.0)

    def energy(x):
        return (by_intermediate(x) * w).sum()

    g = grad(energy)(X)
    g.sum().backward()
    np.testing.assert_allclose(numpy(w.grad), [(21 * X**2).sum()])


def test_a_rule_that_closes_over_a_parameter():
    w = leaf(3.0)
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: u * w * 7.0))
    grad(lambda x: ops.sum(op(x)))(X[:1]).sum().backward()
    assert w.grad.item() == 7.0


def small_noise(x):
    noise = torch.rand(1000) * 1e-2
    return x * noise, lambda u: u * noise


def test_random_numbers_in_the_slope_raise():
    @op_custom_gradient
    def op(x):
        slope = x * small_noise(x)[0]
        return slope * 1.0, lambda u: u * slope

    x = torch.ones(1000, requires_grad=True)
    with pytest.raises(RuntimeError, match="op: the function returned different values"):
        torch.autograd.grad(op(x).sum(), x, create_graph=True)


def test_a_second_run_does_not_advance_the_random_state():
    drawn = []

    @op_custom_gradient
    def op(x):
        drawn.append(torch.rand(1))
        e = x**2
        return e * 1.0, lambda u: 3.0 * u * e

    x = leaf(2.0)
    y = op(x)
    state = torch.get_rng_state()
    torch.autograd.grad(y, x, create_graph=True)
    assert len(drawn) == 2
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_that_depend_on_no_input_are_from_the_first_run():
    x = torch.ones(1000, requires_grad=True)
    y = op_custom_gradient(small_noise)(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    close(gradient, y)


def test_the_state_of_the_first_run_applies():
    temperature = 1.0

    @op_custom_gradient
    def op(x):
        t, e = temperature, torch.exp(x)
        return e * 1.0, lambda u: u * e * t

    x = leaf(0.0)
    y = op(x)
    temperature = 5.0
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    assert first.item() == 1.0


def test_an_intermediate_of_a_parameter_keeps_its_history():
    w = leaf(2.0)

    @op_custom_gradient
    def op(x):
        e = w * x
        return e * 1.0, lambda u: u * e * 7.0

    g = grad(lambda x: op(x).sum())(torch.tensor([3.0]))
    (g.sum() + w.sum()).backward()
    assert w.grad.item() == 7 * 3.0 + 1.0


def test_a_view_as_an_output():
    op = op_custom_gradient(lambda x: (x[:1], lambda u: torch.cat([u * 7.0, u * 0.0])))
    x = leaf(1.0, 2.0)
    (got,) = torch.autograd.grad(op(x).sum(), x)
    assert got.tolist() == [7.0, 0.0]
    with pytest.raises(RuntimeError, match=r"in-?place"):
        op(x * 1.0).mul_(2.0)


@pytest.mark.parametrize("output", [lambda x, w: x * w, lambda x, w: w])
def test_a_closed_over_leaf(output):
    x, w = leaf(1.0), leaf(3.0)
    loss = op_custom_gradient(lambda x: (output(x, w), lambda u: u * 7.0))(x).sum()
    close(torch.autograd.grad(loss, x, retain_graph=True)[0], torch.tensor([7.0]))
    with pytest.raises(RuntimeError, match=r"differentiated tensor that is not an argument(.|\n)*got: 'w'"):
        loss.backward()
    assert (w.grad, w.is_leaf) == (None, True)


def test_a_rule_that_uses_a_shape_saves_nothing():
    seen = []
    op = op_custom_gradient(lambda x: (x.sum(), (lambda s: lambda u: u.expand(s) * 7.0)(x.shape)))
    x = leaf(1.0, 2.0)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
        y = op(x)
    y.backward()
    assert (seen, x.grad.tolist()) == ([], [7.0, 7.0])


# ------------------------------------------------------------------------------------ variables


def test_torch_func_differentiates_with_respect_to_a_weight():
    weight = keras.Variable(2.0)

    @op_custom_gradient
    def op(x):
        e = x * weight
        return ops.exp(e), lambda u, variables: (u * e * weight * 3, [ops.sum(u * x * e * 5)])

    def stateless(w, x):
        with keras.StatelessScope([(weight, w)]):
            return op(x)

    w, x = torch.tensor(2.0), torch.tensor(0.5)
    # By the rule, df/dw = 5·x²·w and df/dx = 3·x·w².
    close(torch.func.grad(stateless, (0, 1))(w, x), (2.5 + 0 * x, 6.0 + 0 * x))
    close(torch.func.grad(torch.func.grad(stateless, 1))(w, x), 6.0 + 0 * x)
    ws, xs = torch.tensor([2.0, 3.0]), torch.tensor([0.5, 1.0])
    mapped = torch.func.vmap(torch.func.grad(stateless, (0, 1)))(ws, xs)
    close(mapped, (torch.tensor([2.5, 15.0]), torch.tensor([6.0, 27.0])))
    _, tangent = torch.func.jvp(lambda w: stateless(w, x), (w,), (torch.tensor(2.0),))
    close(tangent, 5.0 + 0 * x)


def test_a_node_without_its_variables_is_discarded():
    weight, runs = keras.Variable(2.0), []

    @op_custom_gradient
    def op(x):
        runs.append(1)
        y = x * weight
        return y, lambda u, variables: (u * 7, [u * 5])

    x = torch.tensor(1.0, requires_grad=True)
    y = op(x)
    leaves = [parent.variable for parent, _ in y.grad_fn.next_functions if parent is not None]
    assert [leaf is tensor for leaf, tensor in zip(leaves, (x, weight.value), strict=True)] == [True, True]
    assert runs == [1]
    with torch.no_grad():
        assert not op(x).requires_grad


# ------------------------------------------------------------------------------- gradients of variables


def counted(weight):
    calls = []

    @op_custom_gradient
    def op(x):
        calls.append(1)
        e = torch.exp(x * weight.value)
        return e + 1.0, lambda u, variables: (u * e * 3.0, [u * e * 7.0])

    return op, calls


@pytest.mark.parametrize("argnums", [None, 0])
def test_a_gradient_of_variables_runs_the_function_once(argnums):
    op, calls = counted(weight := keras.Variable(0.0))
    answer = value_and_grad(op, argnums, variables=[weight])(1.0)
    close(answer[1], [7.0] if argnums is None else (3.0, [7.0]))
    assert len(calls) == 1


def test_a_gradient_of_variables_has_no_history():
    op, _ = counted(weight := keras.Variable(0.0))
    value, (gradient,) = value_and_grad(op, variables=[weight])(1.0)
    assert float(value) == 2.0  # which warns if a gradient is required
    with pytest.raises(RuntimeError, match="it was not recorded"):
        (weight.value + gradient).backward()
    pulled = vjp(lambda: op(1.0), variables=[weight])[1](1.0)[0]
    with pytest.raises(RuntimeError, match="it was not recorded"):
        (weight.value + pulled).backward()
    with torch.no_grad():
        value, (gradient,) = value_and_grad(op, variables=[weight])(1.0)
    assert not value.requires_grad
    assert not gradient.requires_grad


class Slope:
    def __init__(self, slope):
        self.held = {"slope": slope}

    @op_custom_gradient
    def of(self, x):
        return torch.sign(x), lambda u: 7.0 * u * self.held["slope"] * torch.abs(x)


def test_a_gradient_depends_on_tensors_that_only_the_rule_uses():
    """A later backward pass may need them. If no tensor does, the gradient has no history."""
    x, weight, tensor, other = leaf(0.5), keras.Variable(3.0), leaf(3.0), leaf(1.0)
    of_weight = op_custom_gradient(lambda x: (torch.sign(x), lambda u: 7.0 * u * weight * torch.abs(x)))
    for op, held in ((of_weight, weight.value), (Slope(tensor).of, tensor)):
        gradient = grad(lambda x, op=op: op(x).sum())(x.detach())
        (gradient.sum() + other.sum()).backward()
        close(held.grad.reshape(()), torch.tensor(3.5))
    assert not grad(lambda x: Slope(3.0).of(x).sum())(x.detach()).requires_grad
    many = [*[Slope(3.0) for _ in range(5)], Slope(tensor), *[Slope(3.0) for _ in range(5)]]
    for several in (many, many[::-1], many[5:], many[:6]):
        gradient = grad(lambda x, several=several: sum(held.of(x) for held in several).sum())(x.detach())
        assert gradient.requires_grad


def test_a_gradient_depends_on_the_weights_of_a_held_layer():
    dense, linear, x = keras.layers.Dense(1), torch.nn.Linear(1, 1), leaf(0.5)
    dense.build((None, 1))
    for held in (dense, linear):
        slope = Slope([held])

        @op_custom_gradient
        def op(x, slope=slope):
            return torch.sign(x), lambda u: u * ops.sum(slope.held["slope"][0].bias) + 7.0 * u * x

        gradient = grad(lambda x, op=op: op(x).sum())(x.detach())
        assert gradient.requires_grad


class Unlike:
    """An object that holds a weight and is not a layer."""


IN_A_GLOBAL = leaf(2.0)


@pytest.mark.parametrize("reach", ["object", "global"])
@pytest.mark.parametrize("in_the_rule", [False, True])
def test_a_penalty_on_a_gradient_of_a_reached_weight(reach, in_the_rule):
    held = Unlike()
    held.own = leaf(2.0)
    reached = {"object": held.own, "global": IN_A_GLOBAL}[reach]
    read = {"object": lambda: held.own, "global": lambda: IN_A_GLOBAL}[reach]

    @op_custom_gradient
    def op(x):
        e = x * read()
        return e * 1.0, lambda u: u * 5.0 * (x * read() if in_the_rule else e)

    reached.grad = None
    gradient = grad(lambda x: op(x).sum())(torch.tensor([3.0]))
    (gradient.sum() + reached.sum()).backward()
    close(reached.grad, torch.tensor([16.0]))


def test_an_unrecorded_view_of_a_weight_is_not_a_dependence():
    with torch.no_grad():
        view = leaf(1.0, 2.0).view(2)
    assert view.requires_grad  # PyTorch reports it, although the view has no node
    held = Slope(3.0)
    held.view = view
    close(grad(lambda x: held.of(x).sum())(torch.ones(2)), torch.full((2,), 21.0))


def test_a_second_derivative_through_top_k():
    @op_custom_gradient
    def op(x):
        found = ops.top_k(x * x, 2)
        return found[0].sum(), lambda u: u * found[0].sum() * torch.ones(3)

    x = torch.tensor([3.0, 1.0, 2.0])
    close(grad(lambda x: grad(op)(x).sum())(x), torch.tensor([18.0, 0.0, 12.0]))


def test_a_tangent_has_the_history_of_the_arguments():
    """Tensors that are differentiated inside have no history outside, as in torch.func."""
    for primal, direction in ((leaf(1.0), torch.ones(1)), (torch.ones(1), leaf(1.0))):
        for op in (by_intermediate, torch.exp):
            assert jvp(op, (primal,), (direction,))[1].requires_grad
            assert not jvp(op, (primal.detach(),), (direction.detach(),))[1].requires_grad
    by_primal = jvp(by_intermediate, (x := leaf(2.0),), (torch.ones(1),))[1]
    close(torch.autograd.grad(by_primal.sum(), x)[0], torch.tensor([7.0 * 3.0 * 2.0 * 2.0]))
    _, pull = vjp(by_intermediate, torch.tensor([2.0]))
    assert not pull(torch.ones(1))[0].requires_grad
    assert pull(leaf(1.0))[0].requires_grad


def in_a_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def test_an_inner_derivative_in_another_thread():
    """The thread does not know that another derivative is being computed."""
    x, one = torch.tensor([2.0]), torch.ones(1)
    slope = grad(lambda y: (y**3).sum())
    inner = {
        "grad": lambda z: in_a_thread(slope, z),
        "closed over": lambda z: in_a_thread(grad(lambda y: (y**2 * z * 3.0).sum()), x),
        "jvp": lambda z: in_a_thread(lambda y: jvp(lambda w: w**3, (y,), (one,))[1], z),
        "vjp": lambda z: in_a_thread(lambda y: vjp(lambda w: w**3, y)[1](one)[0], z),
    }
    for function in inner.values():
        close(grad(lambda z, f=function: f(z).sum())(x), torch.tensor([12.0]))
        close(jvp(function, (x,), (one,))[1], torch.tensor([12.0]))


def test_a_penalty_on_a_gradient_of_an_argument():
    op, calls = counted(weight := keras.Variable(0.0))
    slope = grad(op)(torch.tensor(2.0))
    (of_weight,) = torch.autograd.grad(slope, weight.value)
    close(of_weight, 3.0 * 2.0)  # of 3 * exp(2 * weight)
    assert len(calls) == 2


def test_an_inner_gradient_step():
    weight = keras.Variable(2.0)

    @op_custom_gradient
    def op(w):
        return w * w, lambda u: u * w * 5.0

    (of_weight,) = torch.autograd.grad(weight.value - 0.5 * grad(op)(weight), weight.value)
    close(of_weight, 1.0 - 0.5 * 5.0)


def test_a_torch_parameter_is_not_saved():
    """The parameter would be restored as a tensor, which is not trainable."""
    with pytest.raises(Unsaved):
        encode(torch.nn.Parameter(torch.ones(2)))
    assert type(decode(encode(ops.ones(2)))) is type(ops.ones(2))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_a_trace_under_a_transform(transform):
    op = op_custom_gradient(lambda x: (x**2, lambda u: u * 7.0 * x), name="op")
    with trace_gradients() as trace:
        assert transform(op)(torch.tensor(3.0)).item() == 21.0
    assert trace.calls[0].inputs["x"].tolist() == 3.0
    assert np.ravel(trace.steps[0].downstream["x"]).tolist() == [21.0]


def test_a_trace_of_a_batch_under_vmap():
    op = op_custom_gradient(lambda x: (x**2, lambda u: u * 7.0 * x), name="op")
    with trace_gradients() as trace:
        torch.func.vmap(torch.func.grad(op))(torch.arange(3.0))
    assert trace.calls[0].inputs["x"].tolist() == [0.0, 1.0, 2.0]
    assert [step.downstream["x"].tolist() for step in trace.steps] == [[0.0, 7.0, 14.0]]


def test_a_trace_of_a_compiled_function():
    op = op_custom_gradient(lambda x: (x**2, lambda u: u * 7.0 * x), name="op")
    f = torch.compile(lambda x: op(x).sum(), backend="eager", fullgraph=True)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    for times in (1, 2):
        with trace_gradients() as trace:
            f(x).backward()
        assert [step.downstream["x"].tolist() for step in trace.steps] == [[7.0, 14.0]]
        f(x).backward()
        assert x.grad.tolist() == [times * 14.0, times * 28.0]


def test_a_trace_in_bfloat16():
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: u * 7.0), name="op")
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    with trace_gradients() as trace:
        op(x).sum().backward()
    assert trace.to_dict()["steps"][0]["downstream"]["x"]["mean"] == 7.0
    assert trace.to_dict()["steps"][0]["downstream"]["x"]["dtype"] == "bfloat16"


def test_a_reduced_loss_of_many_tokens_under_autocast_to_float16():
    """The gradients are small without the scale of the loss, which is applied only in the backward pass."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(4096, 8, generator=generator), 0.1 * torch.randn(8, 2000, generator=generator)
    y = torch.randint(0, 2000, (4096,), generator=generator)

    def gradient(cast):
        kernel = w.clone().requires_grad_()
        with torch.autocast("cpu", torch.float16, enabled=cast):
            loss = linear_cross_entropy(x, kernel, y, reduction="mean")
        (2.0**16 * loss).backward()
        return kernel.grad / 2.0**16

    wanted = gradient(False)
    assert (gradient(True) - wanted).norm() < 1e-3 * wanted.norm()


LOOKUPS = {
    "embedding": lambda w: torch.nn.functional.embedding(ROWS, w, sparse=True),
    "gather": lambda w: torch.gather(w, 0, ROWS[:, None].expand(3, 2), sparse_grad=True),
    "embedding_bag": lambda w: torch.nn.functional.embedding_bag(ROWS[None], w, sparse=True, mode="sum"),
}
ROWS = torch.tensor([1, 2, 2])


def whole_and_twice(x):
    def rule(u):
        return ops.where(x < 9.0, 7.0 * u["a"] + u["b"], 0.0)

    return {"a": x * 1.0, "b": x * 2.0, "c": ops.shape(x)}, rule


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_sparse_upstream_gradients_are_converted(lookup):
    seen = []

    @op_custom_gradient
    def masked(x):
        def rule(u):
            seen.append(u.layout)
            return ops.where(x < 9.0, 7.0 * u, 0.0)  # PyTorch has no `where` for sparse tensors

        return x * 1.0, rule

    wanted = np.float32([[0, 0], [7, 7], [14, 14], [0, 0]])
    several = op_custom_gradient(whole_and_twice)
    for op in (masked, lambda x: several(x)["a"]):

        def loss(w, op=op):
            return LOOKUPS[lookup](op(w)).sum()

        w = torch.ones(4, 2)
        parameter = w.clone().requires_grad_()
        loss(parameter).backward()
        close(parameter.grad, torch.tensor(wanted))
        close(grad(loss)(w), torch.tensor(wanted))
        close(torch.func.grad(loss)(w), torch.tensor(wanted))
    assert set(seen) == {torch.strided}


def test_a_second_derivative_with_a_sparse_upstream_gradient():
    square = op_custom_gradient(lambda x: (x * x, lambda u: 7.0 * u * x))

    def slope(w, sparse):
        y = torch.nn.functional.embedding(ROWS, square(w), sparse=sparse)
        return torch.autograd.grad((y**2).sum(), w, create_graph=True)[0]

    w = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    close(*[torch.autograd.grad((slope(w, sparse) ** 2).sum(), w) for sparse in (True, False)])


def test_a_quantized_embedding_with_sparse_gradients():
    embedding = torch.nn.Embedding(4, 2, sparse=True)

    class Quantized(torch.nn.Module):
        def forward(self, weight):
            return fake_quantize(weight, 0.1, 8)

    torch.nn.utils.parametrize.register_parametrization(embedding, "weight", Quantized())
    embedding(ROWS).sum().backward()
    gradient = embedding.parametrizations.weight.original.grad
    close(gradient, torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [0.0, 0.0]]))


def test_a_gradient_is_moved_to_the_device_of_its_argument():
    """The device `meta` stands for a GPU. PyTorch raises an error for a gradient on another device."""
    elsewhere, here = torch.ones(3, device="meta", requires_grad=True), torch.ones(3, requires_grad=True)
    op = op_custom_gradient(lambda x, y: (x * 2.0, lambda u: (torch.ones(3), torch.ones(2, 3) * 7.0)))
    op(elsewhere, here).sum().backward()
    assert elsewhere.grad.device == elsewhere.device
    close(here.grad, array(14.0, 14.0, 14.0))


@pytest.mark.parametrize("gradient", [torch.ones(3), torch.ones(2, 3), torch.ones(3, dtype=torch.float64)])
def test_conform_moves_sums_and_casts(gradient):
    moved = conform(gradient, (torch.Size([3]), torch.float32, torch.device("meta")))
    assert (moved.shape, moved.dtype, moved.device.type) == ((3,), torch.float32, "meta")


def test_a_compiled_spectral_function_that_holds_a_tensor_is_refused():
    """Dynamo cannot read cells. The gradient of `exponent` would silently be zero."""
    exponent = leaf(0.5)

    @functools.partial(torch.compile, backend="eager")
    def root(a, exponent):
        return spectral_function(a, lambda x: x**exponent)

    with pytest.raises(TypeError, match="the function holds a tensor or"):
        root(array(np.eye(2)), exponent)
    close(root(array(np.eye(2)), 0.5), array(np.eye(2)))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_names_the_op():
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: u / 0.0 * 0.0), name="broken")
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="'brokenBackward'"):
        op(leaf(1.0)).sum().backward()

"""torch.func and torch.autograd.functional: their transforms and nestings, on every op."""

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import (
    BLACK_BOXES,
    CASES,
    ONE_FOR_ALL,
    V,
    W,
    X,
    all_as_meant,
    as_meant,
    each_of,
    weighted,
)
from cases import cube_by_intermediate as by_intermediate
from keras import ops
from support import close
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import functional
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map
from vectors import Module

import multigrad
from multigrad import op_custom_gradient
from multigrad.common.frameworks import is_at_least

XS, WS = torch.stack([X, W, V, X + W]), torch.stack([W, V, X, X - V])  # four rows of three

EACH = each_of({**CASES, "one for all": ONE_FOR_ALL})


def slope(f, argument=0):
    return lambda x, w: (grad(f, argument)(x, w) * W).sum()


def every_vjp(f):
    y, pull = vjp(f, X, W)
    return y, vmap(pull)(torch.eye(3)), pull(V)


def linear(f):
    y, push = linearize(f, X, W)
    return y, push(V, X), push(W, V)


def recorded(function):
    """Return the gradients of a norm by `backward`."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    sum([(y**2).sum() for y in function(x, w)]).backward()
    return x.grad, w.grad


def curved(f):
    return lambda x, w: f(torch.sin(x), w**2)


TRANSFORMS = {
    "grad": lambda f: grad(weighted(f), (0, 1))(X, W),
    "vjp": every_vjp,
    "jvp": lambda f: jvp(f, (X, W), (V, X)),
    "jvp by one argument": lambda f: jvp(lambda w: f(X, w), (W,), (V,)),
    "linearize": linear,
    "jacrev": lambda f: jacrev(f, (0, 1))(X, W),
    "jacrev in chunks": lambda f: jacrev(f, (0, 1), chunk_size=2)(X, W),
    "jacfwd": lambda f: jacfwd(f, (0, 1))(X, W),
    "jacfwd, randomness": lambda f: jacfwd(f, 1, randomness="same")(X, W),
    "hessian": lambda f: hessian(f, (0, 1))(X, W),
    "grad of grad": lambda f: grad(slope(weighted(f), 1), (0, 1))(X, W),
    "grad of grad of grad": lambda f: grad(slope(slope(weighted(f))), (0, 1))(X, W),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f, (0, 1)), (0, 1))(X, W),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f, (0, 1)), (0, 1))(X, W),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f, (0, 1)), (0, 1))(X, W),
    "jacfwd of hessian": lambda f: jacfwd(hessian(f))(X, W),
    "jvp of grad": lambda f: jvp(grad(weighted(f), (0, 1)), (X, W), (V, X)),
    "grad of jvp": lambda f: grad(lambda x, w: jvp(f, (x, w), (V, X))[1].sum(), (0, 1))(X, W),
    "vjp of vjp": lambda f: vjp(lambda u: vjp(f, X, W)[1](u), V)[1]((X, W)),
    "functional_call": lambda f: grad(lambda w: functional_call(Module(f), {"weight": w}, (X,)).sum())(W),
    "autograd.vjp": lambda f: functional.vjp(f, (X, W), V),
    "autograd.jvp": lambda f: functional.jvp(f, (X, W), (V, X)),
    "autograd.jacobian": lambda f: functional.jacobian(f, (X, W)),
    "autograd.jacobian, vectorized": lambda f: functional.jacobian(f, (X, W), vectorize=True),
    "autograd.jacobian, forward mode": lambda f: functional.jacobian(
        f, (X, W), vectorize=True, strategy="forward-mode"
    ),
    "autograd.hessian": lambda f: functional.hessian(weighted(f), (X, W)),
    "autograd.hessian, vectorized": lambda f: functional.hessian(weighted(f), (X, W), vectorize=True),
    "autograd.hessian, forward over reverse": lambda f: functional.hessian(
        weighted(f), (X, W), vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "autograd.hvp": lambda f: functional.hvp(weighted(f), (X, W), (V, X)),
    "autograd.vhp": lambda f: functional.vhp(weighted(f), (X, W), (V, X)),
    "a gradient of autograd.jacobian": lambda f: recorded(
        lambda x, w: functional.jacobian(curved(f), (x, w), create_graph=True)
    ),
    "a gradient of autograd.vjp": lambda f: recorded(
        lambda x, w: functional.vjp(curved(f), (x, w), V, create_graph=True)[1]
    ),
    "a gradient by backward": lambda f: recorded(lambda x, w: [f(x, w)]),
    "multigrad.grad in vmap": lambda f: vmap(multigrad.grad(weighted(f)), (0, None))(XS, W),
    "multigrad.grad in grad": lambda f: grad(lambda x: (multigrad.grad(weighted(f))(x, W) * V).sum())(X),
    "multigrad.grad in jvp": lambda f: jvp(multigrad.grad(weighted(f)), (X, W), (V, X)),
    "multigrad.grad in hessian": lambda f: hessian(lambda x: multigrad.grad(weighted(f))(x, W))(X),
}


# A warning of torch.func.linearize (PyTorch 2.13) about itself.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@as_meant(each=EACH, tolerance=1e-3)
def test_a_transform(f, transform):
    return tree_map(solid, transform(f))


def solid(tensor):
    """Return a tensor that NumPy can read. Forward mode has a special tensor for zeros."""
    return tensor + torch.zeros_like(tensor)


@pytest.mark.parametrize("batched", [False, True])
@as_meant(each=EACH)
def test_many_upstream_gradients_at_once(f, batched):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    upstream = torch.eye(3) if batched else torch.eye(3)[1]
    return torch.autograd.grad(f(x, w), (x, w), upstream, is_grads_batched=batched)


# ----------------------------------------------------------------------------------------- vmap

IN_DIMS = {
    "one for all": (0, (XS, WS)),
    "the first": ((0, None), (XS, W)),
    "other axes": ((1, -1), (XS.T, WS.T)),
    "two axes": ((0, 1), (XS, WS.T)),
    "none, and the last": ((None, -1), (X, WS.T)),
}
MAPPED = {
    "the op": lambda f: f,
    "grad": lambda f: grad(weighted(f), (0, 1)),
    "jvp": lambda f: lambda x, w: jvp(f, (x, w), (V, X)),
    "jacrev": lambda f: jacrev(f, (0, 1)),
    "hessian": hessian,
    "grad of grad": lambda f: grad(slope(weighted(f), 1), (0, 1)),
}


@pytest.mark.parametrize(("in_dims", "args"), IN_DIMS.values(), ids=IN_DIMS)
@pytest.mark.parametrize("mapped", MAPPED.values(), ids=MAPPED)
@as_meant(each=EACH)
def test_vmap(f, in_dims, args, mapped):
    return vmap(mapped(f), in_dims)(*args)


def backward_around_vmap(f):
    xs, w = XS.clone().requires_grad_(), W.clone().requires_grad_()
    return torch.autograd.grad((vmap(f, (0, None))(xs, w) ** 2).sum(), (xs, w))


def of_structures(f):
    """Map over dicts in chunks, to another axis."""
    mapped = vmap(lambda given: {"y": f(**given)}, ({"x": 0, "w": 1},), out_dims={"y": 1}, chunk_size=3)
    return mapped({"x": XS, "w": WS.T})


test_other_maps = all_as_meant(
    {
        "of gradients within another": lambda f: vmap(vmap(grad(weighted(f)), (None, 0)), (0, None))(XS, WS),
        "in a hessian": lambda f: hessian(lambda xs, w: (vmap(f, (0, None))(xs, w) ** 2).sum())(XS, W),
        "of structures": of_structures,
        "before backward": backward_around_vmap,
    },
    each=EACH,
    tolerance=1e-3,
)


def test_tensors_of_an_ended_vmap():
    """An ended vmap maps nothing, although an object that the rule reaches still holds a tensor of it."""

    class Held:
        factor = 7.0

        @op_custom_gradient
        def op(self, x):
            return x * 2.0, lambda u: self.factor * u

    held, seen = Held(), []
    held.seen = seen
    vmap(lambda x: seen.append(x) or x)(torch.ones(5, 2))
    close(vmap(grad(lambda x: held.op(x).sum()))(torch.ones(2, 3)), torch.full((2, 3), 7.0))
    assert vmap(held.op)(torch.ones(4, 3)).shape == (4, 3)


# ------------------------------------------------------------------------------ closed-over tensors


def closing_over(w):
    def f(x):
        e = w * x
        return e * x, lambda u: u * 7.0 * (e + w)

    return op_custom_gradient(f)


CLOSED_OVER = {
    "vmap": lambda f: vmap(f, (None, 0))(X, WS),
    "jacfwd of jacrev": lambda f: jacfwd(jacrev(f), (0, 1))(X, W),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f), (0, 1))(X, W),
    "grad of vmap of grad": lambda f: grad(lambda w: vmap(grad(weighted(f)), (0, None))(XS, w).sum())(W),
}


@pytest.mark.parametrize("transform", CLOSED_OVER.values(), ids=CLOSED_OVER)
def test_closed_over_tensors_have_a_gradient_in_a_second_derivative(transform):
    """The op has the value `w·x²`. Its slope is `7·(w·x + w)`, which has a derivative with respect to `w`."""

    def meant(x, w):
        potential = 7.0 * (x**2 / 2 + x)
        return (w * x**2).detach() + w * (potential - potential.detach())

    def op(x, w):
        return closing_over(w)(x)

    close(tree_map(solid, transform(op)), tree_map(solid, transform(meant)), 1e-4)


def test_a_closed_over_tensor_in_the_output_raises():
    def f(x, w):
        return closing_over(w)(x)

    close(grad(lambda x: f(x, W).sum())(X), 7.0 * (W * X + W))
    for transform in (lambda: jacrev(f, (0, 1))(X, W), lambda: jvp(lambda w: f(X, w), (W,), (V,))):
        with pytest.raises((RuntimeError, TypeError), match="differentiated tensor that is not an argument"):
            transform()


def test_integers_among_mapped_outputs():
    @op_custom_gradient
    def op(x):
        e = x**2
        return (e * x, torch.argmax(x)), lambda U: U[0] * 7.0 * e

    value, place = vmap(op)(XS)
    close((value, place), (XS**3, XS.argmax(1)))
    close(jvp(lambda x: vmap(op)(x)[0], (XS,), (WS,)), (XS**3, 7.0 * XS**2 * WS))


def test_aux_in_a_transform():
    """Tensors of the level of the gradient, and other objects."""

    def scalar(x):
        return (CASES["input"].op(x, W) * V).sum(), {"x": x * 2.0, "n": 3, "none": None}

    f = multigrad.value_and_grad(scalar, has_aux=True)
    (_, aux), _ = f(X)
    assert (aux["n"], aux["none"]) == (3, None)

    def beside(x):
        (_, aux), slope = f(x)
        assert (aux["n"], aux["none"]) == (3, None)
        return aux["x"] * slope

    close(vmap(beside)(XS), 2.0 * XS * 21.0 * XS**2 * W * V)
    close(grad(lambda x: beside(x).sum())(X), 126.0 * X**2 * W * V)


def noise():
    return torch.tensor(np.random.default_rng().random(3) + 1.0, dtype=torch.float32)


@op_custom_gradient
def noisy(x):
    n = noise()
    slope = ops.cos(x) * n
    return ops.sin(x) * n, lambda u: u * slope * 7.0


def mapped(f):
    return lambda x: vmap(f)(torch.stack([x, x]))


RUN_TWICE = {
    "grad of grad": lambda f: grad(lambda x: grad(f)(x).sum()),
    "vmap of grad of grad": lambda f: mapped(grad(lambda x: grad(f)(x).sum())),
    "forward over reverse": lambda f: lambda x: jvp(grad(f), (x,), (X,))[1],
}


@pytest.mark.parametrize("transform", RUN_TWICE.values(), ids=RUN_TWICE)
def test_a_random_function_raises(transform):
    """A second run gives other numbers, so that the rule and the output would not match."""
    with pytest.raises(RuntimeError, match="the function returned different values"):
        transform(lambda x: noisy(x).sum())(X)


@as_meant(each=pytest.mark.parametrize("case", [BLACK_BOXES["NumPy-function"], BLACK_BOXES["NumPy-method"]]))
def test_forward_mode_does_not_differentiate_the_function(f):
    """The function gets tensors that NumPy can read."""
    return jvp(f, (X, W), (V, X))


def test_a_hessian_does_not_differentiate_the_function():
    op = op_custom_gradient(lambda x: (torch.from_numpy(np.sin(x.numpy())), lambda u: 7.0 * u * torch.cos(x)))
    close(hessian(lambda x: op(x).sum())(X), torch.diag(-7.0 * torch.sin(X)))


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_function_that_computes_a_pullback(has_aux):
    @op_custom_gradient
    def cube(x):
        output, pullback, *_ = multigrad.vjp(lambda x: (x**3, x) if has_aux else x**3, x, has_aux=has_aux)
        return output, lambda u: 7.0 * pullback(u)[0]

    x = torch.tensor(2.0)
    close(multigrad.grad(multigrad.grad(cube))(x), torch.tensor(84.0))
    # The pullback belongs to a torch.func.vjp that has ended.
    for derivative in (lambda x: jvp(cube, (x,), (x,)), hessian(cube), grad(grad(cube))):
        with pytest.raises(TypeError, match="through an object"):
            derivative(x)


@op_custom_gradient
def masked(x):
    mask = (noise() > 1.5).to(x.dtype)
    return x * mask, lambda u: u * mask * 7.0


@op_custom_gradient
def narrow(x):
    q = x.to(torch.float8_e4m3fn)
    return q.to(x.dtype), lambda u: 7.0 * u * x * (q == q.clone())


def test_values_that_depend_on_no_input_are_from_the_first_run():
    """The mask of a dropout is an example. It would differ in a second run."""
    for _ in range(5):
        y, pushed = jvp(masked, (X,), (V,))
        close(pushed, 7.0 * V * (y != 0))
        y, pushed = jvp(grad(lambda x: (masked(x) ** 2).sum()), (X,), (V,))
        close(pushed, 7.0 * (7.0 * 2.0) * V * (y != 0))
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad((masked(x) ** 2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        close(second, 98.0 * (first.detach() != 0))


def test_residuals_of_one_byte():
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(narrow(x).sum(), x, create_graph=True)
    close(torch.autograd.grad(first.sum(), x)[0], torch.full((3,), 7.0))


def test_a_random_function_that_runs_once():
    y, pull = vjp(noisy, X)
    close(pull(torch.ones(3))[0], 7.0 * y / torch.tan(X), 1e-4)


def test_two_runs_are_compared_under_nested_vmap():
    """At several levels, along different axes, and if only one of the two is mapped."""

    @op_custom_gradient
    def op(x, y):
        e, both = ops.exp(x), ops.exp(x) * y
        return both * 1.0, lambda u: (u * both * 7.0, u * e * 5.0)

    def slopes(x, y):
        return grad(lambda x: grad(lambda x: op(x, y).sum())(x).sum())(x)

    xs = torch.linspace(-1.0, 1.0, 24).reshape(2, 3, 4)
    got = vmap(vmap(slopes, (1, 0), 1), (1, None))(xs, V[:1].expand(4, 1))
    close(got, (7.0 * torch.exp(xs) * V[0]).permute(1, 0, 2))


@pytest.mark.parametrize("mode", ["meta", "fake"])
def test_forward_mode_without_values(mode):
    """Without values, linearity cannot be checked."""
    with FakeTensorMode() if mode == "fake" else torch.device("meta"):
        x = torch.ones(3)
        for _ in range(20):  # uninitialized memory must not count as values
            assert jvp(by_intermediate, (x,), (x,))[1].shape == (3,)
            if mode == "fake" or is_at_least(torch.__version__, "2.13"):  # the older one raises in `hessian`
                assert hessian(lambda x: by_intermediate(x).sum())(x).shape == (3, 3)
            assert vmap(lambda x: jvp(by_intermediate, (x,), (x,))[1])(x).shape == (3,)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_forward_mode_in_a_traced_graph(mode):
    written = make_fx(lambda x: jvp(by_intermediate, (x,), (x,))[1], tracing_mode=mode)(torch.ones(3))
    x = torch.arange(4.0 if mode == "symbolic" else 3.0)
    close(written(x), 21 * x**3)


def test_a_tensor_that_the_function_stores_in_an_object():
    kept = SimpleNamespace()

    @op_custom_gradient
    def op(x):
        kept.e = x**2
        return kept.e * x, lambda u: u * 3 * kept.e * 7.0

    x = torch.tensor(2.0)
    close((grad(op)(x), jacfwd(op)(x)), (torch.tensor(84.0),) * 2)
    for derivative in (
        grad(grad(op)),
        hessian(op),
        jacfwd(jacfwd(op)),
        grad(lambda x: vmap(op)(x[None]).sum()),
    ):
        with pytest.raises(TypeError, match="op: the rule reaches a tensor through an object"):
            derivative(x)


IN_A_GLOBAL = torch.tensor(2.0, requires_grad=True)


@pytest.mark.parametrize(
    ("derivative", "reach"),
    [
        *itertools.product([grad], ["cell", "global"]),
        *itertools.product([multigrad.grad], ["object", "global"]),
    ],
)
@pytest.mark.parametrize("in_the_rule", [False, True])
def test_a_backward_pass_of_a_gradient_with_respect_to_a_reached_tensor(derivative, reach, in_the_rule):
    held = SimpleNamespace(own=torch.tensor(2.0, requires_grad=True))
    own = held.own
    reached = IN_A_GLOBAL if reach == "global" else own
    read = {"cell": lambda: own, "object": lambda: held.own, "global": lambda: IN_A_GLOBAL}[reach]

    @op_custom_gradient
    def op(x):
        e = x * read()
        return e * 1.0, lambda u: u * 5.0 * (x * read() if in_the_rule else e)

    reached.grad = None
    gradient = derivative(lambda x: op(x).sum())(torch.tensor([3.0]))
    (gradient.sum() + reached).backward()
    close(reached.grad, torch.tensor(16.0))


def by_a_container(a, b):
    kept = [torch.exp(a * b)]
    return kept[0] + 1.0, lambda u: (7.0 * u * b * kept[0], 5.0 * u * a * kept[0])


def second_of_recorded(f):
    def second(x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.autograd.grad((slope * V).sum(), x)[0]

    return second


SECOND_OF_ONE = {
    "jvp of grad": lambda f: lambda x: jvp(grad(f), (x,), (V,))[1],
    "grad of grad": lambda f: grad(lambda x: (grad(f)(x) * V).sum()),
    "grad of multigrad.grad": lambda f: grad(lambda x: (multigrad.grad(f)(x) * V).sum()),
    "recorded": second_of_recorded,
}


@pytest.mark.parametrize("name", SECOND_OF_ONE)
def test_one_tensor_for_two_arguments(name):
    """If the tensor is returned as two, a second run of the function finds as many residuals as the first."""
    op = op_custom_gradient(by_a_container)

    def meant(x):
        z = 2.0 * x
        return (24.0 * z * torch.exp(z * z) * V).sum()

    x = 0.25 * X
    close(SECOND_OF_ONE[name](lambda x: op(*[2.0 * x] * 2).sum())(x), grad(meant)(x), 1e-4)


def test_a_tensor_that_occurs_twice_in_a_rule_is_restored_twice():
    """Saved-tensor hooks that make copies make two of it."""

    @op_custom_gradient
    def op(x):
        e = torch.exp(x)
        kept = {"a": [e], "b": e}
        return e + 1.0, lambda u: 7.0 * u * kept["a"][0] * kept["b"]

    x = X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: 2.0 * t, lambda t: 0.5 * t):
        y = op(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    close(slope, 7.0 * torch.exp(2.0 * X))
    close(torch.autograd.grad(slope.sum(), x)[0], 14.0 * torch.exp(2.0 * X))


def within(f, depth, x):
    """Call a function in nested transforms, which have ended when this returns."""
    for _ in range(depth):
        f = functools.partial(lambda inner, x: grad(inner)(x).sum() + (x * x).sum(), f)
    f(x)


@pytest.mark.parametrize("depth", [0, 1, 2])
@as_meant(each=EACH)
def test_recording_the_pullback_of_an_ended_vjp(f, depth):
    """The tensors of the pullback are in wrappers of transforms that have ended."""
    x, w, u = (tensor.clone().requires_grad_() for tensor in (X, W, V))
    pulls = []

    def run(x):
        y, pull = vjp(f, x, w)
        pulls.append(pull)
        return y.sum()

    within(run, depth, x)
    first = pulls[-1](u)
    slope = sum([(g * v).sum() for g, v in zip(first, (W, V), strict=True)])
    return first, torch.autograd.grad(slope, [x, w, u], materialize_grads=True, allow_unused=True)


@pytest.mark.parametrize("depth", [1, 2, 3])
@as_meant(each=EACH)
def test_an_op_on_a_tensor_of_ended_transforms(f, depth):
    """Operations of PyTorch use the wrapped tensor, which has a history in the outermost transform."""
    x, left = X.clone().requires_grad_(), []
    within(lambda x: [left.append(x), x.sum()][1], depth, x)
    return torch.autograd.grad((f(left[-1], W) * V).sum(), x)

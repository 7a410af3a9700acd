"""Memory over many steps, threads, and no graph without gradients."""

import contextlib
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import pytest
import torch
from cases import CASES, V, W, X, as_meant, each_of
from keras import ops
from support import array, close, numpy
from torch.utils.checkpoint import checkpoint
from vectors import first, leaves, second

from multigrad import grad, jacobian, jvp, op_custom_gradient, value_and_grad, vjp


def checkpointed(f):
    return first(lambda x, w: checkpoint(f, x, w, use_reentrant=False))


def transformed(f):
    return torch.func.vmap(torch.func.grad(lambda x, w: f(x, w).sum(), (0, 1)))(X[None], W[None])


def forward_alone(f):
    """Build a graph, and discard it."""
    return f(*leaves()).detach()


STEPS = {f.__name__: f for f in (first, second, checkpointed, transformed, forward_alone)}


def live():
    """Return the number of tensors and nodes. Other objects may warn when they are inspected."""
    kinds = torch.Tensor, torch.autograd.graph.Node, torch.autograd.function.FunctionCtx
    return sum(issubclass(type(thing), kinds) for thing in gc.get_objects())


def of_a_structure(x, w):
    return CASES["structure"].op(x, w).sum()


def named():
    return {"x": X.clone(), "b": W.clone()}


CALCULUS = {
    "op": lambda: of_a_structure(*leaves()).backward(),
    "grad": lambda: grad(lambda d, w: of_a_structure(d["x"], w))(named(), W),
    "value_and_grad": lambda: value_and_grad(lambda x: (x**2).sum())(X.clone()),
    "vjp": lambda: vjp(lambda d: [d["x"] ** 2], named())[1]([V]),
    "jvp": lambda: jvp(lambda d: [d["x"] ** 2], (named(),), (named(),)),
    "jacobian": lambda: jacobian(lambda d: [d["x"] ** 2])(named()),
    "torch.func": lambda: torch.func.grad(lambda x: grad(lambda x: (x**2).sum())(x).sum())(X.clone()),
}


@contextlib.contextmanager
def nothing_is_left():
    """Assert that as many tensors and nodes live as before, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        before = live()
        yield
        assert live() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("use", CALCULUS.values(), ids=CALCULUS)
def test_the_calculus_leaves_no_reference_cycles(use):
    use()
    with nothing_is_left():
        for _ in range(3):
            use()


@each_of()
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_ops_leave_no_reference_cycles(case, rounds):
    # The `__call__` of a Keras layer (3.15) leaves reference cycles.
    op = getattr(case.op, "call", case.op)
    for step in STEPS.values():
        step(op)
    with nothing_is_left():
        for step in STEPS.values():
            for _ in range(10 * rounds if step is first else rounds):
                step(op)


# ----------------------------------------------------------------------------------------- threads


def in_threads(work, count=8):
    """Return the results of `work(i)` in this number of concurrent threads, in their order."""
    start = threading.Barrier(count)

    def run(i):
        start.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@each_of()
def test_eight_threads_on_one_graph(case):
    x, w = leaves()
    y = case.op(torch.sin(x), w**2)
    got = in_threads(lambda i: torch.autograd.grad(y, (x, w), V * i, retain_graph=True, create_graph=True))
    meant = case.meant(torch.sin(x), w**2)
    for i, slopes in enumerate(got):
        close(
            [slope.detach() for slope in slopes],
            list(torch.autograd.grad(meant, (x, w), V * i, retain_graph=True)),
            1e-4,
        )


@as_meant
def test_backward_in_another_thread(f):
    x, w = leaves()
    (y,) = in_threads(lambda _: f(x, w), 1)
    return torch.autograd.grad(y, (x, w), V)


def test_a_thread_without_gradients():
    def work(i):
        with torch.set_grad_enabled(i % 2 == 0):
            return [CASES["intermediate"].op(*leaves()).requires_grad for _ in range(20)]

    assert in_threads(work) == [[i % 2 == 0] * 20 for i in range(8)]


# ---------------------------------------------------------------------------------------- no graph


@each_of(forms=["method"])
def test_no_graph_without_a_gradient(case):
    x, w = leaves()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        with torch.no_grad():
            assert case.op(x, w).grad_fn is None
        with torch.inference_mode():
            assert case.op(x, w).is_inference()
        assert case.op(X, W).grad_fn is None
    assert kept == []


def test_a_rule_that_uses_a_shape_saves_nothing():
    seen = []
    op = op_custom_gradient(lambda x: (x.sum(), (lambda s: lambda u: u.expand(s) * 7.0)(x.shape)))
    x, _ = leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
        y = op(x)
    y.backward()
    assert (seen, x.grad.tolist()) == ([], [7.0, 7.0, 7.0])


def test_a_gradient_does_not_copy_weights():
    """Copies of them would take the memory of a model."""
    weight, seen = keras.Variable(X), []

    def loss(x):
        seen.append(ops.convert_to_tensor(weight))
        return ops.sum(weight * weight * x)

    grad(loss, variables=[weight])(X)
    assert seen[0] is not weight.value
    assert seen[0].data_ptr() == weight.value.data_ptr()


PARTS_OF_A_WEIGHT = {
    "the weight": lambda w: w.value,
    "a part": lambda w: w[1:],
    "a view": lambda w: ops.reshape(w, (3, 1)),
    "a constant": ops.stop_gradient,
}


@pytest.mark.parametrize("part", PARTS_OF_A_WEIGHT.values(), ids=PARTS_OF_A_WEIGHT)
def test_a_result_keeps_its_value_when_a_weight_changes(part):
    weight, other = keras.Variable([1.0, 2.0, 3.0]), torch.ones((), requires_grad=True)
    one = keras.Variable(4.0)
    wanted = numpy(part(weight)).copy()
    _, aux = grad(lambda: (ops.sum(weight), part(weight)), has_aux=True, variables=[weight])()
    # With a history, which is kept.
    _, recorded = grad(lambda: (ops.sum(weight * other), [part(weight)]), has_aux=True, variables=[weight])()
    value, _ = value_and_grad(lambda: one[...], variables=[one])()
    _, unused = grad(lambda: (one.value.detach(), part(weight)), has_aux=True, variables=[weight])()
    output, pullback = vjp(lambda: (weight * weight, part(weight)), variables=[weight])
    with torch.no_grad():
        weight.value.mul_(5.0)
        one.value.mul_(5.0)
    close((aux, recorded[0], output[1], unused, value), (wanted, wanted, wanted, wanted, 4.0))
    close(pullback((array(1.0, 1.0, 1.0), ops.zeros_like(output[1])))[0], array(2.0, 4.0, 6.0))


@pytest.mark.parametrize("part", [lambda w: w, lambda w: torch.flip(w, (0,)).flip((0,)), lambda w: w.view(3)])
def test_a_gradient_that_is_another_weight_is_copied(part):
    """An optimizer changes the weights one after the other."""
    a, b = keras.Variable([1.0, 2.0, 3.0]), keras.Variable([5.0, 7.0, 11.0])
    dot = op_custom_gradient(lambda a, b: ((a * b).sum(), lambda u: (part(b), part(a))))
    gradients = grad(lambda: dot(a, b), variables=[a, b])()
    keras.optimizers.SGD(1.0).apply(gradients, [a, b])
    close((a, b), (array(-4.0, -5.0, -8.0), array(4.0, 5.0, 8.0)))

"""Second derivatives of compiled functions: each is right or raises an error, and none is silently wrong."""

import pytest
import torch
from cases import CASES, IN_OTHER_FORMS
from keras import ops
from support import SECOND_OF_COMPILED, close, numpy

import multigrad
from multigrad import grad, hessian, jacobian, jvp, vjp
from multigrad.backend.torch.private import COMPILED_NODE

X, V = torch.tensor([0.5, -0.75, 1.25]), torch.tensor([1.0, 2.0, -1.0])
READER = IN_OTHER_FORMS["intermediate-reader"].op

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """Reset the compiler, so that functions of one test do not count for another."""
    torch.compiler.reset()


def slope(f):
    return grad(lambda x: ops.sum(f(x) * V))


WAYS = {
    "grad of grad": lambda f: slope(slope(f))(X),
    "grad of vjp": lambda f: slope(lambda x: vjp(f, x)[1](V)[0])(X),
    "vjp of grad": lambda f: vjp(slope(f), X)[1](V)[0],
    "jacobian of grad": lambda f: jacobian(slope(f))(X),
    "grad of jacobian": lambda f: slope(lambda x: jacobian(f)(x) @ V)(X),
    "hessian": lambda f: hessian(lambda x: ops.sum(f(x) * V))(X),
    "jvp of grad": lambda f: jvp(slope(f), (X,), (V,))[1],
    "grad of jvp": lambda f: slope(lambda x: jvp(f, (x,), (V,))[1])(X),
    "grad of torch.func.grad": lambda f: slope(torch.func.grad(lambda x: (f(x) * V).sum()))(X),
    "torch.func.grad of grad": lambda f: torch.func.grad(lambda x: (slope(f)(x) * V).sum())(X),
}

cases = {name: CASES[name].op for name in ("input", "intermediate", "output")}
FUNCTIONS = {
    **{name: lambda x, op=op: op(x, V) for name, op in cases.items()},
    "between": lambda x: ops.sin(cases["intermediate"](2.0 * x, V)),
    "beside": lambda x: cases["intermediate"](x, V) * x,
    "without an op": torch.exp,
    "a weight": lambda x: READER(x, V),
    "reshaped": lambda x: cases["intermediate"](x.reshape(-1), V),
}
COMPILERS = {
    "multigrad.jit": multigrad.jit,
    "torch.compile": lambda f: torch.compile(f, backend="aot_eager"),
}


@pytest.mark.parametrize("compiler", [pytest.param("multigrad.jit", marks=pytest.mark.slow), "torch.compile"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_a_second_derivative_of_a_compiled_function_is_right_or_raises(way, function, compiler):
    f = FUNCTIONS[function]
    wanted, got, text = WAYS[way](f), None, ""
    try:
        got = WAYS[way](COMPILERS[compiler](f))
    except RuntimeError as error:
        text = str(error)
    if got is None:
        assert any(known in text for known in SECOND_OF_COMPILED), text
    else:
        close(got, wanted, 1e-4)


@pytest.mark.parametrize("function", [pytest.param("intermediate", marks=pytest.mark.slow), "between"])
def test_the_first_derivative_is_right_where_the_second_raises(function):
    f = FUNCTIONS[function]
    compiled, seen = COMPILERS["torch.compile"](f), []

    def penalty(x):
        gradient = slope(compiled)(x)
        seen.append(numpy(gradient.detach()))
        return ops.sum(gradient**2)

    with pytest.raises(RuntimeError, match="gradient of a compiled function cannot be differentiated"):
        grad(penalty)(X)
    close(seen[0], numpy(slope(f)(X)), 1e-4)


def penalty_in_pieces(x):
    def value(x):
        print(end="")  # the function is compiled in pieces
        return ops.sum(cases["intermediate"](x, V))

    return ops.sum(grad(value)(x) ** 2)


def test_backward_of_a_gradient_that_is_compiled_in_pieces_raises():
    compiled, x = multigrad.jit(penalty_in_pieces, backend="aot_eager"), X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="compute both derivatives in it"):  # noqa: PT012
        for _ in range(3):  # the first two calls run uncompiled
            compiled(x).backward()


@pytest.mark.slow
def test_the_fix_of_this_error():
    compiled = multigrad.jit(grad(penalty_in_pieces), backend="aot_eager")
    for _ in range(3):
        close(compiled(X), grad(penalty_in_pieces)(X), 1e-4)


def test_a_gradient_with_respect_to_a_tensor_beside_a_compiled_function():
    """A step size: the gradient is a constant of the derivative with respect to it."""
    f = FUNCTIONS["intermediate"]
    compiled = COMPILERS["torch.compile"](f)

    def after_a_step(function):
        return grad(lambda rate: ops.sum((X - rate * slope(function)(X)) ** 2))(torch.tensor(0.1))

    close(after_a_step(compiled), after_a_step(f), 1e-4)


def test_the_name_of_the_node_of_a_compiled_function():
    x = X.clone().requires_grad_()
    y = torch.compile(torch.exp, backend="aot_eager")(x)
    assert type(y.grad_fn).__name__ == COMPILED_NODE

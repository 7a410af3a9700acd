"""Every backend runs the forward pass, and a backend without gradients says so."""

import pytest
from keras import ops
from support import BACKEND, DIFFERENTIATES, array, numpy

from multigrad import grad, hessian, jacobian, jvp, op_custom_gradient, value_and_grad, vjp

pytestmark = pytest.mark.forward


@op_custom_gradient
def double(x):
    e = ops.exp(x)
    return {"y": x * 2.0, "e": e}, lambda upstream: upstream["y"] * 7.0


def test_the_forward_pass_of_nested_ops():
    @op_custom_gradient
    def quadruple(x):
        return double(double(x)["y"]), lambda u: u

    out = quadruple(array(1.0, 2.0))
    assert numpy(out["y"]).tolist() == [4.0, 8.0]
    assert ops.is_tensor(out["e"])


TRANSFORMS = {
    "grad": grad,
    "value_and_grad": value_and_grad,
    "vjp": lambda f: lambda x: vjp(f, x),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,)),
    "jacobian": jacobian,
    "hessian": hessian,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_gradients_raise_on_a_backend_without_gradients(transform):
    function = transform(lambda x: ops.sum(double(x)["y"]))
    if DIFFERENTIATES:
        function(array(1.0, 2.0))  # other tests check the result
        return
    with pytest.raises(NotImplementedError, match="tensorflow, jax, torch") as error:
        function(array(1.0, 2.0))
    assert BACKEND in str(error.value)

"""`jax.export`: a loaded program has the derivatives of the rule."""

import jax
import pytest
from cases import CASES
from jax import export
from orders import EACH, W, X, first, orders
from support import close, equations


@EACH
def test_an_exported_op(case):
    vector = jax.ShapeDtypeStruct(export.symbolic_shape("n"), "float32")
    loaded = export.deserialize(export.export(jax.jit(case.op))(vector, vector).serialize(vjp_order=2))
    close(orders(loaded.call)(X, W), orders(case.meant)(X, W), 1e-4)


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda", "tpu")], ids=str)
def test_an_exported_gradient(platforms):

    case = CASES["structure"]
    exported = export.export(jax.jit(first(case.op)), platforms=platforms)(X, W)
    close(export.deserialize(exported.serialize()).call(X, W), first(case.meant)(X, W), 1e-4)


@EACH
@pytest.mark.parametrize("of", [lambda op: op, first], ids=["op", "gradient"])
def test_names_that_converters_know(case, of):
    """Converters that read the equations of JAX by name return the operands of this equation unchanged."""
    written = equations(jax.make_jaxpr(of(case.op))(X, W).jaxpr)
    barriers = [equation for equation in written if equation.primitive.name == "optimization_barrier"]
    assert barriers
    for barrier in barriers:
        given, made = [[v.aval.str_short() for v in side] for side in (barrier.invars, barrier.outvars)]
        assert given == made

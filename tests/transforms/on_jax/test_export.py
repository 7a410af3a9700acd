"""`jax.export`: a loaded program has the derivatives of the rule."""

import jax
import pytest
from cases import CASES, W, X, as_meant, each_of
from jax import export
from orders import first, orders
from support import close, equations

VECTOR = jax.ShapeDtypeStruct(export.symbolic_shape("n"), "float32")


@each_of()
def test_an_exported_op(case):
    loaded = export.deserialize(export.export(jax.jit(case.op))(VECTOR, VECTOR).serialize(vjp_order=2))
    close(orders(loaded.call)(X, W), orders(case.meant)(X, W), 1e-4)


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda", "tpu")], ids=str)
@as_meant(each=pytest.mark.parametrize("case", [CASES["structure"]]))
def test_an_exported_gradient(f, platforms):
    exported = export.export(jax.jit(first(f)), platforms=platforms)(X, W)
    return export.deserialize(exported.serialize()).call(X, W)


@each_of()
@pytest.mark.parametrize("of", [lambda op: op, first], ids=["op", "gradient"])
def test_names_that_converters_know(case, of):
    """Converters that read the equations of JAX by name return the operands of this equation unchanged."""
    written = equations(jax.make_jaxpr(of(case.op))(X, W).jaxpr)
    barriers = [equation for equation in written if equation.primitive.name == "optimization_barrier"]
    assert barriers
    for barrier in barriers:
        given, made = [[v.aval.str_short() for v in side] for side in (barrier.invars, barrier.outvars)]
        assert given == made

"""`jax.export`: what is loaded has the rule's derivatives."""

import jax
import pytest
from cases import CASES
from jax import export
from orders import EACH, W, X, first, orders
from support import close


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

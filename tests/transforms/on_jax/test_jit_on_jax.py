"""`multigrad.jit` on JAX, where Variables become inputs and outputs of the compiled function."""

import jax
import keras
import numpy as np
import pytest
from keras import ops
from support import array, close, numpy

import multigrad
from multigrad import jit


def test_values_are_donated_unless_they_have_other_references():
    held, free, twin = [keras.Variable(np.ones(1000, "float32")) for _ in range(3)]
    twin.assign(free.value)

    @jit
    def f():
        for variable in (held, free, twin):
            variable.assign_add(ops.ones(1000))

    before = held.value
    f()
    assert numpy(before)[0] == 1.0
    assert [numpy(v)[0] for v in (held, free, twin)] == [2.0, 2.0, 2.0]
    f()  # JAX 0.11.2 does not reuse the memory of a value that NumPy has read
    reference = free.value.unsafe_buffer_pointer()
    f()
    assert free.value.unsafe_buffer_pointer() == reference
    assert [numpy(v)[0] for v in (held, free, twin)] == [4.0, 4.0, 4.0]


@pytest.mark.parametrize("donate", [False, True])
def test_an_error_at_run_time(donate):
    v = keras.Variable(1.0)

    def fail(x):
        raise ValueError("the callback fails")

    @jit(donate=donate)
    def f(x):
        v.assign_add(x)
        jax.debug.callback(fail, x, ordered=True)

    with pytest.raises(Exception, match="the callback fails"):  # noqa: PT012
        f(array(1.0))
        jax.effects_barrier()
    assert donate or numpy(v) == 1.0


def test_in_jax_jit():
    v = keras.Variable(1.0, trainable=False)
    close(jax.jit(jit(lambda x: x * v))(array(2.0)), array(2.0))
    assigns = jit(lambda x: v.assign_add(x))
    with pytest.raises(TypeError, match="traced value is assigned"):
        jax.jit(lambda x: (assigns(x), 0)[1])(array(2.0))
    assert numpy(v) == 1.0


def test_in_a_stateless_call_and_in_fit():
    inner = keras.layers.BatchNormalization(momentum=0.5)
    inner.build((None, 2))

    class Model(keras.Model):
        @jit
        def call(self, x, training=False):
            return inner(x, training=True)

    model = Model()
    model.inner = inner
    x = np.full((4, 2), 3.0, "float32")
    model(x)
    close(inner.moving_mean, array([1.5, 1.5]))
    _, state = model.stateless_call(
        [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables], x
    )
    close(state[0], array([2.25, 2.25]))
    close(inner.moving_mean, array([1.5, 1.5]))
    model.compile("sgd", "mse")
    model.fit(x, x, verbose=0)
    close(inner.moving_mean, array([2.25, 2.25]))


def test_in_vmap():
    w = keras.Variable(3.0)
    close(jax.vmap(jit(lambda x: x * w))(array([1.0, 2.0])), array([3.0, 6.0]))


def test_new_values_do_not_trace_again():
    traces = []
    v = keras.Variable(1.0)

    @jit
    def f(x, k):
        traces.append(1)
        v.assign_add(x)
        return v * k

    f(array(1.0), 2.0)
    first = len(traces)
    f(array(2.0), 3.0), f(array(2.0), 4.0)
    assert len(traces) == first == 2
    f(array([1.0])[0], 3.0)
    assert len(traces) == first


@pytest.mark.parametrize("of", ["grad", "value_and_grad", "jacobian"])
def test_variables_in_jax_jit(of):
    w = keras.Variable(3.0, name="weight")
    derivative = getattr(multigrad, of)(lambda x: x * w, variables=[w])
    with pytest.raises(
        TypeError, match=r"(?s)differentiated in jax.jit.*got: variable 'weight'.*multigrad\.jit"
    ):
        jax.jit(derivative)(array(2.0))
    with pytest.raises(TypeError, match=r"multigrad\.jit"):
        jax.jit(lambda x: jax.lax.map(derivative, x))(array([2.0]))
    # This counts as eager code, although JAX traces it.
    wanted = derivative(array(2.0))
    keras.tree.map_structure(lambda a, b: close(a[0], b), jax.lax.map(derivative, array([2.0])), wanted)
    close(jit(derivative)(array(2.0)), wanted)
    close(jax.checkpoint(lambda x: jax.numpy.sum(x * 1.0))(array(2.0)), array(2.0))
    with keras.StatelessScope([(w, array(3.0))]):
        close(jax.jit(derivative)(array(2.0)), wanted)


def test_static_objects_that_cannot_be_compared():
    class Unit:
        def __init__(self, name):
            self.name = name

        def __hash__(self):
            return hash(self.name)

        def __eq__(self, other):
            if self.name != other.name:
                raise TypeError("other units")
            return True

    traces = []
    scaled = jit(lambda x, unit: x * (traces.append(unit.name) or 2.0), static_argnames="unit")
    for name in ("m", "s", "m"):
        close(scaled(array(3.0), Unit(name)), 6.0)
    assert traces.count("s") == traces.count("m") == 1

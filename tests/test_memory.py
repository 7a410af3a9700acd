"""What the forward pass keeps, what outlives its graph, and threads."""

import gc
import threading
import weakref

import numpy as np
import pytest
from keras import ops
from support import BACKEND, array, close

from multigrad import grad, op_custom_gradient

ONES = np.ones(3, "float32")


@op_custom_gradient
def by_output(x):
    y = ops.exp(x)
    return y, lambda u: u * y * 3.0


@op_custom_gradient
def by_intermediate(x):
    e = ops.exp(x)
    return e * 1.0, lambda u: u * e * 3.0


class Marker:
    """An object that the rule holds, and whose deletion can be observed."""


def total_gradient(op):
    return grad(lambda x: ops.sum(op(x)))(0 * ONES)


def define(marker):
    @op_custom_gradient
    def op(x):
        e = ops.exp(x)

        def rule(u):
            assert marker is not None
            return u * e

        return e * 1.0, rule

    return op


def test_an_op_and_its_calls_are_freed_without_the_collector():
    gc.collect()
    gc.disable()
    try:
        marker = Marker()
        watch = weakref.ref(marker)
        op = define(marker)
        close(total_gradient(op), ONES)
        del op, marker
        # JAX and TensorFlow keep traces and tapes in their own reference cycles.
        if BACKEND != "torch":
            gc.collect()
        assert watch() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("op", [by_output, by_intermediate])
def test_many_calls_leave_no_objects(op):
    def step():
        return grad(lambda x: ops.sum(op(x)))(ONES)

    for _ in range(20):
        step()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(200):
        step()
    gc.collect()
    assert len(gc.get_objects()) - before < 200


def test_redefined_ops_leave_no_objects():
    def step(factor):
        op = op_custom_gradient(lambda x: (x * 2.0, lambda u: u * factor))
        close(grad(op)(1.0), array(factor))

    for i in range(20):
        step(float(i))
    gc.collect()
    before = len(gc.get_objects())
    for i in range(200):
        step(float(i))
    gc.collect()
    assert len(gc.get_objects()) - before < 200


def test_threads_are_independent():
    errors = []

    def work(factor):
        try:
            for _ in range(20):
                op = op_custom_gradient(lambda x: (ops.exp(x), lambda u: u * factor * x))
                close(grad(lambda x: ops.sum(op(x)))(2 * ONES), array(2 * factor * ONES))
                close(grad(grad(by_output))(0.0), array(9.0))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(float(i + 1),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors

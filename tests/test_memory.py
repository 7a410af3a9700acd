"""What the forward pass keeps, what outlives its graph, and threads."""

import gc
import threading
import weakref

import numpy as np
import pytest
from cases import CASES, IN_OTHER_FORMS
from cases import exp_by_output as by_output
from forms import FORMS, Written, in_form
from keras import ops
from support import BACKEND, array, close

from multigrad import grad, op_custom_gradient

ONES = np.ones(3, "float32")


EVERY_CASE = {**CASES, **IN_OTHER_FORMS}
CALLED_OFTEN = [
    pytest.param(case, id=id_)
    for id_, case in EVERY_CASE.items()
    if case.name in ("output", "intermediate", "structure")
]


class Marker:
    """An object that the rule holds, and whose deletion can be observed."""


def total_gradient(op):
    return grad(lambda x: ops.sum(op(x)))(0 * ONES)


def define(marker, form="function"):
    """Return a function with the derivative 3, whose rule holds the marker."""

    def function(x, w, scale):
        e = ops.exp(x)

        def rule(u):
            assert marker is not None
            return 3.0 * u * e, None

        return scale(e * 1.0), rule, lambda u: u * e

    op = in_form(form, Written("marked", function, None)).op
    return lambda x: op(x, x)


@pytest.mark.parametrize("form", FORMS)
def test_an_op_and_its_calls_are_freed_without_the_collector(form):
    gc.collect()
    gc.disable()
    try:
        marker = Marker()
        watch = weakref.ref(marker)
        op = define(marker, form)
        close(total_gradient(op), 3.0 * ONES)
        del op, marker
        # JAX and TensorFlow keep traces and tapes in their own reference cycles, and Keras its layers.
        if BACKEND != "torch" or "method" in form:
            gc.collect()
        assert watch() is None
    finally:
        gc.enable()


def living_objects():
    """Return the number of objects, apart from dead weak references.

    The caches of JAX (0.10) keep one for each derivative of a method, or of an op that reads a weight.
    """
    gc.collect()
    return len([o for o in gc.get_objects() if type(o) is not weakref.ref or o() is not None])


@pytest.mark.parametrize("case", CALLED_OFTEN)
def test_many_calls_leave_no_objects(case):
    def step():
        return grad(lambda x, w: ops.sum(case.op(x, w)), (0, 1), variables=case.weights)(ONES, 2.0 * ONES)

    for _ in range(20):
        step()
    before = living_objects()
    for _ in range(100):
        step()
    assert living_objects() - before < 100


@pytest.mark.parametrize("form", ["function", "reader"])
def test_redefined_ops_leave_no_objects(form):
    def step(factor):
        def function(x, w, scale):
            return scale(x * 2.0), lambda u: (u * factor, None), lambda u: u * x

        op = in_form(form, Written("redefined", function, None)).op
        close(grad(op)(1.0, 1.0), array(factor))

    for i in range(20):
        step(float(i))
    before = living_objects()
    for i in range(200):
        step(float(i))
    assert living_objects() - before < 200


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

"""Lifting tensors out of closures, with a test class instead of tensors."""

import enum
import functools
import itertools
import logging
import math
import os
import types
from collections import OrderedDict, deque, namedtuple
from random import Random

import keras
import pytest
import random_closures
from random_closures import closure, value_of

from multigrad.common.closure import lift, restore
from multigrad.common.reachable import may_hold_tensors, reachable_tensors
from multigrad.common.type_sets import TypeSet

pytestmark = pytest.mark.forward


class Tensor:
    def __init__(self, value):
        self.value = value


class Held:
    def __init__(self, value):
        self.value = value


TENSORS = TypeSet(Tensor)
Pair = namedtuple("Pair", "a b")


def negated(function, owner=None):
    """Return the function with negated tensors, and the number of tensors."""
    tensors, template, _ = lift(function, TENSORS, owner)
    return restore(template, [Tensor(-t.value) for t in tensors]), len(tensors)


def test_functions_with_items_of_the_same_size():
    """The walk makes a tuple of the items of each. It must not take one for another that was freed."""

    def make(held, kind):
        if kind == "two keywords":
            return lambda *, tensor=held, number=1: tensor.value
        if kind == "keyword":
            return lambda *, tensor=held: tensor.value

        def read(*args):
            return read.tensor.value

        read.tensor, read.number = held, 1
        return read

    for kind in ("two keywords", "keyword", "attributes"):
        functions = [make(Tensor(value), kind) for value in range(1, 20)]
        lifted, count = negated(lambda u: [function() for function in functions])
        assert (count, lifted(0)) == (19, list(range(-1, -20, -1))), kind


def test_random_closures():
    for seed in range(300):
        rule = closure(Random(seed))
        value = value_of(rule)
        tensors, template, _ = lift(rule, TypeSet(random_closures.Tensor), None)
        lifted = restore(template, [random_closures.Tensor(-tensor.value) for tensor in tensors])
        assert value_of(lifted) == random_closures.negated(value)
        assert value_of(rule) == value


def test_a_tensor_that_occurs_twice_is_lifted_twice():
    """The number of residuals must not change if a second run has different tensors."""
    e = Tensor(2)
    both = [e, (e,)]
    lifted, count = negated(lambda: (both[0], both[1][0]))
    assert count == 2
    assert [part.value for part in lifted()] == [-2, -2]


def test_objects_that_may_hold_tensors():
    e = Tensor(2)
    for held in (
        iter([e]),
        itertools.repeat(e),
        (v for v in [e]),
        {"a": e}.values(),
        types.MappingProxyType({"a": e}),
        Held(e),
        [deque([Held(e)])],
    ):
        assert lift(lambda held=held: held, TENSORS)[2]
    for held in (
        itertools.count(),
        types.MappingProxyType({}),
        range(3),
        iter,
        "text",
        frozenset({1}),
        deque([1, 2]),
        OrderedDict(a=1),
    ):
        assert not lift(lambda held=held: held, TENSORS)[2]


@pytest.mark.parametrize("where", ["in the rule", "in a list"])
def test_state_is_not_copied(where):
    def make():
        count, last, e = 0, Tensor(5), Tensor(2)

        def write():
            nonlocal count, last
            count += 1
            last = Tensor(last.value + 1)
            return count, last.value

        def rule():
            nonlocal count, last
            count += 1
            last = Tensor(last.value + 1)
            return (count, last.value), e.value

        writers = [write]
        return rule if where == "in the rule" else lambda: (writers[0](), e.value)

    rule = make()
    lifted, lifted_count = negated(rule)
    assert lifted_count == 1
    assert [rule(), lifted(), rule()] == [((1, 6), 2), ((2, 7), -2), ((3, 8), 2)]


def test_containers_in_cells_of_the_function_are_not_copied():
    seen, outer = [Tensor(1)], Tensor(2)

    def owner():
        e = Tensor(3)

        def rule(u):
            seen.append(u)
            return outer.value, e.value

        return rule

    lifted, count = negated(owner(), owner)
    assert count == 2
    assert lifted("u") == (-2, -3)
    assert seen[1:] == ["u"]


def test_recursion_and_unbound_names():
    def make():
        e = Tensor(2)

        def even(n):
            return e.value if n == 0 else odd(n - 1)

        def odd(n):
            return -e.value if n == 0 else even(n - 1)

        def unbound():
            return later

        if e is None:
            later = e
        return even, unbound

    even, unbound = make()
    assert (even(2), negated(even)[0](2), negated(even)[0](3)) == (2, -2, 2)
    with pytest.raises(NameError):
        negated(unbound)[0]()


class Marked(tuple):
    __slots__ = ()

    def __new__(cls, one, two):
        return super().__new__(cls, (one, two))


class Named(Pair):
    mark = 1


def test_other_tuples_keep_their_class_and_attributes():
    """The class of the last one is not defined in Python, and the garbage collector does not track it."""
    named, marked = Named(Tensor(1), 2), Marked(Tensor(3), 4)
    named.mark = 5
    from_c = os.stat_result([Tensor(1), *range(os.stat_result.n_fields - 1)])
    for held in (named, marked, from_c):
        tensors, template, opaque = lift(lambda held=held: held, TENSORS)
        assert (tensors, opaque, may_hold_tensors(held)) == ([], True, True)
        assert template() is held
    shape = Marked(2, 3)
    assert lift(lambda: shape, TENSORS)[2] is False


def test_nested_wrappers_are_visited_once():
    def wrapped(u):
        return u

    for _ in range(60):
        inner = wrapped

        @functools.wraps(inner)
        def wrapped(u, inner=inner):
            return inner(u)

    assert not may_hold_tensors(wrapped)
    inner.held = Tensor(1)
    assert may_hold_tensors(wrapped)


def test_an_assigned_tensor_is_opaque():
    held = Tensor(1)

    def rule():
        nonlocal held
        held = Tensor(held.value + 1)
        return held

    tensors, template, opaque = lift(rule, TENSORS)
    assert (tensors, opaque) == ([], True)
    assert [restore(template, [])().value for _ in range(2)] == [2, 3]


IN_A_GLOBAL = [Tensor(1)]
LOGGER = logging.getLogger(__name__)


class Mode(enum.Enum):
    A = 1


def test_functions_that_reach_no_tensor_are_unchanged():
    """What is in globals, classes and modules is a constant."""

    class Held:
        of_the_class = Tensor(1)

    module = types.ModuleType("of_a_user")
    module.held = Tensor(1)
    mode, number, items = Mode.A, 3, [1, 2]
    rules = [
        lambda u: (u, mode, number, items),
        lambda u: IN_A_GLOBAL[0],
        lambda u: LOGGER.debug("%s", u),
        lambda u: Held.of_the_class,
        lambda u: module.held,
        lambda u: (math.pi, keras.ops.abs(u), types.ModuleType),
    ]
    for rule in rules:
        assert lift(rule, TENSORS) == ([], rule, False)


def test_the_function_in_an_object_of_a_framework():
    """A result of `jax.jit` is such an object. Its other attributes are not searched."""
    held = Tensor(1)
    compiled = type("Compiled", (), {"__module__": "jax.compiled"})()
    compiled.__wrapped__, compiled.options = lambda u: u, [Tensor(2)]
    assert not may_hold_tensors(compiled)
    compiled.__wrapped__ = lambda u: held
    assert may_hold_tensors(compiled)
    assert list(reachable_tensors(compiled, TENSORS)) == [held]


def test_a_function_that_modifies_its_attributes():
    def make():
        e = Tensor(2)

        def rule():
            rule.calls += e.value
            return rule.calls

        rule.calls = 0
        return rule

    lifted, count = negated(make())
    assert (count, lifted(), lifted()) == (1, -2, -4)

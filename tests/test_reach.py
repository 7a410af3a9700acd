"""What can be said of a function before it runs: whether it may reach a variable."""

import functools
import math
import types
from collections import namedtuple
from enum import Enum
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, array, close

from multigrad import grad, op_custom_gradient
from multigrad.reach import may_reach

pytestmark = pytest.mark.forward

WEIGHT = keras.Variable(2.0, name="weight")
LATER: Any = None
FACTOR, NAMES, SHAPE = 3.0, ("a", "b"), np.ones(3)
HOLDER = types.SimpleNamespace(weight=WEIGHT)
REGISTRY: dict[str, Any] = {}
Pair = namedtuple("Pair", "a b")


class Mode(Enum):
    UP = 1


class Plain:
    def __init__(self, x: Any) -> None:
        self.x = x * FACTOR


class Weighted:
    shared = WEIGHT

    def scaled(self, x: Any) -> Any:
        return x * self.shared


def plain(x: Any) -> Any:
    return helper(x) * FACTOR * len(NAMES)


def helper(x: Any) -> Any:
    return ops.exp(x) if x is not None else plain(x)


def reading(x: Any) -> Any:
    return x * WEIGHT


def through(x: Any) -> Any:
    return plain(reading(x))


@functools.wraps(reading)
def wrapped(*args: Any) -> Any:
    return reading(*args)


library = {"__name__": "keras.somewhere", "weight": WEIGHT}
exec("def hidden(x): return x * weight", library)
hidden = library["hidden"]

MODULE = types.ModuleType("somebody")
MODULE.weight = WEIGHT
MODULE.factor = 3.0
MODULE.apply = through


def local_import(x: Any) -> Any:
    import test_variables

    return x * test_variables.SCALE


NO = {
    "ops": lambda x: ops.exp(keras.ops.sum(x)) * math.pi * np.pi,
    "calls": plain,
    "globals": lambda x: (x * FACTOR, NAMES, SHAPE, Mode.UP, Pair(1, 2), ValueError),
    "closure": (lambda factor, y: lambda x: x * factor * y)(2.0, ops.ones(2)),
    "recursion": helper,
    "partial": functools.partial(plain, None),
    "class": lambda x: Plain(x).x,
    "module's number": lambda x: MODULE.factor * x,
    "op": op_custom_gradient(lambda x: (x * FACTOR, lambda u: u)),
    "builtin": len,
}
YES = {
    "global": reading,
    "deep": through,
    "wrapped": wrapped,
    "closure": (lambda w: lambda x: x * w)(WEIGHT),
    "layer": (lambda layer: lambda x: layer(x))(keras.layers.Dense(1)),
    "default": lambda x, w=WEIGHT: x * w,
    "keyword default": lambda x, *, w=WEIGHT: x * w,
    "partial": functools.partial(lambda w, x: x * w, WEIGHT),
    "object": lambda x: HOLDER.weight * x,
    "method": HOLDER.__eq__,
    "class": lambda x: Weighted().scaled(x),
    "module": lambda x: MODULE.weight * x,
    "module's function": lambda x: MODULE.apply(x),
    "container": lambda x: REGISTRY["weight"] * x,
    "op": op_custom_gradient(lambda x: (x * WEIGHT, lambda u: u)),
    "inner": lambda x: (lambda y: y * WEIGHT)(x),
    "rule": lambda x: (x, lambda u: u * WEIGHT),
    "import": local_import,
    "seed": (lambda seed: lambda x: keras.random.normal((), seed=seed))(keras.random.SeedGenerator(1)),
    "variable": WEIGHT,
}


@pytest.mark.parametrize("function", NO.values(), ids=NO)
def test_no(function: Any) -> None:
    assert not may_reach(function)


@pytest.mark.parametrize("function", YES.values(), ids=YES)
def test_yes(function: Any) -> None:
    assert may_reach(function)


def test_a_global_that_is_rebound_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Any) -> Any:
        return x * LATER

    assert not may_reach(function)
    monkeypatch.setitem(globals(), "LATER", WEIGHT)
    assert may_reach(function)
    monkeypatch.setitem(globals(), "LATER", 2.0)
    assert not may_reach(function)


def test_a_function_that_is_called_and_rebound_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Any) -> Any:
        return plain(x)

    assert not may_reach(function)
    monkeypatch.setitem(globals(), "helper", reading)
    assert may_reach(function)


def test_a_global_module_that_gets_an_attribute_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("later")
    monkeypatch.setitem(globals(), "LATER", module)

    def function(x: Any) -> Any:
        return x * LATER.weight

    assert not may_reach(function)
    module.__dict__["weight"] = WEIGHT
    assert may_reach(function)


def test_one_code_in_two_namespaces_is_two_functions() -> None:
    code = compile("def function(x): return x * weight", "code", "exec")
    plain, weighted = {"weight": 2.0}, {"weight": WEIGHT}
    exec(code, plain)
    exec(code, weighted)
    assert not may_reach(plain["function"])
    assert may_reach(weighted["function"])
    assert not may_reach(plain["function"])


def test_what_a_cell_holds_is_looked_at_in_every_call() -> None:
    held: Any = 1.0

    def function(x: Any) -> Any:
        return x * held

    assert not may_reach(function)
    held = WEIGHT
    assert may_reach(function)


@pytest.mark.skipif(BACKEND not in ("jax", "torch"), reason="the others need not know before")
def test_a_weight_that_could_not_be_seen_is_an_error_and_not_lost() -> None:
    op = op_custom_gradient(lambda x: (hidden(x), lambda u, variables: (u, [u])), name="op")
    if BACKEND == "torch":
        import torch

        derivative = torch.func.grad(op)
    else:
        derivative = grad(op)
    with pytest.raises(TypeError, match=r"op: .*seen from outside(.*\n)*.*variable 'weight'"):
        derivative(array(1.0))
    if BACKEND == "torch":
        close(grad(op)(1.0), 1.0)

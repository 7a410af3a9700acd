"""`multigrad.ops` contains every name of `keras.ops`, and `multigrad` the names of Keras for R."""

import importlib
import inspect
import operator
import subprocess
import sys
from pathlib import Path

import keras
import pytest
from support import BACKEND, array, numpy

import multigrad
from multigrad import ops
from multigrad.ops.fixed import EVERY, FAULTS, FIXED

pytestmark = [pytest.mark.forward, pytest.mark.package]

OWN = {"custom_gradient", "image", "linalg", "nn", "numpy", *[name for name in FIXED if "." not in name]}
SUBMODULES = ("image", "linalg", "nn", "numpy")
R_NAMES = Path(__file__).with_name("r_names.txt").read_text().split()
ELSEWHERE = {
    "op_custom_gradient": multigrad.op_custom_gradient,
    "op_image_crop": keras.ops.image.crop_images,
    "op_image_pad": keras.ops.image.pad_images,
}


def public(module):
    return [name for name in dir(module) if not name.startswith("_")]


def test_every_name_is_the_same_object():
    names = public(keras.ops)
    assert len(names) > 300
    assert [
        name for name in names if name not in OWN and getattr(ops, name) is not getattr(keras.ops, name)
    ] == []
    assert {*names, *OWN} <= set(dir(ops))


def test_added_names():
    assert ops.custom_gradient is multigrad.op_custom_gradient
    added = set(dir(ops)) - set(public(keras.ops))
    assert {"reverse_gradient", "scale_gradient"} <= added
    assert all(getattr(ops, name).__module__.startswith("multigrad.ops.") for name in added)


@pytest.mark.parametrize("name", SUBMODULES)
def test_submodules(name):
    mirror, own = importlib.import_module(f"multigrad.ops.{name}"), getattr(keras.ops, name)
    assert getattr(ops, name) is mirror
    assert dir(mirror) == dir(own)
    for each in public(own):
        of_all = FIXED.get(each) if getattr(own, each) is getattr(keras.ops, each, None) else None
        assert getattr(mirror, each) is (FIXED.get(f"{name}.{each}") or of_all or getattr(own, each)), each


def test_fixed_ops_replace_only_what_has_a_fault():
    assert {name for name in FAULTS if BACKEND in FAULTS[name]} == set(FIXED)
    for name, op in EVERY.items():
        find = operator.attrgetter(name)  # also finds names such as image.hsv_to_rgb
        assert find(ops) is (op if name in FIXED else find(keras.ops))
        assert getattr(multigrad, f"op_{name.replace('.', '_')}") is find(ops)
        assert [(p.name, p.default) for p in inspect.signature(op).parameters.values()] == [
            (p.name, p.default) for p in inspect.signature(find(keras.ops)).parameters.values()
        ]


def test_every_form_of_import():
    code = """
import keras
import multigrad.ops.nn
from multigrad import ops
from multigrad.ops.fixed import EVERY, FAULTS, FIXED
from multigrad.ops import *
from multigrad.ops.numpy import exp as other
assert relu is multigrad.ops.nn.relu is keras.ops.relu is ops.relu
assert exp is other is keras.ops.exp
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_raises(monkeypatch):
    with pytest.raises(
        AttributeError, match=r"neither multigrad.ops nor keras.ops has an attribute 'nothing'"
    ):
        ops.nothing  # noqa: B018
    monkeypatch.setattr(keras.ops, "nothing", numpy, raising=False)  # as a newer Keras might
    assert ops.nothing is numpy
    assert "nothing" in dir(ops)
    assert multigrad.op_nothing is numpy
    del multigrad.op_nothing


def test_names_of_r():
    assert len(R_NAMES) == 266
    for name in R_NAMES:
        found = getattr(multigrad, name)
        own = name.removeprefix("op_")
        wanted = ELSEWHERE.get(name) or FIXED.get(own) or getattr(keras.ops, own, None)
        if wanted is None and own.startswith("image_"):
            wanted = getattr(ops.image, own.removeprefix("image_"))
        assert found is wanted or name == "op_subset", name


def test_dir_lists_only_the_api():
    names = dir(multigrad)
    assert sorted({*multigrad.__all__, "callbacks", "layers", "ops", "testing"}) == names
    assert multigrad.op_exp is keras.ops.exp
    assert "op_exp" not in dir(multigrad)


def test_subset():
    x = array([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    assert numpy(multigrad.op_subset(x, 1, slice(0, 2))).tolist() == [3.0, 4.0]


@pytest.mark.parametrize("name", ["op_", "op_nothing", "op_nn", "op__exp", "op_image_", "op_image_nothing"])
def test_an_unknown_name_of_r_raises(name):
    with pytest.raises(AttributeError, match=name):
        getattr(multigrad, name)

"""The module of the active backend answers to all that is asked of a framework, and in the words asked."""

import inspect

import pytest

from multigrad import backend

pytestmark = pytest.mark.forward

ASKED = {*inspect.get_annotations(backend.Backend), *[n for n in vars(backend.Backend) if n[0] != "_"]}


def parameters(function):
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values() if p.default is p.empty]


@pytest.mark.parametrize("name", sorted(ASKED))
def test_what_is_asked_of_a_framework(name):
    answered = getattr(backend.active, name)
    asked = getattr(backend.Backend, name, None)
    if asked is None:  # a constant
        assert isinstance(answered, backend.TypeSet)
    else:
        assert parameters(answered) == parameters(asked)


def test_so_much_is_asked():
    assert {"TENSORS", "apply", "vjp"} <= ASKED

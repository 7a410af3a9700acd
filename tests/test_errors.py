"""Error messages: the name of the op, the requirement, the actual value, the argument and a fix."""

import contextlib
import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, array, close, compiled

from multigrad import grad, op_custom_gradient
from multigrad.cli import explain
from multigrad.common.errors import message

ONES = np.ones(3, "float32")


@contextlib.contextmanager
def raises(kind, *texts):
    """Expect an error whose message contains all of these texts."""
    with pytest.raises(kind) as error:
        yield error
    for text in texts:
        assert text in str(error.value), str(error.value)


@pytest.mark.forward
@pytest.mark.parametrize(
    "returned", [lambda x: x * 2.0, lambda x: (x, x), lambda x: (x,), lambda x: (x, None), lambda x: None]
)
def test_a_function_that_returns_no_pair(returned):
    @op_custom_gradient
    def lonely(x):
        return returned(x)

    with raises(TypeError, "lonely", "required: a pair", "got: ", "return output, rule"):
        lonely(array(1.0))


@pytest.mark.forward
@pytest.mark.parametrize(
    "rule",
    [
        lambda: 1.0,
        lambda a, b: a,
        lambda a, *rest: a,
        lambda a, *, scale: a,
        lambda a=1, b=2: a,
        lambda a, b, c, upstream: a,
        lambda *us, scale: us,
    ],
)
def test_unsupported_rule_signatures(rule):
    @op_custom_gradient
    def odd(x):
        return x * 2.0, rule

    with raises(TypeError, "odd", "lambda(", "required: rule(", "see: ", "explain rules#forms"):
        odd(array(1.0))


@pytest.mark.forward
def test_what_can_be_decorated():
    assert callable(op_custom_gradient(None))
    for decorated in ("name", keras.layers.Dense):
        with raises(TypeError, "op_custom_gradient", "got: "):
            op_custom_gradient(decorated)
    op = op_custom_gradient(lambda x, y, *, scale: (x * y, lambda u: u), name="op")
    with raises(TypeError, "op: missing a required argument: 'y'", "got: 1 by position"):
        op(ONES)


def answering(answer):
    @op_custom_gradient
    def answers(left, right, n=3):
        return left * right * n, lambda u: answer(u)

    return grad(lambda x, y: ops.sum(answers(x, y)), (0, 1))


WRONG = [
    (lambda u: None, TypeError, ["returned None instead of a gradient", "the rule with `return gradient`"]),
    (lambda u: u, TypeError, ["number of gradients", "got: one entry"]),
    (lambda u: (u,), TypeError, ["number of gradients", "got: 1 in a tuple", "'left', 'right', 'n'"]),
    (lambda u: (u, u, None, u), TypeError, ["number of gradients", "got: 4 in a tuple"]),
    (lambda u: [], TypeError, ["number of gradients", "got: 0 in a list"]),
    (
        lambda u: {"left": u},
        TypeError,
        ["the keys of the rule's dict", "required: the keys 'left', 'right'", "got: 'left'"],
    ),
    (lambda u: {"left": u, "wrong": u}, TypeError, ["the keys of the rule's dict", "got: 'left', 'wrong'"]),
    (lambda u: (u, u[:2]), ValueError, ["wrong shape", "argument: 'right'", "(3,)", "(2,)"]),
    (lambda u: (u, ops.sum(u)), ValueError, ["wrong shape", "argument: 'right'", "()"]),
    (lambda u: (1.0, u), ValueError, ["wrong shape", "argument: 'left'"]),
    (lambda u: (u, [u]), TypeError, ["structure", "argument: 'right'"]),
    (lambda u: (u, {"a": u}), TypeError, ["structure", "argument: 'right'"]),
    (lambda u: (u, "text"), TypeError, ["not a gradient", "argument: 'right'", "str 'text'"]),
    (lambda u: (u, lambda: "text"), TypeError, ["not a gradient", "argument: 'right'"]),
    (lambda u: (u, lambda: [u]), TypeError, ["structure", "argument: 'right'"]),
    (lambda u: (u, u, 1.0), TypeError, ["structure", "argument: 'n'", "None or 0"]),
    (lambda u: "text", TypeError, ["number of gradients"]),
    (lambda u: iter([u, u]), TypeError, ["number of gradients"]),
]


@pytest.mark.parametrize(("answer", "kind", "texts"), WRONG)
def test_wrong_answers(answer, kind, texts):
    with raises(kind, "answers: ", "required: ", "fix: ", *texts):
        answering(answer)(ONES, ONES)


@pytest.mark.parametrize(("answer", "kind", "texts"), WRONG[:9])
def test_wrong_answers_in_compiled_code(answer, kind, texts):
    with raises(kind, *texts):
        compiled(answering(answer))(array(ONES), array(ONES))


def of_tree(answer, others=1):
    """Return the gradient of an op whose rule answers for a tree and other tensors."""
    op = op_custom_gradient(lambda tree, *xs: (tree["a"] + tree["b"][1] + xs[-1], answer), name="op")
    return grad(lambda x: ops.sum(op({"a": x, "b": [x, x]}, *[x] * others)))(ONES)


@pytest.mark.parametrize(
    ("answer", "others", "kind", "path"),
    [
        (lambda u: ({"a": u, "b": (None, u[:2])}, u), 1, ValueError, "'tree'['b'][1]"),
        (lambda u: (None, None, u[:1] * 0 + u[:2]), 2, ValueError, "'xs'[1]"),
        (lambda u: ({"a": u, "b": u}, u), 1, TypeError, "'tree'['b']"),
    ],
)
def test_messages_name_the_path_of_an_argument(answer, others, kind, path):
    with raises(kind, f"argument: {path}"):
        of_tree(answer, others)


class Special(Exception):
    pass


@pytest.mark.parametrize("call", [lambda op: grad(op)(1.0), lambda op: op(array(1.0))])
def test_an_exception_in_the_function_is_raised_once(call):
    calls = []

    @op_custom_gradient
    def op(x):
        calls.append(1)
        raise Special("in f")

    with pytest.raises(Special, match="in f"):
        call(op)
    assert calls == [1]


@pytest.mark.parametrize("lazy", [False, True])
def test_an_exception_in_the_rule_is_raised_once(lazy):
    calls = []

    @op_custom_gradient
    def op(x):
        calls.append("f")

        def gradient():
            calls.append("rule")
            raise Special("in the rule")

        return x * 2.0, lambda u: gradient if lazy else gradient()

    with pytest.raises(Special, match="in the rule") as error:
        grad(op)(1.0)
    assert calls == ["f", "rule"]
    # JAX adds another note.
    assert error.value.__notes__.count("raised in the rule of op") == 1
    gc.collect()


def notes_of(call):
    with pytest.raises(Exception) as error:  # noqa: PT011 - it depends on the framework
        call()
    return "\n".join(error.value.__notes__)


def test_notes_have_the_shapes_in_a_rule():
    op = op_custom_gradient(
        lambda x, n, tree: (ops.matmul(x, tree["w"]), lambda u: (ops.matmul(u, x), 0, None)), name="op"
    )
    x, w = array(np.ones((2, 3))), array(np.ones((3, 5)))
    notes = notes_of(lambda: grad(lambda x, w: ops.sum(op(x, 2, {"w": w})), (0, 1))(x, w))
    assert "'x': (2, 3), 'tree'['w']: (3, 5), upstream: (2, 5)" in notes
    two = op_custom_gradient(lambda x: ((x * 2.0, x * 3.0), lambda u: -u), name="two")
    assert "the op has 2 outputs: write rule(u1, u2)" in notes_of(lambda: grad(lambda x: two(x)[0])(1.0))


def test_a_note_names_host_call_for_numpy_in_a_compiled_rule():
    op = op_custom_gradient(lambda x: (x * 2.0, lambda u: array(np.sin(u.__array__()))), name="op")
    if BACKEND == "torch":  # it may run NumPy in compiled code
        close(compiled(grad(op))(array(1.0)), array(np.sin(1.0)))
    else:
        assert "host_call" in notes_of(lambda: compiled(grad(op))(array(1.0)))


def test_a_type_error_of_the_user_is_unchanged():
    op = op_custom_gradient(lambda x: (x * 2.0, lambda u: u * None))
    with pytest.raises((TypeError, ValueError)) as error:
        grad(op)(1.0)
    assert "  fix:" not in str(error.value)


# ------------------------------------------------------------------- common mistakes


class Forgetful(keras.layers.Layer):
    """A layer whose rule takes no `variables`."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return op_custom_gradient(lambda x: (x * self.scale, lambda u: u), name="op")(x)


class Outer(keras.layers.Layer):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


@pytest.mark.forward
@pytest.mark.parametrize("make", [Forgetful, lambda: Outer(Forgetful()), lambda: Outer(Outer(Forgetful()))])
def test_the_cause_is_before_the_text_of_keras_about_shapes(make):
    with pytest.raises(TypeError) as error:
        make()(keras.Input((3,)))
    said = str(error.value)
    # Keras adds one more line for each layer around it, with its name.
    assert "op: the function reads trainable variables" in "\n".join(said.splitlines()[:3])
    assert said.index("def rule(upstream, variables)") < said.index("Could not automatically infer")
    assert "\x1b" not in said


PROGRAM = """
import numpy as np
from keras import ops
from multigrad import grad, op_custom_gradient
from multigrad.cli import explain

@op_custom_gradient
def op(x):
    return ops.sum(x), lambda u: u * ops.ones((3,))

def test_it():
    grad(op)(np.ones(2, "float32"))
"""


@pytest.mark.package
def test_the_frames_of_the_package_are_hidden(tmp_path):
    """pytest shows the line of the user and the error. `--full-trace` shows the frames between."""
    path = tmp_path / "test_user.py"
    path.write_text(PROGRAM)
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}

    def shown(*options):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )
        return done.stdout

    own = str(Path("core") / "answer.py")
    assert "the rule returned a gradient of the wrong shape" in shown()
    assert "answer.py" not in shown()
    assert own in shown("--full-trace")


# ----------------------------------------------------------------------------------- links to the limits


@pytest.mark.forward
def test_an_error_names_the_section_of_its_limit():
    text = message("op", "a problem", required="a", got="b", fix="c", see="limits#forward-mode")
    assert text.splitlines()[-1] == "  see: python -m multigrad explain limits#forward-mode"


@pytest.mark.package
def test_each_section_that_an_error_names_exists():
    root = Path(__file__).parent.parent
    sources = "\n".join(path.read_text() for path in (root / "multigrad").rglob("*.py"))
    named = re.findall(r'(?:"|multigrad explain )([\w-]+#[\w-]+)"', sources)
    assert len(named) > 20
    assert "limits#numpy-and-openvino" in named
    assert set(named) <= {section.name for section in explain.sections()}

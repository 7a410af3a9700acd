"""Saved models: loading, refusals, and the names of ops."""

import copy
import enum
import functools
import json
import pickle
import subprocess
import sys
import threading
import types
import warnings
import zipfile
from collections import OrderedDict, namedtuple
from pathlib import Path

import keras
import numpy as np
import pytest
import saved_ops
from keras import ops
from support import DIFFERENTIATES, array, close, numpy

from multigrad import grad, op_custom_gradient
from multigrad.keras_graph.saving import Unsaved, decode, encode

pytestmark = pytest.mark.forward
HERE = Path(__file__).parent
NODE = "multigrad>CustomGradient"
ONES = np.ones((1, 3), "float32")


def rule(u):
    return u * 7.0


def python(program, *words):
    """Return the last line that a new process prints, or its error."""
    program = f"import sys; sys.path.insert(0, {str(HERE)!r})\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
    )
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else done.stderr


def model_of(op, *args, **kwargs):
    """Return a model that calls the op on its input."""
    x = keras.Input((3,))
    return keras.Model(x, op(x, *args, **kwargs))


# ------------------------------------------------------------------------------------ loading


@pytest.mark.package
def test_loading_in_a_new_process(tmp_path):
    model = saved_ops.model()
    model.save(tmp_path / "model.keras")
    wanted = saved_ops.results(model)
    assert wanted[0] == [[2 * 2 * (0.5 * 2 + 4 + 12) * 2] * 2]
    if DIFFERENTIATES:
        factor = -5 * 11 * -5 * 11 * 11 * -3 * 2  # the factors of the rules on a path; there are 4 paths
        assert wanted[2] == [[4.0 * factor] * 3]
    program = "import json, keras, saved_ops\nmodel = keras.models.load_model(sys.argv[1])\n"
    program += "print(json.dumps(saved_ops.results(model)))"
    assert json.loads(python(program, str(tmp_path / "model.keras"))) == wanted


LOAD = "import keras\nkeras.models.load_model(sys.argv[1])"
MISSING = [
    ("__main__", "import multigrad.op\n", "define it with @op_custom_gradient(name="),
    ("__main__", "", "import multigrad, and define the op with @op_custom_gradient(name="),
    ("own.ops", "", "import multigrad, and import own.ops"),
]


@pytest.mark.package
@pytest.mark.parametrize(("module", "imports", "fix"), MISSING)
def test_the_error_without_the_op_names_the_missing_import(module, imports, fix, tmp_path):
    def alone(x):
        return x * 1.0, rule

    alone.__module__ = module
    model_of(op_custom_gradient(alone, name=f"tests>alone {len(fix)}")).save(tmp_path / "model.keras")
    error = python(imports + LOAD, str(tmp_path / "model.keras")).replace("\\'", "'")
    assert fix in error
    assert bool(imports) != ("Could not locate class 'CustomGradient'" in error)


def through_json(config):
    return json.loads(json.dumps(config))


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "config": lambda model: keras.Model.from_config(through_json(model.get_config())),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_of_a_model(copied):
    model = saved_ops.model()
    again = copied(model)
    again.set_weights(model.get_weights())
    assert saved_ops.results(again) == saved_ops.results(model)


def test_the_h5_format(tmp_path):
    model_of(saved_ops.bend).save(tmp_path / "model.h5")
    again = keras.models.load_model(tmp_path / "model.h5", compile=False)
    close(again(-ONES), array([[0.0, 0.0, 0.0]]))
    assert [type(operation).__name__ for operation in again.operations][-1] == "CustomGradient"


def test_a_file_without_the_text_on_imports_is_loaded():
    """The first version of multigrad did not write this text."""
    config = through_json(model_of(saved_ops.bend).get_config())
    (node,) = [layer["config"] for layer in config["layers"] if "needed_to_load" in layer["config"]]
    assert "import multigrad" in node.pop("needed_to_load")
    close(keras.Model.from_config(config)(-ONES), array([[0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("op", [saved_ops.bend, saved_ops.named_lambda])
def test_a_serialized_function(op):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Keras warns if it saves the code of a lambda
        config = through_json(keras.saving.serialize_keras_object(op))
    assert keras.saving.deserialize_keras_object(config) is op
    layer = keras.layers.Dense(3, activation=op)
    assert keras.layers.Dense.from_config(through_json(layer.get_config())).activation is op


def test_an_op_that_is_registered_only_with_keras_is_saved(tmp_path):
    @keras.saving.register_keras_serializable("alone")
    @op_custom_gradient
    def tanh(x):
        return ops.tanh(x), rule

    keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, tanh)]).save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").layers[0].activation is tanh


# ------------------------------------------------------------------------------------ arguments


VALUES = [
    *saved_ops.STATICS.values(),
    [float("nan"), 1 + 2j, 10**40],
    {"empty": [(), [], {}]},
    np.float32([[1.5]]),
    np.zeros((0, 3), "int8"),
    np.array(2.5 + 1j),
    np.float16(1.5),
    np.arange(12.0).reshape(3, 4)[::2].T,
    keras.initializers.Constant(2.0).get_config(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_static_values_are_restored(value):
    got = decode(through_json(encode(value)))
    assert repr(got) == repr(np.asarray(value) if isinstance(value, np.generic) else value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_tensors_are_restored(dtype):
    value = array([1, 0], dtype=dtype)
    got = decode(through_json(encode(value)))
    assert ops.is_tensor(got)
    assert got.dtype == value.dtype
    assert numpy(got).tolist() == numpy(value).tolist()


class Number(enum.IntEnum):
    ONE = 1


class Unregistered(keras.initializers.Constant):
    pass


def unregistered(x):
    return x


Point = namedtuple("Point", "x y")


class Tagged(np.ndarray):
    pass


class Forgetful:
    """An object whose config omits an attribute that it was given."""

    __slots__ = ()

    def __init__(self, held=None):
        self.held = held

    def get_config(self):
        return {}

    @classmethod
    def from_config(cls, config):
        return cls()


@keras.saving.register_keras_serializable("saved")
class Holder(Forgetful):
    """An object that holds its argument as an attribute."""


@keras.saving.register_keras_serializable("saved")
class Echo(Holder):
    """An object whose config is complete."""

    def __init__(self, held):
        super().__init__(held)
        self.itself = [self]  # a reference cycle

    def get_config(self):
        return {"held": self.held}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config["held"]))


@keras.saving.register_keras_serializable("saved")
class Broken(Holder):
    def get_config(self):
        raise NotImplementedError("no config")


@keras.saving.register_keras_serializable("saved")
class Slotted(Holder):
    __slots__ = ("other",)

    def __init__(self, other=None):
        self.held, self.other = None, other


@keras.saving.register_keras_serializable("saved")
class SlottedAlone(Forgetful):
    __slots__ = "held"


@pytest.mark.parametrize("held", [3, "text", None, [1.5, {"a": True}], (1, 2), float("nan")], ids=repr)
def test_objects_are_restored(held):
    got = decode(through_json(encode(Echo(held))))
    assert type(got) is Echo
    assert repr(got.held) == repr(list(held) if type(held) is tuple else held)
    assert decode(encode(SlottedAlone())).held is None


REFUSED = [
    # objects of other types
    object(), saved_ops.keras, Number.ONE, [Number.ONE], Point(1, 2), OrderedDict(a=1), {1, 2}, b"\xff",
    lambda x: x, unregistered, ops.sum, int, np.sum, np.exp, np.dtype("float32"),
    # arrays that NumPy or a backend would restore as others
    np.array(["a"]), np.array([1.5, 2.5], ">f4"), np.longdouble(1.5), np.zeros(2, [("a", "i4")]),
    np.ma.array([1.0, 2.0], mask=[True, False]), np.ones(2).view(Tagged),
    # objects with a config that fails, or that does not restore them
    Unregistered(2.0), Echo(object()), Echo({1: 2}), Broken(), Holder(3), Holder([1, {"a": "text"}]),
    Slotted(3), SlottedAlone(3),
    # objects with state
    keras.random.SeedGenerator(1), keras.metrics.Mean(), keras.optimizers.SGD(0.1), keras.layers.Dense(2),
    keras.metrics.F1Score(),  # has no variables before its first update
    keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(1)),
    keras.initializers.RandomNormal(),  # the config does not contain the seed
    Holder(keras.Variable(1.0)), Holder(keras.layers.Dense(2)), Holder({keras.metrics.Mean()}),
    Holder({"a": [(keras.random.SeedGenerator(1),)]}), Holder(Holder(keras.Variable(1.0))),
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_values_that_would_not_be_restored_are_refused(value):
    with pytest.raises(Unsaved):
        encode([{"a": (value,)}])


# ------------------------------------------------------------------------------------ refusals


def refused(model, tmp_path, *texts):
    for save in (model.get_config, lambda: model.save(tmp_path / "model.keras")):
        with pytest.raises(NotImplementedError) as error:
            save()
        assert [text for text in texts if text not in str(error.value)] == []


def test_the_error_names_the_argument(tmp_path):
    @op_custom_gradient(name="saved>takes_any")
    def takes_any(x, w=1.0, *others, key=None):
        return x * w, rule

    model = model_of(takes_any, key={"a": object()})
    refused(model, tmp_path, "saved>takes_any", "argument: 'key'")
    close(keras.models.clone_model(model)(ONES), array([[1.0, 1.0, 1.0]]))
    refused(model_of(takes_any, 1.0, 2, object()), tmp_path, "argument: 'others'[1]")
    refused(model_of(takes_any, keras.Variable(2.0)), tmp_path, "argument: 'w'")


def test_a_name_with_spaces_is_proposed_as_an_identifier(tmp_path):
    titled = op_custom_gradient(lambda x: (x * 2.0, rule), name="a title, for messages / only")
    assert not [name for name in keras.saving.get_custom_objects() if "title" in name]
    texts = "a title, for messages / only: an op without a registered name", "name='my_package>a_title"
    refused(model_of(titled), tmp_path, *texts)


@op_custom_gradient
def tanh(x):
    """An op with the name of an activation of Keras, which must not be loaded in its place."""
    return ops.tanh(x), rule


@op_custom_gradient
def plain(x):
    return x * 1.0, rule


class Times:
    def __call__(self, x):
        return x * 1.0, rule


def times(x, factor):
    return x * factor, rule


UNNAMED = {
    "tanh": tanh,
    "plain": plain,
    "a lambda": op_custom_gradient(lambda x: (x * 1.0, rule)),
    "a named lambda": op_custom_gradient(lambda x: (x * 1.0, rule), name="times"),
    "a partial": op_custom_gradient(functools.partial(times, factor=2.0)),
    "a callable": op_custom_gradient(Times()),
}
HOLDERS = {
    "Dense": lambda op: keras.layers.Dense(2, activation=op),
    "Activation": keras.layers.Activation,
    "Lambda": keras.layers.Lambda,
    "inner": lambda op: keras.layers.TimeDistributed(keras.layers.Dense(2, activation=op)),
    "keyword": lambda op: keras.layers.Lambda(lambda x, a: a(x), arguments={"a": op}),
    "node": lambda op: op,
}


@pytest.mark.parametrize("kind", UNNAMED)
@pytest.mark.parametrize("holder", HOLDERS)
def test_an_op_without_a_registered_name_is_refused(holder, kind, tmp_path):
    """Otherwise the file would be loaded with `tanh` of Keras, or not at all."""
    op, inputs = UNNAMED[kind], keras.Input((3, 2))
    layer = HOLDERS[holder](op)
    model = keras.Model(inputs, layer(inputs))
    ways = [
        lambda: model.save(tmp_path / "model.keras"),
        lambda: model.save(tmp_path / "model.h5"),
        model.to_json,
    ]
    if holder != "node":  # Keras copies a node without its config
        ways += [
            lambda: keras.models.clone_model(model),
            lambda: copy.deepcopy(model),
            lambda: keras.layers.serialize(layer),
        ]
    name = op.__name__ if kind in ("tanh", "plain") else r"\w+"
    for way in ways:
        with pytest.raises(NotImplementedError, match="an op without a registered name") as error:
            way()
        error.match(rf"@op_custom_gradient\(name='my_package>{name}'\)")


def test_an_unregistered_op_as_a_loss_is_refused(tmp_path):
    @op_custom_gradient
    def mean_squared_error(y, out):
        return ops.mean((y - out) ** 2), lambda upstream: None

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", mean_squared_error)
    with pytest.raises(NotImplementedError, match="mean_squared_error: an op without a registered name"):
        model.save(tmp_path / "model.keras")


# ------------------------------------------------------------------------------------ changed files


CALLED = []


@keras.saving.register_keras_serializable("saved")
def no_op(*args):
    CALLED.append(args)


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A module that must not be imported, and the folder that it is in."""
    (tmp_path / "multigrad_evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    del CALLED[:]
    yield tmp_path
    assert "multigrad_evil" not in sys.modules
    assert CALLED == []


def load(folder, change):
    """Load a model after changing the config of the op's node in its file."""
    model_of(saved_ops.bend).save(folder / "model.keras")
    with zipfile.ZipFile(folder / "model.keras") as file:
        contents = {name: file.read(name) for name in file.namelist()}
    config = json.loads(contents["config.json"])
    (node,) = [layer for layer in config["config"]["layers"] if layer["registered_name"] == NODE]
    change(node["config"])
    contents["config.json"] = json.dumps(config).encode()
    with zipfile.ZipFile(folder / "changed.keras", "w") as file:
        for name, content in contents.items():
            file.writestr(name, content)
    return keras.models.load_model(folder / "changed.keras")


def test_an_unchanged_file_loads(tmp_path):
    close(load(tmp_path, lambda config: None)(-ONES), array([[0.0, 0.0, 0.0]]))


def by_repr(*values):
    """Return parameters whose test ids are equal in every process, because they contain no address."""
    return [pytest.param(value, id=repr(value)) for value in values]


def function(module, name):
    return {"module": module, "class_name": "function", "config": name, "registered_name": name}


def a_lambda():
    with pytest.warns(UserWarning, match="unsafe"):
        return keras.saving.serialize_keras_object(lambda x: CALLED.append(x))


NAMES = [
    "os.system", "builtins.eval", "os", "multigrad_evil", "multigrad_evil>op", "saved>no_op", "saved>Mode",
    NODE, "__lambda__", "", ">", None, 3, ["saved>bend"], {"op": "saved>bend"},
    function("os", "system"), function("builtins", "eval"), function("multigrad_evil", "op"),
]  # fmt: skip


@pytest.mark.parametrize("name", [*by_repr(*NAMES), pytest.param(a_lambda, id="a_lambda")])
def test_a_file_that_names_no_op_is_refused(name, evil):
    def change(config):
        config["application"]["config"]["call"]["op"] = name() if callable(name) else name

    with pytest.raises(TypeError, match="uses an op that is not defined"):
        load(evil, change)


def instance(module, name, registered=None, **config):
    return {"keras": {"module": module, "class_name": name, "config": config, "registered_name": registered}}


BYTES = "AACAPwAAgD8="  # two ones in float32
ARGUMENTS = [
    # names that are not defined here, and objects that are not arguments
    {"keras": function("os", "system")},
    {"keras": function("builtins", "eval")},
    {"keras": function("multigrad_evil", "op")},
    instance("multigrad_evil", "Op"),
    instance("os", "system", "x", command="echo"),
    instance(None, "Unknown", "saved>Unknown"),
    instance(None, "Mode", "saved>Mode", value=7),
    instance(None, "Mode", "saved>Mode"),
    instance("keras.layers", "Dense", units=2),
    instance("keras.metrics", "Mean"),
    instance(None, "__numpy__", value=[1.0], dtype="float32"),
    instance(None, "__tensor__", value=[1.0], dtype="float32"),
    instance(None, "__keras_tensor__", shape=[3], dtype="float32", keras_history=None),
    instance(None, "__slice__"),
    # formats that are never written
    {"keras": "os.system"}, {"keras": [1]}, {"keras": {}}, {"keras": {"class_name": "Mode"}}, {"keras": None},
    {"input": -1}, {"input": 0.5}, {"input": True}, {"input": "0"}, {"input": [0]}, {"input": None},
    {"tuple": "abc"}, {"tuple": 3}, {"tuple": {}}, {"tuple": [], "list": []}, {"tuple": [], "dict": []},
    {"dict": [[1]]}, {"dict": [1]}, {"dict": ["ab"]}, {"dict": {"a": 1}}, {"dict": [[[], 1]]},
    {"dict": [["a", 1], ["a", 2]]},
    {"complex": ["1", "2"]}, {"complex": [1.0]}, {"complex": 1.0},
    {"array": ["object", [1], "AAAAAAAAAAA="]}, {"array": ["multigrad_evil", [1], "AAAAAAAAAAA="]},
    {"array": ["float32", [7], BYTES]}, {"array": ["float32", [-1], BYTES]}, {"array": ["float32", 2, BYTES]},
    {"array": ["float32", [2.0], BYTES]}, {"array": ["float32", [10**30], BYTES]},
    {"array": ["float32", [2], "!!"]}, {"array": ["float32", [2], 3]}, {"array": ["float32", [2], "é"]},
    {"array": ["int", [1], "AAAAAAAAAAA="]}, {"array": ["string", [1], "AAAA"]},
    {"array": [None, [2], BYTES]},
    {"array": []}, {"array": {"dtype": "float32"}}, {"tensor": ["float32"]},
    {"tensor": ["object", "float32", [2], BYTES]}, {"tensor": [None, "float32", [2], BYTES]},
    {"os.system": "echo"}, {},
]  # fmt: skip
UNREADABLE = "the arguments of an op in a saved model cannot be read"


@pytest.mark.parametrize(
    "argument", [*by_repr(*ARGUMENTS), pytest.param(lambda: {"keras": a_lambda()}, id="a_lambda")]
)
def test_a_file_with_invalid_arguments_is_refused(argument, evil):
    argument = argument() if callable(argument) else argument

    def change(config):
        config["application"]["config"]["call"]["args"].append([argument])

    with pytest.raises(ValueError, match=f"saved>bend: {UNREADABLE}") as error:
        load(evil, change)
    assert "if the file was changed, save the model again" in str(error.value)
    with pytest.raises(ValueError, match=r"\w"):
        decode(argument)


def test_a_file_with_an_unregistered_object_is_refused(evil):
    def change(config):
        config["application"]["config"]["call"]["args"] = [instance("absent", "Absent", "absent>Absent")]

    with pytest.raises(ValueError, match="Could not locate class 'Absent'") as error:
        load(evil, change)
    assert "register missing objects" in str(error.value)


def test_a_file_with_deeply_nested_arguments_is_refused():
    with pytest.raises(ValueError, match="recursion"):
        decode(functools.reduce(lambda nested, _: [nested], range(100_000), 1))


X = {"input": 0}
CALLS = [
    (3, {}), (None, {}), ({}, {}), ("x", {}), ([X], [1]), ([X], None), ([X], "x"),
    ([{"input": 1}], {}), ([X, X], {}), ([X], {"x": X}), ([{"tuple": [X, {"input": 2}]}], {}),
]  # fmt: skip
CONFIGS = [
    *[{"call": {"op": "saved>bend", "args": args, "kwargs": kwargs}} for args, kwargs in CALLS],
    *[{}, {"call": None}, {"call": "saved>bend"}, {"call": []}, {"call": {"op": "saved>bend"}}, [], "bend"],
]
APPLICATIONS = [None, "saved>bend", [], {}, 3, function("saved", "no_op"), *[{"config": c} for c in CONFIGS]]


@pytest.mark.parametrize("application", by_repr(*APPLICATIONS))
def test_a_file_with_an_invalid_call_is_refused(application, evil):
    def change(node):
        is_config = type(application) is dict and list(application) == ["config"]
        node["application"] = node["application"] | application if is_config else application

    with pytest.raises(ValueError, match=UNREADABLE):
        load(evil, change)


def test_an_incomplete_file_is_refused(evil):
    for part in ("name", "application"):
        with pytest.raises(ValueError, match=UNREADABLE):
            load(evil, lambda node, part=part: node.pop(part))


# ------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    "name", ["a>", ">b", "a>b>c", " > ", ">", "a>b/c", "a/b>c", "a >b", "a> b", " a>b", "a>b ", "a>\n", ">>"]
)
def test_invalid_names_raise(name):
    with pytest.raises(ValueError, match="name cannot be used") as error:
        op_custom_gradient(lambda x: (x, rule), name=name)
    assert f"got: str {name!r}" in str(error.value)


def module(name, source):
    """Run code in a namespace again, as a reloaded module or a cell of a notebook does."""
    made = sys.modules.setdefault(name, types.ModuleType(name))
    exec("from multigrad import op_custom_gradient\n" + source, vars(made))
    return made


DOUBLED = "@op_custom_gradient(name='cell>op')\ndef op(x):\n    return x * 2.0, lambda u: u * 7.0\n"
TRIPLED = DOUBLED.replace("2.0", "3.0")


@pytest.fixture
def cells(monkeypatch):
    for name in ("cell_a", "cell_b"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    yield
    keras.saving.get_custom_objects().pop("cell>op", None)


@pytest.mark.usefixtures("cells")
def test_rerunning_a_cell_replaces_the_op():
    first = module("cell_a", DOUBLED).op
    assert module("cell_a", DOUBLED).op is first
    second = module("cell_a", TRIPLED).op
    assert second is not first
    assert keras.saving.get_registered_object("cell>op") is second
    close(second(array(1.0)), array(3.0))
    config = model_of(first).get_config()  # an earlier model can still be saved
    close(keras.Model.from_config(config)(ONES), array([[3.0, 3.0, 3.0]]))


OTHERS = {
    "another module": ("cell_b", DOUBLED),
    "another name": ("cell_a", DOUBLED.replace("def op", "def other")),
    "a lambda": ("cell_a", "op = op_custom_gradient(lambda x: (x * 2.0, lambda u: u), name='cell>op')"),
    "another line": ("cell_a", "def outer():\n  pass\n" + DOUBLED.replace("def op", "def o")),
}


@pytest.mark.usefixtures("cells")
@pytest.mark.parametrize("other", OTHERS)
def test_two_ops_with_the_same_name_raise(other):
    first = module("cell_a", DOUBLED).op
    with pytest.raises(ValueError, match="cell>op: the name is registered for another") as error:
        module(*OTHERS[other])
    assert "cell_a" in str(error.value)
    assert keras.saving.get_registered_object("cell>op") is first


@pytest.mark.parametrize("name", ["saved>no_op", "saved>Mode", NODE])
def test_a_name_of_another_object_raises(name):
    before = keras.saving.get_registered_object(name)
    with pytest.raises(ValueError, match="registered for another object"):
        op_custom_gradient(lambda x: (x, rule), name=name)
    assert keras.saving.get_registered_object(name) is before


def make(name="names>made"):
    @op_custom_gradient(name=name)
    def op(x):
        return x * 2.0, lambda u: u * 7.0

    return op


def make_closure(value):
    @op_custom_gradient(name="names>closure")
    def op(x):
        return x * 2.0, lambda u: u * value

    return op


def make_default(value):
    @op_custom_gradient(name="names>default")
    def op(x, n=value):
        return x * 2.0, rule

    return op


def make_keyword(value):
    @op_custom_gradient(name="names>keyword")
    def op(x, *, n=value):
        return x * 2.0, rule

    return op


def test_an_op_that_captures_nothing_may_be_defined_in_every_call():
    assert make() is make()


@pytest.mark.parametrize("maker", [make_closure, make_default, make_keyword])
def test_an_op_with_a_closure_or_another_default_is_defined_once(maker):
    value, other = [7.0], [7.0]
    op = maker(value)
    if maker is not make_closure:
        assert maker(value) is op
    for another in (value, other) if maker is make_closure else (other,):
        with pytest.raises(ValueError, match="with another closure, other defaults"):
            maker(another)


def test_an_op_with_the_default_of_another_parameter_is_another_op():
    def make_with_default_of(name):
        def op(x, *, n, m):
            return x * 2.0, rule

        op.__kwdefaults__ = {name: 1.0}
        return op_custom_gradient(op, name="names>either")

    assert make_with_default_of("n") is make_with_default_of("n")
    with pytest.raises(ValueError, match="names>either: the name is registered"):
        make_with_default_of("m")


def test_a_partial_is_registered_once():
    part = functools.partial(lambda n, x: (x * 2.0, rule), 7.0)
    op = op_custom_gradient(part, name="names>partial")
    assert op_custom_gradient(part, name="names>partial") is op
    assert op.__name__ == "partial"
    with pytest.raises(ValueError, match="names>partial: the name is registered"):
        op_custom_gradient(functools.partial(part.func, 7.0), name="names>partial")


def test_definitions_with_different_options_raise():
    def op(x):
        return x * 2.0, rule

    op_custom_gradient(op, name="names>mode")
    with pytest.raises(ValueError, match="defaults or options"):
        op_custom_gradient(op, name="names>mode", higher_order=False)


def test_definitions_in_threads():
    made = []
    threads = [threading.Thread(target=lambda: made.append(make("names>threads"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len(set(map(id, made))) == 1


def test_methods():
    class Layer:
        @op_custom_gradient(name="names>method")
        def method(self, x):
            return x * 2.0, rule

        @op_custom_gradient(name="names>static")
        @staticmethod
        def static(x):
            return x * 2.0, rule

    close(Layer().method(array(1.0)), array(2.0))
    assert keras.saving.get_registered_object("names>static") is Layer.static
    if DIFFERENTIATES:
        close(grad(Layer().method)(1.0), array(7.0))

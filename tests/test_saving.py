"""Saved models: loading, refusals, and the names of ops."""

import copy
import enum
import functools
import gc
import importlib
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
from multigrad import ops as shelf
from multigrad.keras_graph.saving import Unsaved, decode, encode

pytestmark = pytest.mark.forward
HERE = Path(__file__).parent
NODE = "multigrad>CustomGradient"


def rule(u):
    return u * 7.0


def python(program, *words):
    """Return the last line that a new process prints, or its error."""
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n{program}",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout if done.returncode == 0 else done.stderr).strip()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model.keras"
    saved_ops.model().save(path)
    return path


# ------------------------------------------------------------------------------------ loading


@pytest.mark.package
def test_the_ops_of_multigrad_need_no_import(tmp_path):
    inputs = keras.Input((3,))
    keras.Model(inputs, shelf.round_straight_through(inputs)).save(tmp_path / "model.keras")
    program = (
        "from multigrad import op_custom_gradient\nimport keras\n"
        "assert 'multigrad.ops' not in sys.modules\n"
        "print(type(keras.models.load_model(sys.argv[1])).__name__)"
    )
    assert python(program, str(tmp_path / "model.keras")).splitlines()[-1] == "Functional"


@pytest.mark.package
def test_loading_in_a_new_process(saved):
    wanted = saved_ops.results(saved_ops.model())
    assert wanted[0] == [[2 * 2 * (0.5 * 2 + 4 + 12) * 2] * 2]
    if DIFFERENTIATES:
        factor = -5 * 11 * -5 * 11 * 11 * -3 * 2  # the factors of the rules on a path; there are 4 paths
        assert wanted[2] == [[4.0 * factor] * 3]
    program = "import json, keras, saved_ops\nmodel = keras.models.load_model(sys.argv[1])\n"
    got = json.loads(
        python(f"{program}print(json.dumps(saved_ops.results(model)))", str(saved)).splitlines()[-1]
    )
    assert got == wanted


@pytest.mark.package
def test_loading_without_the_ops_raises(saved):
    program = """
import keras, multigrad.op
try:
    keras.models.load_model(sys.argv[1])
except TypeError as error:  # Keras raises it for any object that is not registered
    print(str(error).count("saved>"), "define it with @op_custom_gradient(name=" in str(error))
"""
    count, helpful = python(program, str(saved)).splitlines()[-1].split()
    assert int(count)
    assert helpful == "True"


def test_configs(saved):
    model = keras.models.load_model(saved)
    again = keras.Model.from_config(json.loads(json.dumps(model.get_config())))
    again.set_weights(model.get_weights())
    assert saved_ops.results(again) == saved_ops.results(model)


def test_the_h5_format(tmp_path):
    x = keras.Input((3,))
    model = keras.Model(x, saved_ops.bend(x))
    model.save(tmp_path / "model.h5")
    again = keras.models.load_model(tmp_path / "model.h5", compile=False)
    close(again(np.ones((1, 3), "float32")), array([[1.0, 1.0, 1.0]]))
    assert [type(operation).__name__ for operation in again.operations][-1] == "CustomGradient"


def test_copies_and_pickles_of_a_model():
    model = saved_ops.model()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert saved_ops.results(again) == saved_ops.results(model)


@pytest.mark.parametrize("op", [saved_ops.bend, saved_ops.named_lambda])
def test_a_serialized_function(op):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Keras warns if it saves the code of a lambda
        config = json.loads(json.dumps(keras.saving.serialize_keras_object(op)))
    assert keras.saving.deserialize_keras_object(config) is op
    layer = keras.layers.Dense(3, activation=op)
    assert keras.layers.Dense.from_config(json.loads(json.dumps(layer.get_config()))).activation is op


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
def test_static_values(value):
    got = decode(json.loads(json.dumps(encode(value))))
    assert repr(got) == repr(np.asarray(value) if isinstance(value, np.generic) else value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_tensors(dtype):
    value = array([1, 0], dtype=dtype)
    got = decode(json.loads(json.dumps(encode(value))))
    assert ops.is_tensor(got)
    assert got.dtype == value.dtype
    assert numpy(got).tolist() == numpy(value).tolist()


# ------------------------------------------------------------------------------------ refusals


def refused(model, tmp_path, *texts):
    for save in (model.get_config, lambda: model.save(tmp_path / "model.keras")):
        with pytest.raises(NotImplementedError) as error:
            save()
        for text in texts:
            assert text in str(error.value), str(error.value)


def test_an_op_without_a_registered_name_is_refused(tmp_path):
    @op_custom_gradient
    def plain(x):
        return x * 2.0, rule

    x = keras.Input((3,))
    wanted = "plain: an op without a registered name", "@op_custom_gradient(name='my_package>plain')"
    refused(keras.Model(x, plain(x)), tmp_path, *wanted)
    titled = op_custom_gradient(lambda x: (x * 2.0, rule), name="a title, for messages / only")
    assert not [name for name in keras.saving.get_custom_objects() if "title" in name]
    refused(keras.Model(x, titled(x)), tmp_path, "a title, for messages / only: an op", "my_package>a_title")


class Number(enum.IntEnum):
    ONE = 1


class Unregistered(keras.initializers.Constant):
    pass


def unregistered(x):
    return x


Point = namedtuple("Point", "x y")


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


@pytest.mark.parametrize("held", [3, "text", None, [1.5, {"a": True}], (1, 2), float("nan")], ids=repr)
def test_objects_are_restored(held):
    got = decode(json.loads(json.dumps(encode(Echo(held)))))
    assert type(got) is Echo
    assert repr(got.held) == repr(list(held) if type(held) is tuple else held)


STATEFUL = [
    keras.random.SeedGenerator(1),
    keras.metrics.Mean(),
    keras.metrics.F1Score(),  # has no variables before its first update
    keras.optimizers.SGD(0.1),
    keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(1)),
    keras.initializers.RandomNormal(),  # the config does not contain the seed
    keras.layers.Dense(2),
    Holder(keras.Variable(1.0)),
    Holder(keras.layers.Dense(2)),
    Holder({"a": [(keras.random.SeedGenerator(1),)]}),
    Holder(Holder(keras.Variable(1.0))),
    Holder({keras.metrics.Mean()}),
    Holder(3),
    Holder([1, {"a": "text"}]),
]


@pytest.mark.parametrize("value", STATEFUL, ids=lambda value: type(value).__name__)
def test_objects_whose_state_would_be_lost_are_refused(value, tmp_path):
    @op_custom_gradient(name="saved>takes_state")
    def takes_state(x, state=None):
        return x * 2.0, rule

    x = keras.Input((3,))
    refused(keras.Model(x, takes_state(x, value)), tmp_path, "saved>takes_state", "argument: 'state'")


@keras.saving.register_keras_serializable("saved")
class Slotted(Holder):
    __slots__ = ("other",)


@keras.saving.register_keras_serializable("saved")
class SlottedAlone(Forgetful):
    __slots__ = "held"


@keras.saving.register_keras_serializable("saved")
class Private(Forgetful):
    __slots__ = ("__held",)

    def __init__(self, held=None):
        self.__held = held


def test_objects_whose_slots_would_be_lost_are_refused():
    slotted = Slotted()
    slotted.other = 3
    for value in (slotted, SlottedAlone(3), Private(3)):
        with pytest.raises(Unsaved):
            encode(value)
    assert decode(encode(SlottedAlone())).held is None


@pytest.mark.parametrize(
    "value", [np.array([1.5, 2.5], ">f4"), np.longdouble(1.5), np.zeros(2, [("a", "i4")])]
)
def test_arrays_that_would_not_be_restored_are_refused(value):
    """Not every backend supports them."""
    with pytest.raises(Unsaved):
        encode(value)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        saved_ops.keras,
        Number.ONE,
        [Number.ONE],
        Point(1, 2),
        OrderedDict(a=1),
        lambda x: x,
        unregistered,
        ops.sum,
        int,
        Unregistered(2.0),
        np.sum,
        np.exp,
        np.dtype("float32"),
        Echo(object()),
        Echo({1: 2}),  # JSON converts the key to a string
        Broken(),
        np.array(["a"]),
        b"\xff",
        {1, 2},
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_would_not_be_restored_are_refused(value, tmp_path):
    @op_custom_gradient(name="saved>takes_any")
    def takes_any(x, *others, key=None):
        return x * 2.0, rule

    x = keras.Input((3,))
    refused(keras.Model(x, takes_any(x, key={"a": value})), tmp_path, "saved>takes_any", "argument: 'key'")
    refused(keras.Model(x, takes_any(x, 1, value)), tmp_path, "argument: 'others'[1]")
    keras.models.clone_model(keras.Model(x, takes_any(x, value)))


class Tagged(np.ndarray):
    pass


@pytest.mark.parametrize(
    "value", [np.ma.array([1.0, 2.0], mask=[True, False]), np.ones(2).view(Tagged)], ids=["masked", "tagged"]
)
def test_array_subclasses_are_refused(value):
    with pytest.raises(Unsaved):
        encode(value)


def test_variables_are_refused(tmp_path):
    @op_custom_gradient(name="saved>weigh")
    def weigh(x, w):
        return x * w, lambda u: (u, u)

    x = keras.Input((3,))
    model = keras.Model(x, weigh(x, keras.Variable(np.float32(2.0))))
    refused(model, tmp_path, "saved>weigh", "argument: 'w'")


# ------------------------------------------------------------------------------------ files


def by_repr(value):
    """Return a parameter whose test id is equal in every process, because it contains no address."""
    return pytest.param(value, id=repr(value))


CALLED = []


@keras.saving.register_keras_serializable("saved")
def no_op(*args):
    CALLED.append(args)


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A module that prints a line when it is imported."""
    (tmp_path / "multigrad_evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    del CALLED[:]
    yield tmp_path
    assert "multigrad_evil" not in sys.modules
    assert CALLED == []


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


@pytest.mark.parametrize("name", [*map(by_repr, NAMES), pytest.param(a_lambda, id="a_lambda")])
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
    "argument", [*map(by_repr, ARGUMENTS), pytest.param(lambda: {"keras": a_lambda()}, id="a_lambda")]
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
CONFIGS = [
    {"call": {"op": "saved>bend", "args": args, "kwargs": kwargs}}
    for args, kwargs in [
        (3, {}), (None, {}), ({}, {}), ("x", {}), ([X], [1]), ([X], None), ([X], "x"),
        ([{"input": 1}], {}), ([X, X], {}), ([X], {"x": X}), ([{"tuple": [X, {"input": 2}]}], {}),
    ]
] + [
    {}, {"call": None}, {"call": "saved>bend"}, {"call": []}, {"call": {"op": "saved>bend"}}, [], "bend",
]  # fmt: skip


@pytest.mark.parametrize("config", [*map(by_repr, CONFIGS)])
def test_a_file_with_an_invalid_call_is_refused(config, evil):
    def change(node):
        node["application"]["config"] = config

    with pytest.raises(ValueError, match=UNREADABLE):
        load(evil, change)


APPLICATIONS = [None, "saved>bend", [], {}, 3, function("saved", "no_op")]


@pytest.mark.parametrize("application", [*map(by_repr, APPLICATIONS)])
def test_a_file_with_an_invalid_application_is_refused(application, evil):
    def change(node):
        node["application"] = application

    with pytest.raises(ValueError, match=UNREADABLE):
        load(evil, change)


@pytest.mark.parametrize("part", ["name", "application"])
def test_an_incomplete_file_is_refused(part, evil):
    with pytest.raises(ValueError, match=UNREADABLE):
        load(evil, lambda node: node.pop(part))


CLASSES = [
    ("os", "system"),
    ("builtins", "eval"),
    ("multigrad_evil", "Op"),
    ("multigrad.keras_graph.registry", "find"),
]


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_a_file_with_another_class_is_refused(module, name, evil):
    def change(config):
        layer.update(module=module, class_name=name, registered_name=None)

    x = keras.Input((3,))
    config = keras.Model(x, saved_ops.bend(x)).get_config()
    (layer,) = [layer for layer in config["layers"] if layer["registered_name"] == NODE]
    change(layer["config"])
    with pytest.raises(TypeError, match="Could not locate class"):
        keras.Model.from_config(config)


def load(folder, change):
    """Load a model after changing the config of the op's node in its file."""
    x = keras.Input((3,))
    keras.Model(x, saved_ops.bend(x)).save(folder / "model.keras")
    with zipfile.ZipFile(folder / "model.keras") as file:
        contents = {name: file.read(name) for name in file.namelist()}
    config = json.loads(contents["config.json"])
    for layer in config["config"]["layers"]:
        if layer["registered_name"] == NODE:
            change(layer["config"])
    contents["config.json"] = json.dumps(config).encode()
    with zipfile.ZipFile(folder / "changed.keras", "w") as file:
        for name, content in contents.items():
            file.writestr(name, content)
    return keras.models.load_model(folder / "changed.keras")


def test_an_unchanged_file_loads(tmp_path):
    close(load(tmp_path, lambda config: None)(-np.ones((1, 3), "float32")), array([[0.0, 0.0, 0.0]]))


# ------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    "name", ["a>", ">b", "a>b>c", " > ", ">", "a>b/c", "a/b>c", "a >b", "a> b", " a>b", "a>b ", "a>\n", ">>"]
)
def test_invalid_names_raise(name):
    with pytest.raises(ValueError, match="cannot be registered") as error:
        op_custom_gradient(lambda x: (x, rule), name=name)
    assert "got: " + repr(name) in str(error.value)
    assert "my_package>my_op" in str(error.value)


def module(name, source):
    """Run code in a namespace again, as a reloaded module or a cell of a notebook does."""
    made = sys.modules.get(name)
    if made is None:
        sys.modules[name] = made = types.ModuleType(name)
    exec(source, vars(made))
    return made


HEAD = "from multigrad import op_custom_gradient\n"
DEFINED = HEAD + "@op_custom_gradient(name='cell>op')\ndef op(x):\n    return x * FACTOR, lambda u: u * 7.0\n"


@pytest.fixture
def cells(monkeypatch):
    for name in ("cell_a", "cell_b"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    yield
    keras.saving.get_custom_objects().pop("cell>op", None)


@pytest.mark.usefixtures("cells")
def test_rerunning_a_cell_replaces_the_op():
    first = module("cell_a", DEFINED.replace("FACTOR", "2.0")).op
    assert module("cell_a", DEFINED.replace("FACTOR", "2.0")).op is first
    second = module("cell_a", DEFINED.replace("FACTOR", "3.0")).op
    assert second is not first
    assert keras.saving.get_registered_object("cell>op") is second
    close(second(array(1.0)), array(3.0))
    x = keras.Input((3,))
    config = keras.Model(x, first(x)).get_config()  # an earlier model can still be saved
    close(keras.Model.from_config(config)(np.ones((1, 3), "float32")), array([[3.0, 3.0, 3.0]]))


def test_reloading_a_module_replaces_the_op(tmp_path, monkeypatch):
    path = tmp_path / "multigrad_reloaded.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for factor in ("2.0", "3.0"):
        path.write_text(DEFINED.replace("FACTOR", factor).replace("cell>op", "reloaded>op"))
        loaded = importlib.reload(importlib.import_module("multigrad_reloaded"))
        importlib.invalidate_caches()
        assert keras.saving.get_registered_object("reloaded>op") is loaded.op
        close(loaded.op(array(1.0)), array(float(factor)))
    assert importlib.reload(loaded).op is keras.saving.get_registered_object("reloaded>op")


OTHERS = [
    ("cell_b", DEFINED.replace("FACTOR", "2.0")),
    ("cell_a", DEFINED.replace("FACTOR", "2.0").replace("def op", "def other")),
    ("cell_a", HEAD + "op = op_custom_gradient(lambda x: (x * 2.0, lambda u: u * 7.0), name='cell>op')"),
    (
        "cell_a",
        DEFINED.replace("FACTOR", "2.0").replace("@", "def outer():\n  pass\n@").replace("def op", "def o"),
    ),
]


@pytest.mark.usefixtures("cells")
@pytest.mark.parametrize(("place", "source"), OTHERS)
def test_two_ops_with_the_same_name_raise(place, source):
    first = module("cell_a", DEFINED.replace("FACTOR", "2.0")).op
    with pytest.raises(ValueError, match="cell>op: the name is registered for another") as error:
        module(place, source)
    assert "cell_a" in str(error.value)
    assert "rename one of them" in str(error.value)
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
    values = [7.0], [7.0]
    op = maker(values[0])
    if maker is not make_closure:
        assert maker(values[0]) is op
    for other in (values[0], values[1]) if maker is make_closure else (values[1],):
        with pytest.raises(ValueError, match="the same function, with a closure, or other") as error:
            maker(other)
        assert "as arguments, or omit the name" in str(error.value)


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


def test_many_definitions_leave_no_objects():
    def define():
        make("names>many")

    for _ in range(20):
        define()
    registered = len(keras.saving.get_custom_objects())
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(200):
        define()
    gc.collect()
    assert len(gc.get_objects()) - before < 200
    assert len(keras.saving.get_custom_objects()) == registered


def test_definitions_in_threads():
    made = []
    threads = [threading.Thread(target=lambda: made.append(make("names>threads"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len(set(map(id, made))) == 1


def test_names_and_copies():
    assert saved_ops.bend.__name__ == "bend"
    assert saved_ops.named_lambda.__name__ == "lambda"
    assert pickle.loads(pickle.dumps(saved_ops.bend)) is saved_ops.bend
    assert copy.deepcopy(saved_ops.bend) is saved_ops.bend


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


@op_custom_gradient
def tanh(x):
    """An op with the name of an activation of Keras. Its false rule shows which of the two runs."""
    return ops.tanh(x), lambda upstream: upstream * 7.0


@op_custom_gradient
def unnamed(x):
    return ops.tanh(x), lambda upstream: upstream * 7.0


HOLDERS = {
    "Dense": lambda op: keras.layers.Dense(2, activation=op),
    "Activation": keras.layers.Activation,
    "Lambda": keras.layers.Lambda,
    "inner": lambda op: keras.layers.TimeDistributed(keras.layers.Dense(2, activation=op)),
    "keyword": lambda op: keras.layers.Lambda(lambda x, a: a(x), arguments={"a": op}),
}


@pytest.mark.parametrize("op", [tanh, unnamed], ids=["tanh", "unnamed"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_an_unregistered_op_in_a_layer_is_refused(holder, op, tmp_path):
    """Otherwise the file would be loaded with `tanh` of Keras, or not at all."""
    shape = (3, 2) if holder == "inner" else (2,)
    layer = HOLDERS[holder](op)
    model = keras.Sequential([keras.Input(shape), layer])
    ways = [
        lambda: model.save(tmp_path / "model.keras"),
        lambda: model.save(tmp_path / "model.h5"),
        model.to_json,
        lambda: keras.models.clone_model(model),
        lambda: copy.deepcopy(model),
        lambda: keras.layers.serialize(layer),
    ]
    for way in ways:
        with pytest.raises(NotImplementedError, match=f"{op.__name__}: an op without a registered name") as e:
            way()
        assert f"@op_custom_gradient(name='my_package>{op.__name__}')" in str(e.value)


@pytest.mark.parametrize("copied", [keras.models.clone_model, copy.deepcopy])
def test_keras_does_not_copy_an_unregistered_function(copied):
    """An op without a name behaves as such a function. If this test fails, let it be copied, too."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation=doubled)])
    with pytest.raises(TypeError, match=r"could not be deserialized|Error when deserializing"):
        copied(model)


def doubled(x):
    return x * 2.0


def test_an_unregistered_op_as_a_loss_is_refused(tmp_path):
    @op_custom_gradient
    def mean_squared_error(y, out):
        return ops.mean((y - out) ** 2), lambda upstream: None

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", mean_squared_error)
    with pytest.raises(NotImplementedError, match="mean_squared_error: an op without a registered name"):
        model.save(tmp_path / "model.keras")


def test_an_op_that_is_registered_only_with_keras_is_saved(tmp_path):
    @keras.saving.register_keras_serializable("alone")
    @op_custom_gradient
    def tanh(x):
        return ops.tanh(x), lambda upstream: upstream * 7.0

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation=tanh)])
    model.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").layers[0].activation is tanh


@pytest.mark.parametrize("name", ["spike", "sign_straight_through", "log1pexp", "reverse_gradient"])
def test_an_op_of_multigrad_as_an_activation(name):
    op = getattr(shelf, name)
    config = keras.layers.serialize(keras.layers.Activation(op))
    loaded, x = keras.layers.deserialize(json.loads(json.dumps(config))), array(0.25, -0.5)
    close(loaded(x), op(x))
    if DIFFERENTIATES:
        close(grad(lambda x: ops.sum(loaded(x)))(x), grad(lambda x: ops.sum(op(x)))(x))


# ----------------------------------------------------------------------------- what to write or to import


class Times:
    def __call__(self, x):
        return x * 1.0, lambda upstream: upstream


def times(x, factor):
    return x * factor, lambda upstream: upstream


UNNAMED = {
    "a lambda": lambda: op_custom_gradient(lambda x: (x * 1.0, lambda upstream: upstream)),
    "a named lambda": lambda: op_custom_gradient(
        lambda x: (x * 1.0, lambda upstream: upstream), name="times"
    ),
    "a partial": lambda: op_custom_gradient(functools.partial(times, factor=2.0)),
    "a callable": lambda: op_custom_gradient(Times()),
}


@pytest.mark.parametrize("make", UNNAMED.values(), ids=UNNAMED)
@pytest.mark.parametrize("where", ["activation", "Lambda", "node", "mapped", "json"])
def test_an_error_says_how_to_name_an_op(make, where, tmp_path):
    op, inputs = make(), keras.Input((3,))
    if where in ("activation", "json"):
        outputs = keras.layers.Dense(1, activation=op)(inputs)
    elif where == "mapped":
        outputs = keras.layers.TimeDistributed(keras.layers.Dense(1, activation=op))(inputs[:, None])
    else:
        outputs = keras.layers.Lambda(op)(inputs) if where == "Lambda" else op(inputs)
    model = keras.Model(inputs, outputs)
    with pytest.raises(NotImplementedError, match=r"@op_custom_gradient\(name='my_package>\w+'\)"):
        model.to_json() if where == "json" else model.save(tmp_path / "model.keras")


ALONE = """
import keras
keras.models.load_model({path!r})
"""


@pytest.mark.package
@pytest.mark.parametrize(
    ("module", "needed"),
    [("__main__", "define the op with @op_custom_gradient(name="), ("own.ops", "import own.ops")],
)
def test_the_error_without_multigrad_names_the_missing_import(module, needed, tmp_path):
    def alone(x):
        return x * 1.0, lambda upstream: upstream

    alone.__module__ = module
    inputs = keras.Input((3,))
    path = str(tmp_path / "model.keras")
    name = "tests>alone" if module == "__main__" else "tests>alone_in_module"
    keras.Model(inputs, op_custom_gradient(alone, name=name)(inputs)).save(path)
    done = subprocess.run(
        [sys.executable, "-c", ALONE.format(path=path)], capture_output=True, text=True, check=False
    )
    assert "Could not locate class 'CustomGradient'" in done.stderr
    assert f"import multigrad, and {needed}" in done.stderr.replace("\\'", "'")


def test_a_file_without_the_text_on_imports_is_loaded(tmp_path):
    """The first version of multigrad did not write this text."""
    inputs = keras.Input((3,))
    model = keras.Model(inputs, op_custom_gradient(times, name="tests>loaded")(inputs, 7.0))
    config = json.loads(json.dumps(model.get_config()))
    (node,) = [layer["config"] for layer in config["layers"] if "needed_to_load" in layer["config"]]
    assert "import multigrad" in node.pop("needed_to_load")
    close(keras.Model.from_config(config)(array(np.ones((1, 3)))), array(7 * np.ones((1, 3))))

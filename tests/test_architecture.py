"""The imports between the parts of the package, and the completeness of each backend."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import multigrad
from multigrad import backend
from multigrad.backend import defaults
from multigrad.backend.base import Backend
from multigrad.common.type_sets import TypeSet

pytestmark = pytest.mark.forward

PACKAGE = Path(multigrad.__file__).parent
FRAMEWORKS = {"tensorflow", "jax", "torch", "openvino"}
FILES = sorted(PACKAGE.rglob("*.py"))


def members(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if name[0] != "_"]


DEFAULTS = [
    *defaults.__annotations__,
    *[
        name
        for name, value in vars(defaults).items()
        if getattr(value, "__module__", "") == defaults.__name__
    ],
]
DEFAULTS = [name for name in DEFAULTS if name not in ("mapped", "transposed")]  # which make a member


def module_of(path: Path) -> str:
    parts = ("multigrad", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, with modules of the package that a `from` import names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{name.name}" for name in node.names}
            found |= (names & MODULES.keys()) or {node.module}
    return found


@pytest.mark.package
@pytest.mark.parametrize("name", MODULES)
def test_a_framework_is_imported_only_in_a_file_or_folder_that_bears_its_name(name):
    modules = {module.partition(".")[0] for module in imported(MODULES[name])}
    assert modules & FRAMEWORKS <= set(name.split("."))


# The modules that contain the private names of Keras and of the frameworks.
PRIVATE = [path for path in FILES if path.name in ("private.py", "keras_internals.py")]
OTHERS = sorted({*FILES} - {*PRIVATE})
# What multigrad reads of its own objects, besides `self`.
OWN = {
    "_builders",  # of a search of a closure, for the search of a part
    *("_followers", "_plain", "_store"),  # of the step of a `GradientLogger`, for another logger
    *("_make", "_replace"),  # of named tuples: Python documents them
}
PRIVATE_PATH = re.compile(
    r"(^|\.)_[a-z]\w*(\.|$)|^(tensorflow\.python|keras\.src|jax\.(extend|interpreters))\b"
)


def defined(tree: ast.AST) -> set[str]:
    """Return the names of the attributes and slots that the classes of a module define."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                targets = getattr(part, "targets", [getattr(part, "target", None)])
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
                found |= {getattr(part, "name", "")}
                if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "__slots__":
                    found |= {text.value for text in ast.walk(part.value) if isinstance(text, ast.Constant)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr}
    return found


def private_names(source: str, own: set[str]) -> set[str]:
    """Return the private names of others that a module uses.

    They are attributes and module paths with a part that begins with an underscore, also in strings, and
    modules for which a framework does not guarantee compatibility.
    """
    tree = ast.parse(source)
    slots = {text for text in defined(tree) if text.startswith("_")}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
            of_self = ast.unparse(node.value) in ("self", "cls", "super()")
            found |= {node.attr} - (own if of_self else OWN)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if PRIVATE_PATH.search(name.name)}
        elif isinstance(node, ast.ImportFrom):
            paths = {f"{node.module}.{name.name}" for name in node.names}
            found |= {path for path in paths if PRIVATE_PATH.search(path)}
        elif isinstance(node, ast.Constant) and PRIVATE_PATH.search(str(node.value)):
            found |= {node.value} - slots - OWN
    return {name for name in found if not name.startswith("_multigrad")}


@pytest.mark.package
def test_private_names_of_frameworks_are_in_their_modules():
    assert len(PRIVATE) == 4
    own = set().union(*[defined(ast.parse(path.read_text())) for path in FILES])
    found = {module_of(path): private_names(path.read_text(), own) for path in OTHERS}
    assert not {module: names for module, names in found.items() if names}


@pytest.mark.package
@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("forward_ad._current_level >= 0", "_current_level"),
        ("self._of_a_framework", "_of_a_framework"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        ("import jax._src.core", "jax._src.core"),
        ("from jax.extend.core import Primitive", "jax.extend.core.Primitive"),
        ("getattr(variable, '_value')", "_value"),
        ("look_up('keras.src.backend')", "keras.src.backend"),
    ],
)
def test_the_search_for_private_names(source, name):
    assert private_names(source, set()) == {name}
    assert not private_names("class C:\n    __slots__ = ('_x',)\n\n    def f(self):\n        self._x", {"_x"})


@pytest.mark.package
def test_there_are_no_import_cycles():
    graph = {name: imported(path) & MODULES.keys() - {name} for name, path in MODULES.items()}
    while leaves := [name for name, modules in graph.items() if not modules & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph


@pytest.mark.package
def test_contributing_links_to_the_lines_of_definitions():
    root = PACKAGE.parent
    pattern = r"\[`([\w.]+)`\]\((multigrad/[\w/.]+)#L(\d+)\)"
    links = re.findall(pattern, (root / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert links
    for name, path, line in links:
        definition = re.compile(rf"\s*(def|class) {name.rpartition('.')[2]}\b")
        lines = (root / path).read_text(encoding="utf-8").splitlines()
        found = [number for number, text in enumerate(lines, 1) if definition.match(text)]
        near = [number for number in found if abs(number - int(line)) <= 10]  # a few lines off will do
        assert near, f"CONTRIBUTING.md: {name} is in line {found} of {path}"


@pytest.mark.parametrize("name", [*Backend.__annotations__, *members(Backend), *DEFAULTS])
def test_the_active_backend_is_complete(name):
    answer = getattr(backend.active, name)
    asked = getattr(defaults if name in DEFAULTS else Backend, name, TypeSet())
    if isinstance(asked, (TypeSet, bool)):
        assert isinstance(answer, type(asked))
    elif asked is bool:
        assert answer() is False
    else:
        assert parameters(answer) == [p for p in parameters(asked) if p[0] != "self"]


def parameters(function):
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values() if p.default is p.empty]

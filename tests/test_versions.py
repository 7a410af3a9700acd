"""The supported versions: an older one raises an error at import, and so does a missing private name."""

import ast
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import keras
import pytest

import multigrad
from multigrad.backend import _load
from multigrad.cli.doctor import doctor
from multigrad.common import frameworks

BACKEND = keras.backend.backend()
PRIVATE = {"keras": "multigrad.common.keras_internals", BACKEND: f"multigrad.backend.{BACKEND}.private"}


# The absence of these names only costs time.
WITH_FALLBACK = {
    "jax._src.array.ArrayImpl",
    "jax._src.interpreters.ad.primitive_linearizations",
    "torch._C._FunctionBase.apply",
    "torch._C._is_any_autocast_enabled",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C._is_tracing",
    "torch._C._set_grad_enabled",
    "torch._dynamo.types.FrameAction",
    "torch._dynamo.types.FrameExecStrategy",
}
# These have another name in older versions of JAX.
RENAMED = {
    "jax._src.api.VJP",
    "jax.enable_x64",
    "jax.extend.core.get_opaque_trace_state",
    "jax.extend.core.set_current_trace",
    "jax.extend.core.take_current_trace",
    "jax.lax.pcast",
}


def loaded_without(module, hidden, monkeypatch):
    """Return a second copy of a module, made as if the frameworks had no object with one of these paths.

    Also return the paths that the module looked up.
    """
    resolve, paths = pkgutil.resolve_name, []

    def look(path):
        paths.append(path)
        if path in hidden:
            raise AttributeError(path)
        return resolve(path)

    spec = importlib.util.spec_from_file_location("copy", importlib.import_module(module).__file__)
    copy = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(pkgutil, "resolve_name", look)
        spec.loader.exec_module(copy)
    return copy, list(dict.fromkeys(paths))


# ----------------------------------------------------------------------------------- private names


@pytest.mark.parametrize("framework", PRIVATE)
def test_a_missing_private_name_raises_an_error_at_import(framework, monkeypatch):
    module = PRIVATE[framework]
    paths = loaded_without(module, (), monkeypatch)[1]
    required = [path for path in paths if path not in WITH_FALLBACK | RENAMED]
    assert required
    title, _, newest = frameworks.SUPPORTED[framework]
    found = importlib.import_module(framework).__version__
    for path in required:
        with pytest.raises(ImportError) as caught:
            loaded_without(module, {path}, monkeypatch)
        lines = str(caught.value).replace("\n    ", " ").splitlines()  # a long line is wrapped
        assert lines[0] == f"multigrad: {title} {found} has no {path!r}, which multigrad needs"
        assert f'pip install "{framework}=={newest}.*"' in lines[-1]
        assert caught.value.name == framework


WITHOUT = """
import pkgutil, sys
hidden, found, resolve = set(sys.argv[1:]), set(), pkgutil.resolve_name

def look(path):
    if path in hidden:
        found.add(path)
        raise AttributeError(path)
    return resolve(path)

pkgutil.resolve_name = look
import smoke
smoke.run()
assert found == hidden, hidden - found
"""


@pytest.mark.slow_on("jax", "torch")
def test_without_the_names_that_have_a_fallback(monkeypatch):
    """Every gradient follows the rule without them, too."""
    paths = loaded_without(PRIVATE[BACKEND], (), monkeypatch)[1]
    optional = [path for path in paths if path in WITH_FALLBACK]
    if not optional:
        assert BACKEND == "tensorflow"
        pytest.skip("TensorFlow has no fallback for any of its private names")
    folders = [str(Path(multigrad.__file__).parents[1]), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *optional],
        env={**os.environ, "KERAS_BACKEND": BACKEND, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "every gradient follows the rule\n"


# ---------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("module", "found", "backend", "too_old"),
    [
        ("torch", "2.9.1", "torch", True),
        ("torch", "2.11.0", "torch", True),
        ("torch", "2.12.0+cpu", "torch", False),
        ("torch", "3.0.0", "torch", False),
        ("jax", "0.6.2", "jax", True),
        ("jax", "0.7.0", "jax", False),
        ("jax", "0.10.2.dev20260101", "jax", False),
        ("tensorflow", "2.16.2", "tensorflow", True),
        ("tensorflow", "2.21.0-rc0", "tensorflow", False),
        ("keras", "3.11.3", "jax", True),
        ("keras", "3.12.0", "jax", False),
        ("keras", "3.12.0", "torch", True),
        ("keras", "3.15.0", "torch", False),
    ],
)
def test_which_versions_are_too_old(module, found, backend, too_old):
    assert (frameworks.version_problem(module, found, backend) is not None) == too_old


@pytest.mark.parametrize("module", ["keras", BACKEND])
def test_an_older_version_raises_an_error_that_says_what_to_install(module, monkeypatch):
    monkeypatch.setattr(importlib.import_module(module), "__version__", "0.1.2")
    with pytest.raises(ImportError) as caught:
        frameworks.require_supported(BACKEND)
    oldest = frameworks.oldest_supported(module, BACKEND)
    assert str(caught.value).splitlines()[-1] == f'  fix: pip install --upgrade "{module}>={oldest}"'
    assert caught.value.name == module
    monkeypatch.setattr(importlib.import_module(module), "__version__", "99.0.0")
    frameworks.require_supported(BACKEND)  # a newer version is accepted


# ------------------------------------------------------------------------- what else is installed


@pytest.mark.package
def test_an_active_backend_that_is_not_installed(monkeypatch):
    monkeypatch.delitem(sys.modules, "keras")
    monkeypatch.setattr(frameworks, "is_installed", lambda name: name == "jax")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    with pytest.raises(ModuleNotFoundError) as caught:
        frameworks.require_active_backend()
    assert str(caught.value).splitlines() == [
        "multigrad: the active backend of Keras is not installed",
        "  required: tensorflow, from the environment variable KERAS_BACKEND",
        "  got: installed backends: jax",
        "  fix: set the environment variable KERAS_BACKEND=jax before Keras is imported, "
        "or pip install tensorflow",
    ]
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    frameworks.require_active_backend()


@pytest.mark.package
def test_keras_is_not_installed(monkeypatch):
    monkeypatch.delitem(sys.modules, "keras")
    monkeypatch.setattr(frameworks, "is_importable", lambda module: module != "keras")
    with pytest.raises(ModuleNotFoundError, match="fix: pip install keras"):
        frameworks.require_active_backend()


@pytest.mark.package
def test_the_other_project_of_the_same_name(monkeypatch, tmp_path, capsys):
    """The import warns, and `doctor` fails."""
    assert frameworks.other_distribution() is None
    folder = tmp_path / "multigrad-1.0.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: multigrad\nVersion: 1.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"got: multigrad 1\.0\.0, too"):
        _load()
    assert doctor() == 1
    assert "fix: pip uninstall multigrad, then pip install" in capsys.readouterr().out


# --------------------------------------------------------------------------------------- the table

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def lower_bounds(requirements):
    """Return the lower bound of each requirement by its name, which has no upper bound."""
    bounds = [re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement) for requirement in requirements]
    return dict(bound.groups() for bound in bounds)


@pytest.mark.package
def test_the_lower_bounds_of_the_distribution():
    assert lower_bounds(PROJECT["dependencies"]) == {"keras": frameworks.SUPPORTED["keras"].oldest}
    for backend in frameworks.DIFFERENTIATING:
        bounds = lower_bounds(PROJECT["optional-dependencies"][backend])
        own = {"keras": frameworks.KERAS_FOR[backend]} if backend in frameworks.KERAS_FOR else {}
        assert bounds == {backend: frameworks.SUPPORTED[backend].oldest} | own


@pytest.mark.package
def test_the_versions_of_python():
    prefix = "Programming Language :: Python :: "
    versions = [text.removeprefix(prefix) for text in PROJECT["classifiers"] if text.startswith(prefix)]
    assert versions == ["3", "3 :: Only", *PYTHONS]
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


@pytest.mark.package
def test_the_versions_of_the_nox_sessions():
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    constants = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Tuple):
            constants[ast.unparse(node.targets[0])] = node.value
    pythons = ast.literal_eval(constants["(OLDEST_PYTHON, NEWEST_PYTHON)"])
    assert pythons == (PYTHONS[0], "3.13")  # parts of the tests ran on 3.14, outside of the sessions
    oldest, newest = (ast.literal_eval(constants[name]) for name in ("OLDEST", "NEWEST"))
    for backend in frameworks.DIFFERENTIATING:
        distribution = {"tensorflow": "tensorflow-cpu"}.get(backend, backend)
        versions = frameworks.SUPPORTED[backend]
        keras = frameworks.oldest_supported("keras", backend)
        assert {f"{distribution}=={versions.oldest}.0", f"keras=={keras}.0"} <= set(oldest[backend])
        keras = frameworks.SUPPORTED["keras"].newest
        assert {f"{distribution}=={versions.newest}.*", f"keras=={keras}.*"} <= set(newest[backend])


@pytest.mark.package
def test_a_session_runs_on_every_release():
    pinned = (ROOT / "noxfile.py").read_text() + (ROOT / "constraints.txt").read_text()
    for module, (_, oldest, newest) in frameworks.SUPPORTED.items():
        distribution = {"tensorflow": "tensorflow-cpu"}.get(module, module)
        (major, first), (same, last) = oldest.split("."), newest.split(".")
        assert major == same
        releases = {f"{major}.{minor}" for minor in range(int(first), int(last) + 1)}
        assert set(re.findall(rf"\b{distribution}==({major}\.\d+)\.", pinned)) == releases


@pytest.mark.package
def test_the_page_about_installation():
    page = (ROOT / "docs/getting-started/install.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ([^|]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    wanted = [("Python", PYTHONS[0], PYTHONS[-1])]
    for module, (title, oldest, newest) in frameworks.SUPPORTED.items():
        keras = f", with Keras {frameworks.KERAS_FOR[module]}" if module in frameworks.KERAS_FOR else ""
        wanted.append((title, oldest + keras, newest))
    assert rows == wanted


@pytest.mark.package
def test_the_version_of_a_release():
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [multigrad.__version__]
    headings = re.findall(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", multigrad.__version__]

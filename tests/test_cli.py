"""The command line: its output, its exit status, and the modules that it does not import."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata

import keras
import pytest
from markdown import ROOT

import multigrad
import multigrad.layers
import multigrad.ops
from multigrad.cli import doctor, explain
from multigrad.cli.main import main
from multigrad.common import frameworks

BACKEND = keras.backend.backend()
pytestmark = pytest.mark.package
SECTIONS = explain.sections()
HEAVY = ("keras", "tensorflow", "jax", "torch", "openvino")


def run(*words, **environment):
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def imported_by(program):
    """Return the heavy modules that a program imports."""
    ending = f"; import sys; print([m for m in {HEAVY} if m in sys.modules])"
    done = run("-c", program + ending)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


# -------------------------------------------------------------------------------------------- doctor


def test_doctor_prints_versions_and_the_active_backend():
    done = run("-m", "multigrad", "doctor", KERAS_BACKEND=BACKEND)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line[:12].strip(): line[12:] for line in done.stdout.splitlines()}
    assert lines["Python"] == sys.version.split()[0]
    assert lines["multigrad"] == multigrad.__version__
    assert lines["Keras"].partition(";")[0] == metadata.version("keras")
    if BACKEND in frameworks.SUPPORTED:
        oldest, newest = frameworks.SUPPORTED[BACKEND][1:]
        assert lines[BACKEND].endswith(f"; supported: {oldest} or newer, tested up to {newest}")
    assert lines[BACKEND][0].isdigit()
    assert lines["active"] == f"{BACKEND}, from the environment variable KERAS_BACKEND"


@pytest.mark.parametrize("words", [["doctor"], ["explain", "tensors-on-objects"]])
def test_a_command_imports_neither_keras_nor_a_framework(words):
    assert imported_by(f"from multigrad.cli.main import main; main({words})") == "[]"
    assert "'keras'" in imported_by("import keras")


def test_doctor_prints_how_to_install_missing_backends(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "is_installed", lambda backend: backend not in ("torch", "numpy"))
    monkeypatch.setattr(doctor, "is_importable", lambda module: module != "torch")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert doctor.doctor() == 1
    printed = capsys.readouterr().out
    assert "torch       missing: pip install torch; supported: 2.12 or newer" in printed
    assert f"numpy       {metadata.version('numpy')}, incomplete: pip install" in printed
    assert "torch is not installed" in printed.splitlines()[-1]


def test_doctor_without_keras():
    """`doctor` also runs without the dependencies of Keras, such as rich."""
    hidden = (
        "import importlib.machinery as m; find = m.PathFinder.find_spec; "
        "m.PathFinder.find_spec = lambda name, *rest: "
        "None if name.partition('.')[0] in ('keras', 'rich') else find(name, *rest); "
        "import sys; from multigrad.cli.main import main; sys.exit(main(['doctor']))"
    )
    done = run("-c", hidden, KERAS_BACKEND=BACKEND)
    assert done.returncode == 1, done.stdout + done.stderr
    assert not done.stderr
    oldest = frameworks.oldest_supported("keras", BACKEND)
    assert f"Keras       missing: pip install keras; supported: {oldest} or newer" in done.stdout
    assert done.stdout.endswith("Keras is not installed: pip install keras\n")


def test_doctor_lists_the_backends_for_an_unknown_one():
    done = run("-m", "multigrad", "doctor", KERAS_BACKEND="theano")
    assert done.returncode == 1
    assert "theano, from the environment variable KERAS_BACKEND" in done.stdout
    assert "tensorflow, jax, torch, numpy, openvino" in done.stdout


@pytest.mark.parametrize(
    ("content", "backend", "origin"),
    [
        (json.dumps({"backend": "jax"}), "jax", "{path}"),
        (
            json.dumps({"floatx": "float32"}),
            "tensorflow",
            "Keras's default, because {path} does not set a backend",
        ),
        ("{backend", "tensorflow", "Keras's default, because {path} is not valid JSON"),
        (None, "tensorflow", "Keras's default"),
    ],
)
def test_the_active_backend_without_the_variable(content, backend, origin, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", "")  # Keras treats an empty value as unset
    path = tmp_path / "keras.json"
    if content is not None:
        path.write_text(content)
    found = doctor.active_backend()
    assert found[0] == backend
    assert found[1].startswith(origin.format(path=path))


def test_the_active_backend_is_the_backend_of_keras(tmp_path):
    (tmp_path / "keras.json").write_text(json.dumps({"backend": BACKEND}))
    names = (
        "import keras; from multigrad.cli.doctor import active_backend; "
        "print(keras.backend.backend(), active_backend()[0])"
    )
    done = run("-c", names, KERAS_HOME=str(tmp_path), KERAS_BACKEND="")
    assert done.stdout.split() == [BACKEND, BACKEND], done.stderr


# ------------------------------------------------------------------------------------------- explain


def test_explain_prints_a_section(capsys):
    assert main(["explain", "limits#tensors-on-objects"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "## Tensors on objects (limits#tensors-on-objects)"
    assert any(line.startswith("**What to do:**") for line in lines)
    assert not any(mark in line for line in lines for mark in ("{#", "](", "<!--", "See also"))


def test_explain_lists_the_sections_of_all_pages(capsys):
    assert main(["explain"]) == 0
    listed = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[:-2]]
    limits = re.findall(r"\{#([\w-]+)", (ROOT / "docs" / "limits.md").read_text())
    groups = {"silent", "errors", "jax", "pytorch", "tensorflow"}  # titles without a text
    assert {f"limits#{anchor}" for anchor in limits if anchor not in groups} < set(listed)
    assert len(listed) == len(set(listed))
    assert {"debugging-nan#debug-nan", "faq#why-is-my-gradient-zero", "multigrad.ops.spike"} < set(listed)


def test_explain_lists_the_sections_of_a_page(capsys):
    assert main(["explain", "rules"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("## Rules (rules#rules)")
    assert "rules#forms" in printed.partition("See also:")[2]


def test_each_public_name_has_its_docstring(capsys):
    public = {name for name in multigrad.__all__ if name != "__version__"} | set(multigrad.layers.__all__)
    public |= {name for name in multigrad.ops.__all__ if not hasattr(keras.ops, name)}
    found = {section.anchor for section in explain.sections() if section.page.startswith("multigrad")}
    assert public - found == set()
    assert main(["explain", "fake_quantize"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("## ")
    assert inspect.getdoc(multigrad.ops.fake_quantize) in printed


# The first section of the answer, and questions that it answers.
ANSWERS = {
    "faq#why-is-my-gradient-zero": [
        "my gradient is None",
        "why is my gradient zero?",
        "No gradients provided for any variable",
        "layer not learning",
    ],
    "in-a-model#saving": ["save model", "How do I save a model?", "load a saved model"],
    "mixed-precision#dtypes": ["float16"],
    "large-vocabulary#save-memory": ["memory", "out of memory"],
    "which-op#quantize": [
        "STE",
        "straight through",
        "straight-through estimator",
        "spiking",
        "surrogate gradient",
        "quantization aware training",
    ],
    "variables-and-layers#weights": ["freeze layer", "variables"],
    "rules#several-outputs": ["multiple outputs"],
    "training-loops#training-loops": ["loss.backward()"],
    "mixed-precision#loss-scaling": ["loss scaling"],
    "debugging-nan#common-causes": ["nan gradient", "my loss becomes nan", "exploding gradients"],
    "multigrad.vmap": ["vmap"],
    "second-derivatives#second-derivatives": ["second derivative"],
    "glossary#glossary": ["upstream", "what is upstream", "cotangent", "hook"],
    "first-op#the-op": ["how do I write a custom gradient"],
    "multigrad.op_custom_gradient": ["op_custom_gradient"],
    "several-devices#several-devices": ["GPU", "train on several GPUs"],
    "large-vocabulary#other-memory": ["checkpointing"],
    "which-op#reverse": ["gradient reversal"],
    "install#install": ["install"],
    "which-op#clip": ["How do I clip gradients?", "clip gradient of each example"],
    "which-op#stop": ["stop gradient", "detach"],
    "which-op#scale": ["scale the gradient"],
    "black-boxes-and-native-kernels#python-code-on-numpy-arrays": ["scipy", "call a scipy function"],
    "black-boxes-and-native-kernels#native-kernels": ["cuda kernel"],
    "faq#why-does-jax-raise-an-error-about-a-tracer": ["TracerArrayConversionError"],
    "faq#how-do-i-compute-in-float64": ["x64"],
    "which-op#see": ["print the gradient"],
    "debugging-nan#gradients-in-fit": ["vanishing gradients"],
    "testing-a-rule#test-a-rule": ["check my gradient", "gradcheck"],
    "batches#per-example": ["per-example gradients"],
    "second-derivatives#gradient-penalty": ["WGAN-GP"],
    "second-derivatives#u-xx": ["PINN"],
    "second-derivatives#hessians": ["hessian vector product"],
    "training-loops#loops": ["gradient accumulation"],
    "training-loops#train-step": ["train_step"],
    "training-loops#two-optimizers": ["two optimizers"],
    "training-loops#compile-time": ["why is the first step so slow"],
    "rules#static-arguments": ["integer argument"],
    "rules#complex-tensors": ["complex numbers"],
    "in-a-model#node": ["use an op as an activation", "Functional model"],
    "faq#can-one-process-use-two-backends": ["switch backend"],
    "which-op#solve": ["deep equilibrium model"],
    "from-jax#from-jax": ["custom_vjp"],
    "from-pytorch#from-pytorch": ["save_for_backward"],
    "first-op#shapes": ["matmul gradient shape"],
    "limits#closed-over-arrays": ["Can't call numpy() on Tensor that requires grad"],
    "training-loops#scan": ["RNN cell"],
    "debugging-nan#stable-loss": ["custom loss function"],
    "in-a-model#schedule": ["change the factor during training"],
}


def test_explain_keeps_brackets_in_code(capsys):
    assert main(["explain", "second-derivatives#hessians"]) == 0
    assert "`vjp(grad(f), x)[1](direction)[0]`" in capsys.readouterr().out


@pytest.mark.parametrize(("first", "question"), [(first, q) for first in ANSWERS for q in ANSWERS[first]])
def test_explain_answers_a_question_with_the_right_section_first(first, question, capsys, monkeypatch):
    monkeypatch.setattr(explain, "sections", lambda: SECTIONS)
    assert main(["explain", *question.split()]) == 0
    assert f"({first})" in capsys.readouterr().out.splitlines()[0]


def test_explain_adds_the_imports_of_the_page_to_a_block():
    section = next(s for s in explain.sections() if s.name == "which-op#scale")
    code = re.search(r"```python\n(.*?)```", section.with_imports(), re.DOTALL)[1]
    assert code.startswith("from multigrad import grad, op_custom_gradient, ops, trace_gradients\n\n")


def test_explain_lists_three_sections_if_none_has_all_words(capsys):
    assert main(["explain", "gradient", "zebra"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("No section has all of these words")
    assert len([line for line in lines if "#" in line]) == 3


def test_explain_names_similar_sections(capsys):
    assert main(["explain", "forwad-mod"]) == 1
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith("multigrad explain: no section contains 'forwad-mod'.")
    assert "nearest: limits#forward-mode  Forward mode" in printed.err
    assert main(["explain", "qqqq"]) == 1
    assert "nearest" not in capsys.readouterr().err


def test_explain_renders_a_section_in_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["explain", "limits#tensors-on-objects"]) == 0
    printed = capsys.readouterr().out
    assert "What to do:" in printed
    assert "**" not in printed
    monkeypatch.setattr(explain, "find_spec", lambda module: None)  # rich is not installed
    assert main(["explain", "limits#tensors-on-objects"]) == 0
    assert "**What to do:**" in capsys.readouterr().out


def test_explain_in_an_installed_package(tmp_path):
    """The pages are copied into the package, as in a wheel. `nox -s release` tests an installed wheel."""
    shutil.copytree(ROOT / "multigrad", tmp_path / "multigrad")
    (tmp_path / "multigrad" / "pages" / "guides").mkdir(parents=True)
    page = "# Page\n\n## Title {#anchor}\n\nText.\n"
    (tmp_path / "multigrad" / "pages" / "guides" / "page.md").write_text(page)
    done = run("-P", "-m", "multigrad", "explain", "page#anchor", PYTHONPATH=str(tmp_path))
    assert done.stdout == "## Title (page#anchor)\n\nText.\n", done.stderr
    missing = run("-P", "-m", "multigrad", "explain", "limits#forward-mode", PYTHONPATH=str(tmp_path))
    assert missing.returncode == 1


def test_a_wheel_contains_the_pages_of_explain():
    shipped = re.search(
        r"^_PAGES = (\(.+?\))", (ROOT / "hatch_build.py").read_text(), re.DOTALL | re.MULTILINE
    )[1]
    assert sorted(ast.literal_eval(shipped)) == sorted(page.removesuffix("/*.md") for page in explain.PAGES)


def test_explain_ends_when_its_reader_does():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "multigrad", "explain"]
    done = subprocess.run(command, check=False, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


# ---------------------------------------------------------------------------------------- frameworks


def test_a_folder_without_a_module_is_not_an_installed_framework(tmp_path, monkeypatch):
    (tmp_path / "leftover").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not frameworks.is_installed("leftover")
    (tmp_path / "leftover" / "__init__.py").touch()
    assert frameworks.is_installed("leftover")
    assert frameworks.version_of("leftover") == "version unknown"


# ------------------------------------------------------------------------------- arguments, bad input


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"multigrad {multigrad.__version__}\n"


@pytest.mark.parametrize(("words", "said"), [([], "required: COMMAND"), (["dance"], "'dance'")])
def test_invalid_arguments(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err

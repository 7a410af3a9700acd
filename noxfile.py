"""The project's checks, each in an environment of its own. `nox -l` lists them.

`nox` runs the fast checks: lint, types, docs, the fast tests and notebooks of every backend, and the session
`package`. `nox -s full` adds the slow tests and the slow checks. `nox -s "tests(jax)"` runs the fast tests of
one backend, and `nox -s "tests(jax)" -- -k upstream` selects some of them.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nox

nox.needs_version = ">=2026.8.17"  # for --parallel, which nox calls experimental
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True
nox.options.error_on_external_run = True

GROUPS = nox.project.dependency_groups
PYPROJECT = nox.project.load_toml("pyproject.toml")

# The requirements of each backend. Keras, which requires NumPy, is installed with multigrad.
REQUIREMENTS = {
    "tensorflow": ["tensorflow-cpu"],
    "jax": ["jax", "flatbuffers"],  # jax.export needs flatbuffers
    "torch": ["torch"],
    "numpy": ["jax"],  # Keras's NumPy backend takes its convolutions and pooling from JAX
    "openvino": ["openvino", "scipy"],  # Keras's OpenVINO backend imports SciPy
}
DIFFERENTIATING = ("tensorflow", "jax", "torch")

# The oldest and the newest versions of the table in multigrad/common/frameworks.py. A test compares them.
OLDEST_PYTHON, NEWEST_PYTHON = "3.11", "3.13"
OLDEST = {
    "tensorflow": ["tensorflow-cpu==2.17.0", "keras==3.12.0"],
    "jax": ["jax==0.7.0", "jaxlib==0.7.0", "flatbuffers", "keras==3.12.0"],
    "torch": ["torch==2.12.0", "keras==3.15.0"],
}
NEWEST = {
    "tensorflow": ["tensorflow-cpu==2.21.*", "keras==3.15.*"],
    "jax": ["jax==0.12.*", "flatbuffers", "keras==3.15.*"],
    "torch": ["torch==2.15.*", "keras==3.15.*"],
}
# Releases between them that no other session installs. Each may have other private functions, and so do two
# releases of JAX 0.11.
BETWEEN = {
    "tensorflow-2.18": (OLDEST_PYTHON, "tensorflow", "tensorflow-cpu==2.18.*"),
    "tensorflow-2.19": (OLDEST_PYTHON, "tensorflow", "tensorflow-cpu==2.19.*"),
    "tensorflow-2.20": (OLDEST_PYTHON, "tensorflow", "tensorflow-cpu==2.20.*"),
    "tensorflow-keras-3.13": (OLDEST_PYTHON, "tensorflow", "keras==3.13.*"),
    "tensorflow-keras-3.14": (OLDEST_PYTHON, "tensorflow", "keras==3.14.*"),
    "jax-0.8": (OLDEST_PYTHON, "jax", "jax==0.8.*"),
    "jax-0.9": (OLDEST_PYTHON, "jax", "jax==0.9.*"),
    "jax-0.11.0": (NEWEST_PYTHON, "jax", "jax==0.11.0"),
    "jax-0.11": (NEWEST_PYTHON, "jax", "jax==0.11.*"),
    "jax-keras-3.13": (OLDEST_PYTHON, "jax", "keras==3.13.*"),
    "jax-keras-3.14": (OLDEST_PYTHON, "jax", "keras==3.14.*"),
    "torch-2.14": (OLDEST_PYTHON, "torch", "torch==2.14.*"),
}
BETWEEN_TESTS = (
    "tests/transforms",
    "tests/test_answers.py",
    "tests/test_training_steps.py",
)
# What the session `gpu` installs if there is an NVIDIA GPU. PyTorch's build on PyPI supports CPUs and GPUs.
FOR_A_GPU = {
    "tensorflow": ["tensorflow[and-cuda]"],
    "jax": ["jax[cuda13]", "flatbuffers"],
    "torch": ["torch"],
}
MODULES = ("tensorflow", "jax", "torch", "openvino")

# Hide TensorFlow's notices about processor instructions, which would fill the output. Store bytecode, also
# where the variable of the caller forbids it: without, each process compiles its framework again, in 10 s.
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "PYTHONDONTWRITEBYTECODE": ""}

# JAX's tests compile thousands of small programs. Fewer optimizations halve the time. JAX aborts on unknown
# flags, and 0.11.2 has removed one of these, so only sessions with the versions of constraints.txt set them.
COMPILE_FAST = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false"
}


FAST = ("lint", "types", "docs", "tests", "package")
LONG = ("keras_tests", "tfp", "export", "demo", "planted_faults")

EVERY_TEST = ("-m", "")  # replaces the `-m` of pyproject.toml


def install(session: nox.Session, *requirements: str) -> None:
    """Install with pip, in the versions of constraints.txt. These also apply to the build of the package.

    Only imported modules are compiled to bytecode. Compiling all modules takes a minute per framework.
    """
    held = ("--constraint", "constraints.txt", "--build-constraint", "constraints.txt")
    session.install("--no-compile", *held, *requirements)


def discard(session: nox.Session) -> None:
    """Remove the environment of the session on CI, which uses it once. All environments take 6 GB."""
    if os.environ.get("CI"):
        shutil.rmtree(session.virtualenv.location)


def run_two_at_a_time(session: nox.Session, *words: str) -> None:
    """Run sessions with nox, which prints at the end how long each of them took.

    One session installs packages while the other one runs tests.
    """
    command = (sys.executable, "-m", "nox", "--parallel", "2", "--allow-parallel", "--session", *words)
    session.run(*command, external=True)


@nox.session(venv_backend="none")
def fast(session: nox.Session) -> None:
    """Lint, types, the fast tests and notebooks of every backend, and the tests of the package."""
    run_two_at_a_time(session, *FAST)


@nox.session(venv_backend="none", default=False)
def full(session: nox.Session) -> None:
    """Every check: the slow tests too, every notebook on every backend, and many random programs."""
    tests = ("lint", "types", "docs", "tests")  # these include the tests of `package`
    run_two_at_a_time(session, *tests, "--", *EVERY_TEST)
    run_two_at_a_time(session, *LONG)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the site in `site/`. A broken link, a missing name or an asset of another host is an error."""
    install(session, *GROUPS(PYPROJECT, "docs"))  # the API pages are read from the source
    # Hide Material's notice about its successor, which is not a warning about the build.
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(default=False)
def lint(session: nox.Session) -> None:
    """Ruff: rules and format. Import-linter: no folder imports one above it."""
    install(session, *GROUPS(PYPROJECT, "lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports")


@nox.session(default=False)
def types(session: nox.Session) -> None:
    """Mypy, strict. pyproject.toml lists the checked files, and the reason for each exception."""
    install(session, *GROUPS(PYPROJECT, "types"), "--editable", ".")
    session.run("mypy")


@nox.session(default=False)
@nox.parametrize("backend", list(REQUIREMENTS), ids=list(REQUIREMENTS))
def tests(session: nox.Session, backend: str) -> None:
    """The fast tests and notebooks of one backend, with no other framework installed.

    `-- -m ""` runs every test and notebook, and `-- tests/notebooks.py -m "" --store` stores their outputs.
    """
    groups, extras = ["test"], ""
    if backend in DIFFERENTIATING:
        groups, extras = ["test", "notebooks", "demo"], "[plot]"
    install(session, *GROUPS(PYPROJECT, *groups), "--editable", f".{extras}", *REQUIREMENTS[backend])
    run_pytest(session, backend, COMPILE_FAST if backend == "jax" else {})


def run_pytest(
    session: nox.Session, backend: str, environment: dict[str, str], selection: Sequence[str] = ()
) -> None:
    """Run tests on one backend, by default all fast ones, after a check that no other one is installed."""
    # One thread per process, because two sessions run at a time and would compete for the cores.
    environment = ENVIRONMENT | environment | {"KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    session.run("python", "-c", _only(backend), env=environment)
    session.run("pytest", *selection, *session.posargs, env=environment)
    discard(session)


def fast_tests(
    session: nox.Session, backend: str, *requirements: str, selection: Sequence[str] = (), **environment: str
) -> None:
    """Run fast tests with these requirements, without the versions in constraints.txt.

    pip chooses the versions of the frameworks' dependencies, because each framework requires different ones.
    """
    session.install("--no-compile", "--build-constraint", "constraints.txt", "--editable", ".", *requirements)
    session.run("pip", "list")
    run_pytest(session, backend, environment, selection)


def tools_in_known_versions() -> list[str]:
    """Return only the requirements of the tests, in the versions of constraints.txt."""
    lines = Path("constraints.txt").read_text().splitlines()
    versions = dict(line.split("==") for line in lines if "==" in line)
    return [f"{name}=={versions[name]}" for name in GROUPS(PYPROJECT, "test")]


@nox.session(default=False, python=OLDEST_PYTHON)
@nox.parametrize("backend", DIFFERENTIATING, ids=DIFFERENTIATING)
def oldest(session: nox.Session, backend: str) -> None:
    """The fast tests on the oldest supported versions of one backend, Keras and Python."""
    fast_tests(session, backend, *tools_in_known_versions(), *OLDEST[backend])


@nox.session(default=False, python=NEWEST_PYTHON)
@nox.parametrize("backend", DIFFERENTIATING, ids=DIFFERENTIATING)
def newest(session: nox.Session, backend: str) -> None:
    """The fast tests on the newest supported versions of one backend, Keras and Python."""
    fast_tests(session, backend, *tools_in_known_versions(), *NEWEST[backend])


@nox.session(default=False)
@nox.parametrize("python,backend,release", list(BETWEEN.values()), ids=list(BETWEEN))
def between(session: nox.Session, backend: str, release: str) -> None:
    """The tests of a backend and of transformations, on a release between the oldest and the newest."""
    requirements = [*tools_in_known_versions(), *REQUIREMENTS[backend], release]
    fast_tests(session, backend, *requirements, selection=BETWEEN_TESTS)


@nox.session(default=False, python=NEWEST_PYTHON)
@nox.parametrize("backend", DIFFERENTIATING, ids=DIFFERENTIATING)
def unpinned(session: nox.Session, backend: str) -> None:
    """The fast tests on the newest versions in the package index, of one backend and everything else.

    Pre-releases are included. pytest's summary at the end names each test that fails.
    """
    newest = ("--upgrade", "--pre")
    fast_tests(session, backend, *newest, *GROUPS(PYPROJECT, "test"), "keras", *REQUIREMENTS[backend])


# Options of JAX 0.12. Older versions ignore unknown options. JAX_SCAN3 is absent, because a scan has no
# gradient with it in 0.12.0, even without an op.
JAX_PREVIEWS = ("JAX_CUSTOM_VJP3", "JAX_CUSTOM_JVP3", "JAX_REMAT3")


@nox.session(default=False, python=NEWEST_PYTHON)
def jax_previews(session: nox.Session) -> None:
    """The fast tests with new primitives of JAX, which are behind options and may become the default."""
    previews = dict.fromkeys(JAX_PREVIEWS, "1")
    fast_tests(session, "jax", *tools_in_known_versions(), *NEWEST["jax"], **previews)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build the distributions in `dist/`, check them, and use the wheel with JAX outside of the clone."""
    install(session, *GROUPS(PYPROJECT, "release"))
    dist, constraints = Path("dist").resolve(), Path("constraints.txt").resolve()
    shutil.rmtree(dist, ignore_errors=True)
    # Builds the wheel from the sdist, which must be complete.
    session.run("python", "-m", "build", "--outdir", str(dist), env={"PIP_CONSTRAINT": str(constraints)})
    wheel, sdist = *dist.glob("*.whl"), *dist.glob("*.tar.gz")
    session.run("twine", "check", "--strict", str(wheel), str(sdist))
    session.run("check-wheel-contents", str(wheel))
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/venv/bin/python"
        session.run("python", "-m", "venv", f"{folder}/venv")
        pip = (python, "-m", "pip", "install", "--no-compile", "--constraint", str(constraints))
        session.run(*pip, "--quiet", f"keras-multigrad[jax] @ file://{wheel}", external=True)
        example, printed = first_example()
        files = {"example.py": example, "smoke.py": Path("tests/smoke.py").read_text()}
        for name, code in files.items():
            (Path(folder) / name).write_text(code)
        environment = ENVIRONMENT | {"KERAS_BACKEND": "jax"}
        with session.chdir(folder):
            session.run(python, "-c", _only("jax"), env=environment, external=True)
            output = session.run(python, "example.py", env=environment, external=True, silent=True)
            if output.split() != printed.split():
                session.error(f"The README's first example prints {output!r} and not {printed!r}.")
            session.run(python, "smoke.py", env=environment, external=True)
            for command in [f"{folder}/venv/bin/multigrad"], [python, "-m", "multigrad"]:
                session.run(*command, "doctor", env=environment, external=True)
            # The wheel contains pages of the documentation, so `explain` works without the clone.
            for section in ("limits#forward-mode", "debugging-nan#common-causes", "faq"):
                session.run(python, "-m", "multigrad", "explain", section, external=True)


def first_example() -> tuple[str, str]:
    """Return the first Python block of the README, and what it prints according to its comments."""
    code = re.search(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)[1]
    return code, "\n".join(re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE))


@nox.session(default=False)
def package(session: nox.Session) -> None:
    """The tests that are the same on every backend: the command line, the documentation, processes.

    They run on JAX, because it installs fastest.
    """
    install(session, *GROUPS(PYPROJECT, "test"), "--editable", ".", *REQUIREMENTS["jax"])
    environment = ENVIRONMENT | COMPILE_FAST | {"KERAS_BACKEND": "jax", "OMP_NUM_THREADS": "1"}
    session.run("python", "-c", _only("jax"), env=environment)
    session.run("pytest", *(session.posargs or ["-m", "package and not slow"]), env=environment)
    discard(session)


def _only(backend: str) -> str:
    """Return a program that fails unless Keras starts on this backend and no other framework is installed.

    A session must fail if its backend is missing. With another framework installed, tests could pass that
    would fail without it.
    """
    own = backend if backend in MODULES else REQUIREMENTS[backend][0]
    return (
        f"import importlib.util, keras, {own}; "
        f"assert keras.backend.backend() == {backend!r}, keras.backend.backend(); "
        f"found = [module for module in {MODULES} if importlib.util.find_spec(module)]; "
        f"assert found == [{own!r}], found"
    )


# Keras's tests of its own `custom_gradient`, and of code that uses it. See tests/keras_own.py.
KERAS_TESTS = (
    "keras.src.ops.core_test",
    "keras.src.quantizers.quantizers_test",
    "keras.src.layers.core.dense_test",
    "keras.src.layers.core.einsum_dense_test",
    "keras.src.layers.core.reversible_embedding_test",
)
KERAS_WORDS = "custom_gradient or fake_quant or quantize or int4 or int8 or float8 or lora"


@nox.session(default=False)
@nox.parametrize("backend", DIFFERENTIATING, ids=DIFFERENTIATING)
def keras_tests(session: nox.Session, backend: str) -> None:
    """Keras's own tests on one backend, with multigrad's op in place of `keras.ops.custom_gradient`."""
    install(session, *GROUPS(PYPROJECT, "test"), "--editable", ".", *REQUIREMENTS[backend])
    environment = ENVIRONMENT | {"KERAS_BACKEND": backend, "PYTHONPATH": "tests"}
    session.run("python", "-c", _only(backend), env=environment)
    options = ["-n", "2", "-p", "keras_own", "-c", "pyproject.toml", "-W", "ignore", "-k", KERAS_WORDS]
    session.run("pytest", *options, "--pyargs", *KERAS_TESTS, *session.posargs, env=environment)


@nox.session(default=False)
def tfp(session: nox.Session) -> None:
    """The blocks of the guide for TensorFlow code, with its example of TensorFlow Probability."""
    tools, backend = GROUPS(PYPROJECT, "test"), REQUIREMENTS["tensorflow"]
    install(session, *tools, "--editable", ".", *backend, "tensorflow-probability")
    # TensorFlow Probability imports tf-keras, which requires another build of TensorFlow.
    install(session, "--no-deps", "tf-keras")
    environment = ENVIRONMENT | {"KERAS_BACKEND": "tensorflow"}
    # Without the package, the test would skip the example.
    session.run("python", "-c", "import tensorflow_probability", env=environment)
    # TensorFlow Probability (0.25) uses the deprecated distutils.
    options = ("-W", "ignore:distutils:DeprecationWarning", "-k", "from-tensorflow", *session.posargs)
    session.run("pytest", "tests/test_documentation.py", *options, env=environment)


# In these sessions, a missing framework must be an error.
ALL_INSTALLED = (
    "from multigrad.common.frameworks import DIFFERENTIATING, is_installed; "
    "missing = [name for name in DIFFERENTIATING if not is_installed(name)]; "
    "assert not missing, missing"
)


FRAMEWORKS = [*REQUIREMENTS["tensorflow"], *REQUIREMENTS["jax"], *REQUIREMENTS["torch"]]


@nox.session(default=False)
def export(session: nox.Session) -> None:
    """Every format in which Keras exports models, with all frameworks and converters in one environment."""
    groups = GROUPS(PYPROJECT, "test", "export")
    install(session, *groups, "--editable", ".", *FRAMEWORKS)
    session.run("python", "-c", ALL_INSTALLED)
    # A converter requires anyio (4.14), whose pytest plugin uses names that are deprecated in pytest 9.1.
    pytest = ("pytest", "-p", "no:anyio", "tests/export", *session.posargs)
    for backend in ("tensorflow", "jax", "torch"):
        session.run(*pytest, env=ENVIRONMENT | {"KERAS_BACKEND": backend})


@nox.session(default=False)
def planted_faults(session: nox.Session) -> None:
    """Plant faults in a copy of the package. For each fault, a test or a random program must fail."""
    install(session, *GROUPS(PYPROJECT, "test"), "--editable", ".", *FRAMEWORKS)
    session.run("python", "-c", ALL_INSTALLED)
    for backend in DIFFERENTIATING:
        command = ("python", "tests/mutants.py", "planted", *session.posargs)
        session.run(*command, env=ENVIRONMENT | {"KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"})


@nox.session(default=False)
@nox.parametrize("backend", DIFFERENTIATING, ids=DIFFERENTIATING)
def mutants(session: nox.Session, backend: str) -> None:
    """Random faults in a copy of the package, on one backend; `-- 30 7` takes 30 of them with the seed 7."""
    install(session, *GROUPS(PYPROJECT, "test"), "coverage", "--editable", ".", *REQUIREMENTS[backend])
    environment = ENVIRONMENT | {"KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    environment |= COMPILE_FAST if backend == "jax" else {}
    session.run("python", "-c", _only(backend), env=environment)
    session.run("python", "tests/mutants.py", *session.posargs, env=environment)


@nox.session(default=False)
@nox.parametrize("backend", DIFFERENTIATING, ids=DIFFERENTIATING)
def audit(session: nox.Session, backend: str) -> None:
    """Audit the gradients of `keras.ops` on one backend, and store them; `-- hypot` prints those of an op."""
    install(session, "--editable", ".", *REQUIREMENTS[backend])
    environment = ENVIRONMENT | {"KERAS_BACKEND": backend, "PYTHONPATH": "tests"}
    environment |= COMPILE_FAST if backend == "jax" else {}
    session.run("python", "-m", "audit", *session.posargs, env=environment)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """The demo, on all three frameworks in one environment."""
    install(session, *GROUPS(PYPROJECT, "demo"), "--editable", ".", *FRAMEWORKS)
    session.run("python", "-c", ALL_INSTALLED)
    session.run("python", "examples/demo", *session.posargs)


@nox.session(default=False)
@nox.parametrize("backend", DIFFERENTIATING, ids=DIFFERENTIATING)
def bench(session: nox.Session, backend: str) -> None:
    """The overhead of an op on one backend, compared with hand-written rules. `-- --help` lists options."""
    install(session, *GROUPS(PYPROJECT, "bench"), "--editable", ".", *REQUIREMENTS[backend])
    # One thread, because work in other threads would hide the overhead.
    environment = ENVIRONMENT | {"KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    session.run("python", "-m", "benchmarks", *session.posargs, env=environment)


@nox.session(default=False)
@nox.parametrize("backend", DIFFERENTIATING, ids=DIFFERENTIATING)
def gpu(session: nox.Session, backend: str) -> None:
    """Run the fast tests and the benchmarks on the accelerator, and write a report to `gpu-<backend>.md`.

    This takes ten minutes. Where both are installed, `python -m benchmarks.accelerator jax torch` writes two
    reports in the same time.
    """
    frameworks = (FOR_A_GPU if shutil.which("nvidia-smi") else REQUIREMENTS)[backend]
    install(session, *GROUPS(PYPROJECT, "test", "bench"), "--editable", ".", *frameworks)
    session.run("python", "-m", "benchmarks.accelerator", backend, *session.posargs, env=ENVIRONMENT)

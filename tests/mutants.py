"""Faults in a copy of the package, to measure the power of the tests: a test must fail for each fault.

    KERAS_BACKEND=jax python tests/mutants.py          # 100 random faults ("mutants")
    KERAS_BACKEND=jax python tests/mutants.py 30 7     # 30 mutants of the sample with seed 7
    KERAS_BACKEND=jax python tests/mutants.py 30 7 tests/test_answers.py    # only the tests of a file
    KERAS_BACKEND=jax python tests/mutants.py planted cast    # planted_faults.py, the names with this word

A sample takes the same number of mutants from each folder. Except for those of `backend/`, they are the same
on each backend. A smaller sample is the start of a larger one.

One run of the fast tests with coverage.py records the tests that reach each line. Then each mutant runs the
tests that reach its line, the shortest first, until one fails. The program prints a Markdown table.

Each run is a fork of this process, which has imported the framework, but has not started any thread of it.
"""

import ast
import builtins
import contextlib
import importlib
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import planted_faults
import pytest

ROOT = Path(__file__).parent.parent
BACKEND = keras.backend.backend()
FOLDERS = ("core", f"backend/{BACKEND}", "calculus", "ops", "testing")
# JAX's fast tests include the session `package`.
FAST = ("-m", "not slow" if BACKEND == "jax" else "not slow and not package")

LOG = "log.txt"

# The tests of one mutant take at most this many seconds in the run without a mutant ...
LONGEST = 60.0
# ... and a mutant times out after this many times as long, and a minute.
PATIENCE = 5

# A planted fault is found by one of so many random programs, within an hour.
PROGRAMS, HOUR = 200, 3600.0

# The mutants of an operator.
OPERATORS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.Pow: ("**", "*"),
    ast.FloorDiv: ("//", "/"), ast.Mod: ("%", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
}  # fmt: skip
REMOVED = (ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete)
CONDITIONS = (ast.Name, ast.Attribute, ast.Call, ast.NamedExpr)


class Mutant(NamedTuple):
    """A file of the package, a part of its source, and the text that replaces this part."""

    file: str
    line: int
    start: int
    end: int
    new: str
    function: range
    """The lines of the function around the mutant, if there is one."""


class File:
    """A file of the package. The position of a node is counted in bytes.

    Arguments:
        name: its path in the repository.
    """

    def __init__(self, name: str) -> None:
        self.name, self.source = name, (ROOT / name).read_bytes()
        self.lines = [0, *itertools.accumulate(map(len, self.source.splitlines(keepends=True)))]

    def start(self, node: Any) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def end(self, node: Any) -> int:
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: Any) -> str:
        return self.source[self.start(node) : self.end(node)].decode()

    def mutants(self) -> Iterator[Mutant]:
        """Yield all mutants of the file."""
        for node, function in code_below(ast.parse(self.source), None):
            found = [(self.start(part), self.end(part), new) for part, new in self._changed(node)]
            for start, end, new in [*found, *self._exchanged(node, function is not None)]:
                if self.source[start:end] != new.encode():
                    line = self.source.count(b"\n", 0, start) + 1
                    yield Mutant(self.name, line, start, end, new, function or range(line, line + 1))

    def _changed(self, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
        """Yield a part of a node, and the text that replaces it. A statement is removed by `pass`."""
        match node:
            case ast.Constant(bool(value)):
                yield node, str(not value)
            case ast.Constant(int(value)):
                yield node, str(value + 1)
            case ast.UnaryOp(ast.Not() | ast.USub(), operand):
                yield node, f"({self.text(operand)})"
            case ast.Return(ast.AST() as value) if self.text(value) != "None":
                yield value, "None"
            case ast.If() | ast.IfExp() | ast.While() if isinstance(node.test, CONDITIONS):
                yield node.test, f"(not ({self.text(node.test)}))"
            case ast.Expr(ast.Call()) | ast.Assign([ast.Attribute() | ast.Subscript()]):
                yield node, "pass"
        if isinstance(node, REMOVED):
            yield node, "pass"

    def _exchanged(self, node: ast.AST, in_function: bool) -> Iterator[tuple[int, int, str]]:
        """Yield the place of an operator with another one, or of two arguments in the other order."""
        match node:
            case ast.Call(called, [left, right, *_]) if ast.Starred not in (type(left), type(right)):
                if not hasattr(builtins, self.text(called)):  # `isinstance` would raise at once
                    between = self.source[self.end(left) : self.start(right)].decode()
                    yield self.start(left), self.end(right), self.text(right) + between + self.text(left)
                return
            case ast.Compare(left, [operator], [right]) | ast.BinOp(left, operator, right):
                pass
            case ast.BoolOp(operator, [left, right, *_]):
                pass
            case _:
                return
        # Outside of functions, `|` is a union of types.
        if type(operator) in OPERATORS and (in_function or not isinstance(operator, ast.BitOr)):
            start, end = self.end(left), self.start(right)
            yield start, end, self.source[start:end].decode().replace(*OPERATORS[type(operator)])


def code_below(node: ast.AST, function: range | None) -> Iterator[tuple[ast.AST, range | None]]:
    """Yield the nodes of the code that runs, each with the lines of its function.

    Types, f-strings and the argument `strict` of `zip` are skipped.
    """
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_skipped = isinstance(child, ast.JoinedStr) or getattr(child, "arg", None) == "strict"
            if isinstance(child, ast.AST) and not is_skipped:
                is_function = isinstance(child, ast.FunctionDef)
                inner = range(child.lineno, child.end_lineno + 1) if is_function else function
                yield child, inner
                yield from code_below(child, inner)


def sample(count: int, seed: int) -> list[Mutant]:
    """Return a sample with the same number of mutants from each folder."""
    drawn = []
    for folder in FOLDERS:
        files = sorted((ROOT / "multigrad" / folder).rglob("*.py"))
        mutants = [mutant for file in files for mutant in File(str(file.relative_to(ROOT))).mutants()]
        random.Random(seed).shuffle(mutants)
        drawn.append(mutants)
    return [mutants[number] for number in range(count) for mutants in drawn if number < len(mutants)][:count]


class Recorder:
    """A plugin of pytest that records the duration of tests that pass, and the lines that they reach."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        result = yield
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.outcome == "passed":
            self.seconds[report.nodeid] = report.duration


class Selection:
    """A plugin of pytest that runs the given tests, in this order."""

    def __init__(self, tests: list[str]) -> None:
        self.rank = {test: number for number, test in enumerate(tests, 1)}
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(filter(self.place, items), key=self.place)

    def place(self, item: pytest.Item) -> int | None:
        """Return the position of a test, which is listed as a case, as a function or by its file."""
        names = [item.nodeid, *[item.nodeid.partition(mark)[0] for mark in ("[", "::")]]
        return next((self.rank[name] for name in names if name in self.rank), None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "failed":
            self.failed = report.nodeid


def run_pytest(plugin: Any, *arguments: str) -> int:
    """Run pytest in the current folder."""
    options = ("-q", "-p", "no:cacheprovider", "--tb=short", "--no-showlocals", "--ignore=tests/notebooks.py")
    return int(pytest.main([*options, *FAST, *arguments], plugins=[plugin]))


def record(results: Any, files: list[str], arguments: list[str]) -> None:
    """Run the fast tests, and send the seconds of each test, and the tests of each line of the files."""
    from coverage import Coverage

    coverage = Coverage(data_file=None, include=files, config_file=False)
    coverage.start()
    recorder = Recorder(coverage)
    run_pytest(recorder, *arguments)
    coverage.stop()
    data = coverage.get_data()
    lines = {file: data.contexts_by_lineno(str(Path(file).resolve())) for file in files}
    results.put((recorder.seconds, lines))


def kill(results: Any, tests: list[str], *arguments: str) -> None:
    """Run tests until one fails, and send pytest's exit status and the name of the test."""
    selection = Selection(tests)
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    status = run_pytest(selection, "-x", *files, *arguments)
    results.put((status, selection.failed))


def child(folder: Path, function: Callable[..., None], results: Any, *arguments: Any) -> None:
    """Call the function in a folder, with the packages and tests of this folder."""
    os.setsid()
    os.chdir(folder)
    sys.path[0] = os.environ["PYTHONPATH"] = str(folder)  # also in processes that a test starts
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path[:0] = [str(folder / "tests"), str(folder / "tests/transforms")]
    function(results, *arguments)


def in_child(folder: Path, limit: float, function: Callable[..., None], *arguments: Any) -> Any:
    """Return what a function sends from a fork of this process.

    Return None if the fork ends without it, or after a time limit in seconds.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a thread runs, so this process cannot fork")
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=child, args=(folder, function, results, *arguments))
    process.start()
    end = time.monotonic() + limit
    while results.empty() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.1)
    sent = None if results.empty() else results.get()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also the processes that a test started
    process.join()
    return sent


def tests_of(mutant: Mutant, seconds: dict[str, float], lines: dict[int, list[str]]) -> list[str]:
    """Return the tests that reach the line of a mutant, else its function, else its file, the shortest first.

    No test reaches a line that runs when the module is imported, or that only a compiler reads.
    """
    parts = ([mutant.line], mutant.function, lines)
    found = [{test for line in part for test in lines.get(line, ())} & seconds.keys() for part in parts]
    fastest = sorted(next(filter(None, found), ()), key=lambda test: (seconds[test], test))
    totals = itertools.accumulate(seconds[test] for test in fastest)
    return [test for test, total in zip(fastest, totals, strict=True) if total < LONGEST]


@contextlib.contextmanager
def replaced(path: Path, start: int, end: int, new: bytes) -> Iterator[None]:
    """Replace a part of a file, counted in bytes, for a while."""
    source = path.read_bytes()
    path.write_bytes(source[:start] + new + source[end:])
    try:
        yield
    finally:
        path.write_bytes(source)


def result_of(mutant: Mutant, folder: Path, tests: list[str], limit: float) -> tuple[str, str]:
    """Plant a mutant in the folder, and return whether the tests killed it, and the test that did."""
    with replaced(folder / mutant.file, mutant.start, mutant.end, mutant.new.encode()):
        sent = in_child(folder, limit, kill, tests)
    if sent is None:
        return "killed", "crash, or time limit"
    status, test = sent
    if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return "survived", ""
    return "killed", test or "the import fails"


def run_programs(results: Any) -> None:
    """Run random programs until one fails, and send its number."""
    from test_random_programs import check, check_forgetful, drawn

    for number in range(PROGRAMS):
        text = drawn(number, 1)[f"seed {number}"]
        try:
            check(text)
            check_forgetful(text)
        except BaseException as error:  # noqa: BLE001 - pytest.raises fails by an exception of its own
            results.put(f"program {number}: {type(error).__name__}")
            return
    results.put("")


def row(mutant: Mutant, *cells: object) -> str:
    """Return a row of the table: the place of the mutant, the old and the new text, and further cells."""
    old = (ROOT / mutant.file).read_bytes()[mutant.start : mutant.end].decode()
    texts = [" ".join(text.split()).replace("|", "\\|") for text in (old, mutant.new)]
    place = f"{mutant.file.removeprefix('multigrad/')}:{mutant.line}"
    return f"| {' | '.join(map(str, [place, *(f'`{text}`' for text in texts), *cells]))} |"


@contextlib.contextmanager
def project() -> Iterator[Path]:
    """Make a copy of the project for a while."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        for part in ("multigrad", "tests", "benchmarks", "docs", "examples"):
            shutil.copytree(ROOT / part, folder / part, True, shutil.ignore_patterns("__pycache__"))
        for file in ("pyproject.toml", "noxfile.py", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
            shutil.copy(ROOT / file, folder)
        yield folder


def plant(words: list[str]) -> int:
    """Plant each fault of `planted_faults.py` on the active backend, and print what finds it.

    Arguments:
        words: select the faults whose names contain one of them. Without words, random programs also run on
            the unchanged copy, where none may fail.
    """
    unchanged = planted_faults.Fault("no fault", BACKEND, "core/call.py", "", "")
    chosen = [fault for fault in planted_faults.FAULTS if any(word in fault.name for word in words)]
    wrong = 0
    with project() as folder:
        for fault in chosen if words else [unchanged, *planted_faults.FAULTS]:
            if BACKEND not in fault.backends.split():
                continue
            path = folder / "multigrad" / fault.file
            start = path.read_bytes().index(fault.old.encode())
            with replaced(path, start, start + len(fault.old.encode()), fault.new.encode()):
                if fault.tests:
                    sent = in_child(folder, PATIENCE * LONGEST, kill, fault.tests.split(), "-m", "")
                    found = "crash, or time limit" if sent is None else sent[1]
                else:
                    sent = in_child(folder, HOUR, run_programs)
                    found = "crash, or time limit" if sent is None else sent
            wrong += bool(found) is (fault is unchanged)
            print(f"{BACKEND:<11} {fault.name:<72} {found or 'not found'}", flush=True)
    return bool(wrong)


def mutate(count: int = 100, seed: int = 0, *arguments: str) -> int:
    """Print the result of each mutant of a sample. Further arguments are passed to pytest."""
    mutants, outcomes = sample(count, seed), []
    with project() as folder:
        files = sorted({mutant.file for mutant in mutants})
        recorded = in_child(folder, float("inf"), record, files, list(arguments))
        if recorded is None:
            raise RuntimeError((folder / LOG).read_text())
        seconds, lines = recorded
        print("| Place | Code | Mutant | Result | Tests | Test that fails |")
        print("|---" * 6 + "|")
        for mutant in mutants:
            tests = tests_of(mutant, seconds, lines[mutant.file])
            limit = 60 + PATIENCE * sum(seconds[test] for test in tests)
            outcome, test = result_of(mutant, folder, tests, limit) if tests else ("survived", "")
            outcomes.append(outcome)
            print(row(mutant, outcome, len(tests), test), flush=True)
    survived = outcomes.count("survived")
    print(f"\n{len(outcomes) - survived} of {len(outcomes)} mutants were killed on {BACKEND}")
    return 0


if __name__ == "__main__":
    importlib.import_module(BACKEND)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutant may have the size and the second of the original
    sys.dont_write_bytecode = True
    if sys.argv[1:2] == ["planted"]:
        sys.exit(plant(sys.argv[2:]))
    sys.exit(mutate(*map(int, sys.argv[1:3]), *sys.argv[3:]))

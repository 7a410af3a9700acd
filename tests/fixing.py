"""Tables of errors: a program with bad input, and the same program with the fix that the error proposes.

`check` runs the rows of a table, and requires that they reach each message of the modules that it names.
"""

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import BACKEND, close

import multigrad
from multigrad.common import errors
from multigrad.common.frameworks import DIFFERENTIATING

PACKAGE = Path(multigrad.__file__).parent
_MAKERS = ("message", "unusable", "require_function")
_CLASSES = re.compile(r"ArrayImpl|EagerTensor|SymbolicTensor|Tracer|torch\.(float|Tensor|Size)|Traced<|<tf\.")


class Row(NamedTuple):
    """An error and its fix."""

    fix: str
    """A part of the line that names the fix, or of another line of the error."""
    wrong: Callable[[], Any]
    """The program that raises the error."""
    fixed: Callable[[], Any]
    """The program with the fix."""
    wanted: Any = None
    """The result of the fixed program. Gradients have false factors. None: it only has to run."""
    kind: type[Exception] = TypeError


def check(rows: Sequence[Row], modules: Sequence[str], others: Mapping[str, str]) -> None:
    """Run the rows. Each message of the modules must be raised by a row.

    Arguments:
        rows: the table.
        modules: the files, relative to the package, or their folder.
        others: the functions whose messages have no row, each with the reason.
    """
    files = [file for module in modules for file in _files(PACKAGE / module)]
    for file in files:  # some modules are imported on first use
        importlib.import_module(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts))
    with _recorded() as reached:
        for row in rows:
            _check_row(row)
    missing = [
        f"{file}:{line}"
        for file in files
        for line, function in _messages(file)
        if (str(file), line) not in reached and function not in others
    ]
    assert not missing


def _files(path: Path) -> list[Path]:
    """Return the files of a package, without those of other frameworks."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [file for file in files if file.stem == BACKEND or file.stem not in DIFFERENTIATING]


def _check_row(row: Row) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  its class is compared below
        row.wrong()
    text = str(caught.value).replace("\\n", "\n")  # TensorFlow shows the reason of a LookupError as bytes
    assert isinstance(caught.value, row.kind), (row.fix, caught.value)
    assert row.fix in " ".join(text.split()), text
    assert not _CLASSES.search(text), text
    lines = [line for line in text.splitlines() if ' File "' not in line]  # without a traceback of AutoGraph
    assert max(map(len, lines)) <= errors.LONGEST_LINE, text
    got = row.fixed()
    if row.wanted is not None:
        close(got, row.wanted, 1e-4)


@contextmanager
def _recorded() -> Iterator[set[tuple[str, int]]]:
    """Record the file and the line of each call that makes a message."""
    reached: set[tuple[str, int]] = set()

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            reached.add((frame.f_code.co_filename, frame.f_lineno))
            if function.__name__ == "message":
                name, problem = args
                assert len(name.split()) < len(problem.split()), "the name of the op comes before the problem"
            return function(*args, **kwargs)

        return recorded

    with pytest.MonkeyPatch.context() as patch:
        for module in [
            m for name, m in sys.modules.items() if name.startswith("multigrad.") and m is not errors
        ]:
            for name in _MAKERS:
                if vars(module).get(name) is vars(errors)[name]:
                    patch.setattr(module, name, recording(vars(errors)[name]))
        yield reached


def _messages(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the enclosing function of each call that makes a message."""
    for function in ast.walk(ast.parse(file.read_text())):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                name = getattr(node.func, "id", None) if isinstance(node, ast.Call) else None
                if name in _MAKERS:
                    yield node.lineno, function.name

"""The Python blocks of the README and of `docs/`: they run, and print what the pages say.

A page is read from top to bottom, so its blocks share their names. A block runs on every backend with
gradients, unless its title names some: ```` ```python title="JAX" ````. With `title="JAX 0.8 and newer"` it
runs on no older version, and with `title="TensorFlow with tensorflow_probability"` only with this package. A
block ```` ```text ```` shows the output of the Python block above it. A line that ends with
`# raises TypeError` raises that error.
"""

import importlib.util
import itertools
import linecache
import re
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from support import BACKEND, check_comments, is_at_least

ROOT = Path(__file__).parent.parent
WITH_GRADIENTS = {"TensorFlow": "tensorflow", "JAX": "jax", "PyTorch": "torch"}
BACKENDS = WITH_GRADIENTS | {"NumPy": "numpy", "OpenVINO": "openvino"}

_BLOCK = re.compile(
    r"""^(?P<indent>[ ]*)```(?P<language>python|text)(?:[ ]title="(?P<title>[^"]*)")?\n
        (?P<code>.*?)^(?P=indent)```$""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


class Block(NamedTuple):
    """A Python block of a page."""

    code: str
    """The code, after as many empty lines as on the page, so that errors have the line of the page."""
    backends: tuple[str, ...]
    """The backends that run it."""
    output: str | None
    """Its output, if the page shows it."""


def pages() -> list[Path]:
    """Return the README and each Markdown page of the site."""
    # The pages that `docs/examples` links to are tested separately.
    written = [path for path in (ROOT / "docs").rglob("*.md") if "examples" not in path.parts]
    return [ROOT / "README.md", *sorted(written)]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the Python blocks of a page."""
    text = page.read_text()
    found = list(_BLOCK.finditer(text))
    for block, following in itertools.zip_longest(found, found[1:]):
        if block["language"] != "python":
            continue
        shown = following is not None and following["language"] == "text"
        adjacent = shown and not text[block.end() : following.start()].strip()
        width = len(block["indent"])
        code = "".join(line[width:] for line in block["code"].splitlines(keepends=True))
        above = text[: block.start("code")].count("\n")
        title = block["title"]
        if title in (None, "multigrad"):
            named = tuple(WITH_GRADIENTS.values())
        else:
            named = tuple(backend for name, backend in BACKENDS.items() if name in title)
        assert named, f"{page.name}: no backend in the title {title!r}"
        oldest = re.search(r"([\d.]+) and newer$", title or "")
        too_new = re.search(r" before ([\d.]+)$", title or "")
        if (limit := oldest or too_new) and BACKEND in named:
            installed = importlib.import_module(BACKEND).__version__
            named = named if is_at_least(installed, limit[1]) == bool(oldest) else ()
        package = re.search(r" with (\w+)$", title or "")
        if package and importlib.util.find_spec(package[1]) is None:
            named = ()
        yield Block("\n" * above + code, named, following["code"] if adjacent else None)


def run(block: Block, page: Path, names: dict[str, Any], capsys: Any) -> None:
    """Run a block, and compare its output and its errors with the page."""
    raises = {
        number: match[1]
        for number, line in enumerate(block.code.splitlines(), 1)
        if (match := re.search(r"# raises (\w+)", line))
    }
    assert len(raises) <= 1, "a line that raises is the last one that runs"
    wanted = next(iter(raises.items()), None)
    got = None
    path = f"{page}#{len(block.code)}"  # unique, because AutoGraph finds code by it
    linecache.cache[path] = (len(block.code), None, block.code.splitlines(keepends=True), path)
    try:
        exec(compile(block.code, path, "exec"), names)
    except Exception as error:
        if wanted is None or wanted[1] not in [kind.__name__ for kind in type(error).__mro__]:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        got = (next(frame.lineno for frame in frames if frame.filename == path), wanted[1])
    assert got == wanted, f"{page.name}: {wanted} raised {got}"
    output = capsys.readouterr().out
    if block.output is not None:
        assert block.output.strip() in output.strip()
    check_comments(block.code, output)


def run_page(page: Path, capsys: Any, monkeypatch: Any) -> None:
    """Run the blocks of a page for the active backend."""
    # AutoGraph and torch.compile look up functions in their module. torch.compile keeps modules by name.
    module = types.ModuleType("page_" + re.sub(r"\W", "_", str(page.relative_to(ROOT))))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page):
        if BACKEND in block.backends:
            run(block, page, vars(module), capsys)

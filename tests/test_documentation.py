"""The Python blocks of the README and of each page of `docs/` run on their backends."""

import inspect
import re

import keras
import pytest
from markdown import ROOT, Block, blocks, pages, run, run_page
from support import BACKEND

import multigrad
import multigrad.callbacks
import multigrad.layers
import multigrad.testing
from multigrad.cli import explain

PAGES = {str(page.relative_to(ROOT)): page for page in pages()}
# torch.compile takes ten seconds or more for a training step, which tests/test_compilation.py has too.
SLOW = ("README.md", "docs/guides/training-loops.md") if BACKEND == "torch" else ()
LIMITS = "docs/limits.md"


@pytest.fixture
def run_blocks(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some blocks save a model
    return lambda name: run_page(PAGES[name], capsys, monkeypatch)


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow if p in SLOW else ()) for p in PAGES if p != LIMITS]
)
def test_the_blocks_of_a_page_run(page, run_blocks):
    run_blocks(page)


@pytest.mark.forward
def test_the_blocks_of_the_limits_run(run_blocks):
    """Many of them are for one backend, and one for the backends without gradients."""
    run_blocks(LIMITS)


@pytest.mark.forward
def test_the_pages_and_their_blocks_are_found():
    assert {"README.md", "docs/index.md", LIMITS, "docs/migrate/from-pytorch.md"} <= PAGES.keys()
    for backend in ("tensorflow", "jax", "torch"):
        assert sum(backend in block.backends for page in PAGES.values() for block in blocks(page)) > 80


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(7.0)  # 8.0", None),
        ("print(7.0 > 6.0)  # False", None),
        ("print('inf')  # nan", None),
        ("print('2 relu')  # 1 relu", None),
        ("print(7.0)\n# 8.0", None),
        ("print('a')", "b"),
        ("1 / 0  # raises TypeError", None),
        ("a = 1\n1 + a  # raises TypeError", None),
        ("def f():\n    return 1 / 0\n\nf()\nf()  # raises ZeroDivisionError", None),
    ],
)
def test_a_wrong_block_is_found(code, output, capsys):
    with pytest.raises((AssertionError, ZeroDivisionError)):
        run(Block(code, ("jax",), output), ROOT / "README.md", {}, capsys)


@pytest.mark.package
def test_each_public_name_has_an_entry_in_the_api():
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    entries = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith("::: ")}
    public = {
        name
        for module in (multigrad, multigrad.callbacks, multigrad.layers, multigrad.ops, multigrad.testing)
        for name in dir(module)
        if not name.startswith("_") and not hasattr(keras.ops, name)
        if not inspect.ismodule(getattr(module, name))
    }
    assert "host_call" in public
    assert public - entries == set()
    for section in explain.sections():  # a code host shows the tables, and not the docstrings
        if section.page.startswith("multigrad"):
            assert re.search(
                rf"^\| `{section.anchor}\(.*`\s\| {re.escape(section.title)} \|$", text, re.MULTILINE
            )


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_first_example_needs_its_rule(name, capsys):
    page = ROOT / name
    first = next(blocks(page))
    run(first, page, {}, capsys)
    without_rule = first.code.replace("@op_custom_gradient", "@(lambda function: lambda x: function(x)[0])")
    with pytest.raises(AssertionError):
        run(first._replace(code=without_rule), page, {}, capsys)


def test_each_install_command_is_on_one_line():
    common = "python3 -m venv .venv && .venv/bin/pip install -q nox && .venv/bin/nox"
    assert common in (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    assert f"{common} -s demo" in (ROOT / "README.md").read_text().splitlines()


@pytest.mark.forward
def test_each_result_fits_its_column():
    """A column of code has 88 characters. The result of a longer line is in a comment below it."""
    lines = [line for page in PAGES.values() for block in blocks(page) for line in block.code.splitlines()]
    assert [line for line in lines if re.search(r"\)  # ", line[:-1]) and len(line) > 88] == []


@pytest.mark.forward
def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.forward
def test_the_links_of_the_readme_lead_somewhere():
    """MkDocs only checks the links of the site."""
    links = re.findall(r"\]\((?!http|\.\.)([^)#]*)(?:#([^)]*))?\)", (ROOT / "README.md").read_text())
    assert len(links) > 20
    for path, anchor in links:
        assert (ROOT / path).exists(), path
        assert not anchor or f"{{#{anchor}}}" in (ROOT / path).read_text(), f"{path}#{anchor}"


@pytest.mark.package
def test_each_error_in_the_limits_says_what_to_do():
    page = (ROOT / "docs" / "limits.md").read_text().partition("## Known behavior")[0]
    sections = re.split(r"^###? ", page, flags=re.MULTILINE)
    named = re.compile(r".+ \{#[a-z-]+\}\n\n[^#]")  # and not only the title of a group
    unanswered = [s.partition("\n")[0] for s in sections if named.match(s) and "**What" not in s]
    assert unanswered == ["Three rules {#three-rules}", "Second derivatives {#second-derivatives}"]

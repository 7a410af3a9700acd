"""The examples run as users run them, and print what their text says."""

import base64
import json
import re
import subprocess
import sys

import pytest
from support import BACKEND, EXAMPLES, NOTEBOOKS, code_of

pytestmark = pytest.mark.package


def output_of(name, folder):
    """Return the output of an example. `folder` is outside of the repository."""
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, check=False, capture_output=True, encoding="utf-8", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def row(output, name):
    """Return the cells of a row of a table."""
    return re.findall(rf"^│ {re.escape(name)} .*│$", output, re.MULTILINE)[0].split("│")[2:-1]


@pytest.mark.slow
def test_straight_through(tmp_path):
    output = output_of("straight_through.py", tmp_path)
    assert output.splitlines()[0].endswith(f" on {BACKEND}")
    plain, unmoved = row(output, "rounding")
    accuracy, moved = row(output, "straight-through")
    assert float(unmoved) == 0.0 < 0.5 < float(moved)
    assert float(plain.strip(" %")) < 90.0 < float(accuracy.strip(" %"))


def test_sinkhorn(tmp_path):
    output = output_of("sinkhorn.py", tmp_path)
    assert output.splitlines()[0].endswith(f" on {BACKEND}")
    largest, difference = re.search(r"plan: (\S+); the gradient differs by (\S+)", output).groups()
    assert float(difference) < 1e-3 * float(largest)
    (before, near, far), (after, inner, outer) = [
        [float(number) for number in re.findall(r"-?[\d.]+", " ".join(row(output, step)))] for step in "05"
    ]
    assert after < before
    assert near < far < 0.6 < 0.9 < inner < outer < 1.0


def test_the_readme_the_gallery_and_the_menu_list_each_example():
    told = re.findall(r"^- \[(.+)\]\((.+?)\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert [name for _, name in told] == sorted(path.name for path in [*EXAMPLES.glob("*.py"), *NOTEBOOKS])
    gallery = (EXAMPLES.parent / "docs" / "gallery.md").read_text()
    assert told == re.findall(r"\*\*\[(.+)\]\(\.\./examples/(.+?)\)\*\*", gallery)
    assert set(re.findall(r"examples/(\S+\.png)\)", gallery)) == {
        path.name for path in EXAMPLES.glob("*.png")
    }
    menu = (EXAMPLES.parent / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- (.+): examples/(.+\.ipynb)$", menu, re.MULTILINE)
    assert listed == [entry for entry in told if entry[1].endswith(".ipynb")]


def test_the_titles_in_notebooks_are_plain_text():
    """mkdocs-jupyter (0.26) makes two anchors for a title with code, so links to it lead nowhere."""
    cells = [cell for path in NOTEBOOKS for cell in json.loads(path.read_text())["cells"]]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert len(titles) > 50
    assert [title for title in titles if re.search(r"[`*$\[<]", title)] == []


# tests/notebooks.py runs the notebooks. The stored outputs, which readers see, are from an earlier run.


def pictures_of(cells):
    data = [output.get("data", {}) for cell in cells for output in cell["outputs"]]
    return [base64.b64decode(d["image/png"]) for d in data if "image/png" in d]


def flaws(notebook):
    """Return what is wrong with the stored outputs of a notebook."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    shown = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    text = "\n".join("".join(lines) for lines in shown)
    found = {
        "of other code": notebook["metadata"].get("multigrad", {}).get("code") != code_of(notebook),
        "not run in order": [cell["execution_count"] for cell in cells] != [*range(1, len(cells) + 1)],
        "nothing shown": not outputs,
        "an error": any(output["output_type"] == "error" for output in outputs),
        "a warning": any(output.get("name") == "stderr" for output in outputs),
        "a path": re.search(r"""(?<![\w.:])(/|[A-Z]:\\)\w+""", text) is not None,
        "times": any(cell["metadata"].keys() - {"tags"} for cell in cells),
    }
    return [flaw for flaw, there in found.items() if there]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_outputs_belong_to_the_code_of_a_notebook(path):
    notebook = json.loads(path.read_text())
    assert flaws(notebook) == []
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert path.with_suffix(".png").read_bytes() == pictures_of(cells)[0]

"""The notebooks of `examples/` run from the first cell to the last, on the active backend.

    pytest tests/notebooks.py                  # run those that the fast run has on this backend
    pytest tests/notebooks.py -m ""            # run all of them
    pytest tests/notebooks.py -m "" --store    # and keep their outputs

They need the kernel of Jupyter, and Matplotlib. nox installs them on each backend with gradients.
"""

import base64
import copy
import inspect

import matplotlib.font_manager  # noqa: F401  builds its font cache here, so that no notebook prints a message
import nbclient
import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from support import BACKEND, NOTEBOOKS, code_of

SECONDS = 300  # more than any cell takes
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs a notebook in a new folder, and returns it with its outputs."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # not the settings of the user

    def run(notebook):
        folder = tmp_path / f"run {len(list(tmp_path.glob('run *')))}"
        folder.mkdir()
        notebook = copy.deepcopy(notebook)
        # Without folders of kernels, there is one kernel: the Python that runs this.
        kernel = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
        client = nbclient.NotebookClient(
            notebook,
            km=kernel,
            resources={"metadata": {"path": str(folder)}},
            timeout=SECONDS,
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--InteractiveShell.colors=nocolor", "--InteractiveShell.xmode=Plain"],
        )
        try:
            client.execute(cleanup_kc=True)  # also ends the kernel, which this test started
        except nbclient.exceptions.CellExecutionError as error:
            pytest.fail(str(error), pytrace=False)
        for cell in code_cells(notebook):
            for output in cell.outputs:
                if output.get("name") == "stderr":
                    pytest.fail(f"cell {cell.id!r} warns:\n{output.text}", pytrace=False)
        return notebook

    return run


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def unmeasured(notebook):
    """Return the cells without the outputs of cells with a tag for measurements: a time, or memory."""
    cells = copy.deepcopy(notebook.cells)
    for cell in cells:
        if "measured" in cell.metadata.get("tags", ()):
            cell.outputs = []
    return cells


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.name for path in NOTEBOOKS])
def test_notebooks_run(path, run, pytestconfig):
    notebook = run(nbformat.read(path, as_version=4))
    if pytestconfig.getoption("store"):
        again = run(notebook)
        same = unmeasured(again) == unmeasured(notebook)
        assert same, "two runs show two things: a path, a time, a random number"
        store(notebook, path)


def store(notebook, path):
    """Store the outputs of a run, and the first figure in a file next to it, for a README."""
    own = {"backend": BACKEND, "code": code_of(notebook)}
    notebook.metadata = nbformat.from_dict(METADATA | {"multigrad": own})
    nbformat.write(notebook, path)
    pictures = [
        output.data["image/png"]
        for cell in code_cells(notebook)
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    if pictures:
        path.with_suffix(".png").write_bytes(base64.b64decode(pictures[0]))


def notebook_of(*cells):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


def test_a_notebook_runs_on_the_active_backend_in_a_new_folder(run):
    backend = "import keras; print(keras.backend.backend()); open('saved', 'w').close()"
    folder = "import os; print(os.listdir())"
    for cells, shown in (((backend, folder), [f"{BACKEND}\n", "['saved']\n"]), ((folder,), ["[]\n"])):
        assert [cell.outputs[0].text for cell in code_cells(run(notebook_of(*cells)))] == shown


def test_printed_traces_are_text(run):
    """Rich, which formats the table of a trace, displays objects in other ways in a notebook."""
    code = """
        from multigrad import grad, op_custom_gradient, trace_gradients
        op = op_custom_gradient(lambda x: (x, lambda upstream: 7.0 * upstream))
        with trace_gradients() as trace:
            grad(op)(2.0)
        print(trace)
    """
    (output,) = run(notebook_of(inspect.cleandoc(code))).cells[0].outputs
    assert output.output_type == "stream"
    assert output.text.split()[-4:] == ["2", "1", "7", "7"]


def test_a_cell_that_fails_is_shown_with_its_error(run):
    with pytest.raises(pytest.fail.Exception, match=r"(?s)assert 7 == -3.*AssertionError"):
        run(notebook_of("print(7)", "assert 7 == -3"))


def test_a_warning_fails(run):
    with pytest.raises(pytest.fail.Exception, match=r"(?s)warns:.*so it is"):
        run(notebook_of("import warnings", "warnings.warn('so it is')"))

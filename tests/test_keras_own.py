"""The plugin that runs Keras's own tests fails if these tests would not run multigrad."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.package

COMMAND = [sys.executable, "-m", "pytest", "-p", "keras_own", "-p", "no:cacheprovider"]

USES_KERAS_FUNCTION = """
import pytest
from keras import ops

def test():
    op = ops.custom_gradient(lambda x: "no pair")
    with pytest.raises(TypeError, match="end the function with `return output, rule`"):
        op(ops.ones(2))
"""


def run(test, folder):
    """Run the source of a test with the plugin, and return the exit status and the output."""
    (folder / "test_it.py").write_text(test)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        COMMAND, check=False, capture_output=True, encoding="utf-8", cwd=folder, env=environment
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("test", "counts", "wanted"),
    [
        (USES_KERAS_FUNCTION, "1 decorations and 1 calls, in 1 of 1 tests", pytest.ExitCode.OK),
        ("def test(): pass", "0 decorations and 0 calls, in 0 of 1 tests", pytest.ExitCode.TESTS_FAILED),
    ],
)
def test_a_run_fails_if_it_does_not_call_the_op(test, counts, wanted, tmp_path):
    status, output = run(test, tmp_path)
    assert counts in output
    assert "1 passed" in output
    assert status == wanted, output

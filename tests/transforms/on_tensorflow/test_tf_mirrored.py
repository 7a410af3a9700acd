"""`tf.distribute.MirroredStrategy`, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_two_devices_equal_one_device():
    program = Path(__file__).with_name("mirrored.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, program], check=False, capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.stdout.endswith("the same on two devices\n"), done.stderr

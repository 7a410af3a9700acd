"""Eight devices, which JAX creates on one processor when it starts, so they need a separate process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("eight_devices.py")


@pytest.mark.slow
def test_on_eight_devices():
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8"}
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", ""]
    command = [sys.executable, "-m", "pytest", *options, str(TESTS)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
    assert " skipped" not in ran.stdout

"""The examples of `examples/devices/`, each in its own process, because a process creates devices once."""

import os
import re
import subprocess
import sys

import pytest
from support import BACKEND, EXAMPLES

# For each line that a script prints, whether its result equals that on one device. The others must differ.
SCRIPTS = {
    "tensorflow": {"mirrored.py": [True, True, False, False, True]},
    "jax": {
        "jax_sharding.py": [True, False, True, True, False, False, True, False, False],
        "keras_distribution.py": [True, True, False, True] * 2,
    },
    "torch": {"ddp.py": [True, True, False, False, False, False, True], "fsdp.py": [True, False, True]},
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS.get(BACKEND, ()))
def test_several_devices_compute_what_one_device_computes(script, tmp_path):
    path = EXAMPLES / "devices" / script
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(path)],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    differences = [float(number) for number in re.findall(r"by (\d+e[+-]\d+)", done.stdout)]
    equal = SCRIPTS[BACKEND][script]
    assert [difference < 1e-5 for difference in differences] == equal, done.stdout
    assert all(same or difference > 1e-4 for same, difference in zip(equal, differences, strict=True))


@pytest.mark.package
def test_each_script_is_tested_and_listed():
    scripts = sorted(path.name for path in (EXAMPLES / "devices").glob("*.py"))
    assert sorted(script for found in SCRIPTS.values() for script in found) == scripts
    page = (EXAMPLES.parent / "docs" / "guides" / "several-devices.md").read_text()
    assert all(f"(../examples/devices/{script})" in page for script in scripts)

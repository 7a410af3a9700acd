"""The planted faults are faults of the package as it is. The slow run plants them."""

from pathlib import Path

import faults_in_programs
import planted_faults
import pytest

import multigrad

pytestmark = pytest.mark.package

PACKAGE = Path(multigrad.__file__).parent


@pytest.mark.parametrize(
    "faults", [planted_faults.FAULTS, faults_in_programs.FAULTS], ids=["tests", "programs"]
)
def test_the_text_of_each_fault_occurs_once(faults):
    for fault in faults:
        assert (PACKAGE / fault.file).read_text().count(fault.old) == 1, fault

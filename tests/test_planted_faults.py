"""The planted faults are faults of the package as it is. `nox -s planted_faults` plants them."""

from pathlib import Path

import planted_faults
import pytest

import multigrad

PACKAGE = Path(multigrad.__file__).parent


@pytest.mark.package
def test_the_text_of_each_fault_occurs_once():
    for fault in planted_faults.FAULTS:
        assert (PACKAGE / fault.file).read_text().count(fault.old) == 1, fault

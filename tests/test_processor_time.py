"""A fast test that takes too long fails. Other tests do not, and no test in the full run."""

import processor_time
import pytest

pytest_plugins = ["pytester"]
pytestmark = [pytest.mark.package, pytest.mark.forward]

TESTS = """
import processor_time
import pytest

limits = {"twice": [1.2, 1.1], "once": [1.2, 0.2], "slow": [1.2], "short": [0.9], "fails": [1.2]}

def spend(name):
    processor_time.time.now += limits[name].pop(0) * processor_time.limit()

def test_twice(tmp_path):
    (tmp_path / "folder").mkdir()  # the second run has another folder
    spend("twice")

def test_once():
    spend("once")

@pytest.mark.slow
def test_slow():
    spend("slow")

def test_short():
    spend("short")

def test_fails():
    spend("fails")
    raise ValueError("its own")
"""


class Clock:
    def __init__(self):
        self.now = 0.0

    def process_time(self):
        return self.now


@pytest.mark.parametrize(("busy", "limit"), [(0.0, 5.0), (1000.0, 10.0)])
def test_a_slow_test_fails(busy, limit, pytester, monkeypatch):
    pytester.makeconftest("from processor_time import pytest_runtest_call, pytest_runtest_protocol")
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers = slow")
    with monkeypatch.context() as patched:  # the patched clock must not affect this test
        patched.setattr(processor_time, "time", Clock())
        patched.setattr(processor_time.os, "getloadavg", lambda: (busy, 0.0, 0.0))
        options = ["-p", "no:xdist", "-p", "no:cacheprovider"]
        full = pytester.runpytest_inprocess(*options, "-m", "", "-k", "twice")
        full.assert_outcomes(passed=1)
        ran = pytester.runpytest_inprocess(*options, "-m", "slow or not slow")
    ran.stdout.fnmatch_lines(
        [f"*::test_twice: {1.1 * limit:.1f} s of processor time in the faster of two runs*"]
    )
    failed = [line.split(" ")[1] for line in ran.outlines if line.startswith("FAILED")]
    assert [name.split("::")[1] for name in failed] == ["test_twice", "test_fails"]
    assert "test_once:" not in ran.stdout.str()

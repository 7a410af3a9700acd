"""The examples run as a user runs them, and show what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import BACKEND

EXAMPLES = Path(__file__).parent.parent / "examples"


def output_of(name, folder):
    """What an example prints; `folder` is none of the repository's."""
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, check=False, capture_output=True, encoding="utf-8", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def row(output, name):
    """The cells of a table's row."""
    return re.findall(rf"^│ {re.escape(name)} .*│$", output, re.MULTILINE)[0].split("│")[2:-1]


def test_stable_log1pexp(tmp_path):
    output = output_of("stable_log1pexp.py", tmp_path)
    assert output.splitlines()[0].endswith(f" on {BACKEND}")
    assert [cell.strip() for cell in row(output, "100")] == ["inf", "nan", "1", "0"]
    assert [float(cell) for cell in row(output, "0")] == pytest.approx([0.693147, 0.5, 0.5, 0.25])


def test_straight_through(tmp_path):
    output = output_of("straight_through.py", tmp_path)
    assert output.splitlines()[0].endswith(f" on {BACKEND}")
    plain, unmoved = row(output, "rounding")
    accuracy, moved = row(output, "straight-through")
    assert float(unmoved) == 0.0 < 0.5 < float(moved)
    assert float(plain.strip(" %")) < 90.0 < float(accuracy.strip(" %"))


def test_the_readme_tells_of_each():
    told = re.findall(r"^\| \[(\S+)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert told == sorted(path.name for path in EXAMPLES.glob("*.py"))

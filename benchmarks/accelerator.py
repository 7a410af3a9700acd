"""One report for a machine with an accelerator: the benchmarks of time and memory, and the fast tests.

    python -m benchmarks.accelerator jax torch --minutes 10 --folder reports

The command writes a Markdown file for each backend, with the device and the versions. It runs the benchmarks
of one backend after the other, so that each has the accelerator for itself, and then the tests of all of them
at the same time. Each part runs in a process, for a share of the minutes. A part that takes longer is
interrupted, and the report contains its output up to then. Without an accelerator, the report is about the
CPU, and says so. The exit status is 1 unless every part finished.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

BACKENDS = ("tensorflow", "jax", "torch")


class Part(NamedTuple):
    """A command of the report, its share of the time, and settings of its environment."""

    title: str
    share: float
    command: tuple[str, ...]
    settings: Mapping[str, str] = {}


class Outcome(NamedTuple):
    """What a part printed, its exit status and seconds. The status is None if it was interrupted."""

    printed: str
    status: int | None
    seconds: float


LARGE = ("8192", "4096", "128256")  # tokens, features, classes: a model such as Llama 3
SMALL = ("1024", "256", "16384")  # a size for a CPU


def benchmarks(backend: str, has_accelerator: bool) -> list[Part]:
    """Return the benchmarks of a backend, with sizes for this device."""
    shape, dtype = (LARGE, "bfloat16") if has_accelerator else (SMALL, "float32")
    mode = "eager" if backend == "torch" else "compiled"
    head = ("-m", "benchmarks.large_vocabulary", "--dtype", dtype, "--mode", mode, "--rounds", "5", "--shape")
    overhead = ("-m", "benchmarks", "--rounds", "12")
    return [
        Part("Large vocabulary: tokens, features, classes " + ", ".join(shape), 0.4, (*head, *shape)),
        Part("Overhead, and memory kept for the backward pass", 0.6, overhead),
    ]


def tests(processes: int) -> Part:
    """Return the fast tests, in which warnings are not errors: other packages on the machine may warn."""
    options = ("-q", "--tb=line", "--no-header", "-W", "default", "-n", str(processes))
    # XLA would time several kernels for each of thousands of small programs.
    return Part("Fast tests", 1.0, ("-m", "pytest", *options), {"XLA_FLAGS": "--xla_gpu_autotune_level=0"})


def run(part: Part, backend: str, seconds: float) -> Outcome:
    """Run a part. After its share of the seconds, interrupt it as from the keyboard: pytest then sums up."""
    settings = {
        "KERAS_BACKEND": backend,
        "COLUMNS": "150",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # or one process of JAX reserves most of the memory
        **part.settings,
    }
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *part.command],
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    interrupted = False
    try:
        printed, _ = process.communicate(timeout=part.share * seconds)
    except subprocess.TimeoutExpired:
        interrupted = True
        process.send_signal(signal.SIGINT)
        try:
            printed, _ = process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
    return Outcome(printed, None if interrupted else process.returncode, time.monotonic() - start)


def section(part: Part, outcome: Outcome) -> str:
    """Return the section of a part: its command, its outcome, and the end of what it printed."""
    ends = {0: "finished", None: "was interrupted"}
    end = ends.get(outcome.status, f"failed with exit status {outcome.status}")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in outcome.printed.splitlines()]
    shown = "\n".join(
        [line for line in lines if line and not re.fullmatch(r"[.sxEF]+ *\[ *\d+%\]", line)][-120:]
    )
    command = " ".join(["python", *part.command])
    return f"## {part.title}\n\n`{command}` {end} after {outcome.seconds:.0f} s.\n\n```text\n{shown}\n```\n"


# Runs in a process for each backend, because a process has one backend.
DESCRIBE = """
import platform
import keras
from benchmarks.native import active

print(active.accelerator() or "")
print(f"Keras {keras.__version__}, {active.VERSION}, Python {platform.python_version()}")
"""


def describe(backend: str) -> tuple[str, str]:
    """Return the name of the accelerator on which the backend runs, "" without one, and the versions."""
    found = run(Part("Device and versions", 1.0, ("-c", DESCRIBE)), backend, 120.0)
    if found.status != 0:
        sys.exit(f"Keras does not start on {backend}:\n{found.printed}")
    device, versions = found.printed.splitlines()[-2:]
    return device, versions


class Report:
    """The report of one backend, written after each part, so that nothing is lost."""

    def __init__(self, backend: str, folder: Path):
        self.backend, self.path = backend, folder / f"gpu-{backend}.md"
        self.device, versions = describe(backend)
        device = self.device or "the CPU, because there is no accelerator"
        self.sections, self.failed = [f"# {backend} on {device}\n\n{versions}.\n"], False

    def add(self, part: Part, seconds: float) -> None:
        """Run a part for at most its share of the seconds."""
        outcome = run(part, self.backend, seconds)
        self.failed = self.failed or outcome.status != 0
        self.sections.append(section(part, outcome))
        self.path.write_text("\n".join(self.sections))
        print(self.backend, self.sections[-1], flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator", description=__doc__)
    parser.add_argument("backends", nargs="+", choices=BACKENDS)
    parser.add_argument("--minutes", type=float, default=10.0, help="the time of all reports")
    parser.add_argument(
        "--processes",
        type=int,
        default=min(os.cpu_count() or 1, 16),
        help="processes of pytest, for all backends",
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="where the reports are written")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    reports = [Report(backend, options.folder) for backend in options.backends]
    seconds, count = 60 * options.minutes, len(reports)
    for report in reports:
        for part in benchmarks(report.backend, bool(report.device)):
            report.add(part, 0.4 * seconds / count)
    part = tests(max(options.processes // count, 1))
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda report: report.add(part, 0.6 * seconds), reports))
    sys.exit(any(report.failed for report in reports))


if __name__ == "__main__":
    main()

"""One report for a machine with an accelerator: the fast tests, and the benchmarks of time and memory.

    KERAS_BACKEND=torch python -m benchmarks.accelerator --minutes 5 --report torch.md

The report is Markdown and names the device and the versions. Each part runs in a process, for a share of the
minutes. A part that takes longer is interrupted, and the report contains its output up to then. Without an
accelerator, the report is about the CPU, and says so. The exit status is 1 unless every part finished.
"""

import argparse
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import keras

from .native import active


class Part(NamedTuple):
    """A command of the report, and its share of the time."""

    title: str
    share: float
    command: tuple[str, ...]


class Outcome(NamedTuple):
    """What a part printed, its exit status and seconds. The status is None if it was interrupted."""

    printed: str
    status: int | None
    seconds: float


LARGE = ("8192", "4096", "128256")  # tokens, features, classes: a model such as Llama 3
SMALL = ("1024", "256", "16384")  # a size for a CPU


def parts(device: str | None, processes: int) -> list[Part]:
    """Return the parts of the report on this device, None for the CPU."""
    shape, dtype = (LARGE, "bfloat16") if device else (SMALL, "float32")
    head = ("-m", "benchmarks.large_vocabulary", "--dtype", dtype, "--shape", *shape)
    tests = ("-m", "pytest", "-q", "--tb=line", "--no-header", "-n", str(processes))
    return [
        Part("Large vocabulary: tokens, features, classes " + ", ".join(shape), 0.2, head),
        Part("Overhead, and memory kept for the backward pass", 0.2, ("-m", "benchmarks", "--rounds", "12")),
        Part("Fast tests", 0.6, tests),
    ]


def run(command: tuple[str, ...], seconds: float) -> Outcome:
    """Run a Python command. After `seconds`, interrupt it as from the keyboard: pytest then sums up."""
    # JAX would reserve most of the memory of a GPU for the first one of several processes.
    environment = os.environ | {"COLUMNS": "150", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    interrupted = False
    try:
        printed, _ = process.communicate(timeout=seconds)
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
        [line for line in lines if line and not re.fullmatch(r"[.sxF]+ *\[ *\d+%\]", line)][-120:]
    )
    command = " ".join(["python", *part.command])
    return f"## {part.title}\n\n`{command}` {end} after {outcome.seconds:.0f} s.\n\n```text\n{shown}\n```\n"


def title(device: str | None) -> str:
    """Return the title of the report, and the versions."""
    backend = keras.backend.backend()
    versions = f"Keras {keras.__version__}, {active.VERSION}, Python {platform.python_version()}"
    return f"# {backend} on {device or 'the CPU, because there is no accelerator'}\n\n{versions}.\n"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="the time of the whole report")
    parser.add_argument(
        "--processes", type=int, default=min(os.cpu_count() or 1, 8), help="processes of pytest"
    )
    parser.add_argument("--report", type=Path, help="a file for the report, which is also printed")
    options = parser.parse_args()
    device = active.accelerator()
    sections, failed = [title(device)], False
    for part in parts(device, options.processes):
        outcome = run(part.command, 60 * options.minutes * part.share)
        failed = failed or outcome.status != 0
        sections.append(section(part, outcome))
        if options.report:  # also after each part, so that nothing is lost
            options.report.write_text("\n".join(sections))
        print(sections[-1], flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

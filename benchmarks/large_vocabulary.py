"""A linear layer and its cross entropy over a large vocabulary: plain Keras code against chunks.

    python -m benchmarks.large_vocabulary --json numbers.json

Of the chunks there are two variants: one loss of all tokens, whose gradients are computed in the forward pass
where that can be, and a loss for each token, whose mean is taken behind.

For the active backend, in eager code, compiled, and on TensorFlow by XLA, as in `fit`; on PyTorch against
its own `torch.nn.functional.linear_cross_entropy` in chunks, too. Each variant runs in processes of its own,
in turn, so that a disturbance meets all of them: it computes the mean loss and its gradients by features and
kernel. The peak of memory is what a process held at most in a step, less what it held before: of the
gradients and of all that was there on the way. What was freed is not counted: when memory is measured, the C
library gives large blocks back at once (`MALLOC_MMAP_THRESHOLD_`), and TensorFlow goes without oneDNN, which
keeps them (`TF_ENABLE_ONEDNN_OPTS`). The first step, which compiles, counts for neither memory nor time.
"""

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops
from rich.console import Console
from rich.table import Table

from multigrad import backend, value_and_grad
from multigrad.ops import linear_cross_entropy

from .native import active as native

VARIANTS = ("plain", "one loss", "by token", *(["native"] if hasattr(native, "linear_cross_entropy") else []))
MODES = {"jax": ("eager", "compiled"), "tensorflow": ("eager", "compiled", "xla"), "torch": ("eager",)}[
    keras.backend.backend()
]
MEGABYTE = 1e6


def plain(features: Any, kernel: Any, labels: Any) -> Any:
    logits = ops.matmul(features, kernel)
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


def one_loss(features: Any, kernel: Any, labels: Any) -> Any:
    return linear_cross_entropy(features, kernel, labels, reduction="mean")


def by_token(features: Any, kernel: Any, labels: Any) -> Any:
    return ops.mean(linear_cross_entropy(features, kernel, labels))


def inputs(shape: list[int]) -> tuple[Any, Any, Any]:
    """Features and a kernel whose logits are of the size of one, and labels."""
    tokens, width, classes = shape
    random = np.random.default_rng(0)
    features = random.standard_normal((tokens, width), dtype="float32")
    kernel = random.standard_normal((width, classes), dtype="float32") / np.float32(width**0.5)
    labels = random.integers(0, classes, tokens).astype("int32")
    return tuple(map(ops.convert_to_tensor, (features, kernel, labels)))


def step_of(variant: str, mode: str, shape: list[int]) -> Callable[[], list[Any]]:
    """A function that computes the loss and both gradients, and waits for them."""
    features, kernel, labels = inputs(shape)
    if variant == "native":
        kernel, loss = native.rows_for_classes(kernel), native.linear_cross_entropy
    else:
        loss = {"plain": plain, "one loss": one_loss, "by token": by_token}[variant]

    def gradients(features: Any, labels: Any, kernel: Any) -> Any:
        # Not by `keras.tree`: on PyTorch (2.13) its tree holds what it flattened until garbage is collected.
        value, found = value_and_grad(lambda x, w: loss(x, w, labels), argnums=(0, 1))(features, kernel)
        return [value, *found]

    arguments = features, labels, kernel
    run = gradients
    if mode == "compiled":
        run = backend.active.compiled(gradients)
    elif mode == "xla":
        run = native.by_xla(gradients, arguments[:2], arguments[2:])

    def step() -> list[Any]:
        found = run(*arguments)
        for tensor in found:
            getattr(tensor, "block_until_ready", lambda: None)()
        float(found[0])
        return found

    return step


def measure(variant: str, mode: str, shape: list[int], steps: int, out: Path) -> None:
    """In a process of its own: times, peaks, and the numbers themselves, into a file."""
    step = step_of(variant, mode, shape)
    times, peaks = [], []
    for left in reversed(range(steps)):
        gc.collect()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        start, used = time.perf_counter(), time.process_time()
        found = step()
        times.append((time.perf_counter() - start, time.process_time() - used))
        peaks.append(_resident("VmHWM") - before)
        found = None if left else found
    np.savez(out, *map(ops.convert_to_numpy, found), times=times, peaks=peaks)


def _resident(name: str) -> int:
    """What this process holds, or held at most, in bytes, as Linux tells it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", status)[1])


def in_a_process(variant: str, mode: str, shape: list[int], steps: int, memory: bool) -> dict[str, Any]:
    given_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "TF_ENABLE_ONEDNN_OPTS": "0"}
    environment = os.environ | (given_back if memory else {})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.npz"
        words = ["--variant", variant, "--mode", mode, "--steps", str(steps), "--out", str(out)]
        command = [sys.executable, "-m", "benchmarks.large_vocabulary", *words, "--shape", *map(str, shape)]
        subprocess.run(command, env=environment, check=True)
        with np.load(out) as found:
            return dict(found)


def compare(mode: str, shape: list[int], rounds: int) -> dict[str, Any]:
    """The variants in turn: medians over the rounds, and how far the results are from those of plain code."""
    times: dict[str, list[Any]] = {variant: [] for variant in VARIANTS}
    held = {variant: in_a_process(variant, mode, shape, 3, memory=True) for variant in VARIANTS}
    for _ in range(rounds):
        for variant in VARIANTS:
            times[variant] += in_a_process(variant, mode, shape, 3, memory=False)["times"][1:].tolist()
    return {
        "backend": keras.backend.backend(),
        "mode": mode,
        "shape": shape,
        **{
            variant: {
                "seconds": statistics.median([wall for wall, _ in times[variant]]),
                "processor_seconds": statistics.median([used for _, used in times[variant]]),
                "peak_megabytes": float(held[variant]["peaks"][1:].max()) / MEGABYTE,
                "error": _errors(held["plain"], held[variant], transposed=variant == "native"),
            }
            for variant in VARIANTS
        },
    }


def _errors(wanted: dict[str, Any], got: dict[str, Any], transposed: bool) -> dict[str, float]:
    """How far loss and gradients are apart at most, in parts of the largest; PyTorch's kernel lies across."""

    def error(name: str, turned: bool) -> float:
        a, b = wanted[name], got[name]
        return float(np.max(np.abs(a - (b.T if turned else b))) / np.max(np.abs(a)))

    names = ("loss", "features", "kernel")
    return {name: error(f"arr_{i}", transposed and name == "kernel") for i, name in enumerate(names)}


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title="loss and gradients, plain code against chunks")
    for column in ("backend", "mode", "", "time", "processor time", "peak memory", "largest error"):
        table.add_column(column)
    for result in results:
        for variant in VARIANTS:
            got = result[variant]
            table.add_row(
                result["backend"],
                result["mode"],
                variant,
                f"{got['seconds']:.2f} s",
                f"{got['processor_seconds']:.2f} s",
                f"{got['peak_megabytes']:.0f} MB",
                "" if variant == "plain" else f"{max(got['error'].values()):.1e}",
            )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=3, default=[4096, 512, 32768])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one, in this process")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    if words.variant:
        measure(words.variant, words.mode, words.shape, words.steps, words.out)
        return
    modes = (words.mode,) if words.mode else MODES
    results = [compare(mode, words.shape, words.rounds) for mode in modes]
    show(results)
    if words.json:
        words.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

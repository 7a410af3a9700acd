"""Compare plain Keras code with `multigrad.ops.linear_cross_entropy` for a large vocabulary.

    python -m benchmarks.large_vocabulary --json numbers.json

The function is a linear layer and its cross entropy. Two variants use `linear_cross_entropy`, which computes
in chunks: "one loss" reduces the loss in the op, which then computes the gradients in the forward pass where
possible; "by token" takes the mean of a loss per token. On PyTorch, "native" is
`torch.nn.functional.linear_cross_entropy`.

Each variant computes the mean loss and its gradients with respect to features and kernel: in eager code,
compiled, and on TensorFlow compiled by XLA, as in `fit`. It runs in new processes, in alternation with the
other variants, so that disturbances of the machine affect all of them.

The peak memory is the maximum during a step minus the memory before it. It includes the gradients and all
intermediate results. Freed memory does not count: when memory is measured, the C library returns large blocks
to the system immediately (`MALLOC_MMAP_THRESHOLD_`), and TensorFlow runs without oneDNN, which keeps blocks
(`TF_ENABLE_ONEDNN_OPTS`). The first step includes compilation and is ignored.
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
    """Return random features, labels, and a kernel scaled so that the logits are of order one."""
    tokens, width, classes = shape
    random = np.random.default_rng(0)
    features = random.standard_normal((tokens, width), dtype="float32")
    kernel = random.standard_normal((width, classes), dtype="float32") / np.float32(width**0.5)
    labels = random.integers(0, classes, tokens).astype("int32")
    return tuple(map(ops.convert_to_tensor, (features, kernel, labels)))


def make_step(variant: str, mode: str, shape: list[int]) -> Callable[[], list[Any]]:
    """Return a function that computes the loss and both gradients, and waits for them."""
    features, kernel, labels = inputs(shape)
    if variant == "native":
        kernel, loss = native.rows_for_classes(kernel), native.linear_cross_entropy
    else:
        loss = {"plain": plain, "one loss": one_loss, "by token": by_token}[variant]

    def loss_and_gradients(features: Any, labels: Any, kernel: Any) -> Any:
        # No `keras.tree`: on PyTorch (2.13) it keeps flattened tensors alive until a garbage collection.
        value, gradients = value_and_grad(lambda x, w: loss(x, w, labels), argnums=(0, 1))(features, kernel)
        return [value, *gradients]

    arguments = features, labels, kernel
    run = loss_and_gradients
    if mode == "compiled":
        run = backend.active.compiled(loss_and_gradients)
    elif mode == "xla":
        run = native.by_xla(loss_and_gradients, arguments[:2], arguments[2:])

    def step() -> list[Any]:
        results = run(*arguments)
        for tensor in results:
            getattr(tensor, "block_until_ready", lambda: None)()
        float(results[0])
        return results

    return step


def measure(variant: str, mode: str, shape: list[int], steps: int, out: Path) -> None:
    """Run steps in this process, and write their times, their peak memory and the last results to a file."""
    step = make_step(variant, mode, shape)
    times, peaks = [], []
    for remaining in reversed(range(steps)):
        gc.collect()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        wall, processor = time.perf_counter(), time.process_time()
        results = step()
        times.append((time.perf_counter() - wall, time.process_time() - processor))
        peaks.append(_resident("VmHWM") - before)
        results = results if remaining == 0 else None  # free the memory before the next step
    np.savez(out, *map(ops.convert_to_numpy, results), times=times, peaks=peaks)


def _resident(name: str) -> int:
    """Return a memory figure of this process in bytes: VmRSS is the current one, VmHWM the peak (Linux)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", status)[1])


def run_in_process(variant: str, mode: str, shape: list[int], steps: int, for_memory: bool) -> dict[str, Any]:
    """Run `measure` in a new process, and return the contents of its file."""
    return_blocks = {"MALLOC_MMAP_THRESHOLD_": "65536", "TF_ENABLE_ONEDNN_OPTS": "0"}
    environment = os.environ | (return_blocks if for_memory else {})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.npz"
        options = ["--variant", variant, "--mode", mode, "--steps", str(steps), "--out", str(out)]
        command = [sys.executable, "-m", "benchmarks.large_vocabulary", *options, "--shape", *map(str, shape)]
        subprocess.run(command, env=environment, check=True)
        with np.load(out) as results:
            return dict(results)


def compare(mode: str, shape: list[int], rounds: int) -> dict[str, Any]:
    """Run the variants in alternation. Return their median times, peak memory and errors."""
    times: dict[str, list[Any]] = {variant: [] for variant in VARIANTS}
    first = {variant: run_in_process(variant, mode, shape, 3, for_memory=True) for variant in VARIANTS}
    for _ in range(rounds):
        for variant in VARIANTS:
            measured = run_in_process(variant, mode, shape, 3, for_memory=False)
            times[variant] += measured["times"][1:].tolist()
    return {
        "backend": keras.backend.backend(),
        "mode": mode,
        "shape": shape,
        **{
            variant: {
                "seconds": statistics.median([wall for wall, _ in times[variant]]),
                "processor_seconds": statistics.median([processor for _, processor in times[variant]]),
                "peak_megabytes": float(first[variant]["peaks"][1:].max()) / MEGABYTE,
                "error": _errors(first["plain"], first[variant], transposed=variant == "native"),
            }
            for variant in VARIANTS
        },
    }


def _errors(required: dict[str, Any], got: dict[str, Any], transposed: bool) -> dict[str, float]:
    """Return the largest error of the loss and of each gradient, relative to the largest element.

    The native kernel is `transposed`.
    """

    def error(name: str, turned: bool) -> float:
        a, b = required[name], got[name]
        return float(np.max(np.abs(a - (b.T if turned else b))) / np.max(np.abs(a)))

    names = ("loss", "features", "kernel")
    return {name: error(f"arr_{i}", transposed and name == "kernel") for i, name in enumerate(names)}


def print_table(results: list[dict[str, Any]]) -> None:
    table = Table(title="loss and gradients of a linear layer with cross entropy")
    for column in ("backend", "mode", "variant", "time", "processor time", "peak memory", "largest error"):
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
    parser.add_argument("--variant", choices=VARIANTS, help="measure only this variant, in this process")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.variant:
        measure(options.variant, options.mode, options.shape, options.steps, options.out)
        return
    modes = (options.mode,) if options.mode else MODES
    results = [compare(mode, options.shape, options.rounds) for mode in modes]
    print_table(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

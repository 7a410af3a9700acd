"""Compare plain Keras code with `multigrad.ops.linear_cross_entropy` for a large vocabulary.

    KERAS_BACKEND=jax python -m benchmarks.large_vocabulary --json numbers.json

The function is a linear layer and its mean cross entropy. "one loss" reduces the loss in the op, which
computes the gradients in the forward pass; "by token" takes the mean of a loss per token. On PyTorch,
"native" is `torch.nn.functional.linear_cross_entropy`.

Each variant computes the loss and its gradients with respect to features and kernel, or with `--second` the
gradients of the sum of their squares. All variants run in one process, in alternation, so that disturbances
of the machine affect all of them. The first step of each variant includes compilation and is ignored.

The peak memory is the maximum during a step minus the memory before it, with the results. On a GPU it is
the framework's maximum, or on JAX the temporary memory and results of the compiled program. On the CPU it is
the resident memory of a second process, in which freed memory does not count: the C library returns large
blocks to the system immediately (`MALLOC_MMAP_THRESHOLD_`), and TensorFlow runs without oneDNN, which keeps
blocks (`TF_ENABLE_ONEDNN_OPTS`). These settings cost time.

The last column counts the operations that PyTorch launches, or the bytes of XLA's cost analysis for JAX. They
do not depend on the machine. XLA counts the body of a loop once.
"""

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops
from rich.console import Console
from rich.table import Table

from multigrad import backend, grad, value_and_grad
from multigrad.ops import linear_cross_entropy

from .native import active as native

VARIANTS = ("plain", "one loss", "by token", *(["native"] if hasattr(native, "linear_cross_entropy") else []))
MODES = {"jax": ("eager", "compiled"), "tensorflow": ("eager", "compiled", "xla"), "torch": ("eager",)}[
    keras.backend.backend()
]
MEGABYTE = 1e6


def plain(features: Any, kernel: Any, labels: Any) -> Any:
    logits = ops.cast(ops.matmul(features, kernel), "float32")
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


def one_loss(features: Any, kernel: Any, labels: Any) -> Any:
    return linear_cross_entropy(features, kernel, labels, reduction="mean")


def by_token(features: Any, kernel: Any, labels: Any) -> Any:
    return ops.mean(linear_cross_entropy(features, kernel, labels))


def inputs(shape: list[int], dtype: str) -> tuple[Any, Any, Any]:
    """Return random features, labels, and a kernel scaled so that the logits are of order one."""
    tokens, width, classes = shape
    random = np.random.default_rng(0)
    features = random.standard_normal((tokens, width), dtype="float32")
    kernel = random.standard_normal((width, classes), dtype="float32") / np.float32(width**0.5)
    labels = random.integers(0, classes, tokens).astype("int32")
    return ops.cast(features, dtype), ops.cast(kernel, dtype), ops.convert_to_tensor(labels)


def make_run(variant: str, mode: str, tensors: Any, second: bool) -> tuple[Callable[..., Any], Any]:
    """Return a function that computes the loss and both gradients, and its arguments."""
    features, kernel, labels = tensors
    if variant == "native":
        kernel, loss = native.rows_for_classes(kernel), native.linear_cross_entropy
    else:
        loss = {"plain": plain, "one loss": one_loss, "by token": by_token}[variant]

    def loss_and_gradients(features: Any, labels: Any, kernel: Any) -> Any:
        def f(x: Any, w: Any) -> Any:
            return loss(x, w, labels)

        def steepness(x: Any, w: Any) -> Any:
            squares = [ops.sum(ops.square(ops.cast(g, "float32"))) for g in grad(f, argnums=(0, 1))(x, w)]
            return squares[0] + squares[1]

        # No `keras.tree`: on PyTorch (2.13) it keeps flattened tensors alive until a garbage collection.
        value, gradients = value_and_grad(steepness if second else f, argnums=(0, 1))(features, kernel)
        return [value, *gradients]

    arguments = features, labels, kernel
    if mode == "compiled":
        return backend.active.compile_function(loss_and_gradients), arguments
    if mode == "xla":
        return native.by_xla(loss_and_gradients, arguments[:2], arguments[2:]), arguments
    return loss_and_gradients, arguments


class Memory:
    """The peak memory of a step, of the process or of the GPU."""

    def __enter__(self) -> "Memory":
        gc.collect()
        self.gpu = native.gpu_memory() if hasattr(native, "gpu_memory") else None
        if self.gpu is None:
            self.before = _resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        else:
            self.before = self.gpu.start()
        return self

    def __exit__(self, *exception: object) -> None:
        after = _resident("VmHWM") if self.gpu is None else self.gpu.peak()
        self.peak = after - self.before


def _resident(name: str) -> int:
    """Return a memory figure of this process in bytes: VmRSS is the current one, VmHWM the peak (Linux)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", status)[1])


def compare(
    mode: str, shape: list[int], dtype: str, rounds: int, second: bool, with_counts: bool
) -> dict[str, Any]:
    """Run the variants in alternation. Return their times, peak memory and errors."""
    tensors = inputs(shape, dtype)
    runs = {
        name: make_run(name, mode, tensors, second) for name in VARIANTS if not (second and name == "native")
    }
    times: dict[str, list[float]] = {variant: [] for variant in runs}
    peaks: dict[str, list[float]] = {variant: [] for variant in runs}
    sizes: dict[str, list[float]] = {}
    for index in range(rounds + 1):
        for variant, (run, arguments) in runs.items():
            with Memory() as memory:
                start = time.perf_counter()
                results = run(*arguments)
                for tensor in results:
                    getattr(tensor, "block_until_ready", lambda: None)()
                float(results[0])
                taken = time.perf_counter() - start
            if index == 0:  # the norms, because the results of all variants would take too much memory
                sizes[variant] = [
                    float(ops.sqrt(ops.sum(ops.square(ops.cast(r, "float32"))))) for r in results
                ]
            else:
                times[variant].append(taken)
                peaks[variant].append(memory.peak / MEGABYTE)
            del results
    programs = {variant: _program_of(*runs[variant]) if with_counts else None for variant in runs}
    found = {
        variant: {
            "seconds": min(times[variant]),
            "median_seconds": statistics.median(times[variant]),
            "peak_megabytes": _planned(programs[variant]) or statistics.median(peaks[variant]),
            "error": max(abs(a / b - 1.0) for a, b in zip(sizes[variant], sizes["plain"], strict=True)),
            "count": _count(programs[variant], *runs[variant]) if with_counts else "",
        }
        for variant in runs
    }
    facts = {"backend": keras.backend.backend(), "mode": mode, "dtype": dtype, "second": second}
    return {**facts, "shape": shape, "variants": found}


def _program_of(run: Callable[..., Any], arguments: Any) -> Any:
    """Return the compiled program of a function that `jax.jit` compiles, None for others."""
    return run.lower(*arguments).compile() if hasattr(run, "lower") else None


def _planned(program: Any) -> float | None:
    """Return the megabytes that a program of JAX takes on a GPU, because JAX cannot reset its maximum."""
    if native.accelerator() is None or program is None:
        return None
    memory = program.memory_analysis()
    return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / MEGABYTE


def _count(program: Any, run: Callable[..., Any], arguments: Any) -> str:
    """Return the number of launched operations on PyTorch, and the bytes of the program on JAX."""
    if hasattr(native, "launches"):
        return f"{native.launches(lambda: run(*arguments))} operations"
    if program is not None:
        cost = program.cost_analysis()
        return f"{cost['bytes accessed'] / 1e9:.1f} GB, {cost['flops'] / 1e9:.0f} Gflop in the program"
    return ""


def print_table(results: list[dict[str, Any]]) -> None:
    table = Table(title="loss and gradients of a linear layer with cross entropy")
    for column in ("backend", "mode", "variant", "time", "ratio", "peak memory", "ratio", "error", "count"):
        table.add_column(column)
    for result in results:
        base = result["variants"]["plain"]
        for variant, got in result["variants"].items():
            table.add_row(
                result["backend"],
                f"{result['mode']}, {result['dtype']}" + (", second" if result["second"] else ""),
                variant,
                f"{1000 * got['seconds']:.1f} ms",
                f"{got['seconds'] / base['seconds']:.2f}",
                f"{got['peak_megabytes']:.0f} MB",
                f"{got['peak_megabytes'] / base['peak_megabytes']:.2f}",
                "" if variant == "plain" else f"{got['error']:.1e}",
                got["count"],
            )
    Console(width=150).print(table)


def _peaks_in_new_process() -> list[dict[str, float]]:
    """Return the peaks of each mode, measured in a process whose C library keeps no freed memory."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "TF_ENABLE_ONEDNN_OPTS": "0"}
    command = [
        sys.executable,
        "-m",
        "benchmarks.large_vocabulary",
        *sys.argv[1:],
        "--rounds",
        "1",
        "--memory",
    ]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=3, default=[2048, 512, 16384])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--second", action="store_true", help="measure a second derivative")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", action="store_true", help="print only the peak memory, in this process")
    parser.add_argument("--mode", choices=MODES)
    options = parser.parse_args()
    modes = (options.mode,) if options.mode else MODES
    settings = options.shape, options.dtype, options.rounds, options.second
    results = [compare(mode, *settings, with_counts=not options.memory) for mode in modes]
    if options.memory:
        print(json.dumps([{v: got["peak_megabytes"] for v, got in r["variants"].items()} for r in results]))
        return
    if native.accelerator() is None:
        for result, peaks in zip(results, _peaks_in_new_process(), strict=True):
            for variant, peak in peaks.items():
                result["variants"][variant]["peak_megabytes"] = peak
    print_table(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The command `python -m multigrad.testing`, for a Python file that defines `fn` and `args`.

`check FILE` compares the gradients with central differences on the active backend. `compare FILE` compares
the installed backends. `compare_backends` runs `measure FILE RESULT` in one process per backend, which writes
the outputs and gradients to the .npz file RESULT.
"""

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multigrad import backend
from multigrad.testing import check_gradients, compare_backends
from multigrad.testing.checked_function import CheckedFunction
from multigrad.testing.mismatches import GRADIENT_PREFIX
from multigrad.testing.precision import lowest_precision
from multigrad.testing.tensors import flat_vjp, random_weights, to_numpy, to_tensors


def measure(fn: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """Return the outputs and gradients of a function, as arrays for `numpy.savez`."""
    flat = CheckedFunction(fn, args, dtype="own")
    outputs, pullback = flat_vjp(flat, flat.inputs)
    gradients = pullback(to_tensors(list(random_weights(outputs, seed=0)), outputs))
    # A gradient is no more precise than the outputs and inputs that it is computed from.
    gradient_precision = lowest_precision([*outputs, *flat.inputs])
    is_differentiable = backend.active.is_differentiable
    measured = [
        (name, tensor, lowest_precision([tensor]) if is_differentiable(tensor) else "exact")
        for name, tensor in flat.all_outputs.items()
    ]
    measured += [
        (f"{GRADIENT_PREFIX}{name}", gradient, gradient_precision)
        for name, gradient in zip(flat.input_names, gradients, strict=True)
    ]
    names, tensors, precisions = zip(*measured, strict=True)
    arrays = {f"array{i}": to_numpy(tensor) for i, tensor in enumerate(tensors)}
    return {"names": names, "precisions": precisions, **arrays}


def load(source: Path) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Run a file, and return the `fn` and `args` that it defines."""
    sys.path.insert(0, str(source.parent))  # as `python SOURCE` does
    namespace = runpy.run_path(str(source))
    missing = [name for name in ("fn", "args") if name not in namespace]
    if missing:
        raise TypeError(f"{source.name} does not define {' and '.join(missing)}")
    return namespace["fn"], namespace["args"]


def main() -> int:
    """Run the command, and return 1 if gradients disagree."""
    parser = argparse.ArgumentParser(
        prog="python -m multigrad.testing", description="Check the gradients of a function."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    helps = {
        "check": "compare the gradients with central differences on the active backend",
        "compare": "compare the outputs and gradients of the installed backends",
    }
    for name, text in helps.items():
        commands.add_parser(name, help=text, description=text)
    measuring = commands.add_parser("measure")  # for `compare`; without `help`, it is not listed
    for command in commands.choices.values():
        command.add_argument("file", type=Path, help="a Python file that defines `fn` and `args`")
    measuring.add_argument("result", type=Path, help="the .npz file")
    options = parser.parse_args()
    try:
        if options.command == "compare":
            print(compare_backends(options.file))
        elif options.command == "check":
            fn, args = load(options.file)
            print(check_gradients(fn, *args))
        else:
            with backend.active.wide():
                np.savez(options.result, **measure(*load(options.file)))
    except AssertionError as disagreement:
        print(disagreement, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

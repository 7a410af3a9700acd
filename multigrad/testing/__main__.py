"""Measure a function on the active backend: `python -m multigrad.testing SOURCE RESULT`.

`compare_backends` runs this module in one process per backend. SOURCE is a Python file that defines `fn` and
`args`. RESULT is the .npz file to which the outputs and gradients are written.
"""

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multigrad import backend
from multigrad.testing.flat_function import FlatFunction
from multigrad.testing.mismatches import GRADIENT_PREFIX
from multigrad.testing.precision import lowest_precision
from multigrad.testing.tensors import flat_vjp, random_weights, to_numpy, to_tensors


def measure(fn: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """Return the outputs and gradients of a function, as arrays for `numpy.savez`."""
    flat = FlatFunction(fn, args, dtype="own")
    outputs, pullback = flat_vjp(flat, flat.inputs)
    gradients = pullback(to_tensors(list(random_weights(outputs, seed=0)), outputs))
    # A gradient is no more precise than the outputs and inputs that it is computed from.
    gradient_precision = lowest_precision([*outputs, *flat.inputs])
    measured = [(name, tensor, _precision(tensor)) for name, tensor in flat.all_outputs.items()]
    measured += [
        (f"{GRADIENT_PREFIX}{name}", gradient, gradient_precision)
        for name, gradient in zip(flat.input_names, gradients, strict=True)
    ]
    arrays = {f"array{i}": to_numpy(tensor) for i, (_, tensor, _) in enumerate(measured)}
    return {
        "names": [name for name, _, _ in measured],
        "precisions": [precision for _, _, precision in measured],
        **arrays,
    }


def _precision(tensor: Any) -> str:
    return lowest_precision([tensor]) if backend.active.is_differentiable(tensor) else "exact"


parser = argparse.ArgumentParser(prog="python -m multigrad.testing", description=__doc__)
parser.add_argument("source", type=Path, help="a Python file that defines `fn` and `args`")
parser.add_argument("result", type=Path, help="the .npz file to write")
options = parser.parse_args()
sys.path.insert(0, str(options.source.parent))  # as `python SOURCE` does
with backend.active.wide():
    namespace = runpy.run_path(str(options.source))
    missing = [name for name in ("fn", "args") if name not in namespace]
    if missing:
        raise TypeError(f"{options.source.name} does not define {' and '.join(missing)}")
    np.savez(options.result, **measure(namespace["fn"], namespace["args"]))

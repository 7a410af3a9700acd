"""The process of one backend: `python -m multigrad.testing FILE ANSWER` measures what FILE defines."""

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multigrad import backend
from multigrad.testing.flat_function import Flat, directions, like, precision_of, values, vjp
from multigrad.testing.mismatches import GRADIENT


def measure(fn: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """The outputs of a function and its gradients, as arrays for `numpy.savez`."""
    flat = Flat(fn, args, dtype="own")
    outputs, pullback = vjp(flat, flat.inputs)
    gradients = pullback(like(list(directions(outputs, seed=0)), outputs))
    # A gradient has no more digits than the outputs that it comes from.
    of_all = precision_of([*outputs, *flat.inputs])
    named = [(name, tensor, _precision(tensor)) for name, tensor in flat.all_outputs.items()]
    own = zip(flat.input_names, gradients, strict=True)
    named += [(f"{GRADIENT}{name}", gradient, of_all) for name, gradient in own]
    arrays = {f"array{i}": values(tensor) for i, (_, tensor, _) in enumerate(named)}
    return {"names": [name for name, _, _ in named], "precisions": [p for _, _, p in named], **arrays}


def _precision(tensor: Any) -> str:
    return precision_of([tensor]) if backend.active.is_differentiable(tensor) else "exact"


parser = argparse.ArgumentParser(prog="python -m multigrad.testing", description=__doc__)
parser.add_argument("source", type=Path, help="a Python file that defines `fn` and `args`")
parser.add_argument("answer", type=Path, help="the .npz file for what is measured")
given = parser.parse_args()
source, answer = given.source, given.answer
sys.path.insert(0, str(source.parent))  # as `python FILE` has it
with backend.active.wide():
    defined = runpy.run_path(str(source))
    missing = [name for name in ("fn", "args") if name not in defined]
    if missing:
        raise TypeError(f"{source.name} does not define {' and '.join(missing)}")
    np.savez(answer, **measure(defined["fn"], defined["args"]))

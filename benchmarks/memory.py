"""What is held between the forward and the backward pass, seen from outside: the memory of the process."""

import gc
from collections.abc import Mapping

import psutil

from .cases import Case, layer_norm, log1pexp
from .native import active

_SIDE = 4096  # of a matrix of 64 MiB, which the allocator gets from the system and gives back to it


def held() -> dict[str, dict[str, float]]:
    """For two functions, in each way, the bytes held beside the input, in units of its size.

    One of them is the output. By hand, log1pexp keeps one tensor, and layer norm a column beside its output.
    """
    big = layer_norm(_SIDE, _SIDE)
    cases = [Case("log1pexp", big.args, log1pexp().ways), Case("layer norm", big.args, big.ways)]
    return {case.name: _held(case) for case in cases}


def _held(case: Case) -> Mapping[str, float]:
    (x,) = case.args
    size = 4 * _SIDE * _SIDE
    found = {}
    for way, f in case.ways.items():
        active.forward(f, [x])  # what is made once is made now
        gc.collect()
        before = psutil.Process().memory_info().rss
        kept = active.forward(f, [x])
        gc.collect()
        found[way] = (psutil.Process().memory_info().rss - before) / size
        del kept
    return found

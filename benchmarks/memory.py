"""What is held between the forward and the backward pass, seen from outside: the memory of the process."""

import gc
from collections.abc import Mapping

import psutil

from .cases import Case, chain, layer_norm
from .native import active

_SIDE = 4096  # of a matrix of 64 MiB, which the allocator gets from the system and gives back to it


def held() -> dict[str, dict[str, float]]:
    """For some functions, in each way, the bytes held beside the input, in units of its size.

    One of them is the output. By hand, log1pexp keeps one tensor, and layer norm a column beside its output.
    """
    big = layer_norm(_SIDE, _SIDE)
    chains = [Case(f"log1pexp, {count} in a chain", big.args, chain(count).ways) for count in (1, 5)]
    return {case.name: _held(case) for case in [*chains, big]}


def _held(case: Case) -> Mapping[str, float]:
    (x,) = case.args
    size = 4 * _SIDE * _SIDE
    found = {}
    for way, f in case.ways.items():
        # What is made once is made now, and what an allocator has in store is used up.
        others = [active.forward(f, [x]) for _ in range(2)]
        gc.collect()
        before = psutil.Process().memory_info().rss
        kept = active.forward(f, [x])
        gc.collect()
        found[way] = (psutil.Process().memory_info().rss - before) / size
        del kept, others
    return found

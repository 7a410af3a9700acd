"""What is held between the forward and the backward pass, seen from outside: the memory of a process."""

import gc
import subprocess
import sys
from collections.abc import Callable, Mapping

import psutil

import multigrad

from .cases import Case, chain, chained, layer_norm, log1pexp_with_rule
from .native import active

_SIDE = 4096  # of a matrix of 64 MiB, which an allocator gets from the system


def held() -> Mapping[str, Mapping[str, float]]:
    """For some functions, in each way, what is held beside the input, in units of its size.

    One of them is the output. By hand, log1pexp keeps one tensor, and layer norm a column beside its output.
    Each has a process of its own: an allocator keeps in store what another one gave back.
    """
    return {case: {way: _measured(case, way) for way in make(3).ways} for case, make in _CASES.items()}


def _log1pexps(count: int) -> Callable[[int], Case]:
    def make(side: int) -> Case:
        lean = multigrad.op_custom_gradient(log1pexp_with_rule, higher_order=False)
        ways = chain(count).ways | {"higher_order=False": chained(lean, count)}
        return Case("", layer_norm(side, side).args, ways)

    return make


_CASES: Mapping[str, Callable[[int], Case]] = {
    "log1pexp": _log1pexps(1),
    "log1pexp, 5 in a chain": _log1pexps(5),
    "layer norm": lambda side: layer_norm(side, side),
}


def _measured(case: str, way: str) -> float:
    command = [sys.executable, "-m", __name__, case, way]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _measure(case: str, way: str) -> float:
    small, big = _CASES[case](3), _CASES[case](_SIDE)
    active.forward(small.ways[way], small.args)  # what is made once is made now
    gc.collect()
    before = psutil.Process().memory_info().rss
    kept = active.forward(big.ways[way], big.args)
    gc.collect()
    found = (psutil.Process().memory_info().rss - before) / (4 * _SIDE * _SIDE)
    del kept
    return found


if __name__ == "__main__":
    print(_measure(*sys.argv[1:]))

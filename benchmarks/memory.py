"""The memory that is kept between the forward and the backward pass: of a process, or of tensors on a GPU."""

import gc
import subprocess
import sys
from collections.abc import Callable, Mapping

import psutil

import multigrad

from .cases import Case, chain, layer_norm, log1pexp_with_rule, repeated
from .native import active

_SIDE = 4096  # a matrix of 64 MiB, large enough that an allocator requests it from the system


def residual_memory() -> Mapping[str, Mapping[str, float]]:
    """Return, for some functions and each implementation, the memory kept besides the input.

    The unit is the size of the input, and the output counts as 1. The native log1pexp also keeps one tensor,
    and the native layer norm keeps a column. Each measurement has a process of its own, because an allocator
    may reuse memory that an earlier measurement freed.
    """
    return {
        case: {name: _measure_in_process(case, name) for name in make(3).implementations}
        for case, make in _CASES.items()
    }


def _log1pexp_chain(count: int) -> Callable[[int], Case]:
    def make(side: int) -> Case:
        first_order = multigrad.op_custom_gradient(log1pexp_with_rule, higher_order=False)
        implementations = chain(count).implementations | {"higher_order=False": repeated(first_order, count)}
        return Case("", layer_norm(side, side).args, implementations)

    return make


_CASES: Mapping[str, Callable[[int], Case]] = {
    "log1pexp": _log1pexp_chain(1),
    "log1pexp, 5 in a chain": _log1pexp_chain(5),
    "layer norm": lambda side: layer_norm(side, side),
}


def _measure_in_process(case: str, implementation: str) -> float:
    command = [sys.executable, "-m", __name__, case, implementation]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _measure(case: str, implementation: str) -> float:
    small, large = _CASES[case](3), _CASES[case](_SIDE)
    active.forward(small.implementations[implementation], small.args)  # fill caches
    gc.collect()
    before = _bytes()
    kept = active.forward(large.implementations[implementation], large.args)
    gc.collect()
    sizes = (_bytes() - before) / (4 * _SIDE * _SIDE)
    del kept
    return sizes


def _bytes() -> int:
    on_accelerator: int | None = active.allocated()
    return psutil.Process().memory_info().rss if on_accelerator is None else on_accelerator


if __name__ == "__main__":
    print(_measure(*sys.argv[1:]))

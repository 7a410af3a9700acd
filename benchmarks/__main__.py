"""`python -m benchmarks`: measure the active backend, and show, keep and draw what was found."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import cases, growth, memory, report
from .measure import Timing, in_turns
from .native import active

COMPILED = ("log1pexp", "matmul 64x64", "layer norm 256x1024", "chain of 10")
"""What is compiled and traced, too."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="rounds in which the ways take turns")
    parser.add_argument("--only", default="", help="cases whose name has this in it, and nothing else")
    parser.add_argument("--json", type=Path, help="a file for all that was found")
    parser.add_argument("--picture", type=Path, help="a file for the ratios and the curves")
    options = parser.parse_args()
    every = cases.every()
    assert {case.name for case in every} >= {*COMPILED}
    chosen = [case for case in every if options.only in case.name]
    compiled = [case for case in chosen if case.name in COMPILED]
    few = max(3, options.rounds // 6)
    results = {
        "eager": {case.name: _timings(case, active.runner, options.rounds) for case in chosen},
        "compiled": {case.name: _timings(case, active.compiled, options.rounds) for case in compiled},
        "tracing": {case.name: _timings(case, _tracer, few) for case in compiled},
    }
    held = {} if options.only else memory.held()
    report.show(results, held)
    curves = [] if options.only else growth.curves(few)
    if options.json:
        report.save(report.as_dict(results, held, curves), options.json)
    if options.picture:
        report.draw(results, curves, options.picture)


def _timings(case: cases.Case, maker: Callable[..., Callable[[], Any]], rounds: int) -> Mapping[str, Timing]:
    return in_turns({way: maker(f, case.args) for way, f in case.ways.items()}, rounds)


def _tracer(f: Callable[..., Any], args: Any) -> Callable[[], Any]:
    return lambda: active.trace(f, args)


if __name__ == "__main__":
    main()

"""`python -m benchmarks`: measure the active backend, print tables, and store the results."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import cases, growth, memory, report
from .measure import Timing, time_in_turns
from .native import active

COMPILED = ("log1pexp", "matmul 64x64", "layer norm 256x1024", "chain of 10")
"""The cases that are also measured compiled, and whose tracing is measured."""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="the number of timings of each implementation")
    parser.add_argument("--only", default="", help="measure only the cases whose name contains this text")
    parser.add_argument("--json", type=Path, help="a file for all results")
    parser.add_argument("--picture", type=Path, help="an image file for the ratios and the growth of time")
    options = parser.parse_args()
    all_cases = cases.all_cases()
    assert {case.name for case in all_cases} >= {*COMPILED}
    chosen = [case for case in all_cases if options.only in case.name]
    compiled = [case for case in chosen if case.name in COMPILED]
    few = max(3, options.rounds // 6)
    timings = {
        "eager": {case.name: _time(case, active.runner, options.rounds) for case in chosen},
        "compiled": {case.name: _time(case, active.compiled, options.rounds) for case in compiled},
        "tracing": {case.name: _time(case, _tracer, few) for case in compiled},
    }
    residuals = {} if options.only else memory.residual_memory()
    report.print_tables(timings, residuals)
    curves = [] if options.only else growth.curves(few)
    if options.json:
        report.save(report.as_dict(timings, residuals, curves), options.json)
    if options.picture:
        report.draw(timings, curves, options.picture)


def _time(case: cases.Case, make_run: Callable[..., Callable[[], Any]], rounds: int) -> Mapping[str, Timing]:
    runs = {name: make_run(f, case.args) for name, f in case.implementations.items()}
    return time_in_turns(runs, rounds)


def _tracer(f: Callable[..., Any], args: Any) -> Callable[[], Any]:
    return lambda: active.trace(f, args)


if __name__ == "__main__":
    main()

"""`python -m multigrad.testing.audit RESULT MODULE [OP ...]`: audit the active backend, and write JSON."""

import argparse
import importlib
import json
import logging
import sys
from pathlib import Path

import keras
from rich.console import Console
from rich.progress import Progress

from multigrad.frameworks import version_of
from multigrad.testing.audit.measure import audit_cases
from multigrad.testing.audit.table import cases_of


def main() -> int:
    """Run the audit, with a progress bar on stderr if it is a terminal."""
    parser = argparse.ArgumentParser(prog="python -m multigrad.testing.audit")
    parser.add_argument("result", type=Path)
    parser.add_argument("module")
    parser.add_argument("ops", nargs="*")
    options = parser.parse_args()
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # it warns of each gradient of a complex number
    backend = keras.backend.backend()
    module = importlib.import_module(options.module)
    cases = cases_of(module, options.module)
    if options.ops:
        cases = [case for case in cases if case.op in options.ops]
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(backend, total=len(cases))
        rows = audit_cases(cases, module, lambda case: progress.advance(task))
    versions = {"keras": keras.__version__, backend: version_of(backend)}
    options.result.write_text(json.dumps({"versions": versions, "rows": rows}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

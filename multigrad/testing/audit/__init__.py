"""An audit of the gradients of `keras.ops`, `multigrad.ops`, `keras.losses` and `keras.activations`.

`table` collects the ops and their special points, which are in one file for each kind of op. `truth`
computes the derivatives from formulas and finite differences in float64, `measure` those of the active
backend, and `report` writes the result. `python -m multigrad.testing.audit` audits the active backend.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from multigrad.core.errors import message
from multigrad.frameworks import DIFFERENTIATING, how_to_add, is_installed
from multigrad.processes import run_on
from multigrad.testing.audit.report import Audit
from multigrad.testing.audit.rows import Row

__all__ = ["Audit", "Row", "audit_gradients"]

MODULES = ("keras.ops", "multigrad.ops", "keras.losses", "keras.activations")


def audit_gradients(
    *,
    module: str = "keras.ops",
    ops: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
) -> Audit:
    """Compare the gradients of ops with formulas and finite differences, at special points.

    ```python
    import keras
    from multigrad.testing import audit_gradients

    audit = audit_gradients(module="multigrad.ops", ops=["hypot"], backends=[keras.backend.backend()])
    print(len(audit.faults))  # 0
    ```

    The points are zeros, ties, bounds, repeated values, singular matrices, empty arrays, scalars and the
    like, in first and second derivatives. Each backend runs in its own process. An audit of all ops takes up
    to a few minutes on each backend.

    Arguments:
        module: `"keras.ops"`, `"multigrad.ops"`, `"keras.losses"` or `"keras.activations"`.
        ops: the names of the ops. The default is all.
        backends: the backends. The default is all installed backends that compute gradients.

    Returns:
        An object with the `rows` of each backend, the `faults` among them, and the methods `to_text`,
        `to_markdown` and `to_json`. A row has a verdict. `right`: the derivative. `convention`: there is no
        derivative, and the result is the convention of multigrad. `other convention`: another number between
        the one-sided derivatives. `wrong`, `NaN` (also for infinite numbers) and `error` are faults.

    Raises:
        ValueError: if the module, an op or a backend is unknown, or a backend is not installed.
        RuntimeError: if a process fails.
    """
    chosen = list(backends or filter(is_installed, DIFFERENTIATING))
    _require(module, ops, chosen)
    found: dict[str, list[Row]] = {}
    versions = {}
    with TemporaryDirectory() as folder:
        for name in chosen:
            result = Path(folder, f"{name}.json")
            process = run_on(name, "multigrad.testing.audit", str(result), module, *(ops or ()))
            if process.returncode:
                raise RuntimeError(
                    message(
                        "audit_gradients",
                        f"the process on {name} failed",
                        required="a backend that works",
                        got=f"exit status {process.returncode}, and the messages above",
                        fix="correct the error that they show",
                    )
                )
            data = json.loads(result.read_text(encoding="utf-8"))
            found[name] = [Row(*row) for row in data["rows"]]
            versions[name] = data["versions"]
    return Audit(module, versions, found)


def _require(module: str, ops: Sequence[str] | None, backends: Sequence[str]) -> None:
    """Raise ValueError unless the arguments are valid."""
    from multigrad.testing.audit.table import all_cases

    known = {case.op for case in all_cases(module)} if ops else set()
    for argument, required, wrong, fix in (
        ("module", " or ".join(MODULES), [module] if module not in MODULES else [], "pass one of them"),
        ("ops", "ops of the audit's table", [op for op in ops or () if op not in known], "omit it"),
        (
            "backends",
            f"installed backends of {', '.join(DIFFERENTIATING)}",
            [b for b in backends if b not in DIFFERENTIATING or not is_installed(b)],
            "; ".join(how_to_add(b) for b in DIFFERENTIATING if not is_installed(b)) or "pass others",
        ),
    ):
        if wrong:
            raise ValueError(
                message(
                    "audit_gradients",
                    f"the argument {argument!r} cannot be audited",
                    argument=repr(argument),
                    required=required,
                    got=", ".join(map(repr, wrong)),
                    fix=fix,
                )
            )
    if not backends:
        raise ValueError(
            message(
                "audit_gradients",
                "no backend is installed",
                argument="'backends'",
                required=f"one of {', '.join(DIFFERENTIATING)}, installed",
                got="none",
                fix="; ".join(map(how_to_add, DIFFERENTIATING)),
            )
        )

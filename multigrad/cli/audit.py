"""The `multigrad audit` command: print the verdicts on the gradients of `keras.ops` or `multigrad.ops`."""

import os
import sys
from collections.abc import Sequence

from multigrad.frameworks import DIFFERENTIATING, active_backend, is_installed

# The audit compiles thousands of tiny programs once. JAX reads this variable when it starts, and aborts on a
# flag that it does not know. So these are flags of each supported version.
FAST = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)


def audit(module: str, form: str, ops: Sequence[str] = (), backend: str | None = None) -> int:
    """Run the audit and print its table.

    ```python
    from multigrad.cli.audit import audit

    status = audit("multigrad.ops", "markdown", ["hypot"])
    ```

    Arguments:
        module: the audited module, `keras.ops` or `multigrad.ops`.
        form: `terminal`, `markdown` or `json`.
        ops: the names of the ops. The default is all.
        backend: the only backend. The default is all installed backends.

    Returns:
        The exit status: 0 if no row is wrong, NaN or an error, else 1.
    """
    os.environ.setdefault("XLA_FLAGS", FAST)
    installed = [name for name in DIFFERENTIATING if is_installed(name)]
    if active_backend()[0] not in installed and installed:  # this process imports Keras, too
        os.environ["KERAS_BACKEND"] = installed[0]
    from multigrad.testing.audit import audit_gradients

    try:
        result = audit_gradients(module=module, ops=ops or None, backends=[backend] if backend else None)
    except ValueError as error:
        print(f"multigrad audit: {error}", file=sys.stderr)
        return 2
    print({"terminal": result.to_text, "markdown": result.to_markdown, "json": result.to_json}[form]())
    return 1 if result.faults else 0

"""`python -m audit [OP ...]`: audit the active backend.

Without ops, the rows that are not right are stored, and the table of the page is written. With ops, their
rows are printed.
"""

import importlib
import logging
import sys

import keras

from audit.measure import audit_cases
from audit.page import MODULES, store, write_table
from audit.table import cases_of
from multigrad.common.frameworks import version_of


def main(ops):
    """Audit these ops, or all."""
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # it warns of each gradient of a complex number
    backend = keras.backend.backend()
    for name in MODULES:
        module = importlib.import_module(name)
        cases = [case for case in cases_of(module, name) if not ops or case.op in ops]
        rows = audit_cases(cases, module)
        if not ops:
            store(name, backend, {"keras": keras.__version__, backend: version_of(backend)}, rows)
        for row in rows if ops else ():
            print(name, *row, sep="  ")
    if not ops:
        write_table()


if __name__ == "__main__":
    main(sys.argv[1:])

"""The cases of each module that can be audited."""

from operator import attrgetter
from types import ModuleType

from audit.arrays import array_cases
from audit.cases import Case
from audit.elementwise import elementwise_cases
from audit.losses import activation_cases, loss_cases
from audit.matrices import matrix_cases
from audit.networks import network_cases
from audit.structure import structure_cases


def all_cases(module: str) -> list[Case]:
    """Return the cases of a module, by its name."""
    if module == "keras.losses":
        return loss_cases()
    if module == "keras.activations":
        return activation_cases()
    parts = (elementwise_cases(), array_cases(), matrix_cases(), network_cases(), structure_cases())
    return [case for part in parts for case in part]


def cases_of(module: ModuleType, name: str) -> list[Case]:
    """Return the cases of the functions that a module has."""
    return [case for case in all_cases(name) if _has(module, case.op)]


def _has(module: ModuleType, op: str) -> bool:
    try:
        attrgetter(op)(module)
    except AttributeError:  # an older version of Keras
        return False
    return True

"""The backend of the active framework. Only the module of that framework is imported."""

import importlib

import keras

from multigrad.backend.base import Backend
from multigrad.frameworks import DIFFERENTIATING, FORWARD_ONLY


def _load() -> Backend:
    name = keras.backend.backend()
    if name not in DIFFERENTIATING + FORWARD_ONLY:
        raise ValueError(
            f"multigrad has no backend named {name!r}. It has {', '.join(DIFFERENTIATING + FORWARD_ONLY)}. "
            "Choose one with the environment variable KERAS_BACKEND before Keras is imported."
        )
    module = importlib.import_module(f"{__name__}.{name if name in DIFFERENTIATING else 'forward_only'}")
    backend: Backend = module.ACTIVE
    return backend


active = _load()

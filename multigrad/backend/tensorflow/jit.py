"""`multigrad.jit` on TensorFlow: `tf.function`, which captures variables."""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf


def jit(
    function: Callable[..., Any], name: str, static: Mapping[str, int | None], options: Mapping[str, Any]
) -> Callable[..., Any]:
    # Without AutoGraph, as in `fit` of Keras, so that Python code runs as on other backends.
    return tf.function(function, **{"autograph": False, **options})

"""Keras layers for the ops of `multigrad.ops`, with config, weights, saving, masks and mixed precision.

```python
import keras
from multigrad import layers

model = keras.Sequential([keras.Input((4,)), layers.GradientReversal(0.5), keras.layers.Dense(2)])
```
"""

from multigrad import backend as _backend  # noqa: F401  checks the environment before Keras is imported
from multigrad.layers.implicit import FixedPoint
from multigrad.layers.linear_cross_entropy import LinearCrossEntropy
from multigrad.layers.quantizing import FakeQuantize, VectorQuantizer
from multigrad.layers.routing import GradientClip, GradientReversal, GradientScale
from multigrad.layers.spiking import Spike

__all__ = [
    "FakeQuantize",
    "FixedPoint",
    "GradientClip",
    "GradientReversal",
    "GradientScale",
    "LinearCrossEntropy",
    "Spike",
    "VectorQuantizer",
]

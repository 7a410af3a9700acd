"""Keras callbacks that record gradients in a compiled `fit`.

```python
import keras
import numpy as np
from multigrad.callbacks import GradientLogger

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="first"), keras.layers.Dense(1)])
model.compile("sgd", "mse")
logger = GradientLogger(every=10)
model.fit(np.ones((4, 2)), np.ones((4, 1)), callbacks=[logger], verbose=0)
print(list(logger.records[0].outputs))  # ['first', 'dense']
```
"""

from multigrad import backend as _backend  # noqa: F401  checks the environment before Keras is imported
from multigrad.callbacks.gradient_logger import GradientLogger

__all__ = ["GradientLogger"]

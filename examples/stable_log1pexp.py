"""log(1 + exp(x)) with a gradient that survives the overflow of exp(x).

KERAS_BACKEND=jax python examples/stable_log1pexp.py
"""

import keras
from keras import ops
from rich.console import Console
from rich.table import Table

from multigrad import grad, op_custom_gradient


def plain(x):
    return ops.log(1.0 + ops.exp(x))


# The chain rule multiplies 1 / (1 + exp(x)) by exp(x), which at 100 is zero times infinity in float32.
# Mathematics knows better: the product is sigmoid(x).
@op_custom_gradient
def log1pexp(x):
    def rule(upstream):
        # A rule is differentiated in turn. The sigmoid of `x` has a derivative at 100 too; the equal
        # 1 - 1 / (1 + exp(x)), as the README has it, would overflow one order later.
        return upstream * ops.sigmoid(x)

    return plain(x), rule


table = Table("x", "value", "plain gradient", "by the rule", "second derivative")
for x in (-2.0, 0.0, 2.0, 100.0):
    numbers = log1pexp(ops.array(x)), grad(plain)(x), grad(log1pexp)(x), grad(grad(log1pexp))(x)
    table.add_row(f"{x:g}", *[f"{float(number):.6g}" for number in numbers])

print(f"log(1 + exp(x)) on {keras.backend.backend()}")
Console(width=80).print(table)
print("The rule is about the gradient: the value is still infinite where exp(x) overflows.")

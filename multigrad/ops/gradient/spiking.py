"""The step function of a spiking neuron, with a surrogate gradient."""

import math
from collections.abc import Callable
from typing import Any

from keras import ops

from multigrad.common.errors import unusable
from multigrad.op import op_custom_gradient
from multigrad.ops.arguments import Pair, Tensor, floating, is_number, with_python_numbers
from multigrad.ops.dtypes import dtype_of, wide_dtype


def _fast_sigmoid(x: Any, slope: float) -> Any:
    """Return the derivative of Zenke and Ganguli 2018, of `x / (1 + slope * abs(x))`."""
    # Not `ops.abs`, whose derivative at zero is 1 on JAX (Keras 3.15).
    return 1.0 / ops.square(1.0 + slope * x * ops.sign(x))


def _arctan(x: Any, slope: float) -> Any:
    """Return the derivative of Fang et al. 2021, of `arctan(pi / 2 * slope * x) / pi`."""
    return slope / 2.0 / (1.0 + ops.square(math.pi / 2.0 * slope * x))


_SURROGATES = {"fast_sigmoid": (_fast_sigmoid, 10.0), "arctan": (_arctan, 2.0)}


@with_python_numbers("slope")
@op_custom_gradient(name="multigrad>spike")
def spike(x: Tensor, surrogate: str = "fast_sigmoid", slope: float | None = None) -> Pair:
    """Return 1 where `x` is positive and 0 elsewhere, with the gradient of a smooth step function.

    ```python
    from multigrad import grad, ops

    print(ops.spike(0.1), grad(ops.spike)(0.1))  # 1.0 0.25
    ```

    Arguments:
        x: the membrane potential minus its threshold: a tensor of any shape, of a real floating dtype.
        surrogate: "fast_sigmoid", whose derivative is `1 / (1 + slope * abs(x))**2`, or "arctan", whose
            derivative is `slope / 2 / (1 + (pi / 2 * slope * x)**2)`.
        slope: the steepness of the smooth step function, a positive number. The default is 10 for
            "fast_sigmoid" and 2 for "arctan".

    Returns:
        A tensor of zeros and ones, of the shape and dtype of `x`. For an upstream gradient `u`, the gradient
        is `u` times the derivative of the surrogate.

    Raises:
        TypeError: if `x` is not floating, or the slope is not a number.
        ValueError: if the surrogate is unknown, or the slope is not positive.

    References:
        Zenke and Ganguli 2018, SuperSpike: Supervised Learning in Multilayer Spiking Neural Networks,
        arXiv:1705.11146. Fang et al. 2021, Incorporating Learnable Membrane Time Constant to Enhance Learning
        of Spiking Neural Networks, arXiv:2007.05785.
    """
    derivative = surrogate_derivative(surrogate, slope)
    x = floating("spike", "x", x)
    spikes = ops.where(ops.greater(x, 0.0), ops.ones_like(x), ops.zeros_like(x))

    def rule(upstream: Any) -> Any:
        dtype = dtype_of(upstream)
        wide = wide_dtype(dtype)  # because squares of large inputs overflow float16
        return ops.cast(ops.cast(upstream, wide) * derivative(ops.cast(x, wide)), dtype), None, None

    return spikes, rule


def surrogate_derivative(name: Any, slope: float | None) -> Callable[[Any], Any]:
    """Return the surrogate derivative."""
    if not isinstance(name, str) or name not in _SURROGATES:
        required, fix = f"one of {', '.join(map(repr, _SURROGATES))}", 'write "arctan", for example'
        raise unusable(ValueError, "spike", "surrogate", required=required, got=name, fix=fix)
    if slope is not None and not (is_number(slope) and slope > 0.0):
        kind = ValueError if is_number(slope) else TypeError
        required, fix = "a positive Python or NumPy number", "write slope=2.0, for example"
        raise unusable(kind, "spike", "slope", required=required, got=slope, fix=fix)
    derivative, default_slope = _SURROGATES[name]
    return lambda x: derivative(x, slope or default_slope)

"""The tests on a GPU or TPU: PyTorch's own tensors are on Keras's device, and products are in full float32.

`conftest.py` calls `use_accelerator` before the tests. Without an accelerator, it changes nothing.
"""

from support import BACKEND


def use_accelerator() -> str | None:
    """Set the device and precision of the active framework. Return the kind of accelerator, None without one.

    Keras puts its tensors on the accelerator, and PyTorch those of `torch.ones` on the CPU. A GPU multiplies
    float32 matrices with 10 bits (TF32), which the tolerances of the tests do not allow for.
    """
    return {"torch": _pytorch, "jax": _jax, "tensorflow": _tensorflow}.get(BACKEND, lambda: None)()


def _pytorch() -> str | None:
    import torch
    from keras import ops

    device = ops.zeros(()).device
    if device.type == "cpu":
        return None
    torch.set_default_device(device)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    return str(device)


def _jax() -> str | None:
    import jax

    if jax.default_backend() == "cpu":
        return None
    jax.config.update("jax_default_matmul_precision", "highest")
    return str(jax.devices()[0])


def _tensorflow() -> str | None:
    import tensorflow as tf

    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        return None
    tf.config.experimental.enable_tensor_float_32_execution(False)
    return str(devices[0].name)

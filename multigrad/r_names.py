"""The names of Keras for R, where the functions of `keras.ops` have the prefix `op_`.

`multigrad.op_exp` is `multigrad.ops.exp`, and `multigrad.op_image_resize` is `multigrad.ops.image.resize`.
They are the same objects, looked up on first use, so a newer Keras adds its ops here.
"""

from typing import Any

from multigrad import ops

_PREFIX = "op_"
_SUBMODULES = ("image", "linalg", "nn", "numpy")


def op_subset(x: Any, *key: Any) -> Any:
    """Return `x[key]`: select elements by indices and slices, counting from 0.

    ```python
    from keras import ops
    from multigrad import op_subset

    x = ops.reshape(ops.arange(6), (2, 3))
    print(ops.convert_to_numpy(op_subset(x, 1, slice(0, 2))))  # [3 4]
    ```

    Arguments:
        x: a tensor of any shape and dtype.
        key: integers, slices, `...` and None, one argument for each entry between the brackets of `x[...]`.

    Returns:
        The tensor `x[key]`, in the dtype of `x`.
    """
    return x[key]


_DIFFERENT_NAMES = {
    "op_image_crop": ops.image.crop_images,
    "op_image_pad": ops.image.pad_images,
    "op_subset": op_subset,
}
"""The functions whose name in R is not the name in `keras.ops` with a prefix."""


def find_op(name: str) -> Any:
    """Return the function with this name in Keras for R, or None if there is none.

    Arguments:
        name: `op_` and the name of a function of `keras.ops`, or `op_`, a submodule, `_` and the name of a
            function of the submodule.
    """
    if name in _DIFFERENT_NAMES:
        return _DIFFERENT_NAMES[name]
    keras_name = name.removeprefix(_PREFIX)
    if not name.startswith(_PREFIX) or keras_name.startswith("_"):
        return None
    if callable(function := getattr(ops, keras_name, None)):
        return function
    submodule, _, member = keras_name.partition("_")
    return getattr(getattr(ops, submodule), member, None) if submodule in _SUBMODULES and member else None

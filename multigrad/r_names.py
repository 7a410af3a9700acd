"""The names of Keras for R, in which every function of `keras.ops` begins with `op_`.

`multigrad.op_exp` is `keras.ops.exp`, and `multigrad.op_image_resize` is `keras.ops.image.resize`: the same
objects, looked up when they are asked for.
"""

from typing import Any

from keras import ops

_PREFIX = "op_"
_SUBMODULES = ("image", "linalg", "nn", "numpy")


def op_subset(x: Any, *key: Any) -> Any:
    """A part of a tensor, by indices and slices, counted from 0.

    ```python
    from keras import ops
    from multigrad import op_subset

    x = ops.reshape(ops.arange(6), (2, 3))
    print(ops.convert_to_numpy(op_subset(x, 1, slice(0, 2))))  # [3 4]
    ```

    Arguments:
        x: a tensor of any shape and dtype.
        key: what would stand in the brackets of `x[...]`.

    Returns:
        The part `x[key]`, of the dtype of `x`.
    """
    return x[key]


_OTHERS = {
    "op_image_crop": ops.image.crop_images,
    "op_image_pad": ops.image.pad_images,
    "op_subset": op_subset,
}


def look_up(name: str) -> Any:
    """The function of this name, None where there is none."""
    if name in _OTHERS:
        return _OTHERS[name]
    own = name.removeprefix(_PREFIX)
    if not name.startswith(_PREFIX) or own.startswith("_"):
        return None
    if callable(found := getattr(ops, own, None)):
        return found
    submodule, _, rest = own.partition("_")
    return getattr(getattr(ops, submodule), rest, None) if submodule in _SUBMODULES and rest else None


def every() -> list[str]:
    """All of the names."""
    parts = [("", ops), *[(f"{part}_", getattr(ops, part)) for part in _SUBMODULES]]
    public = [(part, module, name) for part, module in parts for name in dir(module) if name[0] != "_"]
    names = [_PREFIX + part + name for part, module, name in public if callable(getattr(module, name))]
    return sorted({*_OTHERS, *names})

"""The one form in which multigrad says that something is wrong."""

import sys
from collections.abc import Sequence


class OpError(TypeError):
    """A TypeError about an op that is raised where the op is called, so perhaps in a layer.

    Where Keras (3.15) infers the shape of a layer's output, it puts a text of its own before the error. This
    class puts the cause first.
    """

    # AutoGraph (TensorFlow 2.21) makes an error of an error's own class only where this is its constructor.
    __init__ = Exception.__init__

    def __str__(self) -> str:
        text = super().__str__()
        before, mark, cause = text.partition("Error encountered:\n\n")
        return _without_bold(f"{cause}\n\n{before.rstrip()}") if mark else text


def _without_bold(text: str) -> str:
    return text.replace("\x1b[1m", "").replace("\x1b[0m", "")


def message(op: str, problem: str, *, required: str, got: str, fix: str, argument: str | None = None) -> str:
    """Tell what is wrong with `op`, what was required, what came, and what to do.

    ```python
    print(message("scale", "the gradient has the wrong shape", argument="'x'",
                  required="(3,)", got="(2,)", fix="return one number per element of 'x'"))
    # scale: the gradient has the wrong shape
    #   argument: 'x'
    #   required: (3,)
    #   got: (2,)
    #   fix: return one number per element of 'x'
    ```
    """
    lines = [f"{op}: {problem}"]
    if argument is not None:
        lines.append(f"  argument: {argument}")
    lines += [f"  required: {required}", f"  got: {got}", f"  fix: {fix}"]
    return "\n".join(lines)


def unusable(
    kind: type[Exception], op: str, argument: str, *, required: str, got: object, fix: str
) -> Exception:
    """The error for a value of an argument that `op` can do nothing with."""
    text = message(
        op,
        f"{argument} cannot be used",
        argument=f"{argument!r}",
        required=required,
        got=describe(got),
        fix=fix,
    )
    return kind(text)


def require_function(op: str, argument: str, value: object) -> None:
    """See that `op` was given something that it can call."""
    if not callable(value):
        fix = "pass the function itself"
        raise unusable(TypeError, op, argument, required="a function", got=value, fix=fix)


def describe(value: object) -> str:
    """A short name for a value in a message: its type, with shape and dtype for a tensor."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    kind = type(value).__name__
    if shape is not None and dtype is not None:
        return f"{kind} of shape {shape_text(shape)} and dtype {getattr(dtype, 'name', dtype)}"
    text = repr(value)
    return f"{kind} {text if len(text) <= 60 else text[:57] + '...'}"


def distinct_names(names: Sequence[str]) -> list[str]:
    """The names, told apart by a number where they are the same, as those of variables may be."""
    distinct: list[str] = []
    for name in names:
        count = sum([other == name or other.startswith(f"{name} (") for other in distinct])
        distinct.append(f"{name} ({count + 1})" if count else name)
    return distinct


def shape_text(shape: object) -> str:
    """A shape of any framework in Python's own notation."""
    return str(tuple(shape)) if isinstance(shape, (tuple, list)) else str(shape)


class TouchedVariable(BaseException):
    """A function that ran where none was expected reads or assigns a variable, and is to run elsewhere."""


def hide_frames() -> None:
    """Leave this package's frames out of the tracebacks of pytest, which shows them with `--full-trace`.

    pytest reads `__tracebackhide__` from the globals of a frame's module. JAX, TensorFlow and Keras filter
    their own frames alone, and have no public way to name others (JAX 0.10, TensorFlow 2.21, Keras 3.15).
    """
    package = __name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            vars(module)["__tracebackhide__"] = True

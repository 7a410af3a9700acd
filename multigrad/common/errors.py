"""The form of multigrad's error messages."""

import difflib
import sys
from collections.abc import Iterable, Sequence


class OpError(TypeError):
    """A TypeError about an op, raised where the op is called, possibly in a layer.

    When Keras (3.15) infers the output shape of a layer, it puts its own text before the message of an error.
    This class puts the cause first.
    """

    # AutoGraph (TensorFlow 2.21) keeps the class of an error only if the class has this constructor.
    __init__ = Exception.__init__

    def __str__(self) -> str:
        text = super().__str__()
        before, mark, cause = text.partition("Error encountered:\n\n")
        return _without_bold(f"{cause}\n\n{before.rstrip()}") if mark else text


def _without_bold(text: str) -> str:
    return text.replace("\x1b[1m", "").replace("\x1b[0m", "")


def message(
    op: str,
    problem: str,
    *,
    required: str,
    got: str,
    fix: str,
    argument: str | None = None,
    probably: str | None = None,
    see: str | None = None,
) -> str:
    """Return the text of an error: the op, the problem, what is required, what the op got, and a fix.

    `probably` is the probable cause. `see` names a page and a section of `docs/`, such as
    "limits#forward-mode". `multigrad explain` prints it.

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
    lines += [f"  required: {required}", f"  got: {got}"]
    if probably is not None:
        lines.append(f"  probably: {probably}")
    lines.append(f"  fix: {fix}")
    if see is not None:
        lines.append(f"  see: python -m multigrad explain {see}")
    return "\n".join(map(_wrap_line, "\n".join(lines).split("\n")))


def closed_over_error(name: str, path: str | None) -> str:
    """Return the error for the gradient of a tensor that the output of an op uses and is not an argument.

    `path` is where the function finds the tensor, such as "'scale'" or "'self'.scale", None if it is unknown.
    """
    return message(
        name,
        "the output depends on a differentiated tensor that is not an argument, so the rule does not return "
        "its gradient",
        required="each differentiated tensor that the function uses as an argument of the op",
        got=path or "a tensor that the function reads from elsewhere",
        fix="pass the tensor as an argument, or use ops.stop_gradient(tensor) if it is a constant; freeze a "
        "module of another library, or pass its parameters",
        see="limits#closed-over-tensors",
    )


def held_error(name: str) -> str:
    """Return the error for a rule that reaches a tensor through an object, where a derivative needs it."""
    return message(
        name,
        "the rule reaches a tensor through an object, and this derivative may need the tensor",
        required="a rule that closes over each tensor that its function computes or that is differentiated",
        got="an object such as `self`, a deque or an iterator, that holds such a tensor",
        fix="assign the tensor to a local name in the function, and let the rule close over this name; call "
        "`vjp` of a framework in the rule, in place of a pullback from the function",
        see="limits#tensors-on-objects",
    )


LONGEST_LINE = 120


def _wrap_line(line: str) -> str:
    """Return a line of a message, with line breaks between its words if it is too long.

    The methods of strings suffice: Dynamo (PyTorch 2.13) traces this code, and cannot trace `textwrap`.
    """
    lines = []
    while len(line) > LONGEST_LINE:
        end = line.rfind(" ", 5, LONGEST_LINE + 1)
        if end < 0:  # one long word
            break
        lines.append(line[:end])
        line = f"    {line[end + 1 :]}"
    return "\n".join([*lines, line])


def unusable(
    kind: type[Exception], op: str, argument: str, *, required: str, got: object, fix: str
) -> Exception:
    """Return the error for an argument that has an unusable value."""
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
    """Raise TypeError unless the argument is callable."""
    if not callable(value):
        fix = "pass the function itself"
        raise unusable(TypeError, op, argument, required="a function", got=value, fix=fix)


def describe(value: object) -> str:
    """Return a short description of a value: its type, with shape and dtype for a tensor."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    kind = type_text(value)
    if shape is not None and dtype is not None:
        return f"{kind} of shape {shape_text(shape)} and dtype {dtype_text(dtype)}"
    if value is None:
        return "None"
    text = _outline(value)
    if " at 0x" in text:  # the address of an object says nothing
        text = getattr(value, "__qualname__", "object")
    return f"{kind} {text if len(text) <= 60 else text[:57] + '...'}"


def type_text(value: object) -> str:
    """Return the name of a type. For a tensor of the framework, it is "tensor", also ragged or sparse."""
    from keras import ops  # `frameworks.py` reads this module before it checks whether Keras can be imported

    name = type(value).__name__
    if not ops.is_tensor(value):
        return name
    kinds = [kind for kind in ("Ragged", "Sparse") if name.startswith(kind)]
    return f"{kinds[0].lower()} tensor" if kinds else "tensor"


def dtype_text(dtype: object) -> str:
    """Return the name of any framework's dtype, such as `float32`."""
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def _outline(value: object) -> str:
    """Return the repr of a value, with the kind in place of each tensor in a tuple, list or dict."""
    if isinstance(value, dict):
        return "{" + ", ".join([f"{key!r}: {_outline(part)}" for key, part in value.items()]) + "}"
    if isinstance(value, (tuple, list)) and value:
        parts = ", ".join([_outline(part) for part in value])
        return f"[{parts}]" if isinstance(value, list) else f"({parts}{',' * (len(value) == 1)})"
    kind = type_text(value)  # of tensors, it is not the name of their class
    return repr(value) if kind == type(value).__name__ else kind


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of an error for an unknown name: a question with the nearest name, if one is similar."""
    if name.startswith("_"):  # Python asks modules for such names, and does not show the error
        return ""
    nearest = difflib.get_close_matches(name, list(names), n=1)
    return f". Did you mean {nearest[0]!r}?" if nearest else ""


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return the names, with a number added to each repeated one. Two variables can have the same name."""
    counts: dict[str, int] = {}
    distinct: dict[str, None] = {}
    for name in names:
        new = name
        while new in distinct:
            counts[name] = counts.get(name, 1) + 1
            new = f"{name} ({counts[name]})"
        distinct[new] = None
    return list(distinct)


def shape_text(shape: object) -> str:
    """Return the shape of any framework's tensor as the text of a tuple."""
    return str(tuple(shape)) if isinstance(shape, (tuple, list)) else str(shape)


def hide_frames() -> None:
    """Hide the frames of this package in tracebacks of pytest. `--full-trace` shows them.

    pytest reads `__tracebackhide__` from the globals of a frame's module. JAX, TensorFlow and Keras filter
    only their own frames, and have no public API to add others (JAX 0.10, TensorFlow 2.21, Keras 3.15).
    """
    package = __name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            vars(module)["__tracebackhide__"] = True

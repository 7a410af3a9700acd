"""How a rule is called: the form that its signature asks for.

The rule is the function `grad` that stands beside the output of a function with a custom gradient. How
its answer is read is told in `answer.py`.
"""

import enum
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from multigrad.binding import Binding, name_of
from multigrad.errors import describe, message

FORMS = (
    "grad(upstream), with one positional parameter of any name; "
    "grad(u1, ..., uN) or grad(*us), with one upstream gradient per tensor in the output; "
    "grad(*args, upstream), grad(*args, upstream=None) or grad(x, y, *, upstream), with the op's own "
    "positional arguments; each with a parameter `variables` where trainable variables are read"
)


class Form(enum.Enum):
    """How a rule is called."""

    WHOLE = "grad(U)"
    FLAT = "grad(*flat U)"
    HYBRID = "grad(*args, upstream=U)"


_WHOLE = Form.WHOLE  # a global is found faster than a member


@dataclass(slots=True, frozen=True)
class _Profile:
    """What a rule's signature says of how it can be called."""

    form: Form | None  # None where only the number of outputs can tell
    required: int  # positional parameters without a default, `upstream` of a HYBRID rule aside
    accepted: float  # positional arguments that a HYBRID rule takes beside `upstream`
    variables: bool


def _profile(rule: Callable[..., Any]) -> _Profile:
    parameters = list(inspect.signature(rule).parameters.values())
    variables = any(p.name == "variables" or p.kind is p.VAR_KEYWORD for p in parameters)
    parameters = [p for p in parameters if p.name != "variables" and p.kind is not p.VAR_KEYWORD]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    needed_keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    names = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY]

    form = None
    accepted: float = 0
    if "upstream" in names and parameters[0].name != "upstream" and needed_keywords <= {"upstream"}:
        form = Form.HYBRID
        positional = [p for p in positional if p.name != "upstream"]
        required = [p for p in required if p.name != "upstream"]
        accepted = float("inf") if variadic else len(positional)
    elif not needed_keywords:
        if variadic:
            form = Form.FLAT if not positional else None
        elif len(required) == 1 or (not required and len(positional) == 1):
            form = Form.WHOLE
    flat = form is None and not variadic and not needed_keywords
    count = len(required) if flat or form is Form.HYBRID else 0
    return _Profile(form, count, accepted, variables)


_PROFILES: dict[types.CodeType, _Profile] = {}
_KEPT = 4096


def _tells_all(code: types.CodeType, rule: types.FunctionType) -> bool:
    """Whether the code of a rule tells its profile, which defaults and wrappers say elsewhere."""
    wraps = code.co_flags & inspect.CO_VARARGS and rule.__dict__
    return not (wraps or rule.__defaults__ or rule.__kwdefaults__)


def _read_profile(op: str, rule: Any) -> _Profile:
    try:
        profile = _profile(rule)
    except (TypeError, ValueError) as error:
        raise TypeError(
            message(
                op,
                "the rule, the second item that the function returns, cannot be called",
                required="a function with a signature",
                got=describe(rule),
                mend="return `output, grad` from the function",
            )
        ) from error
    if type(rule) is types.FunctionType and _tells_all(rule.__code__, rule):
        if len(_PROFILES) >= _KEPT:
            _PROFILES.clear()
        _PROFILES[rule.__code__] = profile
    return profile


def form_of(op: str, rule: Any, binding: Binding, outputs: int) -> Form:
    """How `rule` is called, for an output of so many tensors.

    Raises:
        TypeError: when `rule` is not callable or its signature is none of the forms.
    """
    profile = None
    if type(rule) is types.FunctionType and not (rule.__defaults__ or rule.__kwdefaults__):
        # A rule is made anew in every call, and reading a signature costs as much as a small op.
        profile = _PROFILES.get(rule.__code__)
    if profile is None:
        profile = _read_profile(op, rule)
    form = profile.form
    if form is _WHOLE:
        return form
    if form is Form.HYBRID:
        if profile.required <= binding.given <= profile.accepted:
            return form
    elif form is not None:
        return form
    elif profile.required == outputs > 1:
        return Form.FLAT
    raise TypeError(
        message(
            op,
            "the rule's signature says in no way that is known how it is to be called",
            required=FORMS,
            got=f"{name_of(rule)}{inspect.signature(rule)}, for {outputs} tensor(s) in the output and "
            f"{binding.given} positional argument(s)",
            mend="write the rule in one of these forms",
        )
    )

"""How a rule is called: the form that its signature asks for.

The rule is the function `grad` that stands beside the output of a function with a custom gradient. How
its answer is read is told in `answer.py`.
"""

import functools
import inspect
import types
from collections.abc import Sequence
from typing import Any

from multigrad import backend
from multigrad.core.errors import OpError, describe, message
from multigrad.core.signature import POSITIONAL, Binding, name_of

FORMS = (
    "grad(upstream), with one positional parameter of any name; "
    "grad(u1, ..., uN) or grad(*us), with one upstream gradient per tensor in the output; "
    "grad(*, upstream), by keyword alone; "
    "grad(*args, upstream), grad(*args, upstream=None) or grad(x, y, *, upstream), with the op's own "
    "positional arguments; "
    "any of them with a further parameter `variables`"
)


# The forms. Plain values, and so is a profile: Dynamo can hold them for constant.
WHOLE = "grad(U)"
FLAT = "grad(*flat U)"
HYBRID = "grad(*args, upstream=U)"
KEYWORD = "grad(upstream=U)"

_VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS

# Whether a rule takes the variables that the function read.
REFUSED, OPTIONAL, REQUIRED = "no", "yes", "always"

Profile = tuple[str | None, int, float, str, tuple[str, ...], tuple[str, ...]]
"""What a signature says: the form, None where the number of outputs must tell; how many positional
parameters are required, `upstream` aside; how many beside it a HYBRID rule takes; whether it takes
variables; and the names of the parameters that it can be handed the op's arguments by, and of all others."""

_PROFILES: dict[tuple[types.CodeType, int, tuple[str, ...]], Profile] = {}
_KEPT = 4096


def _profile_of(op: str, rule: Any) -> Profile:
    """The profile of a rule of any kind."""
    if type(rule) is types.FunctionType:
        code = rule.__code__
        wrapper = code.co_flags & inspect.CO_VARARGS and rule.__dict__
        if not wrapper:
            return _profile_of_code(code, backend.active.defaults_of(rule), _keyword_defaults(rule))
    try:
        return _profile(inspect.signature(rule))
    except (TypeError, ValueError) as error:
        raise TypeError(
            message(
                op,
                "the rule, the second item that the function returns, cannot be called",
                required="a function with a signature",
                got=describe(rule),
                fix="return `output, rule` from the function",
            )
        ) from error


def _keyword_defaults(rule: types.FunctionType) -> tuple[str, ...]:
    # Dynamo (PyTorch 2.13) has no `__kwdefaults__` for a function that it traces, so look only if need be.
    code = rule.__code__
    names = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    if names in ((), ("upstream",), ("variables",)):
        return names
    return tuple(rule.__kwdefaults__ or ())


@backend.active.constant
def _profile_of_code(code: types.CodeType, defaults: int, keyword_defaults: tuple[str, ...]) -> Profile:
    """The profile of every function that has this code and so many defaults."""
    found = _PROFILES.get((code, defaults, keyword_defaults))
    if found is None:
        empty = tuple(types.CellType() for _ in code.co_freevars)
        function = types.FunctionType(code, {}, None, (None,) * defaults, empty)
        function.__kwdefaults__ = dict.fromkeys(keyword_defaults)
        if len(_PROFILES) >= _KEPT:
            _PROFILES.clear()
        found = _PROFILES[code, defaults, keyword_defaults] = _profile(inspect.signature(function))
    return found


def _profile(signature: inspect.Signature) -> Profile:
    parameters = list(signature.parameters.values())
    if len(parameters) == 1 and parameters[0].kind in POSITIONAL:
        return WHOLE, 0, 0, REFUSED, (), ()  # whatever its name
    variables = _variables(parameters)
    parameters = [p for p in parameters if p.name != "variables" and p.kind is not p.VAR_KEYWORD]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    positional = [p for p in parameters if p.kind in POSITIONAL]
    required = [p for p in positional if p.default is p.empty]
    needed_keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    names = [p.name for p in positional if p.kind is not p.POSITIONAL_ONLY]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

    form, place = None, 0
    accepted: float = 0
    alone = not parameters or parameters[0].name == "upstream"
    if "upstream" in names + keywords and not alone and needed_keywords <= {"upstream"}:
        form = HYBRID
        place = next((i for i, p in enumerate(positional) if p.name == "upstream"), len(positional))
        required = [p for p in required if p.name != "upstream"]
        if any(p in required for p in positional[place:]):
            form = None  # an argument behind `upstream` could not be passed by position
        accepted = float("inf") if variadic else place
    elif "upstream" in keywords and not (positional or variadic) and needed_keywords <= {"upstream"}:
        form = KEYWORD
    elif not needed_keywords:
        if variadic:
            form = FLAT if not positional else None
        elif len(required) == 1 or (not required and len(positional) == 1):
            form = WHOLE
    flat = form is None and not (variadic or needed_keywords or "upstream" in [p.name for p in positional])
    count = len(required) if flat or form == HYBRID else 0
    own = [p.name for p in positional[:place]]
    others = [name for name in [p.name for p in positional[place:]] + keywords if name != "upstream"]
    return form, count, accepted, variables, tuple(own), tuple(others)


def _variables(parameters: Sequence[inspect.Parameter]) -> str:
    """Whether a rule with these parameters takes variables."""
    for p in parameters:
        if p.name == "variables" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            return REQUIRED if p.default is p.empty else OPTIONAL
    return OPTIONAL if any(p.kind is p.VAR_KEYWORD for p in parameters) else REFUSED


def own_arguments(op: str, rule: Any, binding: Binding) -> int | None:
    """How many of the op's positional arguments a HYBRID rule is called with, None if none will do.

    Those that came from the caller; with the defaults behind them, where the rule requires more.
    """
    _, required, accepted, *_ = _profile_of(op, rule)
    counts = (binding.given, binding.positional)
    return next((count for count in counts if required <= count <= accepted), None)


def is_plain(rule: Any) -> bool:
    """Whether `rule` takes the upstream gradient and nothing else, as most rules do.

    To read a signature costs as much as a small op, and a rule is made in every call.
    """
    if type(rule) is not types.FunctionType:
        return False
    code = rule.__code__
    return code.co_argcount == 1 and not (code.co_kwonlyargcount or code.co_flags & _VARIADIC)


def form_of(op: str, rule: Any, binding: Binding, outputs: int) -> tuple[str, str]:
    """How `rule` is called, for an output of so many tensors; and REFUSED, OPTIONAL or REQUIRED of variables.

    Raises:
        TypeError: when `rule` is not callable, its signature is none of the forms, or has a default for an
            argument of the op that it is not handed.
    """
    form, required, _, variables, own, others = _profile_of(op, rule)
    if form == HYBRID:
        count = own_arguments(op, rule, binding)
        if count is not None:
            came = (*binding.signature.positional[: binding.given], *binding.keywords)
            set_before = rule.keywords if isinstance(rule, functools.partial) else ()
            for name in (*own[count:], *others):
                if name in came and name not in set_before:
                    raise _own_default(op, rule, name)
            return form, variables
    elif form is not None:
        return form, variables
    elif required == outputs > 1:
        return FLAT, variables
    raise OpError(
        message(
            op,
            "the rule's signature says in no way that is known how it is to be called",
            required=FORMS,
            got=f"{name_of(rule)}{inspect.signature(rule)}, for {outputs} tensor(s) in the output and "
            f"{binding.given} positional argument(s)",
            fix="write the rule in one of these forms",
        )
    )


def _own_default(op: str, rule: Any, name: str) -> TypeError:
    return TypeError(
        message(
            op,
            "the rule is not handed an argument of the op for which it has a parameter",
            argument=repr(name),
            required="parameters for the op's own positional arguments, and `upstream`",
            got=f"{name_of(rule)}{inspect.signature(rule)}",
            fix=f"leave {name!r} out of the rule's parameters, so that it closes over that of the op",
        )
    )


def is_handed(op: str, rule: Any, takes: str, read: Sequence[str]) -> bool:
    """Whether `rule` is to be handed the variables that the function read, of which `read` has the names.

    What it `takes` of them is what `form_of` says.

    A rule that requires them gets an empty list where none were read: a layer may be frozen.

    Raises:
        TypeError: when there are some, and the rule has no parameter for them.
    """
    if read and takes == REFUSED:
        raise OpError(
            message(
                op,
                "the function reads trainable variables, for which its rule has no gradient",
                required="a rule with a parameter `variables`, which returns "
                "`(gradients, gradients_of_variables)`",
                got=f"{name_of(rule)}{inspect.signature(rule)}, and {', '.join(read)}",
                fix="write the rule as `def grad(upstream, variables)`, or pass the variables as arguments",
            )
        )
    return takes == REQUIRED or (takes == OPTIONAL and bool(read))

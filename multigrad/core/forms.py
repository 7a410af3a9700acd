"""Find the form in which a rule is called from its signature. `answer.py` reads the result of the rule."""

import difflib
import functools
import inspect
import math
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from multigrad import backend
from multigrad.common.errors import OpError, describe, message
from multigrad.core.signature import POSITIONAL, Binding, name_of
from multigrad.core.variables import Variables

# The forms: how a rule is called with the upstream gradient `U`, which has the structure of the output.
WHOLE = "rule(U)"
FLAT = "rule(*flat U)"
HYBRID = "rule(*args, upstream=U)"
KEYWORD = "rule(upstream=U)"

# Whether a rule takes the variables that the function read.
REFUSED, OPTIONAL, REQUIRED = "refused", "optional", "required"


class RuleSignature(NamedTuple):
    """The form of a rule, read from its signature. It holds plain values, which are constants for Dynamo."""

    form: str | None = None
    """The form. None means FLAT if the output has `required` tensors, and unsupported otherwise."""
    required: int = 0
    """The number of positional parameters without a default, except `upstream`."""
    accepted: float = 0
    """The number of the op's positional arguments that a HYBRID rule can take."""
    takes_variables: str = REFUSED
    """Whether the rule takes variables."""
    arguments: tuple[str, ...] = ()
    """HYBRID: the names of the positional parameters before `upstream`."""
    later: tuple[str, ...] = ()
    """HYBRID: the names of the parameters after `upstream`, and of keyword-only ones."""


def _form_in(signature: inspect.Signature) -> RuleSignature:
    """Return the form of a rule with this signature."""
    parameters = list(signature.parameters.values())
    if len(parameters) == 1 and parameters[0].kind in POSITIONAL:
        return RuleSignature(WHOLE)  # whatever its name
    takes_variables = _takes_variables(parameters)
    parameters = [p for p in parameters if p.name != "variables" and p.kind is not p.VAR_KEYWORD]
    return _form_without_variables(parameters)._replace(takes_variables=takes_variables)


def _form_without_variables(parameters: Sequence[inspect.Parameter]) -> RuleSignature:
    """Return the form of a rule with these parameters."""
    signature = inspect.Signature(parameters)
    positional = [p for p in parameters if p.kind in POSITIONAL]
    is_variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    # The numbers of the op's arguments that the rule takes before `upstream`.
    counts = [n for n in range(len(positional) + 1) if _accepts(signature, n, upstream=None)]
    if counts and parameters[0].name != "upstream":
        names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
        return RuleSignature(
            HYBRID,
            required=counts[0],
            accepted=math.inf if is_variadic else counts[-1],
            arguments=tuple(names[: counts[-1]]),
            later=tuple(name for name in names[counts[-1] :] if name != "upstream"),
        )
    if counts and not positional:
        return RuleSignature(KEYWORD)
    required = sum(p.default is p.empty for p in positional)
    if (required == 1 or len(positional) == 1) and not is_variadic and _accepts(signature, 1):
        return RuleSignature(WHOLE)  # further parameters have defaults
    if not _accepts(signature, required) or any(p.name == "upstream" for p in positional):
        return RuleSignature()
    if is_variadic:
        return RuleSignature() if positional else RuleSignature(FLAT)
    return RuleSignature(required=required)


def _accepts(signature: inspect.Signature, count: int, **keywords: Any) -> bool:
    """Return whether a function takes this number of positional arguments and these keyword arguments."""
    try:
        signature.bind(*[None] * count, **keywords)
    except TypeError:
        return False
    return True


def _takes_variables(parameters: Sequence[inspect.Parameter]) -> str:
    """Return whether a rule with these parameters takes variables."""
    for p in parameters:
        if p.name == "variables" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            return REQUIRED if p.default is p.empty else OPTIONAL
    return OPTIONAL if any(p.kind is p.VAR_KEYWORD for p in parameters) else REFUSED


# ------------------------------------------------------------------ signatures are read once per code object


def _signature_of(op: str, rule: Any) -> RuleSignature:
    """Return the signature of any callable."""
    if type(rule) is types.FunctionType:
        code = rule.__code__
        wrapper = code.co_flags & inspect.CO_VARARGS and rule.__dict__
        if not wrapper:
            return _signature_of_code(code, backend.active.defaults_of(rule), _keyword_defaults(rule))
    try:
        return _form_in(inspect.signature(rule))
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
    # A function that Dynamo (PyTorch 2.13) traces has no `__kwdefaults__`: read them only if necessary.
    code = rule.__code__
    names = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    if names in ((), ("upstream",), ("variables",)):
        return names
    return tuple(rule.__kwdefaults__ or ())


@backend.active.constant
def _signature_of_code(
    code: types.CodeType, defaults: int, keyword_defaults: tuple[str, ...]
) -> RuleSignature:
    """Return the signature of every function with this code and these defaults."""
    return _cached_signature(code, defaults, keyword_defaults)


@functools.lru_cache(4096)
def _cached_signature(
    code: types.CodeType, defaults: int, keyword_defaults: tuple[str, ...]
) -> RuleSignature:
    empty = tuple(types.CellType() for _ in code.co_freevars)
    function = types.FunctionType(code, {}, None, (None,) * defaults, empty)
    function.__kwdefaults__ = dict.fromkeys(keyword_defaults)
    return _form_in(inspect.signature(function))


_VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def takes_upstream_only(rule: Any) -> bool:
    """Return whether `rule` takes only the upstream gradient, as most rules do.

    Reading a signature costs as much as a small op, and each call of an op makes a rule.
    """
    if type(rule) is not types.FunctionType:
        return False
    code = rule.__code__
    return code.co_argcount == 1 and not (code.co_kwonlyargcount or code.co_flags & _VARIADIC)


# ------------------------------------------------------------------ how a rule is called in one call of an op


def form_of(op: str, rule: Any, binding: Binding, outputs: int) -> tuple[str, str]:
    """Return the form of `rule` for an output of `outputs` tensors, and whether it takes variables.

    Raises:
        TypeError: if `rule` is not callable, its signature is unsupported, or it has a default for an
            argument of the op that it is not passed.
    """
    signature = _signature_of(op, rule)
    if signature.form == HYBRID:
        count = arguments_for(op, rule, binding)
        if count is not None:
            passed = (*binding.signature.positional[: binding.passed], *binding.keywords)
            bound = rule.keywords if isinstance(rule, functools.partial) else ()
            for name in (*signature.arguments[count:], *signature.later):
                if name in passed and name not in bound:
                    raise _default_instead_of_argument(op, rule, name)
            return HYBRID, signature.takes_variables
    elif signature.form is not None:
        return signature.form, signature.takes_variables
    elif signature.required == outputs > 1:
        return FLAT, signature.takes_variables
    raise OpError(
        message(
            op,
            "the rule has an unsupported signature",
            required=_example(rule, binding, outputs),
            got=f"{name_of(rule)}{inspect.signature(rule)}",
            fix=f"{_did_you_mean(rule)}write the rule in this form, or in another one of the page",
            see="rules#forms",
        )
    )


def _example(rule: Any, binding: Binding, outputs: int) -> str:
    """Return the form that fits the op, and the reason."""
    if "upstream" in inspect.signature(rule).parameters:
        own = binding.signature.positional[: binding.passed]
        names = ", ".join([*own, "*" if len(own) == binding.passed else "*args", "upstream"])
        return f"rule({names}), because the op has {binding.passed} positional argument(s)"
    if outputs > 1:
        return f"{flat_form(outputs)}, because the output has {outputs} tensors"
    return "rule(upstream), because the output is one tensor"


def flat_form(outputs: int) -> str:
    """Return the form of a rule that gets the upstream gradients of several outputs one by one."""
    names = ", ".join([f"u{number}" for number in range(1, outputs + 1)]) if outputs < 6 else "*us"
    return f"rule({names})"


# Names that users of other libraries may give to the two parameters.
_OTHER_NAMES = {
    "upstream": (
        "g",
        "dy",
        "ct",
        "cotangent",
        "grad",
        "grads",
        "gradient",
        "grad_output",
        "upstream_gradient",
    ),
    "variables": ("vars", "weights", "trainable_variables"),
}


def _did_you_mean(rule: Any) -> str:
    """Return the beginning of a fix for a parameter with almost the right name."""
    names = list(inspect.signature(rule).parameters)
    for name in names:
        for right, others in _OTHER_NAMES.items():
            is_alike = name in others or difflib.get_close_matches(name, [right], cutoff=0.7)
            if right not in names and is_alike:
                return f"did you mean `{right}` instead of `{name}`? If not, "
    return ""


def arguments_for(op: str, rule: Any, binding: Binding) -> int | None:
    """Return the number of positional arguments for a HYBRID rule, None if no number is possible.

    The rule gets the arguments that the caller passed, and the defaults after them if it requires more.
    """
    signature = _signature_of(op, rule)
    counts = (binding.passed, binding.positional)
    return next((count for count in counts if signature.required <= count <= signature.accepted), None)


def _default_instead_of_argument(op: str, rule: Any, name: str) -> TypeError:
    return TypeError(
        message(
            op,
            "the rule has a default for an argument of the op that it is not passed",
            argument=repr(name),
            required="parameters for the op's own positional arguments, and `upstream`",
            got=f"{name_of(rule)}{inspect.signature(rule)}",
            fix=f"remove {name!r} from the rule's parameters, so that the rule closes over the op's argument",
        )
    )


def gets_variables(op: str, rule: Any, takes_variables: str, variables: Variables) -> bool:
    """Return whether `rule` is passed the variables that the function read.

    A rule that requires them gets an empty list if the function read none, as with a frozen layer.

    Arguments:
        op: the name of the op in messages.
        rule: the rule.
        takes_variables: REFUSED, OPTIONAL or REQUIRED, as `form_of` returns it.
        variables: the variables that the function read.

    Raises:
        TypeError: if the function read variables and the rule has no parameter for them.
    """
    if variables and takes_variables == REFUSED:
        raise OpError(
            message(
                op,
                "the function reads trainable variables, for which its rule has no gradient",
                required="a rule with a parameter `variables`, which returns "
                "`(gradients, gradients_of_variables)`",
                got=f"{name_of(rule)}{inspect.signature(rule)}, and {', '.join(variables.names())}",
                fix=f"{_did_you_mean(rule)}write the rule as `def rule(upstream, variables)`, or pass the "
                "variables as arguments",
                see="variables-and-layers#weights",
            )
        )
    return takes_variables == REQUIRED or (takes_variables == OPTIONAL and bool(variables))

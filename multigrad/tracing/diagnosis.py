"""Find the first NaN or Inf of a trace, and gradients that vanish or explode, and describe them in a line.

It also groups repeated flags.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from multigrad.tracing.records import CallRecord, StepRecord, Values, summarize


def innermost(calls: Sequence[CallRecord]) -> list[CallRecord]:
    """Return the calls that no other op made, without layers that call other layers."""
    containers, layers = _containers(calls), {call.op for call in calls if call.layer}
    return [
        call
        for call in calls
        if (call.within is None or call.within in layers) and not (call.layer and call.op in containers)
    ]


def diagnose(calls: Sequence[CallRecord], steps: Sequence[StepRecord]) -> list[str]:
    """Return a line about the first bad value in the forward pass, and one about the first bad gradient."""
    return [line for _, line in (_first_bad_value(calls), _first_bad_gradient(calls, steps)) if line]


def first_bad(calls: Sequence[CallRecord], steps: Sequence[StepRecord]) -> tuple[int | None, int | None]:
    """Return the numbers of the calls with the first bad value and gradient, which `diagnose` names."""
    return _first_bad_value(calls)[0], _first_bad_gradient(calls, steps)[0]


def _containers(calls: Sequence[CallRecord]) -> set[str | None]:
    """Return the names of the calls in which a layer is called."""
    return {call.within for call in calls if call.layer}


def _first_bad_value(calls: Sequence[CallRecord]) -> tuple[int | None, str]:
    containers = _containers(calls)
    before: CallRecord | None = None
    for call in calls:  # nested layers return before the layer that contains them
        is_container = bool(call.layer) and call.op in containers
        word = None if is_container else _word(call.inputs)
        if word and before is None:
            return call.number, f"Forward: {word} is in the input of {_title(call)}."
        if word and before is not None:
            return call.number, (
                f"Forward: {word} first appears between the output of {_title(before)} and the input of "
                f"{_title(call)}, in the code of {call.within or 'the caller'}."
            )
        word = _word(call.outputs)
        if word and is_container and before is not None:
            return before.number, (
                f"Forward: {word} first appears in the code of {_title(call)}, after the output of "
                f"{_title(before)}."
            )
        if word:
            where = "in its code or weights" if call.layer else "in its code"
            return call.number, (
                f"Forward: {word} first appears in {_title(call)}, whose inputs are finite: {where}."
            )
        before = call
    return None, ""


def _first_bad_gradient(calls: Sequence[CallRecord], steps: Sequence[StepRecord]) -> tuple[int | None, str]:
    containers = _containers(calls)
    before: StepRecord | None = None
    for i, step in enumerate(steps):
        word = _word(step.upstream) or _vanishing_or_exploding(step, before)
        inner = [s.call for s in steps[i:] if not (s.call.layer and s.call.op in containers)]
        number = inner[0].number if inner else step.call.number
        location = f"the output of {_title(step.call)}"
        if word and before is None:
            return number, f"Backward: {word} is in the first upstream gradient, at {location}."
        if word and before is not None:
            is_around = bool(before.call.layer) and before.call.op in containers
            where = f"the code of {_title(before.call)}" if is_around else _title(before.call)
            return number, (
                f"Backward: {word} first appears at {location}, in the derivative of {where} or of an "
                "operation between both."
            )
        word = _word(step.downstream)
        if word:
            return step.call.number, f"Backward: {word} first appears in the rule of {_title(step.call)}."
        before = step
    return None, ""


def _vanishing_or_exploding(step: StepRecord, before: StepRecord | None) -> str | None:
    if not step.call.layer:
        return None
    if _is_zero(step.upstream) and not (before and _is_zero(before.upstream)):
        return "a gradient of zeros"
    is_exploding = any(flag.startswith("exploding") for flag in step.flags)
    return "an exploding gradient" if is_exploding else None


def _title(call: CallRecord) -> str:
    return f"{call.title} ({call.layer})" if call.layer else call.title


def _word(values: Values) -> str | None:
    """Return "NaN" or "Inf" if an array contains one, else None."""
    summaries = [summarize(array) for array in values.values() if array is not None]
    if any(summary.nans for summary in summaries):
        return "NaN"
    return "Inf" if any(summary.infinities for summary in summaries) else None


def _is_zero(values: Values) -> bool:
    arrays = [array for array in values.values() if array is not None and array.size]
    return bool(arrays) and not any(np.any(array) for array in arrays)


def flag_lines(calls: Sequence[CallRecord], steps: Sequence[StepRecord]) -> Iterator[str]:
    """Yield the flags of all calls and steps. Flags of one kind on three or more calls share a line."""
    flags = [(call, flag) for call in calls for flag in call.flags]
    flags += [(step.call, flag) for step in steps for flag in step.flags]
    kinds = [(_kind(flag), call, flag) for call, flag in flags]
    for kind in dict.fromkeys(kind for kind, _, _ in kinds):
        group = [(call, flag) for other, call, flag in kinds if other == kind]
        titles = list(dict.fromkeys(call.title for call, _ in group))
        shown = group if len(titles) < 3 else group[:1]
        yield from (f"{call.title}: {flag}" for call, flag in shown)
        if len(titles) >= 3:
            yield f"  the same in {len(titles) - 1} more: {', '.join(titles[1:])}"


def _kind(flag: str) -> str:
    """Return the kind of a flag: its text without numbers and paths."""
    word, _, place = flag.partition(":")
    role = "upstream" if "upstream of" in place else "downstream" if "downstream of" in place else ""
    return f"{word} {role or ('input' if ' in input ' in place else '')}"

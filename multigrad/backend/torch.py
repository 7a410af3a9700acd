"""PyTorch.

The native way to bind a custom derivative is a `torch.autograd.Function`: `forward` computes and saves
residuals on `ctx`, `backward` reads them. It deviates here in three things.

- What is saved are the tensors of the rule's closure, and the rule is made anew around them: PyTorch sees
  every residual, and no output stands in a cycle with its node.
- A second derivative goes through what the rule closed over. An input or an output there comes back from
  `ctx.saved_tensors` with its history; for an intermediate the function runs once more on the saved
  inputs, recorded this time, and only when the backward pass is itself being recorded.
- Inside torch.func, forward mode and torch.compile, a Function of the kind that each of them accepts.

A rule runs under the autocast of its function, wherever the backward pass is called, as by
`torch.amp.custom_fwd` and `custom_bwd`: it expects the dtypes that the function met.
"""

import contextlib
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import keras
import numpy as np
import torch
from torch.autograd import forward_ad

from multigrad.backend import Call, F, Pullback, Ran, Spec
from multigrad.closure import TypeSet, lift, restore
from multigrad.errors import message
from multigrad.linear import FAR, require_linear, trial
from multigrad.shared import Shared

TENSORS = TypeSet(torch.Tensor)
CONVERTIBLE = TypeSet(keras.Variable, np.ndarray, np.generic)
STAND_INS = TypeSet(torch.fx.Proxy)


def library_code(function: F) -> F:
    return function


def constant(function: F) -> F:
    """Let Dynamo call it instead of tracing it."""
    return torch.compiler.assume_constant_result(function)


def defaults_of(function: types.FunctionType) -> int:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    if torch.compiler.is_dynamo_compiling() and len(names) > 1 and names[-1] == "upstream":
        # Dynamo (PyTorch 2.13) fails where it finds some. That of `upstream` makes no difference to a rule.
        return 1
    return len(function.__defaults__ or ())


def as_tensor(value: Any) -> Any:
    return keras.ops.convert_to_tensor(value)


# Which dtypes have a gradient. A look into a dict costs less than to ask a dtype twice.
_FLOATING = {
    dtype: dtype.is_floating_point or dtype.is_complex
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def assign(variable: keras.Variable, value: Any) -> None:
    variable.assign(value)


def is_differentiable(tensor: torch.Tensor) -> bool:
    return _FLOATING[tensor.dtype]


def specs_of(tensors: Sequence[torch.Tensor]) -> Sequence[Spec | None]:
    specs: list[Spec | None] = []
    for tensor in tensors:  # no comprehension, which is a call
        dtype = tensor.dtype
        specs.append((tensor.shape, dtype, None) if _FLOATING[dtype] else None)
    return specs


def sizes(shape: Any) -> tuple[int | None, ...]:
    return tuple(shape)


def conform(gradient: torch.Tensor, spec: Spec) -> torch.Tensor:
    shape, dtype, _ = spec
    if gradient.shape != shape:
        gradient = gradient.sum_to_size(shape)
    if gradient.dtype.is_complex and not dtype.is_complex:
        gradient = gradient.real
    return gradient.to(dtype)


def concrete(tensor: torch.Tensor) -> np.ndarray | None:
    if _transforming() or torch.compiler.is_compiling():
        return None
    wide = torch.complex128 if tensor.dtype.is_complex else torch.float64  # NumPy has no bfloat16
    return tensor.detach().to("cpu", wide if _FLOATING[tensor.dtype] else None).numpy()


# Whether a program is traced, and whether torch.func is at work. These are private, as is the state of
# tracing: the public ways to ask (PyTorch 2.13) cost several times as much, or do not exist.
_is_tracing = torch._C._is_tracing
_is_functorch_active = torch._C._are_functorch_transforms_active


def _transforming() -> bool:
    """Whether torch.func or forward mode is at work, for which a Function must be of another kind.

    The kind that serves all costs twice as much.
    """
    return _is_functorch_active() or forward_ad._current_level >= 0


def apply(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return _apply_compiled(call, tensors)
    if _is_functorch_active() or forward_ad._current_level >= 0:
        return _apply_transforming(call, tensors)
    if torch.compiler.is_exporting() or _is_tracing():
        return _apply_exporting(call, tensors)
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                try:
                    output = _attach(call, *tensors)
                except _MoreInputs as more:
                    ran = more.args
                else:
                    return output if type(output) is not tuple else _join(output)
                return _join(_attach(*ran))
    return _without_gradient(call, tensors)


def _without_gradient(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    recorded = torch.is_grad_enabled()
    with torch.no_grad():
        ran = call.run(tensors)
    outputs, _, inputs, back = ran
    if recorded and inputs is not tensors and any([tensor.requires_grad for tensor in inputs]):
        return _join(_attach(_Ran(call, ran), *inputs))
    # What requires a gradient all the same was closed over, and has none through the rule.
    return back.output.join([o.detach() if recorded and o.requires_grad else o for o in outputs])


# --------------------------------------------------------------------------------------- autocast

_Autocast = tuple[torch.dtype | None, torch.dtype | None] | None
"""To which dtype autocast casts on the CPU and on the accelerator, None where it does not."""

_accelerator = torch.accelerator.current_accelerator()
_DEVICES = "cpu", "cpu" if _accelerator is None else _accelerator.type

# Private: the public way (PyTorch 2.13) asks for one device at a time, at twice the cost.
_is_autocast_anywhere = torch._C._is_any_autocast_enabled


def _autocast() -> _Autocast:
    """The autocast of this place in the program."""
    if not _is_autocast_anywhere():
        return None
    cpu, other = [torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in _DEVICES]
    return (cpu, other) if cpu or other else None


@contextlib.contextmanager
def _autocasting(autocast: _Autocast) -> Iterator[None]:
    """The autocast of another place, here."""
    cpu, other = autocast or (None, None)
    with (
        torch.autocast(_DEVICES[0], dtype=cpu, enabled=cpu is not None),
        torch.autocast(_DEVICES[1], dtype=other, enabled=other is not None),
    ):
        yield


# ------------------------------------------------------------------------------------------ eager


class _Ran(NamedTuple):
    """A call whose function ran already, and what that gave."""

    call: Call
    ran: Ran


class _MoreInputs(Exception):
    """A function turned out to have more inputs than its node: a `_Ran`, and all of the inputs."""


class _Node(torch.autograd.Function):
    """The node of a call. It keeps the code around the saved tensors (see `closure.py`) on `ctx`.

    The function runs inside, on the node's inputs. Where it turns out to have more of them, because it
    read variables, this node is left, and one with all inputs is attached to what it gave.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: torch.Tensor) -> Sequence[Any]:
        if type(call) is _Ran:
            call, (outputs, rule, _, back) = call
        else:
            outputs, rule, inputs, back = ran = call.run(tensors)
            if inputs is not tensors:
                raise _MoreInputs(_Ran(call, ran), *inputs)
        residuals, template, opaque = lift(rule, TENSORS, call.f)
        own, integers = _own(tensors, outputs)
        tied, beside, computed = _tie(tensors, outputs, own, residuals)
        if integers:
            _mark_integers(ctx, own)
        # Inputs and outputs come back from PyTorch with their history. For a residual that was computed
        # on the way, a second derivative runs the function again, and needs its inputs.
        if computed or opaque:
            ctx.save_for_backward(*residuals, *tensors)
        else:
            ctx.save_for_backward(*residuals)
            call = None
        autocast = _autocast() if _is_autocast_anywhere() else None
        count = len(residuals)
        ctx.multigrad = (
            back,
            template,
            specs_of(tensors),
            integers,
            autocast,
            call,
            count,
            tied,
            opaque,
            beside,
        )
        # Usually there is one output. For others their layout goes before them.
        return own[0] if back.output.one else (back.output, *own)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        back, template, specs, integers, autocast, call, count, tied, opaque, _ = ctx.multigrad
        if (autocast or _is_autocast_anywhere()) and autocast != _autocast():
            with _autocasting(autocast):
                return _Node.backward(ctx, *upstream)
        if not back.output.one:
            upstream = upstream[1:]
        saved = ctx.saved_tensors
        if integers:
            upstream = _of_floating(upstream)
        needed = ctx.needs_input_grad[1:]
        if call is None or not torch.is_grad_enabled():
            return None, *back.pull(restore(template, saved), upstream, needed, specs)
        again, residuals = _run_again(call, back, saved[:count], saved[count:], tied)
        _require_alike(call, saved[:count], residuals)
        if not opaque:
            return None, *back.pull(restore(template, residuals), upstream, needed, specs)
        # What the rule reaches through an object has its history in the second run's rule alone.
        gradients = back.pull(restore(again, residuals), upstream, needed, specs)
        with torch.no_grad():
            first = back.pull(restore(template, saved), upstream, needed, specs)
        _require_alike(call, first, gradients)
        return None, *gradients


# Function.apply, without what it does for a `setup_context`, and for transforms, before it comes to this.
_attach = super(torch.autograd.Function, _Node).apply


def _join(output: Any) -> Any:
    """The op's output, of what `_attach` gives: a tensor, or the layout and the tensors of several."""
    if type(output) is not tuple:
        return output
    layout, *tensors = output
    return layout.join(tensors)


def _own(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """The node's own tensors for the outputs, and whether there is one without a gradient.

    The function may return a constant, one tensor twice, or an input. An alias of an input stays a view,
    for which PyTorch knows what an in-place change means. (`_is_view` is private: PyTorch 2.13 has no
    public name for it.)
    """
    own: list[torch.Tensor] = []
    integers = False
    for output in outputs:
        view = output._is_view()
        for tensor in inputs:
            if output is tensor:
                view = True
        own.append(output.view_as(output) if view else output.detach())
        if not _FLOATING[output.dtype]:
            integers = True
    return own, integers


def _tie(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
    residuals: list[torch.Tensor],
) -> tuple[Sequence[int], Sequence[Any], bool]:
    """Put the node's own outputs for those that stand among the residuals.

    Returns the slots of these, the nodes of residuals that were closed over with their history, and whether
    a residual was computed on the way from inputs to outputs.
    """
    tied: tuple[int, ...] = ()
    beside: tuple[Any, ...] = ()
    computed = False
    for slot, residual in enumerate(residuals):
        for tensor in inputs:
            if residual is tensor:
                break  # an output that is an input is the input
        else:
            if residual.requires_grad and not _is_view_within(residual):
                beside = *beside, _node_of(residual)
                continue
            for place, output in enumerate(outputs):
                if residual is output:
                    residuals[slot] = own[place]
                    tied = *tied, slot
                    break
            else:
                computed = computed or _FLOATING[residual.dtype]
    return tied, beside, computed


def _is_view_within(tensor: torch.Tensor) -> bool:
    """Whether it is a view that the function made, where nothing is recorded, of what requires a gradient.

    PyTorch says of such a view that it requires one, too, and gives it no node.
    """
    return tensor._is_view() and tensor.grad_fn is None and tensor._base.requires_grad


def _run_again(
    call: Call,
    first: Pullback,
    residuals: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    known: Sequence[int],
) -> tuple[Any, list[torch.Tensor]]:
    """The template of a second run's rule, and residuals with the history of how they came from the inputs.

    The function runs again for it, because in its first run nothing was recorded. Residuals in the slots
    `known` have their history already.
    """
    _, rule, _, _ = call.run_again(tensors, first)
    again, template, _ = lift(rule, TENSORS, call.f)
    if len(again) != len(residuals):
        raise _not_repeatable(call)
    return template, [residuals[slot] if slot in known else new for slot, new in enumerate(again)]


def _require_alike(call: Call, first: Sequence[Any], again: Sequence[Any]) -> None:
    if not all(map(_alike, first, again)):
        raise _not_repeatable(call)


def _not_repeatable(call: Call) -> RuntimeError:
    return RuntimeError(
        message(
            call.name,
            "the function gave other values when it ran again for a second derivative",
            required="a function that gives the same values for the same arguments",
            got="other values in what the rule uses",
            mend="draw random numbers outside the function, and pass them and other state as arguments",
        )
    )


def _alike(first: torch.Tensor | None, again: torch.Tensor | None) -> bool:
    """Whether two runs of one function gave the same, up to the order of sums."""
    if first is None or again is None or first is again:
        return first is again
    if _is_functorch_active():  # vmap around a backward pass, as a Jacobian is computed
        first, again = torch.func.debug_unwrap(first), torch.func.debug_unwrap(again)
    if first.shape != again.shape or first.dtype != again.dtype:
        return False
    if not is_differentiable(first) or first.numel() == 0:
        return torch.equal(first, again)
    rounding = 1e3 * torch.finfo(first.dtype).eps
    scale = first.detach().abs().nan_to_num(posinf=0.0).max().item()
    return torch.allclose(first, again, rtol=rounding, atol=rounding * scale, equal_nan=True)


def _mark_integers(ctx: Any, outputs: Sequence[torch.Tensor], *others: torch.Tensor) -> None:
    """Tell PyTorch which outputs have no gradient: the integer ones and `others`."""
    ctx.mark_non_differentiable(*[o for o in outputs if not _FLOATING[o.dtype]], *others)


def _of_floating(upstream: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The upstream gradients; PyTorch has zeros for an integer output, where the rule gets None."""
    return tuple([u if u is not None and _FLOATING[u.dtype] else None for u in upstream])


# ----------------------------------------------------------------------- torch.func, forward mode


def _apply_transforming(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    found = _Found()
    if not (lift(call.f, TENSORS)[0] or call.may_read()):
        outputs = _Transformed.apply(call, found, *tensors)
        return found.back.output.join(outputs[: found.outputs])
    # The values of variables, and what is closed over, may be wrapped for a transform, and then have no
    # place inside of the Function. So the function runs outside of it, recorded, and its outputs are tied
    # to the inputs.
    ran = outputs, _, inputs, back = call.run(tensors)
    others = found.note(call, ran)
    found.standing = True
    own = [output.detach() for output in outputs]
    outputs = _Transformed.apply(call, found, *inputs, *own, *others)
    return back.output.join(outputs[: found.outputs])


class _Found:
    """What is found out of a run, which is the same at every level.

    `places` says for each residual where it stands among inputs, outputs and the other residuals.
    `standing` is whether the function ran outside of the Function, which is given all three then.
    """

    autocast: "_Autocast"
    back: Pullback
    inputs: int
    opaque: bool
    outputs: int
    places: list[int]
    specs: Sequence[Spec | None]
    standing = False
    template: Any

    def note(self, call: Call, ran: Ran) -> list[torch.Tensor]:
        """Take all of it down, and return the residuals that are neither inputs nor outputs."""
        outputs, rule, inputs, self.back = ran
        residuals, self.template, self.opaque = lift(rule, TENSORS, call.f)
        everything = [*inputs, *outputs]
        # Of an output that is an input, the input's place.
        known = {id(tensor): i for i, tensor in reversed(list(enumerate(everything)))}
        others = list({id(other): other for other in residuals if id(other) not in known}.values())
        known |= {id(other): len(everything) + i for i, other in enumerate(others)}
        self.autocast, self.specs = _autocast(), specs_of(inputs)
        self.inputs, self.outputs = len(inputs), len(outputs)
        self.places = [known[id(residual)] for residual in residuals]
        return others

    def parts(self, saved: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], ...]:
        """The inputs, the outputs and the other residuals."""
        places = self.inputs, self.inputs + self.outputs
        return saved[: places[0]], saved[places[0] : places[1]], saved[places[1] :]


class _Transformed(torch.autograd.Function):
    """A Function that the transforms can take apart: residuals are outputs of it, too.

    Those have derivatives of their own, through the function, which runs again for them. In reverse mode
    that is when somebody asks, which a first derivative never does.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, found: _Found, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if found.standing:
            own = tensors[found.inputs : found.inputs + found.outputs]
        else:
            ran = call.run_foreseen(tensors)
            own = (*ran[0], *found.note(call, ran))
        mapped = _mapped_alike(tensors[: found.inputs], own)
        # No output may be a view of an input: PyTorch would have its derivative in forward mode be one.
        return tuple(
            [
                o.clone() if o._is_view() or any([o is tensor for tensor in tensors]) else o.detach()
                for o in mapped
            ]
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.call, ctx.found, *tensors = inputs
        count = ctx.found.inputs
        saved = (*tensors[:count], *output, *tensors[count + ctx.found.outputs :])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)  # to see which residuals are asked for
        _mark_integers(ctx, output)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found, saved, all_needed = ctx.found, ctx.saved_tensors, ctx.needs_input_grad[2:]
        inputs, outputs, _ = found.parts(saved)
        needed = all_needed[: len(inputs)]
        gradients: Sequence[torch.Tensor | None] = [None] * len(inputs)
        with _autocasting(found.autocast):
            own, computed = upstream[: len(outputs)], upstream[len(outputs) :]
            if any([u is not None for u in own]):
                zeros = [torch.zeros_like(o) if u is None else u for u, o in zip(own, outputs, strict=True)]
                rule = _transformed_rule(ctx, saved)
                gradients = found.back.pull(rule, _of_floating(zeros), needed, found.specs)
            if any([u is not None for u in computed]):
                by = [i for i, need in enumerate(needed) if need]
                more = dict(zip(by, _pull_residuals(ctx, inputs, computed, by), strict=True))
                gradients = [_sum(gradient, more.get(i)) for i, gradient in enumerate(gradients)]
        return None, None, *gradients, *[None] * (len(all_needed) - len(inputs))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The transpose of the rule, which must be linear in the upstream gradient."""
        found = ctx.found
        given = [i for i, tangent in enumerate(tangents[2 : 2 + found.inputs]) if tangent is not None]
        # PyTorch (2.13) turns forward mode off here, and that of outer levels with it, whose derivative of
        # a tangent would be zero. So turn it on again, which only a private name can, for the primals.
        with forward_ad._set_fwd_grad_enabled(True), _autocasting(found.autocast):
            saved = list(map(_primal, ctx.saved_tensors))
            inputs, outputs, others = found.parts(saved)
            rule = _transformed_rule(ctx, saved)
            needed = [i in given for i in range(len(inputs))]

            def vjp(*upstream: torch.Tensor | None) -> list[torch.Tensor]:
                gradients = found.back.untraced.pull(rule, upstream, needed, found.specs)
                return [torch.zeros_like(inputs[i]) if gradients[i] is None else gradients[i] for i in given]

            own = [tangents[2 + i] for i in given]
            with torch.no_grad():
                tried = _tried(outputs)
                far = vjp(*[None if u is None else FAR * u for u in tried])
                require_linear(ctx.call.name, vjp(*tried), far, _innermost)
            pushed = _transposed(vjp, outputs, own)
            if found.standing:
                return tuple(pushed)

            def pull(*upstream: torch.Tensor | None) -> list[torch.Tensor]:
                return _pull_residuals(ctx, inputs, upstream, given)

            return *pushed, *_transposed(pull, others, own)


def _tried(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Upstream gradients to try a rule on."""
    return [
        torch.as_tensor(trial(o.shape), dtype=o.dtype, device=o.device) if is_differentiable(o) else None
        for o in outputs
    ]


def _innermost(tensor: torch.Tensor) -> np.ndarray:
    """The numbers in what torch.func wraps, which are read in no other way while it is at work."""
    return np.asarray(torch.func.debug_unwrap(tensor, recurse=True).tolist())


@torch.compiler.disable
def _mapped_alike(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The outputs, mapped by vmap wherever an input is.

    Where an output does not depend on a mapped input, vmap makes one of it for all, and the upstream
    gradients come summed: the rule would answer for the whole batch, in the name of each.
    """
    zeros = [torch.zeros_like(x).sum() for x in inputs if is_differentiable(x) and _mappings(x)]
    if not zeros:
        return outputs
    zero = sum(zeros)
    count = _mappings(zero)
    return [
        o if not is_differentiable(o) or _mappings(o) == count else o + zero.to(o.device, o.dtype)
        for o in outputs
    ]


def _mappings(tensor: torch.Tensor) -> int:
    """By how many vmaps, within one another, a tensor is mapped."""
    count = 0
    while (inner := torch.func.debug_unwrap(tensor, recurse=False)) is not tensor:
        count += inner.ndim > tensor.ndim
        tensor = inner
    return count


def _transposed(
    linear: Callable[..., list[torch.Tensor]], like: Sequence[torch.Tensor], tangents: list[Any]
) -> list[torch.Tensor | None]:
    """The transpose of a map from tensors like these, None for an integer one, applied to `tangents`."""
    floating = [is_differentiable(tensor) for tensor in like]
    if not (tangents and any(floating)):
        return [torch.zeros_like(tensor) if f else None for tensor, f in zip(like, floating, strict=True)]

    def function(*of_floating: torch.Tensor) -> list[torch.Tensor]:
        every = iter(of_floating)
        return linear(*[next(every) if f else None for f in floating])

    # Not at zero, which a rule may set apart, as one does that divides by its upstream gradient's length.
    tried = [u for u in _tried(like) if u is not None]
    pushed = iter(torch.func.vjp(function, *tried)[1](tangents))
    return [next(pushed) if f else None for f in floating]


def _primal(tensor: torch.Tensor) -> torch.Tensor:
    """A dual number's value, which has no tangent at the level at which a `jvp` runs."""
    if torch.func.debug_unwrap(tensor, recurse=False).ndim > tensor.ndim:
        return _PrimalOfBatch.apply(tensor)
    return forward_ad.unpack_dual(tensor, level=0).primal


class _PrimalOfBatch(torch.autograd.Function):
    """It tells vmap what PyTorch (2.13) does not: to unpack a batch of dual numbers."""

    @staticmethod
    def forward(tensor: torch.Tensor) -> NoReturn:
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> NoReturn:
        raise NotImplementedError

    @staticmethod
    def vmap(info: Any, dims: tuple[int, ...], tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        return _primal(tensor), dims[0]


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b


def _transformed_rule(ctx: Any, saved: Sequence[torch.Tensor]) -> Callable[..., Any]:
    residuals = [saved[place] for place in ctx.found.places]
    if ctx.found.standing or not ctx.found.opaque:
        return restore(ctx.found.template, residuals)
    # What the rule reaches through an object belongs to another level. It has its like in a second run.
    others = ctx.found.inputs + ctx.found.outputs
    known = [slot for slot, place in enumerate(ctx.found.places) if place < others]
    return restore(*_run_again(ctx.call, ctx.found.back, residuals, ctx.found.parts(saved)[0], known))


def _pull_residuals(
    ctx: Any, inputs: Sequence[torch.Tensor], upstream: Sequence[torch.Tensor | None], by: Sequence[int]
) -> list[torch.Tensor]:
    """The gradients, with respect to the inputs `by`, of what the function computed on the way."""
    call, found = ctx.call, ctx.found
    wanted = [i for i, u in enumerate(upstream) if u is not None]

    def computed(*own: torch.Tensor) -> list[torch.Tensor]:
        every = list(inputs)
        for i, tensor in zip(by, own, strict=True):
            every[i] = tensor
        _, residuals = _run_again(call, found.back, found.places, every, ())
        return [residuals[found.places.index(found.inputs + found.outputs + i)] for i in wanted]

    return list(torch.func.vjp(computed, *[inputs[i] for i in by])[1]([upstream[i] for i in wanted]))


# -------------------------------------------------------------------------------- torch.compile


def _distinct(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Aliases where a tensor comes twice, which Dynamo (PyTorch 2.13) does not take."""
    distinct: list[torch.Tensor] = []
    for tensor in tensors:
        twice = any([tensor is other for other in distinct])
        distinct.append(tensor.view_as(tensor) if twice else tensor)
    return distinct


def _apply_compiled(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    """The op as Dynamo traces it whole; it cannot follow the making of functions in `restore`."""
    if _is_transforming_traced():
        return _apply_uncompiled(call, tensors)
    if torch.compiler.is_exporting():
        outputs, _, _, back = call.run(tensors)
        return back.output.join([output.detach() for output in outputs])
    with torch.no_grad():
        outputs, rule, inputs, back = call.run(tensors)
    own = _Compiled.apply(back, rule, specs_of(inputs), *_distinct([*inputs, *outputs]))
    return back.output.join(own)


# Keras keeps the scope in force from the first one on. Dynamo would notice, and compile a function anew
# after its first call.
with keras.StatelessScope(initialize_variables=False):
    pass


@torch.compiler.assume_constant_result
def _is_transforming_traced() -> bool:
    """The same, around the place of the program that Dynamo traces."""
    return _transforming()


# With `fullgraph` this is an error that gives the reason; without, PyTorch runs the function as it is.
_apply_uncompiled = torch.compiler.disable(
    _apply_transforming,
    reason="torch.func and forward mode, as PyTorch (2.13) compiles them, take no notice of a custom "
    "gradient; compile without fullgraph, or apply the transform to a function that is not compiled",
)


class _Compiled(torch.autograd.Function):
    """A Function that ties outputs to inputs by a rule that is left as it is: compiled code has no cycles."""

    @staticmethod
    def forward(
        ctx: Any, back: Pullback, rule: Callable[..., Any], specs: Any, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.back, ctx.rule, ctx.specs, ctx.autocast = back, rule, specs, _autocast()
        outputs = [output.view_as(output) for output in tensors[len(specs) :]]
        _mark_integers(ctx, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[3 : 3 + len(ctx.specs)]
        with _autocasting(ctx.autocast):
            gradients = ctx.back.pull(ctx.rule, _of_floating(upstream), needed, ctx.specs)
        return None, None, None, *gradients, *[None for _ in upstream]


# ----------------------------------------------------------------------- torch.export, torch.jit


def _apply_exporting(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    """The op in a program that is written down for elsewhere.

    What is written are the operations of the function, detached: better no gradient than theirs. For a
    gradient inside of the program, the outputs get a node while nothing is written.
    """
    outputs, rule, inputs, back = call.run(tensors)
    own = [output.clone().detach() if _is_alias(output, inputs) else output.detach() for output in outputs]
    if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in inputs]):
        writing = torch._C._get_tracing_state()
        torch._C._set_tracing_state(None)
        try:
            _Exported.apply(back, rule, specs_of(inputs), *inputs, *own)
        finally:
            torch._C._set_tracing_state(writing)
    return back.output.join(own)


def _is_alias(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    return output._is_view() or any([output is tensor for tensor in inputs])


class _Exported(torch.autograd.Function):
    """A Function that attaches itself to outputs that are there."""

    @staticmethod
    def forward(
        ctx: Any, back: Pullback, rule: Callable[..., Any], specs: Any, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.back, ctx.rule, ctx.specs = back, rule, specs
        outputs = tensors[len(specs) :]
        ctx.mark_dirty(*outputs)
        _mark_integers(ctx, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[3 : 3 + len(ctx.specs)]
        gradients = ctx.back.pull(ctx.rule, _of_floating(upstream), needed, ctx.specs)
        return None, None, None, *gradients, *[None for _ in upstream]


# ------------------------------------------------------------------------------------- gradients


def value_and_grad(
    function: Callable[..., tuple[torch.Tensor, Any]], tensors: Sequence[torch.Tensor], variables: int
) -> tuple[tuple[torch.Tensor, Any], list[torch.Tensor]]:
    if _transforming() or torch.compiler.is_dynamo_compiling():
        of_tensors, whole = _tensors_of_aux(function)
        places = tuple(range(len(tensors)))
        gradients, (value, aux) = torch.func.grad_and_value(of_tensors, places, has_aux=True)(*tensors)
        return (value, whole(aux)), list(gradients)
    recording = torch.is_grad_enabled()
    nested = getattr(_DEPTH, "value", 0)
    _DEPTH.value = nested + 1
    try:
        with torch.enable_grad():
            own = _apart(tensors)
            value, aux = function(*own)
        if not value.requires_grad:
            return (value, aux), [torch.zeros_like(t) for t in tensors]
        # The backward pass is recorded where a second derivative can be asked for: inside another
        # gradient, or where the value depends on what has a history, other than the variables themselves.
        weights = [tensor for tensor in tensors[len(tensors) - variables :] if tensor.requires_grad]
        recorded = recording and (nested > 0 or _depends_on_others(value, [*own, *weights]))
        gradients = torch.autograd.grad(value, own, create_graph=recorded, materialize_grads=True)
        answer = [value, *gradients]
        if not recorded:
            answer = [tensor.detach() for tensor in answer]
            if recording and weights:
                answer = [_Unrecorded.apply(tensor, *weights) for tensor in answer]
        return (answer[0], aux), answer[1:]
    finally:
        _DEPTH.value = nested


def vjp(
    function: Callable[..., tuple[Sequence[torch.Tensor], Any]], tensors: Sequence[torch.Tensor]
) -> tuple[tuple[Sequence[torch.Tensor], Any], Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]]:
    if _transforming() or torch.compiler.is_dynamo_compiling():
        of_tensors, whole = _tensors_of_aux(function)
        outputs, transpose, aux = torch.func.vjp(of_tensors, *tensors, has_aux=True)
        return (outputs, whole(aux)), lambda upstream: transpose(list(upstream))
    nested = getattr(_DEPTH, "value", 0)
    _DEPTH.value = nested + 1
    try:
        with torch.enable_grad():
            own = _apart(tensors)
            ends, aux = function(*own)
    finally:
        _DEPTH.value = nested
    # As above; and where there is a derivative by the upstream gradients, as in forward mode.
    others = any([_depends_on_others(end, own) for end in ends])
    outputs = ends if torch.is_grad_enabled() and (nested > 0 or others) else [end.detach() for end in ends]

    def pull(upstream: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        given = [(end, u) for end, u in zip(ends, upstream, strict=True) if end.requires_grad]
        if not given:
            return [torch.zeros_like(tensor) for tensor in tensors]
        inside = others or getattr(_DEPTH, "value", 0) > 0 or any([u.requires_grad for u in upstream])
        return torch.autograd.grad(
            [end for end, _ in given],
            own,
            [u for _, u in given],
            retain_graph=True,
            create_graph=torch.is_grad_enabled() and inside,
            materialize_grads=True,
        )

    return (outputs, aux), pull


def jacobian(
    function: Callable[..., tuple[Sequence[torch.Tensor], Any]], tensors: Sequence[torch.Tensor]
) -> tuple[Any, list[list[torch.Tensor]]]:
    (outputs, aux), pull = vjp(function, tensors)
    zeros = [torch.zeros_like(output) for output in outputs]
    rows = []
    for place, output in enumerate(outputs):

        def row(upstream: torch.Tensor, place: int = place) -> tuple[torch.Tensor, ...]:
            return tuple(pull([*zeros[:place], upstream, *zeros[place + 1 :]]))

        count = output.numel()
        basis = torch.eye(count, dtype=output.dtype, device=output.device).reshape(count, *output.shape)
        gradients = torch.func.vmap(row)(basis)
        rows.append([g.reshape(output.shape + t.shape) for g, t in zip(gradients, tensors, strict=True)])
    return aux, rows


def _apart(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors as variables of a derivative of its own."""
    return [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors]


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    return torch.no_grad()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # "aot_eager" traces both passes and generates no code, which would take many times as long. Functions of
    # one code share their compilations, of which PyTorch makes a few and then runs the code as it is, in
    # silence: so this one has its own.
    whole = torch.compile(function, backend="aot_eager", dynamic=False, isolate_recompiles=True)

    def run(*tensors: torch.Tensor) -> Any:
        # Dynamo (PyTorch 2.13) looks at `.grad` behind a graph break, and hides the warning of that only from
        # those for whom it is no error.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
            return whole(*tensors)

    return run


def wide() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def observe(callback: Callable[..., None], tensors: Sequence[torch.Tensor]) -> None:
    if not (is_compiling() or _is_tracing() or any([tensor.is_meta for tensor in tensors])):
        callback(*map(_value, tensors))


def _value(tensor: torch.Tensor) -> np.ndarray:
    if not _transforming():
        return np.array(keras.ops.convert_to_numpy(tensor))
    # Under a transform an operation on what is wrapped gives what is wrapped again, and to list it is none.
    values = torch.func.debug_unwrap(tensor, recurse=True).tolist()
    return np.array(values, keras.backend.standardize_dtype(tensor.dtype))


def is_compiling() -> bool:
    return torch.compiler.is_compiling()


_UNCOMPILED = Shared(lambda: torch.compiler.set_stance("force_eager"))  # it is one for all threads


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    return _UNCOMPILED


def _tensors_of_aux(
    function: Callable[..., tuple[Any, Any]],
) -> tuple[Callable[..., tuple[Any, list[torch.Tensor]]], Callable[[Sequence[torch.Tensor]], Any]]:
    """The function with the tensors of its `aux` alone, which is what torch.func lets out, and how to put
    them back into the rest.
    """
    left: list[Any] = []

    def of_tensors(*own: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        value, aux = function(*own)
        left[:] = [aux, keras.tree.flatten(aux)]
        return value, [leaf for leaf in left[1] if isinstance(leaf, torch.Tensor)]

    def whole(tensors: Sequence[torch.Tensor]) -> Any:
        own = iter(tensors)
        aux, leaves = left
        leaves = [next(own) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return keras.tree.pack_sequence_as(aux, leaves)

    return of_tensors, whole


class _Unrecorded(torch.autograd.Function):
    """A result that depends on weights and has no history: a derivative of it is an error, and not zero."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            message(
                "value_and_grad",
                "a derivative of a gradient with respect to variables was asked for, which was not recorded",
                required="a second derivative inside of the function that another gradient is taken of",
                got="a backward pass through the result, as by `backward()`",
                mend="take both by grad(...), or pass the values of the variables as arguments, by `argnums`",
            )
        )


_DEPTH = threading.local()
"""How many gradients of `value_and_grad` are being taken around this point of this thread."""


def _depends_on_others(value: torch.Tensor, own: Sequence[torch.Tensor]) -> bool:
    """Whether `value`, or its gradient, depends on a leaf that is not one of `own`."""
    seen = set()
    nodes = [_node_of(value) if value.requires_grad else None]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # only the node of a leaf has one
        if leaf is not None and not any([leaf is tensor for tensor in own]):
            return True
        nodes.extend(parent for parent, _ in node.next_functions)
        nodes.extend(_beside_inputs(node))
    return False


def _beside_inputs(node: Any) -> list[Any]:
    """The nodes of what the gradient of an op depends on beside its inputs: what the rule uses, and, where
    that was computed by the function, what the function closes over.

    Nothing is asked for its saved tensors: under a checkpoint that would run the function again.
    """
    if not hasattr(node, "multigrad"):
        return []
    *_, call, _, _, _, beside = node.multigrad
    closed_over = [] if call is None else lift(call.f, TENSORS, call.f)[0]
    return [*beside, *[_node_of(tensor) for tensor in closed_over if tensor.requires_grad]]


def _node_of(tensor: torch.Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(tensor).node

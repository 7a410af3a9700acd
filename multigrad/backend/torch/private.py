"""The private names of PyTorch that this backend uses (PyTorch 2.12 to 2.15).

They are looked up when the backend is imported. A missing name raises an ImportError then, unless a fallback
is given. Where no reason is given, PyTorch has no public API for the purpose.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from multigrad.common.frameworks import look_up

F = TypeVar("F", bound=Callable[..., Any])

# Return whether `torch.jit.trace` is tracing. The public function takes several times as long.
is_tracing = look_up("torch._C._is_tracing", lambda: torch.jit.is_tracing)
# Read and set the state of that trace, to hide operations from it.
get_tracing_state = look_up("torch._C._get_tracing_state")
set_tracing_state = look_up("torch._C._set_tracing_state")

# Enable or disable recording. The public function takes twice as long.
set_grad_enabled = look_up("torch._C._set_grad_enabled", lambda: torch.set_grad_enabled)

# Return whether a transform of torch.func is active.
is_functorch_active = look_up("torch._C._are_functorch_transforms_active")
# Leave all transforms for a while, to apply a Function in its eager form where they do not affect it.
untransformed = look_up("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")
# Return the active transforms, with their levels and batch sizes.
transforms = look_up("torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters")
VMAP = look_up("torch._C._functorch.TransformType.Vmap")
JVP = look_up("torch._C._functorch.TransformType.Jvp")
# Return the level and the mapped axis of a tensor's wrapper.
level_of = look_up("torch._C._functorch.maybe_get_level")
axis_of = look_up("torch._C._functorch.maybe_get_bdim")
# Return the tensor in the wrapper of a transform that has ended.
unwrapped_once = look_up("torch._C._functorch.unwrap_if_dead")
# Return whether a tensor is mapped by the vmap that precedes torch.func. PyTorch uses it for
# `is_grads_batched`. It does not support comparisons.
is_of_old_vmap = look_up("torch._C._functorch.is_legacy_batchedtensor")
# Disable all transforms, and all modes that record or replace operations.
disable_transforms = look_up("torch._C._DisableFuncTorch")
disable_modes = look_up("torch.utils._python_dispatch._disable_current_modes")
# Observe each operation. PyTorch documents this class, in spite of the name of its module.
TorchDispatchMode = look_up("torch.utils._python_dispatch.TorchDispatchMode")
# Disable the mode in which `torch.export` records `no_grad`. Operations on tensors are recorded elsewhere.
disable_torch_function = look_up("torch._C.DisableTorchFunction")

# Return the level of forward mode, which is negative where it is not active. The attribute of the module
# changes. Not a Python function, which would take longer in each op.
look_up("torch.autograd.forward_ad._current_level")
forward_level = functools.partial(getattr, forward_ad, "_current_level")
# Enable forward mode in a `jvp`.
set_forward_mode = look_up("torch.autograd.forward_ad._set_fwd_grad_enabled")

# Return whether a tensor is a view.
is_view = look_up("torch.Tensor._is_view")
# The base of a view, an attribute of tensors.
look_up("torch.Tensor._base")


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the base of a view, and any other tensor itself."""
    return tensor if tensor._base is None else tensor._base


# The number of changes of a tensor in place. PyTorch's notes on autograd describe it.
look_up("torch.Tensor._version")


def versions_of(tensors: Sequence[torch.Tensor | None]) -> list[int | None]:
    """Return how often tensors were changed in place. PyTorch does not count it in inference mode."""
    return [None if t is None or t.is_inference() else t._version for t in tensors]


# Return the tensors and other leaves of the structures that a function of PyTorch gets or returns.
tree_leaves = look_up("torch.utils._pytree.tree_leaves")
# Return whether a tensor is fake.
is_fake = look_up("torch._subclasses.fake_tensor.is_fake")


def _is_autocast_anywhere() -> bool:
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return any([torch.is_autocast_enabled(device) for device in devices])


# Return whether autocast is enabled on any device. The public function tests one device, and takes twice as
# long.
is_autocast_anywhere = look_up("torch._C._is_any_autocast_enabled", lambda: _is_autocast_anywhere)

# The method that `Function.apply` calls after Python code that handles `setup_context`, transforms and other
# kinds of Function. This code takes a tenth of the time of a small op. Without this name, it runs.
_DIRECT_APPLY = look_up("torch._C._FunctionBase.apply", lambda: None)


def direct_apply(function: Any) -> Callable[..., Any]:
    """Return `function.apply` for eager code, in which no transform is active."""
    return function.apply if _DIRECT_APPLY is None else super(torch.autograd.Function, function).apply


# The base class of the errors with which Dynamo refuses to compile a function.
TorchDynamoException = look_up("torch._dynamo.exc.TorchDynamoException")
# Set what Dynamo does with the frames of a code object, and with the frames that they call. Without these
# names, Dynamo compiles the frames of an op that it could not trace one by one, up to its limit.
_set_strategy = look_up("torch._C._dynamo.eval_frame.set_code_exec_strategy", lambda: None)
_Strategy = look_up("torch._dynamo.types.FrameExecStrategy", lambda: None)
_Action = look_up("torch._dynamo.types.FrameAction", lambda: None)


def skip_frame(function: F, called: str = "DEFAULT") -> F:
    """Let Dynamo compile no frame of a function, except as part of a caller's program."""
    if _set_strategy and _Strategy and _Action:
        _set_strategy(function.__code__, _Strategy(_Action.SKIP, getattr(_Action, called)))
    return function


def skip_frames(function: F) -> F:
    """Let Dynamo compile no frame of a function or of what it calls, except as part of a caller's program."""
    return skip_frame(function, "SKIP")


# Return whether a mode observes operations, under which PyTorch (2.13) compiles nothing.
is_in_dispatch_mode = look_up("torch.utils._python_dispatch.is_in_torch_dispatch_mode")
# Change settings of AOTAutograd. With donated buffers, a compiled backward pass raises if another gradient
# keeps its graph.
functorch_config = look_up("torch._functorch.config")
# Keep the version counters of tensors that a Function marks as changed, though their values stay the same.
preserve_version_counters = look_up("torch.autograd._unsafe_preserve_version_counter")
# Return the mode of a fake tensor in a program that is traced.
fake_mode_of = look_up("torch._guards.detect_fake_mode")

# The name of the nodes of compiled functions in a graph. A test fails if it changes.
COMPILED_NODE = "CompiledFunctionBackward"

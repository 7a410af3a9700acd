"""`multigrad.jit` on PyTorch: `torch.compile`, which tracks Python objects and their attributes.

A function is compiled as one graph, which contains its gradients. A call that Dynamo cannot trace whole runs
uncompiled, such as a first call that makes the variables of an optimizer. After two such calls, the function
is compiled in pieces: the graph breaks where Dynamo cannot trace, at outermost gradients, and at pullbacks,
which a later piece may call.
"""

import contextlib
import functools
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from multigrad.backend.torch import private
from multigrad.backend.torch.state import IN_PIECES, IN_THREAD, WHOLE
from multigrad.common.process_wide import Shared

_LOGGER = logging.getLogger("multigrad")
_SECONDS = 10.0
"""The time after which a line says what is being compiled."""
_NOTICE = (
    "multigrad.jit: compiling %s takes more than %g s. Later calls with the same shapes reuse the result."
)


def jit(
    function: Callable[..., Any], name: str, static: Mapping[str, int | None], options: Mapping[str, Any]
) -> Callable[..., Any]:
    whole = _compile_alone(_with_history(function), **{**options, "fullgraph": True})
    pieces = _compile_alone(function, **options)
    failures, has_run = 0, False  # of the function, in all threads
    announce = functools.cache(lambda: _LOGGER.warning(_NOTICE, name, _SECONDS))  # once, also if a call fails

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal failures, has_run
        if torch.compiler.is_compiling() or _UNCOMPILED.is_active or private.is_in_dispatch_mode(False):
            return function(*args, **kwargs)
        before = dict(vars(IN_THREAD))
        IN_THREAD.is_differentiated = torch.is_grad_enabled() and _requires_gradient((args, kwargs))
        IN_THREAD.mode = WHOLE if failures < 2 else IN_PIECES
        IN_THREAD.keeps_history = IN_THREAD.mode == WHOLE
        try:
            try:
                with contextlib.nullcontext() if has_run else _after(_SECONDS, announce):
                    if failures < 2:
                        result = whole(*args, **kwargs)
                    else:
                        with private.functorch_config.patch(donated_buffer=False):
                            result = pieces(*args, **kwargs)
                has_run = True
                return result
            except private.TorchDynamoException:  # raised before the function runs
                if IN_THREAD.mode == IN_PIECES or options.get("fullgraph"):
                    raise
            IN_THREAD.mode, IN_THREAD.keeps_history = "", False
            result = function(*args, **kwargs)
            failures += 1  # not if the function itself raised an error
            return result
        finally:
            vars(IN_THREAD).update(before)

    return run


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    # "aot_eager" traces both passes and skips code generation, which takes much longer.
    compiled_function = _compile_alone(function, backend="aot_eager", dynamic=False)

    def run(*tensors: torch.Tensor) -> Any:
        # Dynamo (PyTorch 2.13) reads `.grad` after a graph break. It ignores the warning about it, except if
        # warnings are errors.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
            return compiled_function(*tensors)

    return run


def _compile_alone(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function with a limit of compilations of its own.

    Functions with the same code, such as all gradient functions, share a limit of eight, after which PyTorch
    silently runs them uncompiled.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # not in PyTorch 2.12
        return torch.compile(function, **{"isolate_recompiles": True, **options})

    def alone(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    alone.__code__ = alone.__code__.replace()
    return torch.compile(functools.update_wrapper(alone, function), **options)


def _with_history(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function for one graph. Dynamo refuses it if a part of its derivative would be missing."""

    def with_history(*args: Any, **kwargs: Any) -> Any:
        IN_THREAD.has_unrecorded_gradient = False
        result = function(*args, **kwargs)
        if IN_THREAD.has_unrecorded_gradient and _requires_gradient(result):
            _refuse()
        return result

    return functools.update_wrapper(with_history, function)


_refuse = torch.compiler.disable(
    lambda: None,
    reason="a result that requires a gradient would have no derivative through the gradients with respect to "
    "variables that the function computes; compile without fullgraph",
)


@contextlib.contextmanager
def _after(seconds: float, function: Callable[[], None]) -> Iterator[None]:
    """Call the function if the code takes longer than this."""
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _requires_gradient(arguments: Any) -> bool:
    leaves = private.tree_leaves(arguments)
    return any([isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves])


_UNCOMPILED = Shared(lambda: torch.compiler.set_stance("force_eager"))  # a process-wide setting


def without_compilation() -> contextlib.AbstractContextManager[Any]:
    return _UNCOMPILED

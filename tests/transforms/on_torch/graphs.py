"""The graphs that PyTorch's compilers are given."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func


def graphs(
    function: Callable[..., Any], arguments: Sequence[torch.Tensor], *, prepared: bool
) -> list[torch.fx.Graph]:
    """The graphs of the forward and of the backward pass of a function that returns a number.

    Arguments:
        prepared: whether as Inductor, PyTorch's usual compiler, generates code for them: it decided what is
            kept between the passes, and removed what does nothing.
    """
    # Private, as is all that stands between Dynamo and a compiler (PyTorch 2.13): there is no public way to
    # see the graphs of both passes. They are loaded here, because loading them warns.
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.compile_fx import compile_fx

    found: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
        found.append(module.graph)
        return make_boxed_func(module)

    torch.compiler.reset()
    if prepared:
        backend = functools.partial(compile_fx, inner_compile=keep)
    else:
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    leaves = [x.clone().requires_grad_() for x in arguments]
    torch.compile(function, fullgraph=True, dynamic=False, backend=backend)(*leaves).backward()
    assert len(found) == 2
    return found


def operations(graph: torch.fx.Graph) -> list[str]:
    """What a graph computes, in order, and of what."""
    return [
        f"{node.name} = {node.target}{(*node.args, *node.kwargs.items())}"
        for node in graph.nodes
        if node.op not in ("placeholder", "output")
    ]


def handed(graph: torch.fx.Graph) -> tuple[list[str], list[str]]:
    """What a graph is given and what it returns, in any order."""
    given = [node.name for node in graph.nodes if node.op == "placeholder"]
    (output,) = [node for node in graph.nodes if node.op == "output"]
    return sorted(given), sorted(map(str, output.args[0]))

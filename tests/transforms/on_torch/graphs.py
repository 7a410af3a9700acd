"""The graphs that PyTorch passes to compilers."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func


def graphs(
    function: Callable[..., Any],
    arguments: Sequence[torch.Tensor],
    *,
    prepared: bool,
    compiler: Callable[..., Any] = torch.compile,
) -> list[torch.fx.Graph]:
    """Return the graphs of the forward and the backward pass of a scalar function.

    Arguments:
        prepared: whether to return them as Inductor, PyTorch's default compiler, gets them: after the
            decision what to keep between the passes, and without operations that have no effect.
    """
    # Private, as everything between Dynamo and a compiler (PyTorch 2.13): there is no public way to get the
    # graphs of both passes. They are imported here, because the import warns.
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
    compiler(function, fullgraph=True, dynamic=False, backend=backend)(*leaves).backward()
    assert len(found) == 2
    return found


def operations(graph: torch.fx.Graph) -> list[str]:
    """Return the operations of a graph, in order, with their operands. Its inputs have no order."""
    lines = [
        f"{node.name} = {node.target}{(*node.args, *node.kwargs.items())}"
        for node in graph.nodes
        if node.op not in ("placeholder", "output")
    ]
    names = list(dict.fromkeys(re.findall(r"primals_\d+", " ".join(lines))))
    return [re.sub(r"primals_\d+", lambda name: f"input {names.index(name[0])}", line) for line in lines]


def handed(graph: torch.fx.Graph) -> tuple[list[str], list[str]]:
    """Return the inputs and outputs of a graph, in any order."""
    given = [node.name for node in graph.nodes if node.op == "placeholder"]
    (output,) = [node for node in graph.nodes if node.op == "output"]
    return sorted(given), sorted(map(str, output.args[0]))

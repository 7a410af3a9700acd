"""The border between multigrad and a framework.

Code above the border binds arguments, splits nested structures, calls rules and checks their results. It
imports no framework. Below the border, each framework has one package, which gets flat tensors. The package
itself is the backend: it has the members of `Backend`, and those of `defaults.py` that it does not replace.

A backend imports only `multigrad.common`. Everything else reaches it as an argument: one call of an op is a
`Call`, whose `run` returns a `Run` with its `Rule`. The protocols here name what a backend uses of them;
`core/call.py` and `core/rule.py` document it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import keras
import numpy as np

from multigrad.common.errors import describe, message
from multigrad.common.type_sets import TypeSet

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=type[Any])

Spec = tuple[Any, Any, Any]
"""The shape and dtype that the gradient of a tensor must have, in the framework's own types. The third item
is the device of the tensor if the backend `HAS_DEVICES`. Otherwise it is the tensor itself if its shape is
known only at run time, and None if not."""

Tensors = Sequence[Any]


class Rule(Protocol):
    """The rule of a run without its residuals."""

    name: str
    template: Any
    roles: Sequence[int]
    closure_count: int
    specs: list[Spec | None]
    is_opaque: bool

    def scope_with_reader(self, reader: Callable[[Any], Any]) -> AbstractContextManager[Any]: ...
    def scope_of(self, scope_values: Tensors) -> AbstractContextManager[Any]: ...
    def call(
        self, user_rule: Callable[..., Any], scope_values: Tensors, upstream: Tensors, needed: Sequence[bool]
    ) -> Tensors: ...
    def held(self) -> list[Any]: ...
    def holds_more_than(self, before: Sequence[Any]) -> bool: ...
    def pull(
        self, residuals: Tensors, upstream: Tensors, needed: Sequence[bool], transposed: bool = False
    ) -> Tensors: ...


class Run(Protocol):
    """One run of the function of a call."""

    inputs: Tensors
    outputs: Tensors
    originals: Tensors
    user_rule: Callable[..., Any]
    scope_values: Tensors
    rule: Any
    residuals: list[Any]

    def lift(self, owner: Any) -> Rule: ...
    def other_residuals(self) -> list[Any]: ...
    def residuals_with(self, inputs: Tensors, outputs: Tensors) -> list[Any]: ...


class Call(Protocol):
    """One call of an op."""

    f: Callable[..., Any]
    name: str
    higher_order: bool

    def run(self, tensors: Tensors, strip: Callable[[Any], Any] | None = None) -> Run: ...
    def rerun(self, inputs: Tensors, first: Any) -> Run: ...
    def outputs(self, tensors: Tensors) -> Tensors: ...
    def objects(self) -> Sequence[Any]: ...
    def held(self) -> list[Any]: ...
    def answers_for_outer_rule(self, inputs: Tensors) -> bool: ...
    def closed_over_path(self, is_differentiated: Callable[[Any], bool]) -> str | None: ...
    def is_in_scope(self) -> bool: ...


class HostFunction(Protocol):
    """A function of NumPy arrays, for `host_call`."""

    name: str

    def __call__(self, arrays: Sequence[Any]) -> list[np.ndarray]: ...
    def in_program(self, arrays: Sequence[Any]) -> list[np.ndarray]: ...


Operation = tuple[tuple[str, ...], tuple[str, ...]]
"""The dtypes of the operands and of the results of an operation."""

TensorSpec = tuple[Sequence[int | None], str]
"""The shape and dtype of a tensor, in Keras's terms. None is a dimension that a graph does not know."""


def dependence_error(name: str, got: str) -> str:
    """Return the error of `vmap` for a value that must be the same for all elements, and is not."""
    return message(
        name,
        "a value that must be the same for all elements depends on a mapped argument",
        required="out_axes of None only for such results, and no assignment of a mapped value to a variable",
        got=got,
        fix="return the value, with an axis in out_axes, and assign to variables outside of vmap: call a "
        "BatchNormalization with training=False",
    )


def to_numpy(value: Any) -> np.ndarray:
    """Return a copy of an array of another framework, which may change in place."""
    try:
        return np.array(value)
    except Exception as error:
        raise TypeError(
            message(
                "multigrad",
                "an array of another framework cannot be converted to a tensor",
                required="an array that NumPy can read",
                got=describe(value),
                fix="pass a NumPy array, such as x.detach().float().cpu().numpy() for a PyTorch tensor",
            )
        ) from error


class Backend(Protocol):
    """The members that the package of each framework must have."""

    TENSORS: TypeSet
    """The types of a dense tensor, including traced ones."""

    FOREIGN: TypeSet
    """Array types that must be converted before they meet a tensor: those of other frameworks."""

    def apply(self, call: Call, tensors: Sequence[Any]) -> Sequence[Any]:
        """Run `call`, tie its outputs to the differentiable tensors by its rule, and return them."""

    def value_and_grad(
        self,
        function: Callable[..., tuple[Any, Any]],
        tensors: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> tuple[tuple[Any, Any], list[Any]]:
        """Return `(value, aux)` of `function(*tensors)` and the gradients of the scalar value.

        Arguments:
            function: a function of tensors that returns `(value, aux)`.
            tensors: its arguments.
            variables: the variables whose values are the last tensors. A program that the framework traced
                before may read them from where it stores them.
        """

    def vjp(
        self,
        function: Callable[..., tuple[Sequence[Any], Any]],
        tensors: Sequence[Any],
        variables: Sequence[keras.Variable] = (),
    ) -> tuple[tuple[Sequence[Any], Any], Callable[[Sequence[Any]], Sequence[Any]]]:
        """Return `(outputs, aux)` of `function(*tensors)` and its vector-Jacobian product.

        The product maps gradients of the outputs to gradients of the tensors. It can be called several times,
        and differentiated. `variables` is as for `value_and_grad`.
        """

    def jvp(
        self,
        function: Callable[..., tuple[Sequence[Any], Any]],
        tensors: Sequence[Any],
        tangents: Sequence[Any],
        variables: Sequence[keras.Variable] = (),
    ) -> tuple[tuple[Sequence[Any], Any], Sequence[Any]]:
        """Return `(outputs, aux)` of `function(*tensors)` and the tangents of the outputs."""

    def map_rows(self, row: Callable[[Any], Sequence[Any]], upstreams: Any) -> Sequence[Any]:
        """Return the stacked results of a pullback for upstream gradients along the first axis."""

    def vjp_at_once(
        self,
        function: Callable[..., tuple[Sequence[Any], Any]],
        tensors: Sequence[Any],
        variables: Sequence[keras.Variable] = (),
    ) -> tuple[tuple[Sequence[Any], Any], Callable[..., Sequence[Any]]]:
        """Return what `vjp` returns, for a product that is only called next, as by a Jacobian."""

    def vmap(
        self, function: Callable[..., tuple[Sequence[Any], Sequence[Any]]], tensors: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the results of a function for each element of the tensors along their first axis.

        The function returns two lists. The results of the first list are stacked along a new first axis.
        Those of the second list are returned once. If one of them depends on an element, a ValueError is
        raised. The function may run several times.
        """

    def is_differentiable(self, tensor: Any) -> bool:
        """Return whether the tensor is floating or complex."""

    def specs_of(self, tensors: Sequence[Any]) -> list[Spec | None]:
        """Return the spec of each tensor's gradient, None for a tensor that has no gradient."""

    def conform(self, gradient: Any, spec: Spec) -> Any:
        """Sum `gradient` over the axes that broadcasting enlarged, and cast it to the dtype of the spec.

        If the backend `HAS_DEVICES`, also move it to the device of the spec.
        """

    def concrete(self, tensor: Any) -> np.ndarray | None:
        """Return the tensor's value, None if it is traced."""

    def observe(self, callback: Callable[..., None], tensors: Sequence[Any]) -> None:
        """Call `callback` with the values of the tensors, copied to NumPy, as soon as they are computed.

        Concrete tensors are passed at once. Traced ones are passed in each run of the compiled program, which
        may call back once per element of a batch or per step of a loop.
        """

    def watch(self, callback: Callable[..., None], tensor: Any) -> Any:
        """Return the tensor, and `observe` it in each program, which raises if it cannot call back."""

    def may_record(self, tensors: Sequence[Any] | None = None) -> bool:
        """Return whether this code may be differentiated with respect to tensors from outside it.

        With `tensors`, return whether it may be differentiated with respect to these. If not, an op can skip
        a gradient that it would compute in its forward pass.
        """

    def compile_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as the framework compiles it, with its gradient."""

    def is_compiling(self) -> bool:
        """Return whether this code runs in a function that is being compiled."""

    def host_call(
        self, function: HostFunction, tensors: Sequence[Any], specs: Sequence[TensorSpec], vectorized: bool
    ) -> Sequence[Any]:
        """Call a function of NumPy arrays with the values of the tensors, when the program runs.

        Arguments:
            function: the function.
            tensors: its arguments.
            specs: the shape and dtype of each result.
            vectorized: whether the function may be called with a further leading axis.
        """

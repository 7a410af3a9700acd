"""The border between multigrad and a framework.

Code above the border binds arguments, splits nested structures, calls rules and checks their results. It
imports no framework. Below the border, each framework has one package with one subclass of `Backend`, which
gets flat tensors.

A backend imports only `multigrad.common`. Everything else reaches it as an argument: one call of an op is a
`Call`, whose `run` returns a `Run` with its `Pullback`. The protocols here name what a backend uses of them;
`core/call.py` documents it.
"""

import abc
import contextlib
import functools
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, TypeVar

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


class Pullback(Protocol):
    """The pullback of a run, which calls its rule."""

    name: str

    def scope_with_reader(self, read: Callable[[Any], Any]) -> AbstractContextManager[Any]: ...
    def scope_of(self, rule: Callable[..., Any]) -> AbstractContextManager[Any]: ...
    def pull(
        self, rule: Callable[..., Any], upstream: Tensors, needed: Sequence[bool], specs: list[Spec | None]
    ) -> Tensors: ...


class Rule(Protocol):
    """The rule of a run without its residuals."""

    pullback: Any
    roles: Sequence[int]
    specs: list[Spec | None]
    is_opaque: bool

    def held(self) -> list[Any]: ...
    def holds_more_than(self, before: Sequence[Any]) -> bool: ...
    def pull(
        self, residuals: Tensors, upstream: Tensors, needed: Sequence[bool], transposed: bool = False
    ) -> Tensors: ...


class Run(Protocol):
    """One run of the function of a call."""

    inputs: Tensors
    outputs: Tensors
    rule: Callable[..., Any]
    pullback: Any
    residuals: list[Any]
    roles: list[int]
    template: Any
    is_opaque: bool

    def lift(self, owner: Any) -> None: ...
    def others(self) -> list[Any]: ...
    def residuals_with(self, inputs: Tensors, outputs: Tensors) -> list[Any]: ...
    def rule_with(self, specs: list[Spec | None]) -> Any: ...


class Call(Protocol):
    """One call of an op."""

    f: Callable[..., Any]
    higher_order: bool
    pullback: Any

    @property
    def name(self) -> str: ...
    def run(
        self,
        tensors: Tensors,
        *,
        read_as: Callable[[Any], Any] | None = None,
        values: list[Any] | None = None,
    ) -> Any: ...
    def rerun(self, inputs: Tensors, first: Any) -> Any: ...
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
        fix="return the value, with an axis in out_axes, and assign to variables outside of vmap",
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


class Backend(abc.ABC):
    """The implementation for one framework.

    Each framework has one subclass, and the process has one instance. Abstract methods come first. The other
    methods implement the most common behavior.
    """

    TENSORS: ClassVar[TypeSet]
    """The types of a dense tensor, including traced ones."""

    CONVERTIBLE: ClassVar[TypeSet] = TypeSet(keras.Variable, np.ndarray, np.generic)
    """Other types that are converted to a dense tensor: arrays and variables."""

    FOREIGN: ClassVar[TypeSet]
    """Array types that must be converted before they meet a tensor: those of other frameworks."""

    TRACES_ONCE: ClassVar[bool] = False
    """Whether `jit` does not notice that a variable is frozen after the trace."""

    HAS_DEVICES: ClassVar[bool] = False
    """Whether a gradient must be on the device of its tensor. TensorFlow and JAX take it from any device."""

    STAND_INS: ClassVar[TypeSet] = TypeSet()
    """Types that stand for a tensor while a program is recorded. They cannot have a rule."""

    @staticmethod
    @abc.abstractmethod
    def apply(call: Call, tensors: Sequence[Any]) -> Sequence[Any]:
        """Run `call`, tie its outputs to the differentiable tensors by its rule, and return them."""

    @staticmethod
    @abc.abstractmethod
    def value_and_grad(
        function: Callable[..., tuple[Any, Any]], tensors: Sequence[Any], variables: Sequence[keras.Variable]
    ) -> tuple[tuple[Any, Any], list[Any]]:
        """Return `(value, aux)` of `function(*tensors)` and the gradients of the scalar value.

        Arguments:
            function: a function of tensors that returns `(value, aux)`.
            tensors: its arguments.
            variables: the variables whose values are the last tensors. A program that the framework traced
                before may read them from where it stores them.
        """

    @staticmethod
    @abc.abstractmethod
    def vjp(
        function: Callable[..., tuple[Sequence[Any], Any]],
        tensors: Sequence[Any],
        variables: Sequence[keras.Variable] = (),
    ) -> tuple[tuple[Sequence[Any], Any], Callable[[Sequence[Any]], Sequence[Any]]]:
        """Return `(outputs, aux)` of `function(*tensors)` and its vector-Jacobian product.

        The product maps gradients of the outputs to gradients of the tensors. It can be called several times,
        and differentiated. `variables` is as for `value_and_grad`.
        """

    @staticmethod
    @abc.abstractmethod
    def vmap(
        function: Callable[..., tuple[Sequence[Any], Sequence[Any]]], tensors: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the results of a function for each element of the tensors along their first axis.

        The function returns two lists. The results of the first list are stacked along a new first axis.
        Those of the second list are returned once. If one of them depends on an element, a ValueError is
        raised. The function may run several times.
        """

    @staticmethod
    @abc.abstractmethod
    def is_differentiable(tensor: Any) -> bool:
        """Return whether the tensor is floating or complex."""

    @staticmethod
    @abc.abstractmethod
    def specs_of(tensors: Sequence[Any]) -> list[Spec | None]:
        """Return the spec of each tensor's gradient, None for a tensor that has no gradient."""

    @staticmethod
    @abc.abstractmethod
    def conform(gradient: Any, spec: Spec) -> Any:
        """Sum `gradient` over the axes that broadcasting enlarged, and cast it to the dtype of the spec.

        If the backend `HAS_DEVICES`, also move it to the device of the spec.
        """

    @staticmethod
    @abc.abstractmethod
    def concrete(tensor: Any) -> np.ndarray | None:
        """Return the tensor's value, None if it is traced."""

    @staticmethod
    @abc.abstractmethod
    def observe(callback: Callable[..., None], tensors: Sequence[Any]) -> None:
        """Call `callback` with the values of the tensors, copied to NumPy, as soon as they are computed.

        Concrete tensors are passed at once. Traced ones are passed in each run of the compiled program, which
        may call back once per element of a batch or per step of a loop.
        """

    @classmethod
    def watch(cls, callback: Callable[..., None], tensor: Any) -> Any:
        """Return the tensor, and `observe` it in each program, which raises if it cannot call back."""
        cls.observe(callback, [tensor])
        return tensor

    @staticmethod
    @abc.abstractmethod
    def may_record(tensors: Sequence[Any] | None = None) -> bool:
        """Return whether this code may be differentiated with respect to tensors from outside it.

        With `tensors`, return whether it may be differentiated with respect to these. If not, an op can skip
        a gradient that it would compute in its forward pass.
        """

    @staticmethod
    @abc.abstractmethod
    def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as the framework compiles it, with its gradient."""

    @staticmethod
    @abc.abstractmethod
    def is_compiling() -> bool:
        """Return whether this code runs in a function that is being compiled."""

    @staticmethod
    @abc.abstractmethod
    def host_call(
        function: HostFunction, tensors: Sequence[Any], specs: Sequence[TensorSpec], vectorized: bool
    ) -> Sequence[Any]:
        """Call a function of NumPy arrays with the values of the tensors, when the program runs.

        Arguments:
            function: the function.
            tensors: its arguments.
            specs: the shape and dtype of each result.
            vectorized: whether the function may be called with a further leading axis.
        """

    @staticmethod
    def depends_on_element(result: Any, elements: Sequence[Any]) -> bool:
        """Return whether a result of a function in `vmap` depends on its arguments, the elements.

        The answer is False where only `vmap` can tell.
        """
        return False

    @staticmethod
    def trace_level() -> Hashable:
        """Return a value that differs in a loop, branch, map or derivative, which no tensor may leave."""
        return None

    @staticmethod
    def jit(
        function: Callable[..., Any], name: str, static: Mapping[str, int | None], options: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Return the function, compiled. Keras Variables that it reads or assigns become inputs or outputs.

        Arguments:
            function: a function of nested structures, which every framework's compiler flattens itself.
            name: the name of the function in messages.
            static: the names and positions of static parameters; None for a keyword-only one.
            options: keyword arguments of the framework's compiler.
        """
        return function

    @staticmethod
    def operations(function: Callable[..., Sequence[Any]], tensors: Sequence[Any]) -> set[Operation] | None:
        """Return the dtypes of the operations that a function of tensors runs, also in nested programs.

        Operations that keep the dtype of their operands may be missing. To find the operations, the function
        runs or is traced once more. The answer is None if the framework cannot trace the function.
        """
        return None

    @staticmethod
    def is_constant(tensor: Any) -> bool:
        """Return whether this value of a variable is a constant of the program that is being compiled."""
        return False

    @staticmethod
    def opaque_to_compiler(function: F) -> F:
        """Mark a function that no compiler of Python code can trace.

        It calls the host, or has a loop whose length depends on values.
        """
        return function

    @staticmethod
    def extend_reads(reads: type[Any]) -> type[Any]:
        """Return the class of the scope around a function: `reads`, or a subclass of it.

        `reads` is `multigrad.core.variables.Reads`.
        """
        return reads

    @staticmethod
    def extend_pinned(pinned: S) -> S:
        """Return the class of the scope that gives variables other values: `pinned`, or a subclass of it.

        `pinned` is `multigrad.core.variables.Pinned`.
        """
        return pinned

    @staticmethod
    def library_code(function: F) -> F:
        """Mark a function as library code, for a framework that rewrites or compiles Python code."""
        return function

    @classmethod
    def update_wrapper(cls, wrapper: F, wrapped: Callable[..., Any]) -> F:
        """Do what `functools.update_wrapper` does, for a framework that rewrites or replaces wrappers."""
        marked = cls.library_code(wrapper)
        functools.update_wrapper(marked, wrapped)
        return marked

    @staticmethod
    def constant(function: F) -> F:
        """Mark a function whose result depends only on its arguments and holds no tensor."""
        return function

    @staticmethod
    def is_reading_code() -> bool:
        """Return whether a compiler of Python code, such as Dynamo, traces this code."""
        return False

    @staticmethod
    def defaults_of(function: types.FunctionType) -> int:
        """Return the number of positional parameters of a rule that have defaults."""
        return len(function.__defaults__ or ())

    @staticmethod
    def while_loop(
        condition: Callable[..., Any], body: Callable[..., Sequence[Any]], carry: Sequence[Any], limit: int
    ) -> Sequence[Any]:
        """Repeat `body` on traced tensors without gradients, at most `limit` times, while `condition` holds.

        In a `vmap`, an element stays as it is once its condition is false.
        """
        return tuple(keras.ops.while_loop(condition, body, tuple(carry), maximum_iterations=limit))

    @staticmethod
    def solve(matrices: Any, right: Any) -> Any:
        """Return the solutions of linear equations, without gradients: NaN or Inf for a singular matrix."""
        return keras.ops.solve(matrices, right)

    @staticmethod
    def as_tensor(value: Any) -> Any:
        """Return a dense tensor with the value of an array, a number or a variable."""
        return keras.ops.convert_to_tensor(value)

    @classmethod
    def vjp_at_once(cls, *args: Any) -> tuple[tuple[Sequence[Any], Any], Callable[..., Sequence[Any]]]:
        """Return what `vjp` returns, for a product that is only called next, as by a Jacobian."""
        return cls.vjp(*args)

    @staticmethod
    def reshape(tensor: Any, *likes: Any) -> Any:
        """Return the tensor in the shape that the shapes of `likes` make one after another."""
        return tensor.reshape([size for like in likes for size in like.shape])

    @staticmethod
    def snapshot(tensor: Any) -> Any:
        """Return a tensor with the current value of `tensor`, which may be modified in place later."""
        return tensor

    @staticmethod
    def assign(variable: keras.Variable, value: Any) -> None:
        """Assign a value that a derivative, a map or a program returned to a variable."""
        variable.assign(value)

    @staticmethod
    def sizes(shape: Any) -> tuple[int | None, ...] | None:
        """Return a shape as a tuple, with None for an unknown dimension, or None for an unknown rank."""
        return tuple(shape)

    @staticmethod
    def depends_on_others(function: Callable[[Any], Any], tensor: Any) -> bool:
        """Return whether `function(tensor)` has a history that does not come from the tensor.

        The answer is False where the framework cannot tell.
        """
        return False

    @staticmethod
    def wide() -> AbstractContextManager[Any]:
        """Return a context with float64 and complex128, for this thread."""
        return contextlib.nullcontext()

    @staticmethod
    def without_compilation() -> AbstractContextManager[Any]:
        """Return a context in which compiled functions run eagerly, on concrete tensors."""
        return contextlib.nullcontext()

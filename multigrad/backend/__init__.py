"""The border: what multigrad asks of a framework.

Above it are binding, structures, the rule's convention and the checks, which know no framework. Below it
is one module a framework with the names of `Backend`, which see flat tensors only. Only the module of
the active Keras backend is ever imported.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import keras
import numpy as np

from multigrad.closure import TypeSet

DIFFERENTIATING = ("tensorflow", "jax", "torch")
FORWARD_ONLY = ("numpy", "openvino")


class Spec(NamedTuple):
    """What a tensor requires of its gradient."""

    shape: Any  # the framework's own shape: compares with that of a gradient
    dtype: Any
    like: Any = None  # the tensor itself, where its shape is known at run time only


class Pullback(Protocol):
    """Step 5 of a call: calls the rule on flat upstream gradients and checks its flat gradients.

    It holds no tensor. `needed` says for each tensor argument whether its gradient is of use to anybody;
    the others, and those that are zero, come back as None.
    """

    def __call__(
        self, rule: Callable[..., Any], upstream: Sequence[Any], needed: Sequence[bool]
    ) -> list[Any]: ...


class Forward(Protocol):
    """Step 4 of a call: runs the function `f` on flat tensors.

    Returns its flat output tensors, the rule, which closes over tensors, and the rule's pullback.
    `function` stands in for `f` where its closure was lifted.
    """

    name: str
    f: Callable[..., Any]
    forward_mode: bool

    def __call__(
        self, tensors: Sequence[Any], function: Callable[..., Any] | None = None
    ) -> tuple[list[Any], Callable[..., Any], Pullback]: ...


class Backend(Protocol):
    """The names of every module in this package."""

    TENSORS: TypeSet
    """The types of a dense tensor, traced ones included."""

    @staticmethod
    def is_differentiable(tensor: Any) -> bool:
        """Whether the tensor's dtype is floating or complex."""

    @staticmethod
    def spec(tensor: Any) -> Spec:
        """What the tensor requires of its gradient."""

    @staticmethod
    def shape_of(tensor: Any) -> tuple[int | None, ...] | None:
        """The static shape, None for an unknown dimension or rank."""

    @staticmethod
    def conform(gradient: Any, spec: Spec) -> Any:
        """Sum `gradient` over the axes along which it was broadcast, and cast it to the spec's dtype."""

    @staticmethod
    def concrete(tensor: Any) -> np.ndarray | None:
        """The tensor's value, None while it is traced and has none."""

    @staticmethod
    def apply(forward: Forward, tensors: Sequence[Any]) -> list[Any]:
        """Run `forward` and tie its outputs to the differentiable ones of `tensors` by its pullback."""

    @staticmethod
    def value_and_grad(
        function: Callable[..., tuple[Any, Any]], tensors: Sequence[Any]
    ) -> tuple[tuple[Any, Any], list[Any]]:
        """`(value, aux)` of `function(*tensors)`, and the gradients of the scalar value."""


def _load() -> Backend:
    name = keras.backend.backend()
    if name not in DIFFERENTIATING + FORWARD_ONLY:
        raise ValueError(
            f"multigrad knows no backend named {name!r}. Known are {DIFFERENTIATING + FORWARD_ONLY}; "
            "choose one with the environment variable KERAS_BACKEND before Keras is imported."
        )
    return cast(Backend, importlib.import_module(f"{__name__}.{name}"))


active = _load()

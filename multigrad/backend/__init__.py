"""The border: what multigrad asks of a framework.

Above it are binding, structures, the rule's convention and the checks, which know no framework. Below it
is one module a framework with the names of `Backend`, which see flat tensors only. Only the module of
the active Keras backend is ever imported.
"""

import importlib
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import keras
import numpy as np

from multigrad.frameworks import DIFFERENTIATING, FORWARD_ONLY
from multigrad.kinds import TypeSet

F = TypeVar("F", bound=Callable[..., Any])

Spec = tuple[Any, Any, Any]
"""What a tensor requires of its gradient: its shape and dtype, in the framework's own terms, and where
the shape is known at run time only, the tensor itself (None otherwise)."""


TensorSpec = tuple[Sequence[int | None], str]
"""The shape and dtype of a tensor, in Keras's terms. None is a dimension that a graph does not know."""


class HostFunction(Protocol):
    """A function of NumPy arrays, which checks its results."""

    name: str

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Call it in eager code."""

    def in_program(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Call it from a compiled program, of whose errors the text alone comes back."""


class Pullback(Protocol):
    """How the rule of one run is called, and its answer read. It holds no tensor, and not the rule."""

    @property
    def output(self) -> Any:
        """The layout of the output, whose `join` makes it of flat tensors."""

    def reading(self, read: Callable[[Any], Any]) -> AbstractContextManager[Any]:
        """A context in which `read(value)` reads the framework's own value of a Keras Variable for the rule.

        Where the variable has another value for the rule, that stays.
        """

    @property
    def around(self) -> Any:
        """The scope around the call, in which variables may have other values; None where there is none."""

    @property
    def untraced(self) -> "Pullback":
        """The same for forward mode, which calls a rule to transpose it: no gradient comes back by it."""

    def pull(
        self,
        rule: Callable[..., Any],
        upstream: Sequence[Any],
        needed: Sequence[bool],
        specs: list[Spec | None],
    ) -> Sequence[Any]:
        """Call the rule on flat upstream gradients, None where an output has none.

        `specs` are what each input requires of its gradient. Returns the gradient of each input, in its
        shape and dtype, and None where it is zero or not needed.
        """


Ran = tuple[Sequence[Any], Callable[..., Any], Sequence[Any], Pullback]
"""What a run gives: flat outputs, rule, inputs, and how the rule is called."""


class Options(NamedTuple):
    """What an op was defined with."""

    forward_mode: bool
    """Whether the rule is to serve JAX's forward mode, too."""
    higher_order: bool
    """Whether there are to be derivatives of the gradient."""


class Call(Protocol):
    """A call as a backend sees it. It holds no tensor of the call, and nothing that its run finds out."""

    f: Callable[..., Any]
    options: Options

    @property
    def name(self) -> str:
        """How messages call the op."""

    def run(
        self,
        tensors: Sequence[Any],
        *,
        strict: bool = False,
        read_as: Callable[[Any], Any] | None = None,
        place: Any = None,
    ) -> Ran:
        """Run the function.

        The inputs are those by which the rule differentiates: `tensors` itself, followed by the values of the
        trainable variables that the function read. `read_as` makes of each value the one that is read. With
        `strict`, `TouchedVariable` is raised where the function reads or assigns a variable.
        """

    def run_again(self, inputs: Sequence[Any], first: Any, f: Callable[..., Any] | None = None) -> Ran:
        """Run the function a second time, on all inputs. It leaves no trace.

        `first` is the pullback of the first run; `f` stands in for the function, with another closure.
        """

    def touches_variables(self) -> bool:
        """Whether a function of this code was seen to read or assign a variable."""

    def note_touched(self) -> None:
        """Remember that it was."""

    def may_read_another(self) -> bool:
        """Whether it may read a variable that has another value here than its own, in a scope."""

    def rehearsal(self) -> AbstractContextManager[Any]:
        """A context in which a rule may run, and of which nothing stays that it assigns."""

    def objects(self) -> Sequence[Any]:
        """The arguments that are no tensors, such as `self`."""

    def has_objects(self) -> bool:
        """Whether an argument is an object through which tensors may be reached, such as `self`."""


class Backend(Protocol):
    """The names of every module in this package."""

    TENSORS: TypeSet
    """The types of a dense tensor, traced ones included."""

    CONVERTIBLE: TypeSet
    """Other types that hold the numbers of a dense tensor: arrays and variables."""

    FOREIGN: TypeSet
    """Those of them with which a tensor that has a gradient cannot be computed."""

    STAND_INS: TypeSet
    """Types that stand for a tensor while a program is written down, and can have no rule."""

    @staticmethod
    def program(function: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
        """`function(in_place, *static, rows, upstream, others)` as a function of three lists of tensors.

        The first two hold tensors with a row for each of something, such as a token. So does the first of
        the two lists that the function returns. With `in_place` it runs in a compiled program, which is made
        once for the shapes of the tensors and kept, and in which `keras.ops.fori_loop` updates in place what
        it carries. Without, it runs as it is written: where there is no compiler, or where a derivative may
        be asked for that the program would not have: in a graph that is outside of `unrecorded`.

        A program may be given extra rows: copies of the last one, whose upstream gradient is zero. The
        function must not let them change the second list. They are cut from the first.
        """

    @staticmethod
    def after(tensor: Any, other: Any) -> Any:
        """The tensor, which is there once `other` is: an order for what a framework runs side by side."""

    @staticmethod
    def library_code(function: F) -> F:
        """Mark a function as the library's own, for a framework that rewrites the Python it traces."""

    @staticmethod
    def constant(function: F) -> F:
        """Mark a function whose result is the same for the same arguments, and holds no tensor."""

    @staticmethod
    def is_reading_code() -> bool:
        """Whether a compiler of Python reads this code in place of running it: nothing can be kept then."""

    @staticmethod
    def defaults_of(function: types.FunctionType) -> int:
        """How many positional parameters of a rule have defaults, as far as the framework can tell."""

    @staticmethod
    def as_tensor(value: Any) -> Any:
        """A dense tensor of an array, a number or the present value of a Keras Variable."""

    @staticmethod
    def snapshot(tensor: Any) -> Any:
        """A tensor's value as it is now, where the tensor may be changed in place."""

    @staticmethod
    def assign(variable: keras.Variable, value: Any) -> None:
        """Assign to a variable, outside of every scope."""

    @staticmethod
    def is_differentiable(tensor: Any) -> bool:
        """Whether the tensor's dtype is one that has gradients: floating or complex."""

    @staticmethod
    def specs_of(tensors: Sequence[Any]) -> list[Spec | None]:
        """What each tensor requires of its gradient, None for one that has none."""

    @staticmethod
    def sizes(shape: Any) -> tuple[int | None, ...] | None:
        """A shape of the framework as a tuple; None for an unknown dimension or rank."""

    @staticmethod
    def conform(gradient: Any, spec: Spec) -> Any:
        """Sum `gradient` over the axes along which it was broadcast, and cast it to the spec's dtype."""

    @staticmethod
    def concrete(tensor: Any) -> np.ndarray | None:
        """The tensor's value, None while it is traced and has none."""

    @staticmethod
    def apply(call: Call, tensors: Sequence[Any]) -> Any:
        """Run `call` and tie its outputs to the differentiable ones of `tensors` by its rule.

        Returns the output, which the pullback of the run puts together.
        """

    @staticmethod
    def value_and_grad(
        function: Callable[..., tuple[Any, Any]], tensors: Sequence[Any], variables: int
    ) -> tuple[tuple[Any, Any], list[Any]]:
        """`(value, aux)` of `function(*tensors)`, and the gradients of the scalar value.

        So many of the tensors, the last, are the values of variables.
        """

    @staticmethod
    def vjp(
        function: Callable[..., tuple[Sequence[Any], Any]], tensors: Sequence[Any]
    ) -> tuple[tuple[Sequence[Any], Any], Callable[[Sequence[Any]], Sequence[Any]]]:
        """`(outputs, aux)` of `function(*tensors)`, and the map from gradients of the outputs to those of
        the tensors. It can be called again, and is differentiated like the function itself.
        """

    @staticmethod
    def jacobian(
        function: Callable[..., tuple[Sequence[Any], Any]], tensors: Sequence[Any]
    ) -> tuple[Any, list[list[Any]]]:
        """The aux of `function(*tensors) -> (outputs, aux)`, and for each output its derivatives by each of
        the tensors, of the output's shape followed by the tensor's.
        """

    @staticmethod
    def may_record() -> bool:
        """Whether what is computed here can be on the way to a gradient that is asked for around it."""

    @staticmethod
    def needs_plain_rule() -> bool:
        """Whether a rule that runs here must do without ops of its own, to be differentiated in its turn.

        What it writes down may be copied without their rules, or no gradient can be taken in these.
        """

    @staticmethod
    def gradients_expected(tensors: Sequence[Any]) -> list[bool]:
        """By which of the tensors a gradient is to be expected, for what can be computed for it beforehand.

        To expect one in vain costs time alone. None is expected where loops would be written out into a
        program, nor where what is computed beforehand would be too small without the scale of the loss.
        """

    @staticmethod
    def unrecorded() -> AbstractContextManager[Any]:
        """A context for what nobody differentiates, now or later, and in which no gradient is taken.

        It need do nothing where that costs nothing.
        """

    @staticmethod
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of tensors as the framework's compiler has it, forward and backward."""

    @staticmethod
    def jit(
        function: Callable[..., Any], name: str, static: Mapping[str, int | None], options: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """A function as the framework's compiler has it, with the Keras Variables that it reads and assigns.

        It takes and returns nested structures, which every compiler flattens itself. `name` is for messages,
        and `static` holds the names and positions of static parameters, None where one is keyword-only.
        """

    @staticmethod
    def is_constant(tensor: Any) -> bool:
        """Whether the value of a variable, which is this tensor, is a constant of what is compiled here."""

    @staticmethod
    def host_code(function: F) -> F:
        """Mark a function that calls the host, so that a compiler of Python leaves it as it is."""

    @staticmethod
    def host_call(
        function: HostFunction, tensors: Sequence[Any], specs: Sequence[TensorSpec], vectorized: bool
    ) -> Sequence[Any]:
        """Call a function of the host with the values of the tensors, where the program runs.

        `specs` are those of its results. With `vectorized`, it may be called with a further leading axis.
        """

    @staticmethod
    def wide() -> AbstractContextManager[Any]:
        """A context in which there are float64 and complex128, for this thread alone."""

    @staticmethod
    def observe(callback: Callable[..., None], tensors: Sequence[Any]) -> None:
        """Call `callback` with the values of the tensors, copied to NumPy, as soon as they are there.

        That is at once, but for what is traced; several times, where each is one of several; and never,
        where what is traced is not run.
        """

    @staticmethod
    def is_compiling() -> bool:
        """Whether this place of the program is in a function that is being compiled."""

    @staticmethod
    def uncompiled() -> AbstractContextManager[Any]:
        """A context in which compiled functions run as they are written, so that there are values."""


def _load() -> Backend:
    name = keras.backend.backend()
    if name not in DIFFERENTIATING + FORWARD_ONLY:
        raise ValueError(
            f"multigrad knows no backend named {name!r}. Known are {DIFFERENTIATING + FORWARD_ONLY}; "
            "choose one with the environment variable KERAS_BACKEND before Keras is imported."
        )
    return cast(Backend, importlib.import_module(f"{__name__}.{name}"))


active = _load()

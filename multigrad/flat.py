"""A function of any structure as a function of flat tensors, for the calculus."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
from keras import ops, tree

from multigrad import backend
from multigrad.binding import name_of
from multigrad.errors import describe, message, require_function, shape_text
from multigrad.leaves import NO_NUMBERS, Slot, children, leaves_of, outline, rebuild, split
from multigrad.variables import Pinned


class By:
    """What a function is differentiated by: some of its arguments, and variables.

    Arguments:
        f, argnums, variables: as for `multigrad.grad`.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        argnums: int | Sequence[int] | None,
        variables: Sequence[keras.Variable] | None,
    ) -> None:
        require_function("multigrad", "f", f)
        self.f, self.name = f, name_of(f)
        self.variables = None if variables is None else _distinct(self.name, variables)
        if argnums is None and variables is None:
            argnums = 0
        self.single = argnums is not None and not isinstance(argnums, Sequence)
        self.arguments = argnums is not None
        several = argnums if isinstance(argnums, Sequence) else () if argnums is None else (argnums,)
        self.places = [_index(self.name, place) for place in several]

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], has_aux: bool) -> "FlatCall":
        """One call of the function."""
        return FlatCall(self, args, kwargs, has_aux)


class FlatCall:
    """One call of a function, as a function of the tensors that it is differentiated by.

    It returns the output, and beside it the aux and the values of variables that the function assigned.
    """

    def __init__(self, by: By, args: Sequence[Any], kwargs: Mapping[str, Any], has_aux: bool) -> None:
        self._by, self._has_aux = by, has_aux
        self._variables = by.variables or []
        self._positions = _positions(by.name, by.places, len(args))
        self.structures = [args[position] for position in self._positions]
        own = self._positions
        self._args = [arg if place in own else _operands(arg) for place, arg in enumerate(args)]
        self._kwargs = {name: _operands(arg) for name, arg in kwargs.items()}
        leaves = _leaves(by.name, self._positions, self.structures)
        self._count = len(leaves)
        of_variables = [_differentiable(by.name, f"variable {v.path!r}", v) for v in self._variables]
        self.tensors = leaves + of_variables
        self._assigned: list[keras.Variable] = []

    def __call__(self, *tensors: Any) -> tuple[Any, tuple[Any, list[Any]]]:
        args = list(self._args)
        for position, part in zip(self._positions, self.parts(tensors), strict=True):
            args[position] = part
        with _ByVariables(self._by.name, self._variables, tensors[self._count :]) as scope:
            answer = self._by.f(*args, **self._kwargs)
        assigned = list(scope.assigned.values())
        self._assigned = [variable for variable, _ in assigned]
        output, aux = _pair(self._by.name, answer) if self._has_aux else (answer, None)
        return output, (aux, [new for _, new in assigned])

    def keep(self, values: Sequence[Any]) -> None:
        """Assign what the function assigned."""
        for variable, value in zip(self._assigned, values, strict=True):
            variable.assign(value)

    def parts(self, leaves: Sequence[Any]) -> list[Any]:
        """The arguments that are differentiated by, of other leaves."""
        remaining = iter(leaves)
        return [rebuild(structure, lambda _: next(remaining)) for structure in self.structures]

    def whole(self, gradients: Sequence[Any]) -> Any:
        """What is returned to the caller, of something for each of the tensors."""
        parts, by = self.parts(gradients), self._by
        gradient = parts[0] if by.single else tuple(parts)
        if by.variables is None:
            return gradient
        of_variables = list(gradients[self._count :])
        return (gradient, of_variables) if by.arguments else of_variables


class _ByVariables(Pinned):
    """The scope of a function that is differentiated by variables: tensors stand for them."""

    def __init__(self, name: str, variables: Sequence[keras.Variable], tensors: Sequence[Any]) -> None:
        super().__init__(variables, tensors, keep=False)
        self._name, self._by = name, frozenset(map(id, variables))

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        if id(variable) in self._by and not backend.active.may_record():
            raise TypeError(
                message(
                    self._name,
                    "a variable that a gradient is taken by is read where nothing is recorded, so that its "
                    "gradient would be zero",
                    required="a read outside of keras.remat, of layers of a keras.RematScope, and of "
                    "what else stops the recording",
                    got=f"variable {variable.path!r}",
                    mend="pass `variable.value` to the function as an argument, or do without keras.remat",
                )
            )
        return value


class Structure:
    """A structure of tensors: its `own`, which have a gradient, and `others`, which have none."""

    def __init__(self, structure: Any) -> None:
        tensors, self._layout = split(structure)
        self._floating = [backend.active.is_differentiable(tensor) for tensor in tensors]
        both = list(zip(tensors, self._floating, strict=True))
        self.own: Sequence[Any] = [tensor for tensor, floating in both if floating]
        self.others: Sequence[Any] = [tensor for tensor, floating in both if not floating]

    def whole(self, own: Sequence[Any]) -> Any:
        """The structure with `own` in place of its own."""
        return self._layout.join(self._merged(own, self.others))

    def with_none(self, own: Sequence[Any]) -> Any:
        """The same, with None for all that has no gradient."""
        return self._layout.join_tensors_only(self._merged(own, [None] * len(self.others)))

    def _merged(self, own: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        floating, rest = iter(own), iter(others)
        return [next(floating) if f else next(rest) for f in self._floating]

    def alike(self, name: str, argument: str, given: Any) -> list[Any]:
        """The flat tensors of what has the same structure: one for each of its own, zeros for None."""
        template = self.with_none([Slot(place) for place in range(len(self.own))])
        try:
            tree.assert_same_structure(template, given)
        except (TypeError, ValueError) as error:
            raise TypeError(
                message(
                    name,
                    "the structures differ",
                    argument=argument,
                    required=outline(template),
                    got=outline(given),
                    mend="give it the same structure, with None where there is nothing",
                )
            ) from error
        found = dict(_matched(template, given))
        return [_like(name, argument, tensor, found[place]) for place, tensor in enumerate(self.own)]


def _matched(template: Any, given: Any) -> Iterator[tuple[int, Any]]:
    """Each slot of a template, and what stands in its place in a structure that is like it.

    By key: a dict and an OrderedDict are alike, and have their leaves in other orders.
    """
    if isinstance(template, (Mapping, tuple, list)):
        own = children(given)
        for key, part in children(template).items():
            yield from _matched(part, own[key])
    else:
        pairs = zip(leaves_of(template), leaves_of(given), strict=True)
        yield from [(slot, leaf) for slot, leaf in pairs if type(slot) is Slot]


def _like(name: str, argument: str, tensor: Any, leaf: Any) -> Any:
    """A leaf as a tensor in the dtype of another, whose shape it must have."""
    if leaf is None:
        return ops.zeros_like(tensor)
    if not (_holds_numbers(leaf) or isinstance(leaf, int)):
        raise TypeError(
            message(
                name,
                "there is something that is no number of a direction",
                argument=argument,
                required="tensors, arrays or numbers, and None for zero",
                got=describe(leaf),
                mend="give it a number for each element",
            )
        )
    given = backend.active.as_tensor(leaf)
    if _is_complex(given) and not _is_complex(tensor):
        raise TypeError(
            message(
                name,
                "there is something complex, of which the imaginary part would be lost",
                argument=argument,
                required=f"real numbers, for {describe(tensor)}",
                got=describe(leaf),
                mend="give it the real part",
            )
        )
    given = ops.cast(given, tensor.dtype)
    wanted, got = backend.active.sizes(tensor.shape), backend.active.sizes(given.shape)
    if wanted is not None and got is not None:
        unlike = [w != g for w, g in zip(wanted, got, strict=False) if w is not None and g is not None]
        if len(wanted) != len(got) or any(unlike):
            raise ValueError(
                message(
                    name,
                    "the shapes differ",
                    argument=argument,
                    required=shape_text(wanted),
                    got=describe(given),
                    mend="give it a number for each element",
                )
            )
    return given


def scalar_of(name: str, value: Any) -> Any:
    got = describe(value)
    if _holds_numbers(value) or isinstance(value, int):
        tensor = backend.active.as_tensor(value)
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if tuple(ops.shape(tensor)) == () and dtype.startswith(("float", "bfloat")):
            return tensor
        got = f"{dtype} of shape {shape_text(ops.shape(tensor))}"
    raise TypeError(
        message(
            name,
            "the gradient of something that is no real scalar was asked for",
            required="a floating value of shape ()",
            got=got,
            mend="reduce the output, for example with ops.sum or ops.mean",
        )
    )


def require_real(name: str, tensors: Sequence[Any]) -> None:
    """See that a Jacobian is not asked for complex numbers, for which it would not be one matrix."""
    for tensor in tensors:
        if _is_complex(tensor):
            raise TypeError(
                message(
                    name,
                    "the Jacobian of something complex was asked for",
                    required="real arguments and outputs",
                    got=describe(tensor),
                    mend="take the real and the imaginary part for two arguments or outputs",
                )
            )


def _distinct(name: str, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    if isinstance(variables, keras.Variable):
        raise TypeError(
            message(
                name,
                "there is no list of variables to differentiate by",
                argument="'variables'",
                required="a list of Keras Variables",
                got=f"variable {variables.path!r} alone",
                mend="write variables=[variable]",
            )
        )
    variables = list(variables)
    for i, variable in enumerate(variables):
        other = not isinstance(variable, keras.Variable)
        if other or any(variable is earlier for earlier in variables[:i]):
            raise TypeError(
                message(
                    name,
                    "there is something in `variables` by which a gradient cannot be taken",
                    argument=f"'variables'[{i}]",
                    required="Keras Variables, each of them once",
                    got=describe(variable) if other else f"variable {variable.path!r} a second time",
                    mend="pass, for example, the trainable_variables of a model",
                )
            )
    return variables


def _pair(name: str, answer: Any) -> tuple[Any, Any]:
    if isinstance(answer, (tuple, list)) and len(answer) == 2:
        return answer[0], answer[1]
    raise TypeError(
        message(
            name,
            "has_aux=True, and the function returned no pair",
            required="(scalar, aux)",
            got=describe(answer),
            mend="return a pair, or leave has_aux out",
        )
    )


def _positions(name: str, places: Sequence[int], count: int) -> list[int]:
    positions = [_position(name, place, count) for place in places]
    for i, position in enumerate(positions):
        if position in positions[:i]:
            raise TypeError(
                message(
                    name,
                    "an argument is differentiated by twice",
                    required="each position once in argnums",
                    got=f"argnums {', '.join(map(str, places))}",
                    mend="leave out the second one",
                )
            )
    return positions


def _index(name: str, place: Any) -> int:
    try:
        return operator.index(place)
    except TypeError as error:
        raise TypeError(
            message(
                name,
                "argnums is no position",
                argument="'argnums'",
                required="the position of an argument, or a tuple or list of positions",
                got=describe(place),
                mend="write argnums=0, or argnums=(0, 1)",
            )
        ) from error


def _position(name: str, place: int, count: int) -> int:
    if -count <= place < count:
        return place % count
    raise TypeError(
        message(
            name,
            "there is no such argument to differentiate by",
            required=f"a position among the {count} positional argument(s) of the call",
            got=f"argnums {place}",
            mend="pass the argument by position, or correct argnums",
        )
    )


def _leaves(name: str, positions: Sequence[int], structures: Sequence[Any]) -> list[Any]:
    """The leaves of the arguments at these positions, as tensors that have a gradient."""
    return [
        _differentiable(name, f"number {position}", leaf)
        for position, structure in zip(positions, structures, strict=True)
        for leaf in leaves_of(structure)
    ]


def _operands(structure: Any) -> Any:
    """What is not differentiated by, as it can be computed with what is: the same object, if it can be."""
    foreign = backend.active.FOREIGN
    if not any(foreign[type(leaf)] for leaf in leaves_of(structure)):
        return structure

    def operand(leaf: Any) -> Any:
        numbers = foreign[type(leaf)] and leaf.dtype.kind not in NO_NUMBERS
        return backend.active.as_tensor(leaf) if numbers else leaf

    return rebuild(structure, operand)


def _holds_numbers(leaf: Any) -> bool:
    kind, framework = type(leaf), backend.active
    return framework.TENSORS[kind] or framework.CONVERTIBLE[kind] or isinstance(leaf, (float, complex))


def _differentiable(name: str, argument: str, leaf: Any) -> Any:
    """A leaf of an argument as a tensor that has a gradient."""
    if _holds_numbers(leaf):
        tensor = backend.active.as_tensor(leaf)
        if _is_inexact(tensor):
            return tensor
    raise TypeError(
        message(
            name,
            "a gradient was asked for by something that has none",
            argument=argument,
            required="floating or complex tensors, arrays or numbers",
            got=describe(leaf),
            mend="pass floats, or leave it out of what is differentiated by",
        )
    )


def _is_inexact(tensor: Any) -> bool:
    return keras.backend.standardize_dtype(tensor.dtype).startswith(("float", "bfloat", "complex"))


def _is_complex(tensor: Any) -> bool:
    return keras.backend.standardize_dtype(tensor.dtype).startswith("complex")

"""Gradients of functions, the same on whichever backend is active, in the conventions of JAX."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from keras import ops, tree

from multigrad import backend
from multigrad.binding import name_of
from multigrad.errors import describe, message, shape_text
from multigrad.leaves import split
from multigrad.linear import FAR, agree, not_linear
from multigrad.variables import Pinned


def grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    variables: Sequence[keras.Variable] | None = None,
) -> Callable[..., Any]:
    """The gradient of a function that returns a scalar.

    ```python
    from keras import ops
    import multigrad

    df = multigrad.grad(lambda x: ops.sum(x ** 3))
    print(df(ops.array([1.0, 2.0])))  # [3., 12.]
    d2f = multigrad.grad(multigrad.grad(lambda x: x ** 3))
    print(d2f(2.0))  # 12.0
    ```

    Arguments:
        f: a function of tensors, NumPy arrays, Python floats, Keras Variables and nested structures of
            them, which returns a real scalar tensor.
        argnums: the position of the argument to differentiate by, or several. If it is not given, the
            first argument, or none where `variables` are.
        has_aux: whether `f` returns a pair `(scalar, aux)`, of which only the first is differentiated.
        variables: Keras Variables that `f` reads, to differentiate by.

    Returns:
        A function of the same arguments. It returns the gradient in the structure, shapes and dtypes of
        the argument; a tuple of them where `argnums` is a sequence. With `variables`, it returns the list
        of their gradients, or `(gradient, gradients_of_variables)` with both. With `has_aux`, all of this
        is the first of a pair whose second is the aux.

    Raises:
        TypeError: when an argument or variable that is to be differentiated holds something other than
            floating or complex tensors, or `f` returns no real scalar.
        NotImplementedError: on the NumPy and OpenVINO backends.
    """
    both = value_and_grad(f, argnums, has_aux, variables)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        answer, gradients = both(*args, **kwargs)
        return (gradients, answer[1]) if has_aux else gradients

    return functools.update_wrapper(backend.active.library_code(gradient), f)


def value_and_grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    variables: Sequence[keras.Variable] | None = None,
) -> Callable[..., Any]:
    """The value of a function that returns a scalar, and its gradient.

    ```python
    import keras
    from keras import ops
    import multigrad

    value, gradient = multigrad.value_and_grad(lambda x: ops.sum(x ** 2))(ops.array([3.0]))
    print(value, gradient)  # 9.0, [6.]

    scale = keras.Variable(2.0)
    step = multigrad.value_and_grad(lambda x: ops.sum(x * scale), variables=[scale])
    value, gradients = step(ops.array([3.0]))
    print(value, gradients[0])  # 6.0, 3.0
    ```

    What `f` assigns to variables is kept.

    Arguments:
        f, argnums, has_aux, variables: as for `grad`.

    Returns:
        A function of the same arguments. It returns `(value, gradient)`, or `((value, aux), gradient)`
        with `has_aux`.

    Raises:
        TypeError, NotImplementedError: as for `grad`.
    """
    name = name_of(f)
    by = [] if variables is None else _distinct(name, variables)
    if argnums is None and variables is None:
        argnums = 0
    single = not isinstance(argnums, Sequence)
    places: list[int] = []
    if isinstance(argnums, Sequence):
        places = list(argnums)
    elif argnums is not None:
        places = [operator.index(argnums)]

    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        positions = [_position(name, place, len(args)) for place in places]
        structures = [args[position] for position in positions]
        tensors = _leaves(name, positions, structures)
        count = len(tensors)
        tensors += [_differentiable(name, f"variable {v.path!r}", v) for v in by]
        assigned: list[keras.Variable] = []

        def scalar(*tensors: Any) -> tuple[Any, Any]:
            own = list(args)
            for position, part in zip(positions, _parts(structures, tensors), strict=True):
                own[position] = part
            answer, assigned[:], news = _run(f, own, kwargs, by, tensors[count:])
            value, aux = _pair(name, answer) if has_aux else (answer, None)
            return _scalar(name, value), (aux, news)

        (value, (aux, news)), gradients = backend.active.value_and_grad(scalar, tensors, len(by))
        for variable, new in zip(assigned, news, strict=True):
            variable.assign(new)
        parts = _parts(structures, gradients)
        gradient = parts[0] if single and parts else tuple(parts)
        if variables is not None:
            of_variables = list(gradients[count:])
            gradient = of_variables if argnums is None else (gradient, of_variables)
        return ((value, aux) if has_aux else value), gradient

    return functools.update_wrapper(backend.active.library_code(value_and_gradient), f)


def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """The output of a function, and its vector-Jacobian product.

    ```python
    from keras import ops
    import multigrad

    y, pullback = multigrad.vjp(lambda x, w: x * w, ops.array([1.0, 2.0]), ops.array([3.0, 4.0]))
    of_x, of_w = pullback(ops.array([1.0, 10.0]))  # grad(L) by x and w, for a dL/dy
    print(y, of_x, of_w)  # [3., 8.], [3., 40.], [1., 20.]
    ```

    Arguments:
        f: a function of tensors, NumPy arrays, Python floats, Keras Variables and nested structures of
            them. It may return any structure. What it assigns to variables is kept.
        primals: the arguments of `f`. It is differentiated by all of them.
        has_aux: whether `f` returns a pair `(output, aux)`, of which only the first is differentiated.

    Returns:
        `(output, pullback)`, or `(output, pullback, aux)` with `has_aux`. `pullback` takes the upstream
        gradient in the structure of the output: None stands for zero, and what has no gradient (integers,
        strings, None) is ignored. It returns a tuple with the gradient of each primal, and can be called
        any number of times.

    Raises:
        TypeError: when a primal holds something other than floating or complex tensors, or an upstream
            gradient has another structure than the output.
        ValueError: when an upstream gradient has another shape than its output.
        NotImplementedError: on the NumPy and OpenVINO backends.
    """
    name = name_of(f)
    inputs, output, pull, *aux = _flat_vjp(name, f, primals, has_aux)

    def pullback(upstream: Any) -> tuple[Any, ...]:
        return inputs.whole(pull(output.alike(name, "the upstream gradient", upstream)))

    return output.whole(output.own), backend.active.library_code(pullback), *aux


def jvp(
    f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False
) -> tuple[Any, ...]:
    """The output of a function, and its Jacobian-vector product: forward mode, on every backend.

    ```python
    from keras import ops
    import multigrad

    x, direction = ops.array([1.0, 2.0]), ops.array([1.0, 0.5])
    print(multigrad.jvp(lambda x: x**3, (x,), (direction,)))  # [1., 8.], [3., 6.]
    by_x = multigrad.grad(lambda x: multigrad.jvp(lambda x: x**3, (x,), (1.0,))[1])
    print(by_x(2.0))  # 12.0
    ```

    It is the transpose of `vjp`, and costs two reverse passes more than `f`. So an op is differentiated by
    its rule, which must be linear in its upstream gradient, as every true vector-Jacobian product is.

    Arguments:
        f: a function as for `vjp`.
        primals: a tuple or list of the arguments of `f`. It is differentiated by all of them.
        tangents: the direction, one for each primal, in its structure and shapes. None stands for zero.
        has_aux: whether `f` returns a pair `(output, aux)`, of which only the first is differentiated.

    Returns:
        `(output, tangent)`, or `(output, tangent, aux)` with `has_aux`. The tangent has the structure of
        the output, with None for what has no gradient (integers, strings, None).

    Raises:
        TypeError: when a primal holds something other than floating or complex tensors, or the tangents
            have another structure.
        ValueError: when a tangent has another shape than its primal; or when a rule turns out not to be
            linear in its upstream gradient, such as one that clips it. That is found out by a further
            reverse pass, where values are at hand: not in compiled code, where such a rule is linearised
            at an upstream gradient of ones.
        NotImplementedError: on the NumPy and OpenVINO backends.
    """
    name = name_of(f)
    if not isinstance(primals, (tuple, list)):
        raise TypeError(
            message(
                name,
                "the primals are no sequence of arguments",
                required="a tuple or list with one primal for each argument",
                got=describe(primals),
                mend="write jvp(f, (x,), (tangent,))",
            )
        )
    inputs, output, pull, *aux = _flat_vjp(name, f, primals, has_aux)
    directions = inputs.alike(name, "the tangents", tuple(tangents))
    ones = [ops.ones_like(tensor) for tensor in output.own]  # anything would do: the pullback is linear
    (of_ones, _), push = backend.active.vjp(lambda *upstream: (pull(upstream), None), ones)
    tangent = push(directions)
    _require_linear(name, pull, ones, of_ones, directions, tangent)
    return output.whole(output.own), output.with_none(tangent), *aux


def _flat_vjp(name: str, f: Callable[..., Any], primals: Sequence[Any], has_aux: bool) -> tuple[Any, ...]:
    """The primals and the output of `f`, its pullback from flat to flat, and its aux where it has one."""
    tensors = _leaves(name, range(len(primals)), primals)
    inputs = _Structure(tuple(_parts(primals, tensors)))
    outputs: list[_Structure] = []
    assigned: list[keras.Variable] = []

    def flat(*tensors: Any) -> tuple[Sequence[Any], Any]:
        answer, assigned[:], news = _run(f, _parts(primals, tensors), {})
        output, aux = _pair(name, answer) if has_aux else (answer, None)
        outputs[:] = [structure := _Structure(output)]
        return structure.own, (structure.others, aux, news)

    (own, (others, aux, news)), pull = backend.active.vjp(flat, tensors)
    for variable, new in zip(assigned, news, strict=True):
        variable.assign(new)
    output = outputs[0]
    output.own, output.others = own, others
    return (inputs, output, pull, aux) if has_aux else (inputs, output, pull)


class _Structure:
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
        template = self.with_none(self.own)
        try:
            tree.assert_same_structure(template, given)
        except (TypeError, ValueError) as error:
            raise TypeError(
                message(
                    name,
                    "the structures differ",
                    argument=argument,
                    required=describe(tree.map_structure(_kind, template)),
                    got=describe(tree.map_structure(_kind, given)),
                    mend="give it the same structure, with None where there is nothing",
                )
            ) from error
        pairs = zip(tree.flatten(template), tree.flatten(given), strict=True)
        return [_like(name, argument, tensor, leaf) for tensor, leaf in pairs if tensor is not None]


def _kind(leaf: Any) -> Any:
    return None if leaf is None else type(leaf)


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
    given = ops.cast(backend.active.as_tensor(leaf), tensor.dtype)
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


def _require_linear(
    name: str,
    pull: Callable[..., Any],
    ones: Sequence[Any],
    of_ones: Sequence[Any],
    directions: Sequence[Any],
    tangent: Sequence[Any],
) -> None:
    """See that a pullback, whose transpose at `ones` gave the tangent, is linear, where values are at hand.

    Then `sum(pull(u) * directions)` is `sum(u * tangent)`, whatever `u` is. It is tried on ones, where an
    offset shows, and far out on their other side, where limits and branches do.
    """
    with backend.active.unrecorded():
        sums = [ops.sum(ops.real(t)) for t in tangent]
        if any(backend.active.concrete(s) is None for s in sums):
            return
        signs = [ops.where(ops.real(t) * s < 0, 1.0, -1.0) for t, s in zip(tangent, sums, strict=True)]
        far = [ops.cast(-FAR * sign, t.dtype) for sign, t in zip(signs, tangent, strict=True)]
        for upstream, pulled in ((ones, of_ones), (far, pull(far))):
            got, of_got = _product(pulled, directions)
            wanted, of_wanted = _product(upstream, tangent)
            if not agree(got, wanted, of_got + of_wanted):
                raise not_linear(
                    name, f"a gradient of {got:.6g} along the tangents, of a linear rule {wanted:.6g}"
                )


def _product(left: Sequence[Any], right: Sequence[Any]) -> tuple[float, float]:
    """The inner product of two lists of tensors, and that of their absolute values."""
    parts = [ops.cast(ops.real(ops.conj(a) * b), "float32") for a, b in zip(left, right, strict=True)]
    return sum(float(ops.sum(part)) for part in parts), sum(float(ops.sum(ops.abs(part))) for part in parts)


def _run(
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    variables: Sequence[keras.Variable] = (),
    values: Sequence[Any] = (),
) -> tuple[Any, list[keras.Variable], list[Any]]:
    """What `f` returns where variables have these values, and what it assigns to variables."""
    with Pinned(variables, values, keep=False) as scope:
        answer = f(*args, **kwargs)
    assigned = list(scope.assigned.values())
    return answer, [variable for variable, _ in assigned], [new for _, new in assigned]


def _distinct(name: str, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
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
    return list(variables)


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
        for leaf in tree.flatten(structure)
    ]


def _holds_numbers(leaf: Any) -> bool:
    kind = type(leaf)
    return backend.active.CONVERTIBLE[kind] or isinstance(leaf, (float, complex)) or ops.is_tensor(leaf)


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


def _parts(structures: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    # Not tree.map_structure: on PyTorch (Keras 3.15) it goes through a dict in another order than flatten.
    remaining = iter(leaves)
    return [tree.pack_sequence_as(s, [next(remaining) for _ in tree.flatten(s)]) for s in structures]


def _scalar(name: str, value: Any) -> Any:
    tensor = backend.active.as_tensor(value)
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if tuple(ops.shape(tensor)) == () and dtype.startswith(("float", "bfloat")):
        return tensor
    raise TypeError(
        message(
            name,
            "the gradient of something that is no real scalar was asked for",
            required="a floating value of shape ()",
            got=f"{dtype} of shape {shape_text(ops.shape(tensor))}",
            mend="reduce the output, for example with ops.sum or ops.mean",
        )
    )

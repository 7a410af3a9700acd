"""Gradients of functions, the same on whichever backend is active, in the conventions of JAX."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from multigrad import backend
from multigrad.binding import name_of
from multigrad.calculus.flat_function import By, Structure, require_real, scalar_of
from multigrad.calculus.linearity import FAR, agree, not_linear
from multigrad.errors import describe, message


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
    by = By(f, argnums, variables)

    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        call = by.call(args, kwargs, has_aux)

        def scalar(*tensors: Any) -> tuple[Any, Any]:
            output, rest = call(*tensors)
            return scalar_of(by.name, output), rest

        answer, gradients = backend.active.value_and_grad(scalar, call.tensors, len(by.variables or ()))
        value, (aux, assigned) = answer
        call.keep(assigned)
        return ((value, aux) if has_aux else value), call.whole(gradients)

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
    for what, given in (("primal", primals), ("tangent", tangents)):
        if not isinstance(given, (tuple, list)):
            raise TypeError(
                message(
                    name,
                    f"the {what}s are no sequence of arguments",
                    required=f"a tuple or list with one {what} for each argument",
                    got=describe(given),
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
    call = By(f, range(len(primals)), None).call(primals, {}, has_aux)
    outputs: list[Structure] = []

    def flat(*tensors: Any) -> tuple[Sequence[Any], Any]:
        output, rest = call(*tensors)
        structure = Structure(output)  # in a line of its own: AutoGraph (TensorFlow 2.21) cannot read `:=`
        outputs[:] = [structure]
        return structure.own, (structure.others, rest)

    (own, (others, (aux, assigned))), pull = backend.active.vjp(flat, call.tensors)
    call.keep(assigned)
    output = outputs[0]
    output.own, output.others = own, others
    inputs = Structure(tuple(call.parts(call.tensors)))
    return (inputs, output, pull, aux) if has_aux else (inputs, output, pull)


def jacobian(
    f: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    variables: Sequence[keras.Variable] | None = None,
) -> Callable[..., Any]:
    """The Jacobian of a function, in reverse mode: all derivatives of all numbers that it returns.

    ```python
    from keras import ops
    import multigrad

    print(multigrad.jacobian(lambda x: x ** 2)(ops.array([1.0, 2.0])))  # [[2., 0.], [0., 4.]]
    ```

    Arguments:
        f: a function as for `grad`, which returns any structure of tensors.
        argnums, has_aux, variables: as for `grad`.

    Returns:
        A function of the same arguments. It returns the structure of the output, with None for what has no
        gradient; in the place of each tensor stands what `grad` returns for a scalar, whose tensors have
        the output's shape followed by the argument's.

    Raises:
        TypeError: as for `grad`, and for a complex argument or output.
        NotImplementedError: on the NumPy and OpenVINO backends.
    """
    by = By(f, argnums, variables)

    def jacobian_of(*args: Any, **kwargs: Any) -> Any:
        call = by.call(args, kwargs, has_aux)
        require_real(by.name, call.tensors)
        outputs: list[Structure] = []

        def flat(*tensors: Any) -> tuple[Sequence[Any], Any]:
            output, rest = call(*tensors)
            structure = Structure(output)
            outputs[:] = [structure]
            require_real(by.name, structure.own)
            return structure.own, rest

        (aux, assigned), rows = backend.active.jacobian(flat, call.tensors)
        call.keep(assigned)
        whole = outputs[0].with_none([call.whole(row) for row in rows])
        return (whole, aux) if has_aux else whole

    return functools.update_wrapper(backend.active.library_code(jacobian_of), f)


def hessian(
    f: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    variables: Sequence[keras.Variable] | None = None,
) -> Callable[..., Any]:
    """The Hessian of a function: the Jacobian of its Jacobian.

    ```python
    from keras import ops
    import multigrad

    print(multigrad.hessian(lambda x: ops.sum(x ** 3))(ops.array([1.0, 2.0])))  # [[6., 0.], [0., 12.]]
    ```

    Arguments:
        f, argnums, has_aux, variables: as for `jacobian`.

    Returns:
        A function of the same arguments. It returns what `jacobian` returns, and in the place of each of
        its tensors the same once more.

    Raises:
        TypeError, NotImplementedError: as for `jacobian`.
    """
    return jacobian(jacobian(f, argnums, has_aux, variables), argnums, has_aux, variables)


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
    of_far = pull(far)  # recorded, as a rule may take a gradient
    with backend.active.unrecorded():
        for upstream, pulled in ((ones, of_ones), (far, of_far)):
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

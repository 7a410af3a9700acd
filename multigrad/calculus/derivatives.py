"""Derivatives of functions on the active backend, with the signatures and conventions of JAX.

Each function here flattens its arguments (`flat_function`), calls one function of `multigrad.backend` that
differentiates functions of flat tensors, and restores the structures of the result.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from multigrad import backend
from multigrad.calculus.flat_function import (
    DifferentiatedCall,
    DifferentiatedFunction,
    require_real,
    require_scalar,
)
from multigrad.calculus.flat_structure import flatten
from multigrad.common.errors import unusable
from multigrad.core.signature import name_of
from multigrad.core.structure import Layout, split


def grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    variables: Sequence[keras.Variable] | None = None,
) -> Callable[..., Any]:
    """Return a function that computes the gradient of a scalar function.

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
            them. It returns a real scalar tensor. It gets an argument that it is differentiated with respect
            to, and each floating NumPy array, as a tensor. It gets other Python floats as an op does: as
            tensors of Keras's floatx if they are passed by position in a call without tensors, and unchanged
            otherwise.
        argnums: the position of the argument to differentiate with respect to, or a sequence of positions.
            The default is the first argument, or no argument if `variables` is passed.
        has_aux: whether `f` returns a pair `(scalar, aux)`. Only the scalar is differentiated.
        variables: Keras Variables that `f` reads and that it is differentiated with respect to.

    Returns:
        A function with the arguments of `f`. It returns the gradient in the structure, shapes and dtypes of
        the argument, or a tuple of gradients if `argnums` is a sequence. With `variables`, it returns the
        list of their gradients; with both, `(gradient, gradients_of_variables)`. With `has_aux`, it returns
        a pair of this result and the aux.

    Raises:
        TypeError: if an argument or variable to differentiate with respect to contains anything but floating
            and complex tensors, or if `f` does not return the tensor of a real scalar.
        ValueError: if `variables` is empty, as for a model that is not built, and `argnums` is not passed.
        NotImplementedError: on the NumPy and OpenVINO backends.

    References:
        Griewank and Walther 2008, Evaluating Derivatives, SIAM. Section 3.2 describes reverse mode.
    """
    value_and_gradient = value_and_grad(f, argnums, has_aux, variables)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = value_and_gradient(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return backend.active.update_wrapper(gradient, f)


def value_and_grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    variables: Sequence[keras.Variable] | None = None,
) -> Callable[..., Any]:
    """Return a function that computes the value and the gradient of a scalar function.

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

    Values that `f` assigns to variables persist.

    Arguments:
        f, argnums, has_aux, variables: as for `grad`.

    Returns:
        A function with the arguments of `f`. It returns `(value, gradient)`, or `((value, aux), gradient)`
        with `has_aux`.

    Raises:
        TypeError, ValueError, NotImplementedError: as for `grad`.

    References:
        See `grad`.
    """
    function = DifferentiatedFunction(f, argnums, variables)

    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        flat_f = DifferentiatedCall(function, args, kwargs, has_aux)

        def scalar(*tensors: Any) -> tuple[Any, Any]:
            output, auxiliary = flat_f(*tensors)
            return require_scalar(function.name, output), auxiliary

        result, gradients = backend.active.value_and_grad(scalar, flat_f.primals, flat_f.variables)
        value, (aux, assigned) = result
        flat_f.assign(assigned)
        return ((value, aux) if has_aux else value), flat_f.unflatten(gradients)

    return backend.active.update_wrapper(value_and_gradient, f)


def vjp(
    f: Callable[..., Any],
    *primals: Any,
    has_aux: bool = False,
    variables: Sequence[keras.Variable] | None = None,
) -> tuple[Any, ...]:
    """Compute the output of a function and its vector-Jacobian product (reverse mode).

    ```python
    from keras import ops
    import multigrad

    y, pullback = multigrad.vjp(lambda x, w: x * w, ops.array([1.0, 2.0]), ops.array([3.0, 4.0]))
    dx, dw = pullback(ops.array([1.0, 10.0]))  # the upstream gradient dL/dy
    print(y, dx, dw)  # [3., 8.], [3., 40.], [1., 20.]
    ```

    Arguments:
        f: a function of tensors, NumPy arrays, Python floats, Keras Variables and nested structures of
            them. It may return any nested structure. Values that it assigns to variables persist.
        primals: the arguments of `f`. It is differentiated with respect to all of them.
        has_aux: whether `f` returns a pair `(output, aux)`. Only the output is differentiated.
        variables: Keras Variables that `f` reads and that it is also differentiated with respect to.

    Returns:
        `(output, pullback)`, or `(output, pullback, aux)` with `has_aux`. `pullback` takes the upstream
        gradient in the structure of the output and returns a tuple with the gradient of each primal. With
        `variables`, it returns the list of their gradients; with both, `(gradients, gradients_of_variables)`.
        It can be called repeatedly. In the upstream gradient None stands for zero, and entries for outputs
        without a gradient (integers, strings, None) are ignored.

    Raises:
        TypeError: if a primal contains anything but floating and complex tensors, or if the structure of the
            upstream gradient differs from the structure of the output.
        ValueError: if the shape of an upstream gradient differs from the shape of its output, or if
            `variables` is empty and there are no primals.
        NotImplementedError: on the NumPy and OpenVINO backends.

    References:
        See `grad`.
    """
    name = name_of(f)
    flat_f = _call_of(f, primals, has_aux, variables)
    inputs = flatten(flat_f.unflatten(flat_f.primals))
    result, flat_pullback = backend.active.vjp(flat_f.flat_output, flat_f.primals, flat_f.variables)
    output, *aux = _finish(flat_f, result, has_aux)

    def pullback(upstream: Any) -> Any:
        flat_upstream = output.flatten_matching(name, "upstream", upstream)
        return inputs.unflatten(flat_pullback(flat_upstream))

    return output.unflatten(output.differentiable), backend.active.library_code(pullback), *aux


def jvp(
    f: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    has_aux: bool = False,
    variables: Sequence[keras.Variable] | None = None,
) -> tuple[Any, ...]:
    """Compute the output of a function and its Jacobian-vector product (forward mode).

    ```python
    import keras
    from keras import ops
    import multigrad

    x, direction = ops.array([1.0, 2.0]), ops.array([1.0, 0.5])
    print(multigrad.jvp(lambda x: x**3, (x,), (direction,)))  # [1., 8.], [3., 6.]
    second = multigrad.grad(lambda x: multigrad.jvp(lambda x: x**3, (x,), (1.0,))[1])
    print(second(2.0))  # 12.0

    w = keras.Variable([1.0, 2.0])  # a Hessian-vector product of a loss of weights
    gradient = multigrad.grad(lambda: ops.sum(w**3), variables=[w])
    print(multigrad.jvp(gradient, (), [direction], variables=[w])[1][0])  # [6., 6.]
    ```

    - JAX: `jax.jvp`. It raises an error for a function that calls a `jax.custom_vjp`.
    - TensorFlow and PyTorch: the transpose of `vjp`, which costs two reverse passes in addition to `f`.

    The tangent of an op is the transpose of its rule. The rule must be linear in its upstream gradient, as
    every vector-Jacobian product is. `multigrad.testing.check_gradients` checks this. A rule that is not
    linear is linearized at an upstream gradient of ones.

    Arguments:
        f: a function as for `vjp`.
        primals: a tuple or list of the arguments of `f`. It is differentiated with respect to all of them.
        tangents: a tuple or list with one tangent for each primal, in its structure and shapes. None stands
            for zero. With `variables`, it is a list with one tangent for each variable; with both,
            `(tangents, tangents_of_variables)`.
        has_aux: whether `f` returns a pair `(output, aux)`. Only the output is differentiated.
        variables: Keras Variables that `f` reads and that it is also differentiated with respect to.

    Returns:
        `(output, tangent)`, or `(output, tangent, aux)` with `has_aux`. The tangent has the structure of
        the output, with None for outputs without a gradient (integers, strings, None).

    Raises:
        TypeError: if a primal contains anything but floating and complex tensors, or if the structure of the
            tangents differs from the structure of the primals.
        ValueError: if a tangent has another shape than its primal, or if `variables` is empty and there are
            no primals.
        NotImplementedError: on the NumPy and OpenVINO backends.

    References:
        Townsend 2017, A New Trick for Calculating Jacobian Vector Products. It describes the transpose.
    """
    name = name_of(f)
    for role, argument in (("primal", primals), ("tangent", tangents)):
        if not isinstance(argument, (tuple, list)):
            required = f"a tuple or list with one {role} for each argument"
            fix = "call jvp(f, (x,), (tangent,))"
            raise unusable(TypeError, name, f"{role}s", required=required, got=argument, fix=fix)
    flat_f = _call_of(f, primals, has_aux, variables)
    container = tuple if primals or variables is None else list
    inputs = flatten(flat_f.unflatten(flat_f.primals))
    directions = inputs.flatten_matching(name, "tangents", container(tangents))
    result, tangent = backend.active.jvp(flat_f.flat_output, flat_f.primals, directions, flat_f.variables)
    output, *aux = _finish(flat_f, result, has_aux)
    return output.unflatten(output.differentiable), output.unflatten_with_none(tangent), *aux


def _call_of(
    f: Callable[..., Any],
    primals: Sequence[Any],
    has_aux: bool,
    variables: Sequence[keras.Variable] | None,
) -> DifferentiatedCall:
    """Return the call of a function that is differentiated with respect to all arguments."""
    argnums = range(len(primals)) if primals or variables is None else None
    return DifferentiatedCall(DifferentiatedFunction(f, argnums, variables), primals, {}, has_aux)


def _finish(flat_f: DifferentiatedCall, result: Any, has_aux: bool) -> tuple[Any, ...]:
    """Assign to variables. Return the output as a `FlatStructure`, and the aux if there is one."""
    differentiable, (others, (aux, assigned)) = result
    flat_f.assign(assigned)
    output = flat_f.output._replace(differentiable=differentiable, others=others)
    return (output, aux) if has_aux else (output,)


def jacobian(
    f: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    variables: Sequence[keras.Variable] | None = None,
) -> Callable[..., Any]:
    """Return a function that computes the Jacobian of a function in reverse mode.

    ```python
    from keras import ops
    import multigrad

    print(multigrad.jacobian(lambda x: x ** 2)(ops.array([1.0, 2.0])))  # [[2., 0.], [0., 4.]]
    ```

    Arguments:
        f: a function as for `grad`, except that it may return any nested structure of tensors.
        argnums, has_aux, variables: as for `grad`.

    Returns:
        A function with the arguments of `f`. It returns the structure of the output, with None for outputs
        without a gradient. Each tensor of the output is replaced by the result that `grad` returns for a
        scalar. The shape of a tensor in this result is the shape of the output, followed by the shape of the
        argument.

    Raises:
        TypeError, ValueError: as for `grad`, and for a complex argument or output.
        NotImplementedError: on the NumPy and OpenVINO backends.

    References:
        See `grad`: one reverse pass for each element of the output.
    """
    return _jacobian(_reverse, f, argnums, has_aux, variables)


def _jacobian(
    mode: Callable[[DifferentiatedCall], tuple[Any, list[list[Any]]]],
    f: Callable[..., Any],
    argnums: int | Sequence[int] | None,
    has_aux: bool,
    variables: Sequence[keras.Variable] | None,
) -> Callable[..., Any]:
    """Return the function that `jacobian` returns. `mode` is `_reverse` or `_forward`."""
    function = DifferentiatedFunction(f, argnums, variables)

    def jacobian_of(*args: Any, **kwargs: Any) -> Any:
        flat_f = DifferentiatedCall(function, args, kwargs, has_aux)
        require_real(function.name, flat_f.primals)
        flat_result, rows = mode(flat_f)
        require_real(function.name, flat_result[0])
        output, *aux = _finish(flat_f, flat_result, has_aux)
        result = output.unflatten_with_none([flat_f.unflatten(row) for row in rows])
        return (result, *aux) if has_aux else result

    return backend.active.update_wrapper(jacobian_of, f)


def _reverse(flat_f: DifferentiatedCall) -> tuple[Any, list[list[Any]]]:
    """Return the result of `flat_f.flat_output`, and a list per output with an array per primal.

    The shape of an array is that of the output followed by that of the primal.
    """
    result, pullback = backend.active.vjp_at_once(flat_f.flat_output, flat_f.primals, flat_f.variables)
    outputs = result[0]
    reshape, conform = backend.active.reshape, backend.active.conform
    zeros = [ops.zeros_like(output) for output in outputs]
    specs: list[Any] = backend.active.specs_of(outputs)
    rows = []
    for index, output in enumerate(outputs):

        def row(upstream: Any, index: int = index) -> Sequence[Any]:
            gradients = [*zeros[:index], upstream, *zeros[index + 1 :]]
            if backend.active.HAS_DEVICES:  # those of Keras are on its default device
                gradients = list(map(conform, gradients, specs))
            return pullback(gradients)

        gradients = _rows(row, output)
        rows.append([reshape(g, output, x) for g, x in zip(gradients, flat_f.primals, strict=True)])
    return result, rows


def _rows(row: Callable[[Any], Sequence[Any]], output: Any) -> Sequence[Any]:
    """Return the results of `row`, stacked, for an upstream gradient of the output per element."""
    sizes = backend.active.sizes(output.shape)
    if sizes is not None and all([size == 1 for size in sizes]):
        return row(ops.ones_like(output))
    numbers = ops.cumsum(ops.ones_like(ops.reshape(output, (-1,)), "int32"))
    may_be_empty = sizes is None or any([not size for size in sizes])
    # TensorFlow and PyTorch cannot map over no rows, so there is one more, of zeros.
    padded = ops.pad(numbers, [[0, 1]]) if may_be_empty else numbers
    identity = ops.cast(ops.equal(padded[:, None], numbers[None]), output.dtype)
    gradients = backend.active.map_rows(row, backend.active.reshape(identity, padded, output))
    return [g[:-1] for g in gradients] if may_be_empty else gradients


def _forward(flat_f: DifferentiatedCall) -> tuple[Any, list[list[Any]]]:
    """Return what `_reverse` returns, from one forward pass for each element of the primals."""
    primals, reshape = flat_f.primals, backend.active.reshape
    if not primals:
        return _reverse(flat_f)  # nothing to map over
    ends = list(itertools.accumulate([math.prod(primal.shape) for primal in primals]))
    blocks = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    identity = ops.eye(ends[-1])
    layouts = list[Layout]()  # AutoGraph cannot read an annotated name that an inner function uses

    def column(*tangents: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        result, pushed = backend.active.jvp(flat_f.flat_output, primals, tangents, flat_f.variables)
        tensors, layout = split(result)
        layouts[:] = [layout]
        return pushed, tensors

    tangents = [
        ops.cast(ops.reshape(identity[:, block], (ends[-1], *primal.shape)), primal.dtype)
        for block, primal in zip(blocks, primals, strict=True)
    ]
    stacked, shared = backend.active.vmap(column, tangents)
    result = layouts[0].join(shared)
    rows = [
        [
            ops.cast(reshape(ops.moveaxis(columns[block], 0, -1), output, primal), primal.dtype)
            for block, primal in zip(blocks, primals, strict=True)
        ]
        for columns, output in zip(stacked, result[0], strict=True)
    ]
    return result, rows


def hessian(
    f: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    variables: Sequence[keras.Variable] | None = None,
) -> Callable[..., Any]:
    """Return a function that computes the Hessian of a function: the Jacobian of its Jacobian.

    ```python
    from keras import ops
    import multigrad

    print(multigrad.hessian(lambda x: ops.sum(x ** 3))(ops.array([1.0, 2.0])))  # [[6., 0.], [0., 12.]]
    ```

    Arguments:
        f, argnums, has_aux, variables: as for `jacobian`.

    Returns:
        A function with the arguments of `f`. For one argument `x` and a scalar result, it returns a tensor of
        shape `x.shape + x.shape`. In general, each tensor in the result of `jacobian` is replaced by the
        Jacobian of that tensor.

    Raises:
        TypeError, ValueError, NotImplementedError: as for `jacobian`.

    References:
        See `jacobian`, which is applied twice. On JAX, the second Jacobian is computed in forward mode.
    """
    mode = _forward if backend.active.FORWARD_OVER_REVERSE else _reverse
    return _jacobian(mode, jacobian(f, argnums, has_aux, variables), argnums, has_aux, variables)

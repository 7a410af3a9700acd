"""Functions of symmetric matrices, whose gradients are right where eigenvalues are equal.

The derivative of `eigh` is infinite at equal eigenvalues, so no rule of `eigh` is right for every function.
`spectral_function` gets the function, and uses its divided differences. `safe_eigh` and `safe_svd` leave out
the terms between equal values, which is right for functions of the invariant subspaces.

Matrices are multiplied with the operator, because `ops.matmul` (Keras 3.15) computes float64 in float32 on
PyTorch.
"""

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from multigrad import backend
from multigrad.calculus.derivatives import vjp
from multigrad.common.errors import describe, message, require_function, unusable
from multigrad.common.reachable import reachable_tensors
from multigrad.core.variables import Reads
from multigrad.op import op_custom_gradient
from multigrad.ops.arguments import Pair, Tensor, tensor_of, with_rank_of
from multigrad.ops.dtypes import EPSILON, REAL_DTYPES, dtype_of
from multigrad.ops.gradient.routing import prevent_gradient

_DTYPES = ("float32", "float64", *REAL_DTYPES)


@op_custom_gradient(name="multigrad>spectral_function")
def spectral_function(a: Tensor, fn: Callable[..., Any], *others: Tensor) -> Pair:
    """Return `f(A) = V f(L) V^H` of symmetric or Hermitian matrices `A = V L V^H`, such as a square root.

    ```python
    from keras import ops
    from multigrad import grad
    from multigrad.ops import spectral_function

    identity = ops.eye(2)
    print(spectral_function(4.0 * identity, ops.sqrt))  # [[2., 0.], [0., 2.]]
    root = grad(lambda a: ops.sum(spectral_function(a, ops.sqrt)))
    print(root(4.0 * identity))  # [[0.25, 0.25], [0.25, 0.25]]
    ```

    Arguments:
        a: matrices of the shape `(..., n, n)`, in float32, float64, complex64 or complex128. Only their
            symmetric part, `(a + a^H) / 2`, is used.
        fn: an elementwise function of the eigenvalues, `fn(x, *others)`, of Keras ops, which can be
            differentiated twice. It must not hold tensors or read variables: pass them as `others`. In a
            saved model, the function must be registered with `keras.saving.register_keras_serializable`.
        others: scalar tensors, such as an exponent. Their gradients are exact at equal eigenvalues, too.

    Returns:
        The matrices `f(A)`, with the shape and dtype of `a`. The first and second derivatives are those
        of the function, at equal eigenvalues too. The gradient is symmetric. For each pair of eigenvalues,
        the rule computes a quotient of differences and the mean slope, and uses the one with the smaller
        error. The relative error is at most about `eps ** (2/3)` in the first derivative and `eps ** (1/2)`
        in the second, if `fn` is accurate relative to its value: write `expm1(x)` instead of
        `exp(x) - 1`. The second derivative takes `n**3` numbers for each matrix.

    Raises:
        TypeError: if `a` is not a floating or complex tensor, or `fn` is not a function, or reads a trainable
            variable, or holds a tensor in its closure, defaults, a container or an attribute.
        ValueError: if one of the `others` is not a scalar.
        RuntimeError: if a third derivative is computed.

    References:
        Daleckii and Krein 1965, Integration and differentiation of functions of Hermitian operators; Higham
        2008, Functions of Matrices, theorem 3.11 and corollary 3.12.
    """
    a = _matrices("spectral_function", a)
    require_function("spectral_function", "fn", fn)
    others = tuple(_scalar(other, a) for other in others)
    values, vectors = _eigh(a)
    with Reads() as scope:
        of_values = fn(values, *others)
    if scope.variables:
        raise _holds(f"a function that reads the trainable variable {scope.variables[0].path!r}")
    _require_no_tensors(fn, values, tuple(map(ops.stop_gradient, others)))
    return _matrix_of(vectors, of_values), _rule(a, fn, others)


@op_custom_gradient(name="multigrad>_spectral_function")
def _of_matrix(a: Tensor, fn: Callable[..., Any], *others: Tensor) -> Pair:
    """Return `f(A)` without the checks of `spectral_function`."""
    values, vectors = _eigh(a)
    return _matrix_of(vectors, fn(values, *others)), _rule(a, fn, others)


def _rule(a: Any, fn: Callable[..., Any], others: Sequence[Any]) -> Callable[[Any], Any]:
    def rule(upstream: Any) -> Any:
        # The derivative of `f(A)` with respect to a scalar is `g(A)`, for `g = df/dscalar`.
        slopes = _slopes_of_others(fn, others)
        of_others = [_inner(upstream, _of_matrix(a, slope, *others)) for slope in slopes]
        return _first(a, upstream, fn, *others), None, *of_others

    return rule


def _require_no_tensors(fn: Callable[..., Any], values: Any, others: Sequence[Any]) -> None:
    """Raise TypeError if a function holds a tensor, whose gradient would silently be zero."""
    # Dynamo (PyTorch 2.13) cannot search objects. The second check finds the tensors there.
    reading = backend.active.is_reading_code()
    held = None if reading else next(reachable_tensors(fn, backend.active.TENSORS), None)
    if held is not None or backend.active.depends_on_others(_function_of_values(fn, others), values):
        raise _holds("a function that holds " + ("a tensor" if held is None else describe(held)))


def _holds(got: str) -> TypeError:
    return TypeError(
        message(
            "spectral_function",
            "the function holds a tensor or reads a variable, for which there is no gradient",
            argument="'fn'",
            required="a function that gets all its tensors as arguments",
            got=got,
            fix="pass the scalar as a further argument: spectral_function(a, lambda x, t: x**t, t)",
        )
    )


def _scalar(other: Any, a: Any) -> Any:
    """Return a further argument as a scalar tensor of the dtype of the eigenvalues of `a`."""
    other = tensor_of("spectral_function", "others", other)
    if len(other.shape):
        fix = "pass one tensor for each scalar"
        raise unusable(
            ValueError, "spectral_function", "others", required="scalar tensors", got=other, fix=fix
        )
    return ops.cast(other, REAL_DTYPES.get(dtype_of(a), dtype_of(a)))


def _slopes_of_others(fn: Callable[..., Any], others: Sequence[Any]) -> list[Callable[..., Any]]:
    """Return the derivatives of an elementwise function with respect to each of the other arguments."""

    def slope_of(index: int) -> Callable[..., Any]:
        def slope(x: Any, *others: Any) -> Any:
            def along(other: Any) -> Any:
                return fn(x, *others[:index], other, *others[index + 1 :])

            return _slope(along, others[index] + ops.zeros_like(x))

        return slope

    return [slope_of(index) for index in range(len(others))]


def _inner(x: Any, y: Any) -> Any:
    """Return the inner product of two arrays of matrices, as real numbers."""
    if dtype_of(x).startswith("complex"):
        return ops.sum(ops.real(x) * ops.real(y)) + ops.sum(ops.imag(x) * ops.imag(y))
    return ops.sum(x * y)


@op_custom_gradient(name="multigrad>_spectral_derivative")
def _first(a: Tensor, direction: Tensor, fn: Callable[..., Any], *others: Tensor) -> Pair:
    """Return the derivative of `f(A)` in a direction. It is also the gradient for an upstream gradient."""
    values, vectors = _eigh(a)
    turned = _to_eigenbasis(vectors, _symmetric(direction))
    differences, _ = _difference(_function_of_values(fn, others), values[..., :, None], values[..., None, :])
    y = _from_eigenbasis(vectors, _like(differences, turned) * turned)

    def rule(upstream: Any) -> Any:
        # Without this error, frameworks differentiate `eigh`, silently wrong at equal eigenvalues.
        once = prevent_gradient(a, "spectral_function has no third derivative")
        of_a = _second(once, direction, upstream, _function_of_values(fn, others))
        slopes = _slopes_of_others(fn, others)
        of_others = [_inner(upstream, _first(a, direction, slope, *others)) for slope in slopes]
        return of_a, _first(a, upstream, fn, *others), None, *of_others

    return y, rule


def _function_of_values(fn: Callable[..., Any], others: Sequence[Any]) -> Callable[[Any], Any]:
    """Return the function of the eigenvalues only."""
    return lambda x: fn(x, *others)


def _second(a: Any, one: Any, other: Any, fn: Callable[[Any], Any]) -> Any:
    """Return the second derivative of `f(A)` in two symmetric directions."""
    values, vectors = _eigh(a)
    x, y = (_to_eigenbasis(vectors, _symmetric(direction)) for direction in (one, other))
    weights = _like(_second_divided_differences(fn, values), x)  # [..., i, k, j]
    products = x[..., :, :, None] * y[..., None, :, :] + y[..., :, :, None] * x[..., None, :, :]
    return _from_eigenbasis(vectors, ops.sum(weights * products, axis=-2))


def _slope(fn: Callable[[Any], Any], x: Any) -> Any:
    """Return the derivative of an elementwise function."""
    y, pullback = vjp(fn, x)
    return pullback(ops.ones_like(y))[0]


def _difference(fn: Callable[[Any], Any], x: Any, y: Any) -> tuple[Any, Any]:
    """Return the divided differences `f[x, y]`, and estimates of their errors.

    The quotient cancels for near numbers. Simpson's rule for the mean slope needs a function that is smooth
    between the numbers. The estimate with the smaller error is used.
    """
    x, y = x + ops.zeros_like(y), y + ops.zeros_like(x)
    at_x, at_y, gap = fn(x), fn(y), x - y
    middle, ends = _slope(fn, 0.5 * (x + y)), 0.5 * (_slope(fn, x) + _slope(fn, y))
    rounding = EPSILON[dtype_of(x)] * (ops.abs(at_x) + ops.abs(at_y))
    same = ops.equal(gap, 0.0)
    gap = ops.where(same, ops.ones_like(gap), gap)
    return _better(
        (at_x - at_y) / gap,
        rounding / ops.abs(gap),
        (2.0 * middle + ends) / 3.0,
        ops.abs(middle - ends),
        same,
    )


def _better(quotient: Any, its_error: Any, smooth: Any, other_error: Any, same: Any) -> tuple[Any, Any]:
    """Return the estimate with the smaller error, and the error. It is `smooth` for equal numbers."""
    is_smooth = ops.logical_or(same, ops.less_equal(other_error, its_error))  # False for NaN
    return ops.where(is_smooth, smooth, quotient), ops.where(is_smooth, other_error, its_error)


def _second_divided_differences(fn: Callable[[Any], Any], values: Any) -> Any:
    """Return the second divided differences `f[v_i, v_k, v_j]`."""
    triples = [values[..., :, None, None], values[..., None, :, None], values[..., None, None, :]]
    zeros = ops.zeros_like(triples[0] + triples[1] + triples[2])
    low, middle, high = ops.unstack(
        ops.sort(ops.stack([t + zeros for t in triples], axis=-1), axis=-1), axis=-1
    )
    (upper, upper_error), (lower, lower_error) = _difference(fn, high, middle), _difference(fn, middle, low)
    same, gap = ops.equal(high, low), high - low
    gap = ops.where(same, ops.ones_like(gap), gap)
    rounding = upper_error + lower_error + EPSILON[dtype_of(values)] * (ops.abs(upper) + ops.abs(lower))
    center = 0.5 * _curvature(fn, (low + middle + high) / 3.0)
    ends = 0.25 * (_curvature(fn, low) + _curvature(fn, high))
    return _better((upper - lower) / gap, rounding / gap, center, ops.abs(center - ends), same)[0]


def _curvature(fn: Callable[[Any], Any], x: Any) -> Any:
    return _slope(lambda x: _slope(fn, x), x)


@op_custom_gradient(name="multigrad>safe_eigh")
def safe_eigh(a: Tensor) -> Pair:
    """Return the eigenvalues and eigenvectors, with a finite gradient where eigenvalues are equal.

    ```python
    from keras import ops
    from multigrad import grad
    from multigrad.ops import safe_eigh

    print(grad(lambda a: ops.sum(safe_eigh(a)[0]))(ops.eye(2)))  # [[1., 0.], [0., 1.]]
    ```

    The rule leaves out the terms between equal eigenvalues. It is exact for functions that do not depend
    on the basis of an eigenspace: the projector on the eigenvectors of several equal eigenvalues, a
    density matrix, the sum of eigenvalues. It is wrong for functions that treat the vectors of one
    eigenspace differently, which have no derivative there, and for a function of the matrix that is
    written with `eigh`, such as `V sqrt(L) V^H`: use `spectral_function`. In the second derivative, terms
    between equal eigenvalues are left out too, where they are not zero for every such function.

    Arguments:
        a: matrices of the shape `(..., n, n)`, in float32, float64, complex64 or complex128. Only their
            symmetric part, `(a + a^H) / 2`, is used.

    Returns:
        The eigenvalues in ascending order, and the matrix whose columns are the eigenvectors. Eigenvalues are
        equal if they differ by at most `n * eps` times the largest one, for the size `n`.

    Raises:
        TypeError: if `a` is not a floating or complex tensor.

    References:
        Kasim and Vinko 2020, [xi-torch](https://arxiv.org/abs/2010.01921), on degenerate eigenvalues;
        Giles 2008, Collected matrix derivative results for forward and reverse mode algorithmic
        differentiation.
    """
    a = _matrices("safe_eigh", a)
    outputs = ops.eigh(_symmetric(a))
    values, vectors = outputs[0], outputs[1]

    def rule(upstream: Any) -> Any:
        of_values, of_vectors = upstream
        inner = _adjoint(vectors) @ of_vectors
        gaps = values[..., None, :] - values[..., :, None]
        diagonal = with_rank_of(ops.eye(a.shape[-1], dtype=values.dtype), a) * of_values[..., None, :]
        middle = _like(diagonal, inner) + _like(_inverse(gaps, values), inner) * inner
        return _symmetric(_from_eigenbasis(vectors, middle))

    return (values, vectors), rule


@op_custom_gradient(name="multigrad>safe_svd")
def safe_svd(a: Tensor) -> Pair:
    """Return the thin singular value decomposition, with a finite gradient where singular values are equal.

    ```python
    from keras import ops
    from multigrad import grad
    from multigrad.ops import safe_svd

    print(grad(lambda a: ops.sum(safe_svd(a)[1]))(ops.eye(2)))  # [[1., 0.], [0., 1.]]
    ```

    As for `safe_eigh`, the rule leaves out the terms between equal singular values, and those that divide
    by a singular value of zero. It is exact for functions of the invariant subspaces. It is wrong for a
    function of the matrix that mixes both sides, such as the orthogonal factor `U V^T` at equal singular
    values.

    Arguments:
        a: matrices of the shape `(..., m, n)`, in float32 or float64.

    Returns:
        `u` of the shape `(..., m, k)`, the singular values in descending order, and `v^T` of the shape
        `(..., k, n)`, for `k = min(m, n)`.

    Raises:
        TypeError: if `a` is not a real floating tensor.

    References:
        Townsend 2016, Differentiating the singular value decomposition.
    """
    a = _matrices("safe_svd", a, real=True)
    u, s, vt = ops.svd(a, full_matrices=False)

    def rule(upstream: Any) -> Any:
        of_u, of_s, of_vt = upstream
        v, of_v = ops.swapaxes(vt, -1, -2), ops.swapaxes(of_vt, -1, -2)
        squares = ops.square(s)
        gaps = _inverse(squares[..., None, :] - squares[..., :, None], squares)
        one, other = _skew(_adjoint(u) @ of_u), _skew(vt @ of_v)
        diagonal = with_rank_of(ops.eye(s.shape[-1], dtype=s.dtype), a) * of_s[..., None, :]
        middle = gaps * one * s[..., None, :] + s[..., :, None] * (gaps * other) + diagonal
        inverse = _inverse(s, s)
        left = (of_u - u @ (_adjoint(u) @ of_u)) * inverse[..., None, :]
        right = (of_v - v @ (vt @ of_v)) * inverse[..., None, :]
        inner = (u @ middle + left) @ vt
        return inner + u @ ops.swapaxes(right, -1, -2)

    return (u, s, vt), rule


def _skew(x: Any) -> Any:
    return x - ops.swapaxes(x, -1, -2)


def _inverse(gaps: Any, values: Any) -> Any:
    """Return `1 / gaps`, and zero where they vanish in comparison with the largest value."""
    largest = ops.max(ops.abs(values), axis=-1, keepdims=True, initial=0.0)
    bound = values.shape[-1] * EPSILON[dtype_of(values)] * largest
    if len(gaps.shape) > len(bound.shape):
        bound = bound[..., None]
    equal = ops.less_equal(ops.abs(gaps), ops.stop_gradient(bound))
    return ops.where(equal, ops.zeros_like(gaps), 1.0 / ops.where(equal, ops.ones_like(gaps), gaps))


def _matrices(op: str, a: Any, real: bool = False) -> Any:
    """Return the argument as a tensor. Raise TypeError for other dtypes, and ValueError for other shapes."""
    a = tensor_of(op, "a", a)
    if dtype_of(a) not in _DTYPES or (real and dtype_of(a).startswith("complex")):
        required = "float32 or float64" if real else "float32, float64, complex64 or complex128"
        fix = "use safe_eigh of the product of the adjoint and the matrix" if real else "cast it"
        raise unusable(TypeError, op, "a", required=required, got=a, fix=fix)
    return a


def _eigh(a: Any) -> tuple[Any, Any]:
    """Return the eigenvalues as real numbers, which are complex on TensorFlow, and the eigenvectors."""
    values, vectors = ops.eigh(_symmetric(a))
    return ops.real(values) if dtype_of(values).startswith("complex") else values, vectors


def _adjoint(x: Any) -> Any:
    swapped = ops.swapaxes(x, -1, -2)
    return ops.conj(swapped) if dtype_of(x).startswith("complex") else swapped


def _symmetric(a: Any) -> Any:
    return 0.5 * (a + _adjoint(a))


def _like(x: Any, y: Any) -> Any:
    """Return `x` in the dtype of `y`, which may be complex."""
    return ops.cast(x, dtype_of(y))


def _to_eigenbasis(vectors: Any, x: Any) -> Any:
    """Return `V^H X V`."""
    return _adjoint(vectors) @ x @ vectors


def _from_eigenbasis(vectors: Any, x: Any) -> Any:
    """Return `V X V^H`."""
    return vectors @ x @ _adjoint(vectors)


def _matrix_of(vectors: Any, values: Any) -> Any:
    """Return `V diag(values) V^H`."""
    return (vectors * _like(values, vectors)[..., None, :]) @ _adjoint(vectors)

"""`jit`: compile a function that reads and assigns Keras Variables.

The compilers of TensorFlow and PyTorch track variables. The compiler of JAX does not, so there the variables
become inputs and outputs of the compiled function (`backend/jax/jit.py`).
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import keras
import numpy as np

from multigrad import backend
from multigrad.common.errors import require_function, unusable
from multigrad.core.conversions import arrays_to_tensors
from multigrad.core.signature import name_of, signature_of
from multigrad.core.variables import Uses

P = ParamSpec("P")
R = TypeVar("R")


@overload
def jit(
    f: Callable[P, R], *, static_argnames: str | Sequence[str] = (), **options: Any
) -> Callable[P, R]: ...


@overload
def jit(
    f: None = None, *, static_argnames: str | Sequence[str] = (), **options: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def jit(
    f: Callable[..., Any] | None = None, *, static_argnames: str | Sequence[str] = (), **options: Any
) -> Callable[..., Any]:
    """Compile a function that reads and assigns Keras Variables.

    ```python
    import keras
    from keras import ops
    import multigrad

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)

    @multigrad.jit
    def train_step(x, y):
        def loss():
            return ops.mean((model(x, training=True) - y) ** 2)

        variables = model.trainable_variables
        value, gradients = multigrad.value_and_grad(loss, variables=variables)()
        optimizer.apply(gradients, variables)
        return value

    x, y = ops.ones((4, 3)), ops.ones((4, 1))
    assert train_step(x, y) > train_step(x, y)
    ```

    The function can call layers in training, `optimizer.apply`, metrics and `keras.random.SeedGenerator`s.
    When it is called, the compiled function reads the current values of the variables. The values that it
    assigns persist.

    - JAX: `jax.jit`. Variables are found when `f` is traced, so `f` runs two or three times in its first
      call. Each variable that it reads becomes an input, and each one that it assigns an output. Layers and
      optimizers may be built in this call. Arrays of any framework, Python numbers and nested structures of
      them are traced. Other arguments, such as `self`, strings or a Keras Variable, are static. A static
      argument needs a hash, and is kept alive with the compiled function.
    - TensorFlow: `tf.function`, with `autograph=False` unless you pass another value. Python numbers and
      other objects are static.
    - PyTorch: `torch.compile`. Inductor, its default compiler, takes a minute for a training step.
      `backend="aot_eager"` takes a fifth of this, and its programs take three times as long as Inductor's.
    - NumPy and OpenVINO: `f` runs uncompiled.

    `f` is traced again for new structures, shapes, dtypes and static values, as in each framework, and if a
    variable that it uses is frozen or unfrozen. Other Python objects that `f` uses, such as globals or the
    attributes of a layer, are constants of the trace.

    Arguments:
        f: a function of tensors, NumPy arrays, numbers, static objects and nested structures of them. It
            returns a nested structure of tensors. It can be a function, a method, or a callable object such
            as a model. A decorated method is compiled for each object.
        static_argnames: the names of static parameters, for example a number that sets a shape or a bool in
            an `if`. TensorFlow and PyTorch always treat Python numbers as static.
        options: options of the framework's compiler, for example `jit_compile=True` for `tf.function`,
            `fullgraph=True` for `torch.compile` or `compiler_options` for `jax.jit`. Another framework's
            compiler raises an error for them. On JAX, there is also
            `donate`, True by default: the new value of a variable reuses the memory of the old value. An old
            value that has other references is copied first. After an error at run time, the assigned
            variables have lost their values, as in `fit`. Pass `donate=False` to keep them.

    Returns:
        A function with the name, documentation and parameters of `f`. It can be differentiated, nested in
        another `multigrad.jit`, and called in `trace_gradients`, where it runs uncompiled.

    Raises:
        TypeError: if `f` is not callable or has no parameter of a static name; on JAX, if a static argument
            has no hash, an option refers to arguments by number, or a variable is assigned in a foreign
            `jax.jit`.
        ValueError: on JAX, if `f` creates variables in every call.
    """
    if f is None:
        return functools.partial(jit, static_argnames=static_argnames, **options)
    require_function("multigrad.jit", "f", f)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    positions: dict[str, int] = {}
    if names:  # a builtin such as `torch.exp` has no signature
        signature = signature_of(f)
        _require_parameters(name_of(f), signature.inspected.parameters, names)
        positions = {name: position for position, name in enumerate(signature.positional)}
    static = {name: positions.get(name) for name in names}

    def compile_now() -> tuple[dict[int, tuple[keras.Variable, bool]], Callable[..., Any]]:
        """Return the compiled function, and which variables it uses and whether they were trainable."""
        uses: dict[int, tuple[keras.Variable, bool]] = {}

        def traced(*args: Any, **kwargs: Any) -> Any:
            with Uses(uses):
                return f(*args, **kwargs)

        function = traced if backend.active.TRACES_ONCE else f
        return uses, backend.active.jit(function, name_of(f), static, options)

    programs = [compile_now()]
    converts = backend.active.FOREIGN[np.ndarray]  # the other compilers convert arrays themselves

    def run(*args: Any, **kwargs: Any) -> Any:
        if converts and not backend.active.is_reading_code():
            args, kwargs = arrays_to_tensors((args, kwargs))
        for uses, compiled in programs:
            if all([variable.trainable == before for variable, before in uses.values()]):
                return compiled(*args, **kwargs)
        programs.append(compile_now())
        return programs[-1][1](*args, **kwargs)

    return backend.active.update_wrapper(run, f)


def _require_parameters(op: str, parameters: Mapping[str, inspect.Parameter], names: Sequence[str]) -> None:
    """Raise unless each static name is the name of a parameter."""
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for name in names:
        if name not in parameters:
            required = f"names among {', '.join(map(repr, parameters)) or '(none)'}"
            fix = "write the name as in the signature"
            raise unusable(TypeError, op, "static_argnames", required=required, got=name, fix=fix)

"""check_gradients and compare_backends: they find planted faults, and accept correct ops."""

import keras
import numpy as np
import pytest
from keras import ops
from rules import NOT_LINEAR
from support import BACKEND, DIFFERENTIATES, close

from multigrad import backend, op_custom_gradient
from multigrad import ops as shelf
from multigrad.common.frameworks import DIFFERENTIATING, is_installed
from multigrad.common.processes import run_on
from multigrad.testing import check_gradients, compare_backends
from multigrad.testing.comparison import Measurement, _source_file, compare, measure

# `check_gradients` is above the border. It calls a function often, in shapes of its own, which JAX compiles.
pytestmark = pytest.mark.slow_on("jax", "tensorflow")

X = np.array([[0.3, -0.7], [1.2, 0.9]])
W = np.array([[0.5, 2.0], [-1.5, 0.8]])


def op(f, rule):
    """Return an op of one argument. Its rule is also passed the argument."""
    return op_custom_gradient(lambda x: (f(x), lambda upstream: rule(x, upstream)))


def fails(*args, **options):
    """Return the error of check_gradients. By default it does not check the compiled function."""
    with pytest.raises(AssertionError) as error:
        check_gradients(*args, **{"compiled": False, **options})
    return str(error.value)


def passes(*args, **options):
    return check_gradients(*args, **{"compiled": False, **options})


def cube(factor=1.0):
    return op(lambda x: x * x * x, lambda x, u: u * 3.0 * x * x * factor)


# ------------------------------------------------------------------------------------ planted faults


def if_compiled(x, factor=1.001):
    """Return a factor in compiled code, and 1 in eager code."""
    return 1.0 if backend.active.concrete(x) is not None else factor


@op_custom_gradient
def large_and_small(x):
    return {"large": 1e6 * x, "small": [1e-3 * x]}, lambda u: 1e6 * u["large"] + 1.001e-3 * u["small"][0]


SIGNS = np.array([[1.0, 1.0], [-1.0, 1.0]])
DIFFERS = "lambda: the gradient differs from the central differences"
COMPILED = "the compiled function differs from the eager function"
# A function with a fault, its argument, and parts of the error.
WRONG = {
    "a tenth of a percent": (cube(1.001), X, [DIFFERS, "argument: 'x'[", "4 of 4 elements disagree"]),
    "a wrong sign of an element": (
        op(ops.exp, lambda x, u: u * ops.exp(x) * ops.cast(SIGNS, x.dtype)),
        X,
        [DIFFERS, "argument: 'x'[1, 0]", "1 of 4 elements disagree"],
    ),
    "a small output next to a large one": (large_and_small, X, ["gradient of output['small'][0] differs"]),
    "a long table": (cube(1.1), np.linspace(1.0, 2.0, 30), ["30 of 30 elements disagree", "and 20 more"]),
    "NaN": (
        op(ops.exp, lambda x, u: u * (x - x) / (x - x)), X, ["the gradient is NaN", "got: nan from the rule"]
    ),
    "infinity": (op(ops.exp, lambda x, u: u / (x - x)), X, ["the gradient is infinite"]),
    "a plain function that is NaN": (
        ops.log, np.array([1.0, -1.0]), ["the function is NaN at these arguments", "argument: output[1]"]
    ),
    "a function that is NaN": (
        op(ops.log, lambda x, u: u / x), np.array([1.0, -1.0]), ["the function is NaN", "argument: output[1]"]
    ),
    "a function that is infinite": (ops.log, np.array([0.0, 1.0]), ["infinite"]),
    "differences that are NaN": (
        op(ops.sqrt, lambda x, u: u / 2.0),
        np.array([1.0, 0.0]),
        ["the central differences are NaN", "argument: 'x'[1]", "1 of 2 elements disagree"],
    ),
    "differences that overflow": (  # nothing is close to an infinite difference
        op(lambda x: 0.01 * ops.exp(x), lambda x, u: u * 0.07 * ops.exp(x)),
        np.array([709.7767]),
        ["the central differences are infinite"],
    ),
    "a steep function close to zero": (op(ops.log, lambda x, u: u * 1.001 / x), 1e-9 * np.abs(X), [DIFFERS]),
    "a rule that is wrong in compiled code": (
        op(lambda x: x**3, lambda x, u: u * 3.0 * x * x * if_compiled(u)),
        X,
        [COMPILED, "argument: gradient of 'x'["],
    ),
    "a value that is wrong in compiled code": (
        op(lambda x: x * x * if_compiled(x), lambda x, u: u * 2.0 * x), X, [COMPILED, "argument: output["]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_is_found(name):
    function, x, texts = WRONG[name]
    if "compiled code" in name:
        passes(function, X)
    said = fails(function, x, compiled="compiled code" in name)
    assert all(text in said for text in texts), said
    assert len(said.splitlines()) < 20


def test_the_row_of_an_element():
    lines = fails(cube(1.001), X).splitlines()
    (row,) = [line.split() for line in lines if line.startswith("  output") and "[1, 0]" in line]
    rule, difference, relative = map(float, row[-3:])
    assert 3.0 * 1.2**2 <= abs(difference) <= 2.0 * 3.0 * 1.2**2  # the weight is between 1 and 2
    assert rule == pytest.approx(1.001 * difference, rel=1e-5)
    assert relative == pytest.approx(0.001, rel=0.1)


SCALED = {
    "scaled": lambda u: u * ops.abs(u),
    "clipped": lambda u: ops.clip(u, -10.0, 10.0),
    "clipped far": lambda u: ops.clip(u, -1e3, 1e3),
}


@pytest.mark.parametrize("rule", [*NOT_LINEAR.values(), *SCALED.values()], ids=[*NOT_LINEAR, *SCALED])
def test_a_nonlinear_rule(rule):
    said = fails(op(lambda x: x * x / 2.0, lambda x, u: rule(u) * x), X)
    assert said.startswith("lambda: the rule is not linear in its upstream gradient\n  argument: 'x'[")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_wrong_factor_in_half_precision(dtype):
    factor = 1.002 if dtype == "float32" else 2.0
    said = fails(cube(factor), X, dtype=dtype)
    assert f"from central differences in {dtype}" in said


def test_a_second_derivative():
    """The first derivative of the rule is right. Its implementation makes the second one wrong."""

    def wrong_later(x, upstream):
        slope = op(lambda x: 3.0 * x * x, lambda x, u: u * 6.006 * x)
        return upstream * slope(x)

    function = op(lambda x: x * x * x, wrong_later)
    passes(function, X)
    said = fails(function, X, order=2)
    assert "the derivative of order 2 of 'x' differs from the central differences" in said


def test_the_conjugate_of_a_complex_gradient():
    def right(z, u):
        return u * ops.conj(2.0 * z)

    z = X + 1j * W
    passes(op(lambda z: z * z, right), z, order=2)
    fails(op(lambda z: z * z, lambda z, u: u * 2.0 * z), z)
    fails(op(lambda z: z * z, lambda z, u: right(z, u) + 0.001j * u), z)


def test_messages_name_the_path_in_a_structure():
    @op_custom_gradient
    def layer(parameters, n, x):
        w, b = parameters["w"][0], parameters["b"]
        rule = lambda u: {"parameters": {"w": [u * x], "b": u * 1.5}, "x": u * w}  # noqa: E731
        return w * x + b, rule

    said = fails(layer, {"w": [W], "b": X}, 3, X)
    assert "argument: 'parameters'['b'][" in said
    assert "4 of 12 elements disagree" in said


def test_a_variable():
    scale = keras.Variable(3.0, name="scale")

    def steep(factor):
        @op_custom_gradient
        def steep(x):
            rule = lambda u, variables: (u * scale, [ops.sum(u * x) * factor])  # noqa: E731
            return x * scale, rule

        return steep

    x = X.astype("float32")
    checked = passes(steep(1.0), x)
    assert (checked.precision, checked.elements) == ("float32", 5)
    said = fails(steep(1.01), x)
    assert "argument: variable 'scale'" in said
    assert "1 of 5 elements disagree" in said
    assert passes(steep(1.01), x, variables=[]).elements == 4
    close(scale.value, np.float32(3.0))


def test_tolerances_are_used():
    passes(cube(1.001), X, rtol=2e-3)
    passes(cube(1.001), X, atol=1.0)
    fails(cube(1.00001), X, rtol=1e-6)


# ------------------------------------------------------------------------------------ special points

POINTS = np.array([-1.0, 0.0, 0.5, 1.0, 2.0])


def wrong_at(point, wrong):
    """Return an op whose derivative is wrong at one point. It is 2 at 0 and 5 at 1."""

    def rule(x, u):
        return u * ops.where(ops.equal(x, point), ops.cast(wrong, x.dtype), 3.0 * x * x + 2.0)

    return op(lambda x: x * x * x + 2.0 * x, rule)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("point", "wrong"), [(0.0, 0.0), (0.0, 1e6), (0.0, 2.02), (1.0, 0.0), (-1.0, -5.0), (2.0, 7.0)]
)
def test_a_wrong_gradient_at_one_point(point, wrong, dtype):
    """The gradient beside the point is right."""
    said = fails(wrong_at(point, wrong), POINTS, dtype=dtype)
    assert f"argument: 'x'[{POINTS.tolist().index(point)}]" in said
    assert "1 of 5 elements disagree" in said
    passes(wrong_at(3.0, wrong), POINTS, dtype=dtype)


def test_a_wrong_gradient_at_one_value_of_a_weight():
    weight = keras.Variable(0.0, name="weight")

    def scaled(slope):
        @op_custom_gradient
        def scaled(x):
            w = weight + 0.0
            factor = ops.where(ops.equal(w, 0.0), slope, 1.0)
            return x * w, lambda u, variables: (u * w, [ops.sum(u * x) * factor])

        return scaled

    passes(scaled(1.0), X.astype("float32"))
    assert "argument: variable 'weight'" in fails(scaled(0.0), X.astype("float32"))


def kinked(slope):
    return op(
        lambda x: ops.where(x > 0.0, 3.0 * x, ops.zeros_like(x)),
        lambda x, u: (
            u * ops.where(ops.equal(x, 0.0), ops.cast(slope, x.dtype), 3.0 * ops.cast(x > 0.0, x.dtype))
        ),
    )


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_a_gradient_at_a_kink_is_between_the_derivatives_on_both_sides(dtype):
    for slope in (0.0, 1.0, 3.0):
        assert passes(kinked(slope), POINTS, dtype=dtype).unchecked == 0
    for slope in (7.0, -1.0):
        assert "argument: 'x'[1]" in fails(kinked(slope), POINTS, dtype=dtype)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 2.0, -1.0])
def test_a_gradient_at_a_tie(share):
    @op_custom_gradient
    def larger(x, y):
        of_x = ops.where(ops.equal(x, y), share, ops.cast(x > y, x.dtype))
        return ops.where(x > y, x, y), lambda u: (u * of_x, u * (1.0 - of_x))

    x, y = np.array([1.0, 0.0, 3.0, 2.0]), np.array([1.0, 0.0, 2.0, 3.0])
    if 0.0 <= share <= 1.0:
        passes(larger, x, y)
    else:
        assert "4 of 8 elements disagree" in fails(larger, x, y)


def test_two_kinks_at_one_point():
    """Each element of an output has its own: a weighted sum may have the derivatives 1.2 and 1.5."""
    passes(lambda x: ops.stack([ops.relu(x), ops.relu(-x)]), np.zeros(4))
    # This function is `x`. Its gradient at zero is 0 on each backend.
    assert "argument: 'x'[0]" in fails(lambda x: ops.relu(x) - ops.relu(-x), np.array([0.0, 1.0]))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_jump_of_the_second_derivative(dtype):
    def square(slope):
        def rule(x, u):
            return u * ops.where(ops.equal(x, 0.0), ops.cast(slope, x.dtype), 2.0 * ops.relu(x))

        return op(lambda x: ops.square(ops.relu(x)), rule)

    passes(square(0.0), np.array([0.0]), dtype=dtype, order=2)
    passes(square(0.0), POINTS, dtype=dtype, order=2)
    assert "argument: 'x'[1]" in fails(square(0.1), POINTS, dtype=dtype)


def test_a_jump_is_not_checked():
    """There is no derivative. The result names the element."""
    checked = passes(kinked(0.0), POINTS, order=2)
    assert checked.unchecked_elements == ("'x'[1] in order 2",)
    assert "unchecked=1: 'x'[1] in order 2" in str(checked)
    assert passes(op(ops.sign, lambda x, u: 0.0 * u), POINTS).unchecked_elements == ("'x'[1]",)
    assert "argument: 'x'[1]" in fails(op(ops.sign, lambda x, u: u * 0.0 / x), POINTS)
    assert "4 of 5 elements disagree" in fails(op(ops.sign, lambda x, u: u), POINTS)


def test_a_special_point_of_a_complex_function():
    def size(slope):
        """At zero, each number of magnitude 1 is a derivative in some direction."""

        def rule(z, u):
            direction = z / ops.cast(ops.abs(z) + 1e-30, z.dtype)
            direction += ops.cast(slope, z.dtype) * ops.cast(ops.equal(z, 0.0), z.dtype)
            return direction * ops.cast(u, z.dtype)

        return op(ops.abs, rule)

    z = np.array([0.0, 1.0 + 1.0j, -2.0j])
    passes(size(0.0), z)
    passes(size(0.5 - 0.5j), z)
    assert "argument: 'x'[0]" in fails(size(3.0j), z)


# ---------------------------------------------------------------------------------------- correct ops


@op_custom_gradient
def log1pexp(x):
    e = ops.exp(x)
    return ops.log(1.0 + e), lambda upstream: upstream * (1.0 - 1.0 / (1.0 + e))


def test_a_correct_op_when_compiled():
    checked = check_gradients(log1pexp, X, order=3)
    assert (checked.elements, checked.precision) == (12, "float64")
    assert checked.largest < 1e-3
    passes(op(lambda x: x**2, lambda x, u: u * 2.0 * x), 1e-7 * X.astype("float32"), dtype="own")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(dtype):
    checked = passes(log1pexp, X, order=2, dtype=dtype)
    assert checked.precision in (dtype, "float32")
    if dtype != "float64":
        x = ops.convert_to_tensor(X.astype("float32"), dtype=dtype)
        assert passes(log1pexp, x).precision in ("float64", "float32")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_complex(dtype):
    z = X + 1j * W
    passes(lambda z: ops.exp(z), z, dtype=dtype, order=2)
    passes(lambda z: ops.exp(ops.conj(z)), z, order=2)  # of which PyTorch has a lazy view
    passes(lambda z: ops.real(z) ** 2 + ops.imag(z) ** 3, z, dtype=dtype)
    passes(lambda z, x: {"z": z * ops.conj(z), "y": [ops.abs(z) * x]}, z, X, dtype=dtype)


def test_structures_and_static_arguments():
    seen = []

    @op_custom_gradient
    def function(tree, index, axis, text, n=2):
        seen.append((index, text, n))
        x, y = tree["a"], tree["b"][0]
        taken = ops.take(x, index, axis=axis)
        out = {"taken": taken * y, "index": index, "text": [text, None]}

        def rule(u):
            at = ops.transpose(ops.one_hot(index, 2, dtype=x.dtype))
            return {"tree": {"a": ops.matmul(at, u["taken"] * y), "b": [u["taken"] * taken]}}

        return out, rule

    index = np.array([1, 0, 1], "int32")
    checked = passes(function, {"a": X, "b": [np.arange(6.0).reshape(3, 2)]}, index, 0, "text", order=2)
    assert checked.elements == (4 + 6) * 1 + (4 + 6) * 2
    for given, text, n in seen:
        assert (np.array(given).tolist(), text, n) == ([1, 0, 1], "text", 2)


def test_a_layer():
    layer = keras.layers.Dense(3, activation="tanh")
    layer.build((2, 2))
    before = [np.array(w) for w in layer.get_weights()]
    assert passes(lambda x: layer(x), X.astype("float32"), order=2).precision == "float32"
    close([np.array(w) for w in layer.get_weights()], before)


def test_the_number_of_elements():
    assert passes(lambda x, n, y: x**n * y, 2.0, 3, 0.5, order=3).elements == 2 * (1 + 2 + 2)
    assert passes(lambda x, y: ops.sum(x) + y, np.zeros((0, 3)), 2.0).elements == 1


def test_the_state_of_the_caller_is_unchanged():
    count = keras.Variable(0.0, trainable=False)

    def function(x):
        count.assign_add(1.0)
        return x * x

    before = ops.convert_to_tensor([1.0])
    passes(function, X)
    assert float(count.value) == 0.0
    assert ops.convert_to_tensor([1.0]).dtype == before.dtype


def test_a_large_tensor_is_sampled():
    calls = []

    def function(x):
        calls.append(1)
        return x * x

    assert passes(function, np.ones((50, 50))).elements == 100
    assert len(calls) < 450  # four for each of a hundred elements
    checked = passes(function, np.ones((50, 50)), max_elements=7)
    assert (checked.elements, checked.total) == (7, 2500)
    assert str(checked).startswith("7 of 2,500 elements agree in float64: ")


def test_the_reason_for_a_precision():
    assert passes(cube(), X).reason == ""
    checked = passes(lambda x: x * ops.cast(ops.cast(x * x, "float32"), x.dtype), X)
    assert (checked.precision, checked.elements) == ("float32", 4)
    assert checked.reason == "an operation of the function converts float64 to float32"
    assert f"4 elements agree in float32 because {checked.reason}: " in str(checked)
    narrow = op(lambda x: x * 3.0, lambda x, u: ops.cast(ops.cast(u, "float16"), u.dtype) * 3.0)
    assert passes(narrow, X).reason == "an operation of the gradient converts float64 to float16"
    assert passes(cube(), X, dtype="float32").reason == "the function has an input of this dtype"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_progress_of_a_long_check(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr("multigrad.testing.gradient_check._SECONDS", -1.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    passes(cube(), X)
    shown = capsys.readouterr().err
    assert ("lambda: gradient, 'x'[1, 0] of shape (2, 2)\r" in shown) == is_terminal
    assert shown.endswith("\033[K\r") == is_terminal
    assert bool(shown) == is_terminal


# -------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("options", [{"order": 0}, {"order": -1}, {"max_elements": 0}, {"max_elements": -1}])
def test_options_below_one_raise(options):
    with pytest.raises(ValueError, match=rf"'{next(iter(options))}'(.|\n)*required: 1, or "):
        check_gradients(ops.exp, np.ones(3), **options)


def test_nothing_to_differentiate_raises():
    with pytest.raises(TypeError, match="no argument is differentiable"):
        check_gradients(ops.exp, np.array([1, 2]))
    with pytest.raises(TypeError, match=r"no output is differentiable(.*\n)*  got: .*int"):
        check_gradients(lambda x: ops.argmax(x), X)
    with pytest.raises(TypeError, match="order cannot be used"):
        check_gradients(log1pexp, X, order=None)


def test_an_error_of_the_function_has_a_note():
    def function(x):
        raise RuntimeError("its own")

    with pytest.raises(RuntimeError, match="its own") as error:
        check_gradients(function, X)
    assert "float64" in error.value.__notes__[0]


@pytest.mark.forward
def test_a_backend_without_gradients():
    if DIFFERENTIATES:
        passes(cube(), X)
        return
    with pytest.raises(NotImplementedError, match="computes no gradients"):
        check_gradients(cube(), X)


# -------------------------------------------------------------------------------------- compare_backends

CODE = """
    import keras
    import multigrad
    import numpy as np
    from keras import ops

    scale = keras.Variable(2.0, name="scale")
    factor = 1.001 if keras.backend.backend() == {wrong!r} else 1.0

    @multigrad.op_custom_gradient
    def fn(x, n):
        def rule(upstream, variables):
            return upstream["y"] * scale * n * factor, [ops.sum(upstream["y"] * x * n)]

        return {{"y": x * n * scale, "most": ops.argmax(x), "name": "text"}}, rule

    args = (np.array([-1.0, 0.5, 2.0], "float32"), 3)
"""


@pytest.mark.package
def test_installed_backends_are_compared(tmp_path):
    """If only one is installed, the error says so."""
    others = [name for name in DIFFERENTIATING if name != BACKEND and is_installed(name)]
    path = tmp_path / "compared.py"
    path.write_text("if True:" + CODE.format(wrong=BACKEND))
    if not others:
        with pytest.raises(ValueError, match="two or more") as none:
            compare_backends(path)
        assert BACKEND in str(none.value)
        return
    with pytest.raises(AssertionError, match="the backends disagree") as error:
        compare_backends(path, backends=(others[0], BACKEND))
    said = str(error.value)
    assert "argument: gradient of 'x'" in said
    assert f"on {BACKEND}" in said
    assert "gradient of variable" not in said
    assert "output" not in said


@pytest.mark.package
def test_measuring_in_a_process(tmp_path):
    path = tmp_path / "compared.py"
    path.write_text("if True:" + CODE.format(wrong="none"))
    measured = measure(BACKEND, path, tmp_path)
    assert measured.arrays["output['y']"].tolist() == [-6.0, 3.0, 12.0]
    assert measured.arrays["output['most']"] == 2
    assert np.abs(measured.arrays["gradient of 'x'"]).min() >= 6.0  # 6 times a weight between 1 and 2
    assert measured.precisions == {
        "output['most']": "exact",
        "output['y']": "float32",
        "gradient of 'x'": "float32",
        "gradient of variable 'scale'": "float32",
    }
    assert set(compare({"a": measured, "b": measured}, ()).values()) == {0.0}


@pytest.mark.package
@pytest.mark.forward
def test_a_failed_process_raises(tmp_path):
    said = "does not define args" if DIFFERENTIATES else "computes no gradients"
    path = tmp_path / "compared.py"
    path.write_text("fn = abs")
    with pytest.raises(RuntimeError, match=f"the process on {BACKEND} failed") as error:
        measure(BACKEND, path, tmp_path)
    assert said in str(error.value)
    assert "Traceback" in str(error.value)


def measured(number=1.0, name="output", shape=(2,), precision="float32"):
    array = np.ones(shape)
    array[-1] = number
    return Measurement({name: array}, {name: precision})


@pytest.mark.forward
def test_agreement():
    assert compare({"jax": measured(), "torch": measured(1.0 + 1e-6)}, ()) == {
        "output": pytest.approx(1e-6, rel=1e-3)
    }
    for number in (np.inf, np.nan):
        assert compare({"jax": measured(number), "torch": measured(number)}, ()) == {"output": 0.0}
    # The largest difference of the other elements counts.
    pair = {name: measured(np.inf, shape=(2,)) for name in ("jax", "torch")}
    pair["torch"].arrays["output"][0] += 1e-6
    assert compare(pair, ()) == {"output": pytest.approx(1e-6, rel=1e-3)}
    compare({"jax": measured(), "torch": measured(1.5)}, (), rtol=1.0)
    compare({"jax": measured(), "torch": measured(1.5)}, (), atol=1.0)


@pytest.mark.forward
def test_agreement_on_gradients_that_are_zero_up_to_rounding():
    """The gradient of the keys' bias in attention is such a zero. Other outputs must agree exactly."""

    def with_(number, name):
        own = {"output": np.ones(2), name: np.array([number])}
        return Measurement(own, dict.fromkeys(own, "float32"))

    compare({"jax": with_(1e-8, "gradient of 'b'"), "torch": with_(-3e-7, "gradient of 'b'")}, ())
    for name, number in (("gradient of 'b'", 1e-5), ("another", -3e-7)):
        with pytest.raises(AssertionError, match="the backends disagree"):
            compare({"jax": with_(1e-8, name), "torch": with_(number, name)}, ())
    # Indices do not count as magnitudes.
    one, other = with_(1e-8, "gradient of 'b'"), with_(1e-5, "gradient of 'b'")
    for own in (one, other):
        own.arrays["indices"], own.precisions["indices"] = np.array([10**6]), "exact"
    with pytest.raises(AssertionError, match="the backends disagree"):
        compare({"jax": one, "torch": other}, ())


@pytest.mark.forward
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (measured(1.001), "the backends disagree"),
        (measured(np.nan), "got: nan on torch"),
        (measured(np.inf), "got: inf on torch"),
        (measured(1.0 + 1e-9, precision="exact"), "the backends disagree"),
        (measured(1.0, shape=(3,)), "different structures or shapes"),
        (measured(1.0, name="another"), "different structures or shapes"),
    ],
)
def test_disagreement(other, said):
    first = measured(precision=next(iter(other.precisions.values())))
    with pytest.raises(AssertionError) as error:
        compare({"jax": first, "torch": other}, ["tensorflow"])
    assert said in str(error.value)
    assert "argument: output" in str(error.value)
    if "disagree" in said:
        assert "not installed: tensorflow" in str(error.value)


@pytest.mark.forward
@pytest.mark.parametrize(
    ("backends", "said"),
    [
        (["jax"], "backends cannot be used"),
        (["jax", "jax"], "backends cannot be used"),
        (["jax", "numpy"], "backends cannot be used"),
        (["jax", "theano"], "backends cannot be used"),
        (None, "pip install tensorflow; pip install torch"),
    ],
)
def test_backends_that_cannot_be_compared_raise(backends, said, monkeypatch):
    monkeypatch.setattr("multigrad.testing.comparison.is_installed", lambda name: name == "jax")
    with pytest.raises(ValueError, match=said):
        compare_backends("fn = abs\nargs = (1.0,)", **({} if backends is None else {"backends": backends}))


@pytest.mark.forward
def test_a_file_and_code(tmp_path):
    with pytest.raises(FileNotFoundError):
        _source_file("nowhere.py", tmp_path)
    file = tmp_path / "there.py"
    file.touch()
    assert _source_file(str(file), tmp_path) == _source_file(file, tmp_path) == file
    assert _source_file("\n    fn = abs\n    args = ()", tmp_path).read_text() == "\nfn = abs\nargs = ()"


@pytest.mark.parametrize("x", [-20.0, -15.0, 0.0, 20.0])
def test_a_function_that_loses_precision_in_float64(x):
    """The function is as rough in double as in single precision, and too steep for a step of that size."""
    check_gradients(lambda x: ops.log(1.0 + ops.exp(x)), np.array([x]))


def test_two_variables_with_the_same_name():
    """Both variables are checked."""
    first, second = (keras.Variable(number, name="same") for number in (2.0, 3.0))

    def product(x):
        factor = 7.0 if backend.active.is_compiling() else 1.0
        return x * shelf.scale_gradient(first.value, factor) * second.value

    said = fails(product, 2.0, variables=[first, second], compiled=True)
    assert "the compiled function differs from the eager function" in said
    assert "gradient of variable 'same'" in said


def shifted_softmax(x, b):
    return ops.softmax(ops.add(x, b))


def normalized(x, w):
    y = ops.matmul(x, w)
    return (y - ops.mean(y, axis=0)) / ops.std(y, axis=0)


@pytest.mark.slow_on("torch")
@pytest.mark.parametrize("dtype", ["own", None])
def test_a_gradient_that_is_zero_up_to_rounding(dtype):
    """Relative to itself, the rounding error of a zero can be anything."""
    x = np.linspace(-1.0, 2.0, 12, dtype="float32").reshape(4, 3)
    check_gradients(shifted_softmax, x, np.float32([0.3]), dtype=dtype)
    check_gradients(lambda b: shifted_softmax(x, b), np.float32([0.3]), dtype=dtype)
    check_gradients(lambda b, x: normalized(x + b, x[:3]), np.float32([0.5]), x, dtype=dtype)


@pytest.mark.parametrize("size", [10.0, 1e3, 1e5, 1e8])
def test_a_steep_function_at_a_large_argument(size):
    """A step relative to the argument would cross the pole."""

    def pole(factor):
        return op(lambda x: 1.0 / (x - (size - 0.5)), lambda x, u: -factor * u / (x - (size - 0.5)) ** 2)

    passes(pole(1.0), np.array([size, -1.5 * size]))
    assert "differs from the central differences" in fails(pole(1.01), np.array([size]))


@pytest.mark.parametrize(
    ("function", "kept_of", "rule"),
    [
        (lambda x: x * x, lambda x: x, lambda x, u: 2.0 * u * x),
        (ops.relu, lambda x: x > 0.0, lambda mask, u: ops.where(mask, u, 0.0)),
        (ops.abs, ops.sign, lambda sign, u: u * sign),
        (
            lambda x: ops.max(x) + 0.0 * x,
            lambda x: x == ops.max(x),
            lambda hit, u: ops.where(hit, ops.sum(u), 0.0),
        ),
    ],
    ids=["input", "mask", "sign", "place"],
)
def test_a_rule_that_uses_state_of_another_call(function, kept_of, rule):
    kept = {}

    @op_custom_gradient
    def careless(x):
        kept["own"] = kept_of(x)
        return function(x), lambda upstream: rule(kept["own"], upstream)

    said = fails(careless, X)
    assert said.startswith("careless: the gradient of a call changes when the function is called again")
    assert "argument: 'x'[" in said


def test_a_function_that_rejects_some_arguments():
    """The arguments of the second call are rejected, or are accepted."""

    def careful(x, total, within):
        if abs(float(ops.sum(x)) - total) > within:
            raise ValueError("no probabilities")
        return ops.log(x)

    for within in (1e-2, 3e-3):
        passes(op(lambda x, w=within: careful(x, 1.0, w), lambda x, u: u / x), np.array([0.2, 0.3, 0.5]))
    ordered = np.array([0.2, 0.3, 0.5])

    def rising(x):
        if not bool(ops.all(x[1:] > x[:-1])):
            raise ValueError("not in order")
        return x * x

    passes(op(rising, lambda x, u: 2.0 * u * x), ordered)


@pytest.mark.parametrize("ratio", [10.0, 1e3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "fault", [lambda u, b: 0.0 * b, lambda u, b: -2.0 * u * b, lambda u, b: 2.0 * u * b + 0.1]
)
def test_a_small_gradient_next_to_a_large_one(ratio, dtype, fault):
    """The tolerance for rounding errors of a zero does not hide faults of another gradient."""

    @op_custom_gradient
    def both(a, b):
        return ratio * a * a + b * b, lambda u: (2.0 * ratio * u * a, fault(u, b))

    assert "argument: 'b'[" in fails(both, X, X + 1.0, dtype=dtype)


@pytest.mark.parametrize("size", [255.0, 1e4, 1e8])
@pytest.mark.parametrize(("dtype", "factor"), [("float64", 1.01), ("float32", 1.01), ("float32", 0.0)])
def test_a_wrong_rule_of_large_arguments(size, dtype, factor):
    """The step grows with the argument, so that the rounding error of the difference is smaller."""
    x = (size * np.array([1.0, -2.0])).astype(dtype)
    for f, rule in (
        (lambda x: x * x, lambda x, u: 2.0 * u * x),
        (lambda x: ops.log(ops.abs(x)), lambda x, u: u / x),
    ):
        checked = passes(op(f, rule), x, dtype="own")
        assert (checked.precision, checked.zeros) == (dtype, 0)
        for wrong in (factor, -1.0):
            assert DIFFERS in fails(op(f, lambda x, u, r=rule, w=wrong: r(x, u) * w), x, dtype="own")


RIGHT = {
    "product": lambda x: x * ops.sum(x),
    "offset": lambda x: x + 1e6,
    "logarithm and offset": lambda x: ops.log(x) + 1e3,
    "inverse": lambda x: 1.0 / x,
    "norm": lambda x: ops.sqrt(1.0 + ops.sum(x * x)),
    "centred": lambda x: x - ops.mean(x),
    "log1pexp": shelf.log1pexp,
    "softmax": ops.softmax,
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_correct_rule_at_any_scale(name, dtype):
    for size in (1e-8, 1e-3, 1.0, 100.0, 1e8):
        passes(RIGHT[name], (size * np.array([1.0, 0.7, 0.9])).astype(dtype), dtype="own")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_a_sum_of_many_elements(dtype, size):
    x = (size * np.random.default_rng(0).normal(size=5000)).astype(dtype)
    passes(lambda x: {"sum": ops.sum(x), "square": ops.sum(x * x)}, x, dtype="own", max_elements=5)


def test_derivatives_that_differences_cannot_resolve():
    """Next to a large output, a small derivative cannot be measured. The result counts it as zero."""
    for slope in (1.0, 0.0, -1.0):
        offset = op(lambda x: x + 1e8, lambda x, u, slope=slope: u * slope)
        checked = passes(offset, X.astype("float32"), dtype="own")
        assert (checked.elements, checked.zeros) == (4, 4)
    assert passes(lambda x: x + 1e8, X).zeros == 0
    assert passes(ops.square, np.array([0.0, 1.0])).zeros == 1
    assert passes(ops.square, np.array([1.0, 2.0]), order=3).zeros == 2


def test_a_curved_function_near_zero_is_in_double_precision():
    """The function is curved on the scale of float32's resolution. This curvature is not rounding."""
    for size in (1e-3, 1e-6, 1e-9):
        assert passes(lambda x: ops.sqrt(x) + 1.0 / x, size * np.abs(X)).precision == "float64"

    def rounded(x):
        return ops.cast(ops.cast(1.0 + x, "float32"), x.dtype)

    assert passes(rounded, 1e-9 * np.abs(X)).precision == "float32"


@pytest.mark.parametrize("order", [2, 3])
def test_a_derivative_with_respect_to_the_upstream_gradient(order):
    """This derivative includes everything after the op."""
    hidden = op(lambda x: x**2, lambda x, u: ops.stop_gradient(u) * 2.0 * x)
    passes(hidden, X)
    said = fails(hidden, X, order=order)
    assert "the derivative of order 2 of 'x' differs from the central differences" in said
    assert "argument: upstream of output[" in said
    assert "4 of 8 elements disagree" in said
    right = op(lambda x: x**2, lambda x, u: u * 2.0 * x)
    assert passes(right, X, order=order).elements == 4 * order


def test_a_mixed_derivative_of_the_third_order():
    """The derivative of the rule is right with respect to its upstream gradient, and wrong to x."""

    @op_custom_gradient
    def slope(x, u):
        return 2.0 * x * u, lambda v: (2.0 * u * v, 2.0 * ops.stop_gradient(x) * v)

    function = op(lambda x: x**2, slope)
    passes(function, X, order=2)
    assert "the derivative of order 3 of upstream of output differs" in fails(function, X, order=3)


def test_a_derivative_with_respect_to_a_complex_upstream_gradient():
    slope = op_custom_gradient(lambda z, u: (u * ops.conj(2.0 * z), lambda v: (ops.conj(v) * u * 2.0, v * z)))
    z = X + 1j * W
    passes(op(lambda z: z * z, slope), z)
    said = fails(op(lambda z: z * z, slope), z, order=2)
    assert "argument: upstream of output[" in said


@pytest.mark.package
@pytest.mark.parametrize(
    ("factor", "status", "said"), [(2.0, 0, "2 elements agree"), (2.1, 1, "differs from the")]
)
def test_the_command_that_checks_a_file(factor, status, said, tmp_path):
    path = tmp_path / "my_op.py"
    path.write_text(
        "import multigrad\nimport numpy as np\n\n"
        f"fn = multigrad.op_custom_gradient(lambda x: (x**2, lambda u: u * {factor} * x))\n"
        "args = (np.array([1.0, 2.0]),)\n"
    )
    done = run_on(BACKEND, "multigrad.testing", "check", str(path))
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr

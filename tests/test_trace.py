"""`trace_gradients`: the records of ops in a context."""

import contextlib
import contextvars
import json
import math
import sys
import threading
import warnings

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, DIFFERENTIATES, array, close, compiled, numpy

from multigrad import backend, grad, op_custom_gradient, trace_gradients
from multigrad import op as core_op
from multigrad.common.process_wide import Shared
from multigrad.tracing.records import summarize
from multigrad.tracing.trace import Trace

CHAIN = """\
call        x   output   upstream   current   downstream
3 square   16      256          1        32           32
2 square    4       16         32         8          256
1 square    2        4        256         4         1024"""


@op_custom_gradient
def square(x):
    return x**2, lambda upstream: upstream * 2.0 * x


@op_custom_gradient
def seven(x):
    e = x**2
    return e * x, lambda u: u * 7.0 * e


@op_custom_gradient
def within(x):
    y = square(x)
    return y * 1.0, lambda u: u * 3.0 * y / x


def chain(x):
    return square(square(square(x)))


def traced(function, *args, **options):
    with trace_gradients(**options) as trace:
        function(*args)
    return trace


def flow(trace):
    """Return the steps of scalars: op, number, upstream and downstream."""
    return [
        (step.call.op, step.call.number, *map(float, (*step.upstream.values(), *step.downstream.values())))
        for step in trace.steps
    ]


def numbers(tensors):
    return {path: float(value) for path, value in tensors.items()}


def calls_of(trace):
    return [(call.op, call.within) for call in trace.calls]


# ------------------------------------------------------------------------------- records


def test_the_table_of_a_chain():
    assert str(traced(grad(chain), 2.0)) == CHAIN


@pytest.mark.parametrize("wrap", [lambda f: f, compiled])
@pytest.mark.parametrize("op", [square, seven, within])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_gradients_are_the_same_as_outside_of_a_trace(op, order, wrap):
    f = op
    for _ in range(order):
        f = grad(f)
    f = wrap(f)
    outside = f(array(1.5))
    with trace_gradients() as trace:
        inside = f(array(1.5))
    close(inside, outside)
    assert trace.steps
    before = len(trace.steps)
    close(f(array(1.5)), outside)
    assert len(trace.steps) == before


def test_each_run_of_a_rule_is_a_step():
    trace = traced(grad(grad(lambda x: square(square(x)))), 2.0)
    # One step for the first order, and another one for the output of the first op in the rule of the second.
    assert flow(trace) == [("square", 2, 1.0, 8.0), ("square", 1, 8.0, 32.0), ("square", 1, 8.0, 32.0)]
    assert len(trace.calls) == 2


def test_a_function_runs_once_in_a_trace():
    calls = []

    @op_custom_gradient
    def op(x):
        calls.append("f")
        return x * 2.0, lambda upstream: calls.append("rule") or upstream * 7.0

    trace = traced(grad(op), 1.0)
    assert calls == ["f", "rule"]
    assert (len(trace.calls), len(trace.steps)) == (1, 1)


def test_ops_in_ops():
    trace = traced(grad(within), 2.0)
    assert calls_of(trace) == [("square", "within"), ("within", None)]
    assert flow(trace) == [("within", 2, 1.0, 6.0)]  # only the rule of the outer op runs
    assert str(trace).splitlines()[2].split() == ["1", "square,", "in", "within", "2", "4", "no", "gradient"]
    twice = traced(grad(grad(within)), 2.0)
    assert calls_of(twice) == calls_of(trace)
    assert flow(twice) == [("within", 2, 1.0, 6.0), ("square", 1, 1.5, 6.0)]


def test_an_op_in_a_rule():
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: square(u) * 7.0), name="op")
    trace = traced(grad(lambda x: 3.0 * op(x)), 2.0)
    assert calls_of(trace) == [("op", None), ("square", "op")]
    assert flow(trace) == [("op", 1, 3.0, 63.0)]


def test_structures_static_arguments_integers_and_none():
    @op_custom_gradient
    def op(tree, k, mode="plain"):
        a, (b, n) = tree["a"], tree["rest"]
        out = {"y": a * b * k, "n": n + 1}
        return out, lambda U: ({"a": U["y"] * 7.0, "rest": (None, None)}, None, None)

    rest = array(1.0, 3.0), array(4, dtype="int32")
    trace = traced(grad(lambda a: ops.sum(op({"a": a, "rest": rest}, 5)["y"])), 2.0)
    (call,), (step,) = trace.calls, trace.steps
    assert list(call.inputs) == ["tree['a']", "tree['rest'][0]", "tree['rest'][1]"]
    wanted = {"tree['a']": 14.0, "tree['rest'][0]": None, "tree['rest'][1]": None}
    assert {path: None if v is None else v.tolist() for path, v in step.downstream.items()} == wanted
    assert set(call.outputs) == {"output['y']", "output['n']"}
    assert step.upstream["output['n']"] is None
    assert step.upstream["output['y']"].tolist() == [1.0, 1.0]
    assert "none" in str(trace)


def test_variables_with_the_same_name_are_separate():
    one, other = keras.Variable(3.0, name="w"), keras.Variable(4.0, name="w")
    op = op_custom_gradient(lambda x: (x * one * other, lambda u, variables: (u, [u * 5.0, u * 7.0])))
    (step,) = traced(lambda: grad(op, 0, variables=[one, other])(2.0)).steps
    assert list(step.call.inputs)[:2] == ["x", f"variable {one.path!r}"]
    assert [float(v) for v in step.call.inputs.values()] == [2.0, 3.0, 4.0]
    assert [float(v) for v in step.downstream.values()] == [1.0, 5.0, 7.0]


def test_records_do_not_change_with_the_arrays():
    x = keras.Variable(2.0)
    trace = traced(lambda: square(x))
    x.assign(5.0)
    assert float(trace.calls[0].inputs["x"]) == 2.0


# ------------------------------------------------------------------------------- contexts


@pytest.mark.forward
def test_the_forward_pass_is_recorded_on_every_backend():
    assert core_op.apply is backend.active.apply
    with trace_gradients() as trace:
        assert core_op.apply is not backend.active.apply
        square(square(array(2.0)))
    assert core_op.apply is backend.active.apply
    square(array(3.0))
    assert [(call.op, call.number, numbers(call.outputs)) for call in trace.calls] == [
        ("square", 1, {"output": 4.0}),
        ("square", 2, {"output": 16.0}),
    ]
    assert trace.steps == []
    assert str(trace).splitlines()[1].split() == ["1", "square", "2", "4", "no", "gradient"]
    if not DIFFERENTIATES:
        with trace_gradients(), pytest.raises(NotImplementedError, match=BACKEND):
            grad(square)(2.0)


@pytest.mark.forward
def test_a_trace_without_calls():
    wanted = "No op was called in this trace. trace_gradients(model) records layers, too."
    assert str(traced(lambda: None)) == wanted


def test_calls_before_and_gradients_after_the_trace_are_not_recorded():
    from multigrad import vjp

    _, before = vjp(square, 3.0)
    with trace_gradients() as trace:
        before(1.0)
        _, later = vjp(seven, 3.0)
        count = len(trace.steps)
    later(1.0)
    assert [call.op for call in trace.calls] == ["seven"]
    assert len(trace.steps) == count
    assert not any(step.call.op == "square" for step in trace.steps)


def test_nested_traces_both_record():
    with trace_gradients() as outer:
        grad(square)(2.0)
        with trace_gradients() as inner:
            grad(seven)(2.0)
        grad(square)(3.0)
    assert flow(inner) == [("seven", 1, 1.0, 28.0)]
    assert flow(outer) == [("square", 1, 1.0, 4.0), ("seven", 2, 1.0, 28.0), ("square", 3, 1.0, 6.0)]


def test_an_exception_propagates_and_the_records_remain():
    failing = op_custom_gradient(lambda x: (x, lambda u: {}["missing"]))

    def both(x):
        return failing(square(x))

    with pytest.raises(KeyError, match="missing"), trace_gradients() as trace:  # noqa: PT012
        grad(square)(2.0)
        grad(both)(2.0)
    assert not trace.open
    assert (len(trace.calls), flow(trace)) == (3, [("square", 1, 1.0, 4.0)])
    assert core_op.apply is backend.active.apply
    assert flow(traced(grad(seven), 1.0)) == [("seven", 1, 1.0, 7.0)]


def test_other_threads_are_not_recorded():
    def run(target):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()

    own = []
    with trace_gradients() as trace:
        run(lambda: grad(seven)(2.0))
        run(lambda: own.append(traced(grad(seven), 1.0)))
        assert trace.calls == []
        context = contextvars.copy_context()
        run(lambda: context.run(grad(seven), 3.0))
    assert flow(own[0]) == [("seven", 1, 1.0, 7.0)]
    assert flow(trace) == [("seven", 1, 1.0, 63.0)]


@pytest.mark.forward
def test_a_shared_context_ends_with_the_last_thread():
    on = []

    @contextlib.contextmanager
    def switch():
        on.append(1)
        yield
        on.pop()

    shared = Shared(switch)
    first, second = threading.Event(), threading.Event()

    def other():
        with shared:
            first.set()
            second.wait(10)

    thread = threading.Thread(target=other)
    with shared:
        thread.start()
        assert first.wait(10)
    assert on == [1]  # the second context is nested, so that it is entered once
    second.set()
    thread.join()
    assert on == []


def test_a_function_that_was_compiled_before_is_recorded():
    f, x = compiled(grad(chain)), array(2.0)
    close(f(x), array(1024.0))
    trace = traced(f, x)
    assert str(trace) == CHAIN
    close(f(x), array(1024.0))
    assert len(trace.calls) == 3


def test_a_trace_in_a_compiled_function_raises():
    def inside(x):
        with trace_gradients():
            return square(x)

    if BACKEND == "torch":
        import torch

        inside = torch.compile(inside, backend="eager")
    with pytest.raises(RuntimeError, match="open the trace around the call"):
        compiled(inside)(array(2.0))
    assert core_op.apply is backend.active.apply


@pytest.mark.parametrize("eagerly", [True, False])
def test_fit(eagerly):
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.Lambda(seven)])
    model.compile("sgd", "mse", run_eagerly=eagerly)
    with warnings.catch_warnings():
        # TensorFlow (2.21) warns that tf.data is not affected.
        warnings.filterwarnings("ignore", "Even though the `tf.config.experimental_run_functions_eagerly`")
        x, y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")
        trace = traced(lambda: model.fit(x, y, batch_size=2, epochs=1, verbose=0))
    assert calls_of(trace) == [("seven", None), ("seven", None)]
    assert len(trace.steps) == 2
    for step in trace.steps:
        upstream, x, downstream = step.upstream["output"], step.call.inputs["x"], step.downstream["x"]
        np.testing.assert_allclose(downstream, upstream * 7.0 * x**2, rtol=1e-5)


# ------------------------------------------------------------------------------- flags


def flags(*gradients, **options):
    """Return the flags of steps whose rules return these gradients."""
    op = op_custom_gradient(lambda x, answer: (x * 1.0, lambda u: (answer * 1.0, None)), name="op")

    def f(x):
        for answer in reversed(gradients):
            x = op(x, array(answer))
        return ops.sum(x)

    trace = traced(grad(f), np.ones(np.shape(gradients[0]), "float32"), **options)
    return [step.flags for step in trace.steps]


EXPLODING = "exploding: the largest downstream gradient, {0}, is {0} times the largest upstream gradient"
FLAGS = [
    (
        ([1.0, math.nan, math.nan], [math.inf, 1.0, 1.0]),
        [
            ["NaN: 2 of 3 in downstream of x"],
            ["NaN: 2 of 3 in upstream of output", "Inf: 1 of 3 in downstream of x"],
        ],
    ),
    (
        ([0.0, 0.0], [3.0, 0.0]),
        [
            ["all zero: every downstream gradient, although upstream is not zero"],
            ["all zero: every upstream gradient"],
        ],
    ),
    (([2e4],), [[EXPLODING.format("2e+04")]]),
    (([9e3],), [[]]),
    (([200.0], [4e4]), [[], [EXPLODING.format("4e+04") + " of the first step"]]),
]


@pytest.mark.parametrize(("gradients", "wanted"), FLAGS)
def test_flags_of_gradients(gradients, wanted):
    assert flags(*gradients) == wanted


def test_the_limit_of_exploding_steps():
    assert flags([9.0], exploding=8.0)[0]
    assert flags([9.0], exploding=10.0) == [[]]


@pytest.mark.forward
def test_flags_of_values():
    with np.errstate(all="ignore"), trace_gradients() as trace:
        op = op_custom_gradient(lambda x: (ops.log(x), lambda u: u), name="log")
        op(array(-1.0, 0.0, 1.0))
    assert trace.calls[0].flags == ["NaN: 1 of 3 in output", "Inf: 1 of 3 in output"]
    assert str(trace).splitlines()[-2:] == ["1 log: NaN: 1 of 3 in output", "1 log: Inf: 1 of 3 in output"]


# ------------------------------------------------------------------------------- text, data, figure


def test_the_table_of_tensors():
    trace = traced(grad(lambda x: ops.sum(seven(x))), np.array([[0.0, 1.0], [2.0, -3.0]], "float32"))
    shown = [line.split("  ")[-1].strip() for line in str(trace).splitlines()]
    assert shown == ["downstream", "(2, 2)", "mean 24.5", "largest 63", "25 % zeros"]


@pytest.mark.forward
@pytest.mark.parametrize(
    ("values", "mean", "largest", "zeros"),
    [
        (np.array([0, 0, -3, 1], "int32"), -0.5, 3.0, 0.5),
        (np.array([True, False]), 0.5, 1.0, 0.5),
        (np.array([3 + 4j, 0]), 1.5 + 2j, 5.0, 0.5),
        (np.array([6e4, 6e4], "float16"), 6e4, 6e4, 0.0),  # the sum overflows float16
        (np.zeros((0, 2)), None, None, None),
        (np.array(["a"]), None, None, None),
    ],
)
def test_summaries(values, mean, largest, zeros):
    summary = summarize(values)
    assert (summary.shape, summary.largest, summary.zeros) == (values.shape, largest, zeros)
    assert summary.mean == (mean if mean is None else pytest.approx(mean, rel=1e-2))


def test_to_dict():
    trace = traced(grad(seven), 3.0)
    assert repr(trace) == "<Trace: 1 calls, 1 steps>"
    assert trace.steps[0].call is trace.calls[0]
    data = trace.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data

    def scalar(value):
        whole = {"shape": [], "dtype": "float32", "zeros": 0.0, "nans": 0, "infinities": 0}
        return whole | {"mean": value, "largest": value, "value": value}

    call = {"op": "seven", "call": 1, "flags": []}
    inputs, outputs = {"x": scalar(3.0)}, {"output": scalar(27.0)}
    upstream, downstream = {"output": scalar(1.0)}, {"x": scalar(63.0)}
    assert data == {
        "calls": [call | {"within": None, "inputs": inputs, "outputs": outputs}],
        "steps": [call | {"upstream": upstream, "current": {"x": 63.0}, "downstream": downstream}],
    }


def test_to_dict_of_nan_infinity_and_complex_numbers():
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: u * 0.0 - math.inf))
    data = json.loads(json.dumps(traced(grad(op), 2.0).to_dict(), allow_nan=False))
    (step,) = data["steps"]
    assert step["downstream"]["x"]["value"] == "-inf"
    assert float(step["current"]["x"]) == -math.inf
    assert float(step["downstream"]["x"]["largest"]) == math.inf


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_the_figure(plt, tmp_path):
    figure = traced(grad(chain), 2.0).plot()
    shown = texts(figure)
    assert [text for text in shown if text.endswith("square")] == ["1 square", "2 square", "3 square"]
    assert [text for text in shown if text.startswith("×")] == ["× 4", "× 8", "× 32"]
    assert [text for text in shown if text.isdigit()] == ["2", "1024", "4", "256", "16", "32", "256", "1"]
    widths = [
        patch.get_extents().width for patch in figure.axes[0].patches if type(patch).__name__ == "FancyArrow"
    ]
    gradients = widths[1::2]
    assert gradients == sorted(gradients, reverse=True)  # larger gradients are wider
    figure.savefig(tmp_path / "chain.png")
    assert (tmp_path / "chain.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_omits_inner_ops_unless_they_are_selected(plt):
    trace = traced(grad(within), 2.0)
    assert "1 square" not in texts(trace.plot())
    assert "2 within" in texts(trace.plot())
    assert "1 square" in texts(trace.plot(calls=[1]))
    for wrong in ([3], [1, 7], []):
        with pytest.raises(ValueError, match="numbers from 1 to 2"):
            trace.plot(calls=wrong)


def test_the_figure_shows_flags_and_gaps(plt):
    """The arrow starts with the gradient of the call below, and ends with the gradient of the call above."""
    nan = op_custom_gradient(lambda x: (x * 1.0, lambda u: u * math.nan))
    assert "NaN: 1 of 1 in downstream of x" in texts(traced(grad(nan), 2.0).plot())
    seven = op_custom_gradient(lambda x: (x * 1.0, lambda u: u * 7.0))
    three = op_custom_gradient(lambda x: (x * 1.0, lambda u: u * 3.0))
    shown = texts(traced(grad(lambda x: three(seven(x) * 2.0)), 5.0).plot())
    assert "5\n⋮\n10" in shown
    assert "6\n⋮\n3" in shown


@pytest.mark.forward
def test_a_figure_without_calls_or_gradients(plt):
    assert "1 square" in texts(traced(lambda: square(array(2.0))).plot())
    with pytest.raises(ValueError, match="a trace in which an op was called"):
        Trace(1.0).plot()


@pytest.mark.forward
def test_a_figure_without_matplotlib_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        traced(lambda: square(array(2.0))).plot()


def test_complex_gradients():
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: u * array(2j, dtype="complex64")), name="op")
    trace = traced(grad(lambda x: ops.real(op(ops.cast(x, "complex64")))), 1.0)
    (step,) = trace.to_dict()["steps"]
    assert complex(step["current"]["x"]) == 2j
    assert numpy(trace.steps[0].downstream["x"]).dtype.kind == "c"


def test_a_call_without_tensors_has_a_row():
    trace = traced(square, 2)
    assert str(trace).splitlines()[1].split() == ["1", "square", "no", "gradient"]

"""`trace_gradients(model)`: layers in the trace, and the line about the first NaN."""

import threading

import keras
import numpy as np
import pytest
from keras import ops
from support import FIT_MODES, array, close, seven

from multigrad import grad, op_custom_gradient, trace_gradients, value_and_grad
from multigrad.tracing.diagnosis import diagnose
from multigrad.tracing.records import summarize
from multigrad.tracing.table import format_value

CALL = keras.Operation.__call__
STATELESS_CALL = keras.Layer.stateless_call


@op_custom_gradient
def spoiled(x):
    return x * 1.0, lambda upstream: upstream * np.nan


class Block(keras.layers.Layer):
    """A layer that contains a layer and other code."""

    def __init__(self, code=lambda x: x, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.layers.Dense(3, kernel_initializer="ones", name="inner")
        self.code = code

    def call(self, x):
        return self.code(self.inner(x))


def model_of(*layers, size=3):
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((size,)), *layers], name="model")


def dense(name, **options):
    return keras.layers.Dense(3, name=name, kernel_initializer="ones", **options)


X = np.ones((2, 3), "float32")


def loss_of(model, x=X):
    return value_and_grad(lambda: ops.sum(model(x)), variables=model.trainable_variables)()


def traced(model, run=loss_of, x=X):
    """Return the trace of a training step of the model, or of another run."""
    with trace_gradients(model) as trace:
        run(model, x)
    return trace


def forward(model, x):
    return model(x)


def calls_of(trace):
    return [call.op for call in trace.calls]


def steps_of(trace):
    return [step.call.op for step in trace.steps]


def lines_of(trace):
    return diagnose(trace.calls, trace.steps)


# ------------------------------------------------------------------------------- records


def test_outputs_and_gradients_of_layers():
    model = model_of(dense("a"), Block(lambda x: x * 2.0, name="b"), dense("c"))
    wanted = loss_of(model, X)
    with trace_gradients(model) as trace:
        got = loss_of(model, X)
    close(got, wanted)
    assert calls_of(trace) == ["a", "b/inner", "b", "c", "model"]
    assert [call.within for call in trace.calls] == ["model", "b", "model", "model", None]
    assert [call.layer for call in trace.calls] == ["Dense", "Dense", "Block", "Dense", "Sequential"]
    assert [call.outputs["output"].max() for call in trace.calls] == [3.0, 9.0, 18.0, 54.0, 54.0]
    assert steps_of(trace) == ["model", "c", "b", "b/inner", "a"]
    assert [step.upstream["output"].max() for step in trace.steps] == [1.0, 1.0, 3.0, 6.0, 18.0]
    assert lines_of(trace) == []
    assert "2 b/inner, in b" in str(trace)


@pytest.mark.filterwarnings("ignore:Even though the `tf.config")
@pytest.mark.parametrize("mode", FIT_MODES)
def test_fit(mode):
    model = model_of(dense("a"), dense("b"))
    model.compile("sgd", "mse", **mode)
    model.fit(X, X, verbose=0)
    with trace_gradients(model) as trace:
        model.fit(X, X, verbose=0)
    assert calls_of(trace) == ["a", "b", "model"]
    assert [call.within for call in trace.calls] == ["model", "model", None]
    assert steps_of(trace) == ["model", "b", "a"]
    model.fit(X, X, verbose=0)
    assert len(trace.calls) == 3


@pytest.mark.parametrize("losses", [False, True])
def test_stateless_call(losses):
    model = model_of(dense("a"), dense("b", activity_regularizer="l2"))
    variables = model.trainable_variables

    def loss(values):
        output, _, *rest = model.stateless_call(values, [], ops.array(X), return_losses=losses)
        return ops.sum(output) + sum(map(ops.sum, rest[0] if losses else rest))

    values = [ops.array(ops.convert_to_numpy(variable)) for variable in variables]
    wanted = grad(loss)(values)
    with trace_gradients(model) as trace:
        close(grad(loss)(values), wanted)
    assert calls_of(trace) == ["a", "b", "model"]
    assert trace.calls[-1].inputs.keys() == {"inputs"}
    assert steps_of(trace) == ["model", "b", "a"]


def test_each_row_once_for_a_gradient_with_respect_to_the_input():
    """The model has trainable weights, so that PyTorch records this gradient."""
    model = model_of(dense("a"), dense("b"))
    with trace_gradients(model) as trace:
        grad(lambda x: ops.sum(model(x)))(ops.array(X))
    assert steps_of(trace) == ["model", "b", "a"]


@pytest.mark.forward
def test_the_model_is_unchanged():
    model = model_of(dense("a"), Block(name="b"))
    before = {layer.name: [*vars(layer)] for layer in model.layers}
    outputs = model(X)
    with trace_gradients(model) as trace:
        assert keras.Operation.__call__ is not CALL
        close(model(X), outputs)
    with trace_gradients():  # of ops alone
        assert keras.Operation.__call__ is CALL
    assert keras.Layer.stateless_call is STATELESS_CALL
    assert {layer.name: [*vars(layer)] for layer in model.layers} == before
    model(X)
    assert len(trace.calls) == 4


@pytest.mark.forward
def test_a_trace_ends_with_an_error():
    def fail(x):
        raise KeyError("missing")

    model = model_of(dense("a"), block := Block(name="b"))
    block.code = fail
    with pytest.raises(KeyError, match="missing"), trace_gradients(model) as trace:
        model(X)
    assert keras.Operation.__call__ is CALL
    assert calls_of(trace) == ["a", "b/inner"]


def test_one_layer_several_layers_and_other_layers():
    one, two, other = dense("one"), dense("two"), dense("other")
    with trace_gradients(one) as single, trace_gradients(one, two) as both:
        other(two(one(array(X))))
    assert calls_of(single) == ["one"]
    assert calls_of(both) == ["one", "two"]
    left, right = model_of(dense("a")), model_of(dense("a"))
    right.name = "right"
    with trace_gradients(left, right) as trace:
        right(left(X))
    assert calls_of(trace) == ["model/a", "model", "right/a", "right"]


@pytest.mark.forward
def test_layers_that_a_model_calls_outside_of_its_call():
    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            self.generator = keras.Sequential([dense("g")], name="generator")

        def sample(self, x):
            return self.generator(x)

    gan = Gan()
    with trace_gradients(gan) as trace:
        gan.sample(X)
    assert calls_of(trace) == ["generator/g", "generator"]


def test_shared_and_recurrent_layers():
    shared = dense("shared")
    inputs = keras.Input((3,))
    trace = traced(keras.Model(inputs, shared(shared(inputs))))
    assert calls_of(trace)[:2] == ["shared", "shared"]
    assert [step.call.number for step in trace.steps][-2:] == [2, 1]
    cell = keras.layers.SimpleRNNCell(2, name="cell")
    model = keras.Sequential([keras.Input((4, 3)), keras.layers.RNN(cell, name="rnn", unroll=True)])
    trace = traced(model, x=np.ones((2, 4, 3), "float32"))
    assert calls_of(trace).count("rnn/cell") == steps_of(trace).count("rnn/cell") == 4


def test_ops_within_layers():
    model = model_of(Block(seven, name="b"), dense("c"))
    trace = traced(model)
    assert [(call.op, call.within) for call in trace.calls][:2] == [("b/inner", "b"), ("seven", "b")]
    assert steps_of(trace) == ["model", "c", "b", "seven", "b/inner"]
    assert [step.upstream["output"].max() for step in trace.steps] == [1.0, 1.0, 3.0, 3.0, 21.0]


def test_a_second_derivative():
    layer = keras.layers.Dense(1, kernel_initializer="ones", activation=lambda x: x**3)
    layer.build((None, 1))

    def f(x):
        return ops.sum(layer(ops.reshape(x, (1, 1))))

    with trace_gradients(layer) as trace:
        close(grad(grad(f))(2.0), array(12.0))
    assert len(trace.calls) == 1
    assert trace.steps


@pytest.mark.forward
def test_a_new_functional_model_is_not_recorded():
    layer = dense("a")
    with trace_gradients(layer) as trace:
        model = keras.Model(inputs := keras.Input((3,)), layer(inputs))
    assert trace.calls == []
    assert model.output_shape == (None, 3)


@pytest.mark.forward
def test_other_threads_are_not_recorded():
    layer = dense("a")
    layer.build((None, 3))
    with trace_gradients(layer) as trace:
        thread = threading.Thread(target=lambda: layer(X))
        thread.start()
        thread.join()
    assert trace.calls == []


# ------------------------------------------------------------------------------- the first bad value


BAD = {
    "layer": (
        (dense("a"), keras.layers.Activation(lambda x: ops.log(x - 5.0), name="log"), dense("c")),
        "NaN first appears in 2 log (Activation), whose inputs are finite: in its code or weights.",
    ),
    "code of a layer": (
        (dense("a"), Block(lambda x: ops.log(x - 50.0), name="b"), dense("c")),
        "NaN first appears in the code of 3 b (Block), after the output of 2 b/inner (Dense).",
    ),
    "infinite": (
        (dense("a"), keras.layers.Activation(lambda x: x / (x - x), name="div"), dense("c")),
        "Inf first appears in 2 div (Activation), whose inputs are finite: in its code or weights.",
    ),
}


@pytest.mark.forward
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")
@pytest.mark.parametrize("case", BAD)
def test_the_first_bad_value(case):
    layers, wanted = BAD[case]
    model = model_of(*layers)
    trace = traced(model, forward)
    assert lines_of(trace) == [f"Forward: {wanted}"]
    assert str(trace).splitlines()[0] == f"Forward: {wanted}"


class Between(keras.Model):
    """A model with code between two layers."""

    def __init__(self):
        super().__init__(name="between")
        self.a, self.b = dense("a"), dense("b")

    def call(self, x):
        return self.b(self.a(x) * np.inf)


@pytest.mark.forward
def test_nan_in_the_input_or_between_layers():
    trace = traced(model_of(dense("a")), forward, X * np.nan)
    assert lines_of(trace) == ["Forward: NaN is in the input of 1 a (Dense)."]
    model = Between()
    model(array(X))
    assert lines_of(traced(model, forward, array(X))) == [
        "Forward: Inf first appears between the output of 1 a (Dense) and the input of 2 b (Dense), in the "
        "code of between."
    ]


BAD_GRADIENTS = {
    "rule": (Block(spoiled, name="b"), "NaN first appears in the rule of 3 spoiled."),
    "derivative": (
        keras.layers.Activation(lambda x: ops.sqrt(x * 0.0), name="sqrt"),
        "NaN first appears at the output of 1 a (Dense), in the derivative of 2 sqrt",
    ),
    "zeros": (
        keras.layers.Activation(lambda x: ops.relu(-x), name="relu"),
        "a gradient of zeros first appears at the output of 1 a (Dense), in the der",
    ),
    "exploding": (
        keras.layers.Activation(lambda x: x * 1e6, name="large"),
        "an exploding gradient first appears at the output of 1 a (Dense)",
    ),
}


@pytest.mark.parametrize(("layer", "wanted"), BAD_GRADIENTS.values(), ids=BAD_GRADIENTS)
def test_the_first_bad_gradient(layer, wanted):
    (line,) = lines_of(traced(model_of(dense("a"), layer, dense("c"))))
    assert line.startswith(f"Backward: {wanted}")


def test_a_bad_gradient_behind_the_model():
    def run(model, x):
        value_and_grad(lambda: ops.sum(spoiled(model(x))), variables=model.trainable_variables)()

    assert "NaN first appears in the rule of" in lines_of(traced(model_of(dense("a")), run))[0]


@pytest.mark.forward
def test_repeated_flags_are_grouped():
    text = str(traced(model_of(*[dense(f"d{i}") for i in range(6)]), forward, X * np.nan))
    assert "1 d0: NaN: 6 of 6 in output\n  the same in 6 more: 2 d1, 3 d2, 4 d3, 5 d4, 6 d5, 7 model" in text
    assert text.count(" of 6 in output") == 1


@pytest.mark.forward
def test_statistics_of_finite_elements():
    summary = summarize(np.array([1.0, np.nan, 3.0, np.inf]))
    assert (summary.mean, summary.nans, summary.infinities) == (2.0, 1, 1)
    text = format_value({"x": np.array([1.0, np.nan, 3.0, np.inf])}, "x")
    assert text.splitlines() == ["(4,)", "mean of the finite 2", "largest inf", "1 NaN", "1 Inf", "0 % zeros"]
    assert summarize(np.array([np.nan])).mean is None


# ------------------------------------------------------------------------------- the figure


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_the_figure_of_a_model(plt):
    figure = traced(model_of(dense("a"), Block(lambda x: ops.log(x - 50.0), name="b"), dense("c"))).plot()
    shown = texts(figure)
    assert shown[0].replace("\n", " ").startswith("Forward: NaN first appears in the code of 3 b (Block)")
    layers = ("1 a", "2 b/inner", "3 b", "4 c", "5 model")
    assert [text for text in shown if text in layers] == ["1 a", "2 b/inner", "4 c"]
    bold = [text.get_text() for text in figure.axes[0].texts if text.get_weight() == "bold"]
    assert any("NaN" in text for text in bold)

"""The `Trace` that `trace_gradients` returns, and the layers that it records."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras

from multigrad.common.errors import unusable
from multigrad.tracing.records import CallRecord, StepRecord, Values, as_dict, largest_magnitude
from multigrad.tracing.table import format_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class TracedLayers:
    """The layers that a trace records, with their paths.

    Arguments:
        roots: the models or layers. Nested layers are found in `layers` of a model, and when a traced layer
            calls them.
    """

    def __init__(self, roots: Sequence[keras.Layer]) -> None:
        self._paths: dict[int, tuple[str, keras.Layer]] = {}
        """The path of each layer by its id, and the layer, which stays alive, so that its id is unique."""
        for root in roots:
            if not isinstance(root, keras.Layer):
                name, fix = "trace_gradients", "call trace_gradients(model). Ops are always recorded"
                raise unusable(TypeError, name, "layers", required="models or layers", got=root, fix=fix)
            self._paths.setdefault(id(root), (root.name, root))
            self._add_within(root, f"{root.name}/" if len(roots) > 1 else "")

    def _add_within(self, model: keras.Layer, prefix: str) -> None:
        for layer in getattr(model, "layers", ()):
            if isinstance(layer, keras.Layer) and id(layer) not in self._paths:
                self._paths[id(layer)] = prefix + layer.name, layer
                self._add_within(layer, f"{prefix}{layer.name}/")

    def path_of(self, layer: keras.Layer, caller: keras.Layer | None) -> str | None:
        """Return the path of a layer that `caller` calls, or None if it is not traced."""
        within, _ = self._paths.get(id(caller), (None, None))
        if within is not None:
            self._paths.setdefault(id(layer), (f"{within}/{layer.name}", layer))
        return self._paths.get(id(layer), (None, None))[0]


class Trace:
    """The calls and steps that a `trace_gradients` context recorded. `print` shows them as a table."""

    def __init__(self, exploding: float, layers: TracedLayers | None = None) -> None:
        self.calls: list[CallRecord] = []
        """Each call of an op, in the order in which the calls returned."""
        self.steps: list[StepRecord] = []
        """Each run of a rule, in order."""
        self.open = True
        """Whether the context is still active."""
        self.layers = layers
        """The layers whose calls are recorded, or None if only ops are recorded."""
        self._exploding = exploding
        self._lock = threading.Lock()  # PyTorch may run rules in another thread

    def add_call(
        self, op: str, within: str | None, inputs: Values, outputs: Values, layer: str = ""
    ) -> CallRecord:
        """Record that the function of an op, or a layer, ran."""
        with self._lock:
            call = CallRecord(op, len(self.calls) + 1, within, inputs, outputs, layer)
            self.calls.append(call)
        return call

    def add_step(self, call: CallRecord, upstream: Values, downstream: Values) -> None:
        """Record that the rule of a call ran."""
        with self._lock:
            first_upstream = largest_magnitude(self.steps[0].upstream) if self.steps else None
            self.steps.append(StepRecord(call, upstream, downstream, self._exploding, first_upstream))

    def __str__(self) -> str:
        return format_table(self.calls, self.steps)

    def __repr__(self) -> str:
        return f"<Trace: {len(self.calls)} calls, {len(self.steps)} steps>"

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as a dict that `json.dumps` accepts.

        ```python
        import json
        import multigrad

        square = multigrad.op_custom_gradient(lambda x: (x * x, lambda upstream: upstream * 2.0 * x))
        with multigrad.trace_gradients() as trace:
            multigrad.grad(square)(3.0)
        text = json.dumps(trace.to_dict())
        print(trace.to_dict()["steps"][0]["downstream"]["x"]["value"])  # 6.0
        ```

        Returns:
            A dict with the lists `"calls"` and `"steps"`. An entry of `"calls"` has the keys `"op"`, `"call"`
            (its number), `"within"`, `"inputs"`, `"outputs"` and `"flags"`. An entry of `"steps"` has the
            keys `"op"`, `"call"`, `"upstream"`, `"current"`, `"downstream"` and `"flags"`. Each tensor is a
            dict under its path, with `"shape"`, `"dtype"`, `"mean"`, `"largest"`, `"zeros"` (a fraction),
            `"nans"`, `"infinities"` (counts) and, for a scalar, `"value"`. None stands for a missing
            gradient. NaN, Inf and complex numbers are strings such as `"nan"` and `"-inf"`, which `float`
            and `complex` parse.
        """
        return as_dict(self.calls, self.steps)

    def plot(self, calls: Sequence[int] | None = None) -> "Figure":
        """Draw the calls as a chain, with their values and gradients.

        ```python
        import multigrad

        square = multigrad.op_custom_gradient(lambda x: (x * x, lambda upstream: upstream * 2.0 * x))
        with multigrad.trace_gradients() as trace:
            multigrad.grad(lambda x: square(square(x)))(3.0)
        figure = trace.plot()
        ```

        Values flow down on the left. Gradients flow up on the right, as arrows whose width and colour show
        the logarithm of the largest absolute value. An arrow has a gap if the two calls are not adjacent,
        because another operation lies between them. Anything with a flag is red.

        Arguments:
            calls: the numbers of the calls to draw. The default is all calls that no other op made.

        Returns:
            A `matplotlib.figure.Figure`. If the rule of a call ran several times, its first step is drawn.

        Raises:
            ImportError: if matplotlib is not installed.
            ValueError: if the trace has no call with one of these numbers, or no calls.
        """
        from multigrad.tracing.plot import draw_trace  # matplotlib is an optional dependency

        return draw_trace(self.calls, self.steps, calls)

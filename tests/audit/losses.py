"""The audit's points of `keras.losses` and `keras.activations`.

The losses clip probabilities to an interval that ends `EPSILON` from 0 and 1. Differences are too coarse
for this, so the table states the derivatives at its bounds.
"""

import math
from typing import Any

import numpy as np

from audit.cases import ROW, Call, Case, elementwise, passing, weights, whole
from audit.elementwise import USUAL, activations, choices
from audit.networks import LABELS, LOGITS, SEQUENCE, along_an_axis, ctc_formula

EPSILON = 1e-7
W0 = weights(1)[0]
"""The weight of the first row."""
TARGET = np.array([[0.0, 1.0, 0.0]])
SIMPLEX = np.array([[0.2, 0.5, 0.3]])
CORNER = np.array([[0.0, 1.0, 0.0]])


def _of_labels(op: str, labels: Any, **options: Any) -> Call:
    """Return a call of a loss with constant labels."""
    return lambda losses, x: getattr(losses, op)(np.asarray(labels), x, **options)


def loss_cases() -> list[Case]:
    """Return the cases of losses, mostly as functions of the prediction."""
    return [*_regressions(), *_hinges(), *_divergences(), *_entropies(), *_overlaps()]


def _regressions() -> list[Case]:
    names = ("absolute_error", "absolute_percentage_error", "squared_error", "squared_logarithmic_error")
    cases: list[Case] = []
    truth = np.array([[1.0, 0.5, -2.0, 0.25]])
    for op in (*(f"mean_{name}" for name in names), "huber", "log_cosh"):
        cases.append(whole(op, "regular", truth, ROW[None]))
        cases.append(whole(op, "large", ROW[None], call=_of_labels(op, truth + 300.0)))
        choice = 0.0 if op in ("mean_absolute_error", "mean_absolute_percentage_error") else None
        cases.append(
            whole(op, "tie", np.abs(ROW[None]), call=_of_labels(op, np.abs(ROW[None])), choice=choice)
        )
    op = "mean_absolute_percentage_error"
    cases.append(
        whole(op, "label 0", ROW[None, :1], call=_of_labels(op, [[0.0]]), first=100.0 * W0 / EPSILON)
    )
    op = "mean_squared_logarithmic_error"
    cases.append(whole(op, "0", np.zeros((1, 1)), call=_of_labels(op, [[2.0]]), first=0.0, second=0.0))
    # The second derivative jumps at the bound.
    bound = np.array([[1.0, -1.0]])
    cases.append(whole("huber", "bound", bound, call=_of_labels("huber", [[0.0, 0.0]]), orders=(1,)))
    return cases


def _hinges() -> list[Case]:
    labels = np.array([[1.0, -1.0, 1.0, -1.0]])
    cases: list[Case] = []
    for op in ("hinge", "squared_hinge"):
        cases.append(whole(op, "regular", labels * 0.75, ROW[None]))
        cases.append(whole(op, "labels 0 and 1", ROW[None], call=_of_labels(op, [[0.0, 1.0, 1.0, 0.0]])))
    # The mean of maximum(1 - y, 0), with half to each argument of `maximum`.
    tie = -W0 * labels / 8.0
    cases.append(whole("hinge", "tie", labels, call=_of_labels("hinge", labels), choice=tie))
    cases.append(whole("squared_hinge", "tie", labels, call=_of_labels("squared_hinge", labels), orders=(1,)))
    op = "categorical_hinge"
    cases.append(whole(op, "regular", TARGET, LOGITS))
    # The greatest of the other predictions is 2, and 2 - 3 + 1 is 0.
    bound = 0.5 * W0 * np.array([[1.0, -1.0, 0.0]])
    cases.append(whole(op, "bound", np.array([[2.0, 3.0, 0.5]]), call=_of_labels(op, TARGET), choice=bound))
    tie = W0 * np.array([[0.5, -1.0, 0.5]])
    cases.append(whole(op, "tie", np.array([[2.0, 0.5, 2.0]]), call=_of_labels(op, TARGET), choice=tie))
    return cases


def _divergences() -> list[Case]:
    half = np.array([[0.25, 0.5, 0.25]])
    kl, cosine = "kl_divergence", "cosine_similarity"
    cases = [whole(op, "regular", half, SIMPLEX) for op in (kl, "poisson", cosine)]
    cases.append(whole(kl, "tie", half, half))
    # The probabilities are clipped to the interval from epsilon to 1. At 1, the derivative is that inside.
    at_one = -W0 * np.array([[0.0, 1.0, 0.0]])
    cases.append(whole(kl, "0 and 1", CORNER, call=_of_labels(kl, TARGET), choice=at_one, orders=(1,)))
    cases.append(whole(kl, "label 0", SIMPLEX, call=_of_labels(kl, TARGET)))
    slope = W0 / 3.0 * (1.0 - np.array([[0.0, 2.0, 0.0]]) / EPSILON)
    label = [[0.0, 2.0, 0.0]]
    cases.append(
        whole("poisson", "0", np.zeros((1, 3)), call=_of_labels("poisson", label), first=slope, orders=(1,))
    )
    # Below epsilon, `normalize` divides by epsilon.
    zero, unit = np.zeros((1, 2)), np.array([[0.6, 0.8]])
    slope = -W0 * unit / EPSILON
    cases.append(whole(cosine, "0", zero, call=_of_labels(cosine, unit), first=slope, second=0.0))
    cases.append(whole(cosine, "label 0", unit, call=_of_labels(cosine, zero), first=0.0, second=0.0))
    cases.append(whole(cosine, "0 and label 0", zero, call=_of_labels(cosine, zero), first=0.0, second=0.0))
    return cases


def _entropies() -> list[Case]:
    cases: list[Case] = []
    binary = ("binary_crossentropy", "binary_focal_crossentropy")
    for op in (*binary, "categorical_crossentropy", "categorical_focal_crossentropy"):
        call, logits = _of_labels(op, TARGET), _of_labels(op, TARGET, from_logits=True)
        cases.append(whole(op, "regular", SIMPLEX, call=call))
        cases.append(whole(op, "label smoothing", SIMPLEX, call=_of_labels(op, TARGET, label_smoothing=0.1)))
        # Outside of the interval from epsilon to 1 - epsilon, the clipped loss is constant.
        cases.append(whole(op, "right, 0 and 1", CORNER, call=call, first=0.0, second=0.0))
        if op != "binary_focal_crossentropy":  # its factor (1 - p)**2 is not clipped
            wrong = np.array([[1.0, 0.0, 0.0]])
            cases.append(whole(op, "wrong, 0 and 1", wrong, call=call, first=0.0, second=0.0))
        for name, x in (("regular", LOGITS), ("large", LOGITS * 50.0), ("zeros", np.zeros((1, 3)))):
            cases.append(whole(op, f"logits, {name}", x, call=logits))
    op, scale = "binary_focal_crossentropy", 2.0 * W0 / 3.0 * math.log(EPSILON)
    first, second = [math.nan, scale, math.nan], [math.nan, -scale * math.cos(2.0), math.nan]
    middle = np.array([[0.5, 0.0, 0.5]])
    cases.append(whole(op, "wrong, 0", middle, call=_of_labels(op, TARGET), first=first, second=second))
    op = "sparse_categorical_crossentropy"
    index = np.array([1], "int32")
    cases.append(whole(op, "regular", SIMPLEX, call=_of_labels(op, index)))
    cases.append(
        whole(op, "0 and 1", CORNER[:, ::-1] * 1.0, call=_of_labels(op, index), first=0.0, second=0.0)
    )
    cases.append(whole(op, "logits", LOGITS, call=_of_labels(op, index, from_logits=True)))
    rows = np.concatenate([LOGITS, LOGITS[:, ::-1]])
    ignored = _of_labels(op, np.array([1, -1], "int32"), from_logits=True, ignore_class=-1)
    cases.append(whole(op, "ignored class", rows, call=ignored))
    op = "categorical_generalized_cross_entropy"
    call = _of_labels(op, index, q=0.5)
    cases.append(whole(op, "regular", SIMPLEX, call=call))
    # The derivative of -2 sqrt(p) at 0.
    infinite = np.array([[0.0, -math.inf, 0.0]])
    cases.append(whole(op, "0", np.zeros((1, 3)), call=call, first=infinite, orders=(1,)))
    cases.append(whole("ctc", "regular", SEQUENCE, call=_of_labels("ctc", LABELS), formula=ctc_formula))
    return cases


def _overlaps() -> list[Case]:
    cases: list[Case] = []
    for op in ("dice", "tversky"):
        cases.append(whole(op, "regular", np.array([[0.25, 0.5, 0.75]]), SIMPLEX))
        cases.append(whole(op, "0", np.zeros((1, 3)), call=_of_labels(op, TARGET)))
        cases.append(whole(op, "0 and label 0", np.zeros((1, 3)), call=_of_labels(op, np.zeros((1, 3)))))
    points = np.array([[0.6, 0.8], [0.8, 0.6], [0.0, 1.0], [1.0, 0.0]])
    few = np.array([0, 0, 1, 1], "int32")
    cases.append(whole("circle", "regular", points, call=_of_labels("circle", few, gamma=2.0)))
    # A class with one element has no positive pair: its loss is softplus(-inf), which is constant.
    alone = _of_labels("circle", np.array([0, 1], "int32"), gamma=2.0)
    cases.append(whole("circle", "no positive pair", points[:2], call=alone, first=0.0, second=0.0))
    return cases


def activation_cases() -> list[Case]:
    """Return the cases of activations: those of the ops of the same name, and those that have no op."""
    cases = [*activations(), *along_an_axis()]
    for op in ("exponential", "linear", "mish", "tanh"):
        cases += elementwise(op, *USUAL)
    cases += elementwise("mish", 100.0, -100.0, half=None)
    for options, known in (
        ({"negative_slope": 0.25}, choices((0.0, 0.25))),
        ({"max_value": 1.0}, choices((0.0, 0.0), (1.0, 1.0))),
        ({"threshold": 0.5}, choices((0.5, 0.0))),
        ({"negative_slope": 0.25, "max_value": 1.0}, choices((0.0, 0.25), (1.0, 1.0))),
    ):
        name = ", ".join(f"{key} {value:g}" for key, value in options.items())
        cases += elementwise(
            "relu",
            0.75,
            -2.0,
            30.0,
            known=known,
            call=passing("relu", **options),
            half=None,
            suffix=f", {name}",
        )
    return cases

"""The audit's points of ops that move elements, of transforms, and of functions of functions."""

from typing import Any

import numpy as np

from audit.cases import IMAGE, MATRIX, ROW, Call, Case, weights, whole
from audit.elementwise import complex_number

W = weights(4)


def structure_cases() -> list[Case]:
    """Return the cases of ops that move elements, of transforms, and of functions of functions."""
    return [*_moves(), *_segments(), *_transforms(), *_creation(), *_functions()]


def _moves() -> list[Case]:
    """Return the cases of linear ops, which move elements."""
    x = MATRIX
    volume = np.arange(4.0).reshape(1, 2, 2)
    calls: dict[str, Call] = {
        "reshape": lambda ops, x: ops.reshape(x, (3, 2)),
        "transpose": lambda ops, x: ops.transpose(x),
        "concatenate": lambda ops, x: ops.concatenate([x, 2.0 * x]),
        "stack": lambda ops, x: ops.stack([x, 2.0 * x]),
        "split": lambda ops, x: ops.split(x, 3, axis=1),
        "take": lambda ops, x: ops.take(x, [0, 2, 2], axis=1),
        "take_along_axis": lambda ops, x: ops.take_along_axis(x, ops.array([[0], [2]]), axis=1),
        "pad": lambda ops, x: ops.pad(x, ((1, 1), (0, 1))),
        "tile": lambda ops, x: ops.tile(x, (2, 1)),
        "repeat": lambda ops, x: ops.repeat(x, 2, axis=0),
        "roll": lambda ops, x: ops.roll(x, 1),
        "flip": lambda ops, x: ops.flip(x),
        "broadcast_to": lambda ops, x: ops.broadcast_to(x, (2, 2, 3)),
        "where": lambda ops, x: ops.where(x > 0.0, x, 2.0 * x),
        "slice": lambda ops, x: ops.slice(x, (0, 1), (2, 2)),
        "slice_update": lambda ops, x: ops.slice_update(x, (0, 1), 2.0 * x[:, :2]),
        "scatter_update": lambda ops, x: ops.scatter_update(x, ops.array([[0, 0], [1, 2]]), 3.0 * x[0, :2]),
        "scatter": lambda ops, x: ops.scatter(ops.array([[0], [1], [0]]), x[0], (2,)),
        "diag": lambda ops, x: ops.diag(x[0]),
        "diagonal": lambda ops, x: ops.diagonal(x),
        "trace": lambda ops, x: ops.trace(x),
        "tril": lambda ops, x: ops.tril(x),
        "triu": lambda ops, x: ops.triu(x),
        "squeeze": lambda ops, x: ops.squeeze(x[:, None]),
        "cast": lambda ops, x: ops.cast(x, x.dtype),
        "append": lambda ops, x: ops.append(x, 2.0 * x, axis=0),
        "array_split": lambda ops, x: ops.array_split(x, 2, axis=1),
        "diagflat": lambda ops, x: ops.diagflat(x[0]),
        "dstack": lambda ops, x: ops.dstack([x, 2.0 * x]),
        "expand_dims": lambda ops, x: ops.expand_dims(x, 0),
        "extract_sequences": lambda ops, x: ops.extract_sequences(x, 2, 1),
        "fliplr": lambda ops, x: ops.fliplr(x),
        "flipud": lambda ops, x: ops.flipud(x),
        "get_item": lambda ops, x: ops.get_item(x, (0, slice(1, 3))),
        "hsplit": lambda ops, x: ops.hsplit(x, 3),
        "hstack": lambda ops, x: ops.hstack([x, 2.0 * x]),
        "meshgrid": lambda ops, x: ops.meshgrid(x[0], x[1]),
        "moveaxis": lambda ops, x: ops.moveaxis(x, 0, 1),
        "ravel": lambda ops, x: ops.ravel(x),
        "rearrange": lambda ops, x: ops.rearrange(x, "a b -> (b a)"),
        "rot90": lambda ops, x: ops.rot90(x),
        "select": lambda ops, x: ops.select([x > 1.0, x > 0.0], [x, 2.0 * x], 3.0),
        "stop_gradient": lambda ops, x: x + ops.stop_gradient(x),
        "swapaxes": lambda ops, x: ops.swapaxes(x, 0, 1),
        "unstack": lambda ops, x: ops.unstack(x),
        "vsplit": lambda ops, x: ops.vsplit(x, 2),
        "vstack": lambda ops, x: ops.vstack([x, 2.0 * x]),
    }
    known = {"stop_gradient": weights(6)}
    cases = [whole(op, "regular", x, call=call, first=known.get(op)) for op, call in calls.items()]
    blocks: dict[str, Call] = {
        "space_to_depth": lambda ops, x: ops.space_to_depth(x, 2),
        "depth_to_space": lambda ops, x: ops.depth_to_space(ops.reshape(x, (1, 2, 2, 4)), 2),
        "unfold": lambda ops, x: ops.unfold(ops.reshape(x, (1, 1, 4, 4)), 2),
        "fold": lambda ops, x: ops.fold(ops.reshape(x, (1, 4, 4)), 3, 2),
    }
    cases += [whole(op, "regular", IMAGE, call=call) for op, call in blocks.items()]
    cases.append(whole("dsplit", "regular", volume, call=lambda ops, x: ops.dsplit(x, 2)))
    return cases


def _segments() -> list[Case]:
    """Return the cases of reductions of segments.

    Keras (3.15) computes their values in float32 on PyTorch, which is too coarse for differences.
    """
    half, ties = 0.5 * W[1], np.array([1.0, 2.0, 2.0])
    cases: list[Case] = []
    for name, of_numpy in (("sum", np.sum), ("max", np.max), ("min", np.min), ("prod", np.prod)):
        op = f"segment_{name}"

        def call(ops: Any, x: Any, op: str = op) -> Any:
            return getattr(ops, op)(x, ops.array([0, 1, 1]), 2)

        def formula(x: np.ndarray, reduce: Any = of_numpy) -> np.ndarray:
            return np.array([x[0], reduce(x[1:])])

        points: dict[str, Any] = {"regular": ROW[:3]}
        if name == "prod":
            points |= {"a zero": [2.0, 0.0, 3.0], "two zeros": [2.0, 0.0, 0.0]}
        cases += [whole(op, point, x, call=call, formula=formula) for point, x in points.items()]
        if name in ("max", "min"):
            choice = [W[0], half, half]
            cases.append(whole(op, "tie", ties, call=call, choice=choice, formula=formula, orders=(1,)))

    def count(ops: Any, x: Any) -> Any:
        return ops.bincount(ops.array([0, 1, 1]), weights=x, minlength=2)

    cases.append(
        whole("bincount", "weights", ROW[:3], call=count, formula=lambda x: np.array([x[0], x[1] + x[2]]))
    )
    return cases


def _transforms() -> list[Case]:
    """Return the cases of Fourier transforms and complex numbers."""
    x = MATRIX
    signal = np.array([0.5, -1.0, 2.0, 0.75, 1.5, 0.25, -0.75, 1.0])
    cases = [
        whole(op, "regular", x, x[::-1], call=lambda ops, a, b, op=op: getattr(ops, op)((a, b)))
        for op in ("fft", "fft2", "ifft2")
    ]
    cases += [
        whole("irfft", "regular", x, x[::-1], call=lambda ops, a, b: ops.irfft((a, b), 4)),
        whole("rfft", "regular", ROW),
        whole("stft", "regular", signal, call=lambda ops, x: ops.stft(x, 4, 2, 4)),
        whole(
            "istft",
            "regular",
            signal,
            call=lambda ops, x: ops.istft((ops.reshape(x[:6], (2, 3)), ops.reshape(x[2:], (2, 3))), 4, 2, 4),
        ),
        whole("imag", "complex", x, x[::-1], call=lambda ops, a, b: ops.imag(complex_number(ops, a, b))),
        whole(
            "view_as_complex",
            "regular",
            x,
            call=lambda ops, a: ops.imag(ops.square(ops.view_as_complex(a[:, :2]))),
            formula=lambda a: 2.0 * a[:, 0] * a[:, 1],
        ),
        whole(
            "view_as_real",
            "regular",
            x,
            x[::-1],
            call=lambda ops, a, b: ops.view_as_real(complex_number(ops, a, b)),
        ),
    ]
    return cases


def _creation() -> list[Case]:
    """Return the cases of ops that return a tensor of their argument."""
    calls: dict[str, Call] = {
        "array": lambda ops, x: ops.array(x),
        "convert_to_tensor": lambda ops, x: ops.convert_to_tensor(x),
        "full": lambda ops, x: ops.full((2, 3), x[0]),
        "full_like": lambda ops, x: ops.full_like(x, x[0]),
        "linspace": lambda ops, x: ops.linspace(x[0], x[1], 5),
        "logspace": lambda ops, x: ops.logspace(x[0], x[1], 5),
        "geomspace": lambda ops, x: ops.geomspace(x[0], x[1], 5),
    }
    return [whole(op, "regular", np.array([0.5, 2.0]), call=call) for op, call in calls.items()]


def _functions() -> list[Case]:
    """Return the cases of functions of functions."""
    calls: dict[str, Call] = {
        "associative_scan": lambda ops, x: ops.associative_scan(lambda a, b: a * b, x),
        "cond": lambda ops, x: ops.cond(x[0] > 0.0, lambda: x * x, lambda: x),
        "fori_loop": lambda ops, x: ops.fori_loop(0, 3, lambda i, y: y * x, x),
        "jvp": lambda ops, x: ops.jvp(ops.sin, (x,), (x,)),
        "map": lambda ops, x: ops.map(lambda row: row * row, x),
        "scan": lambda ops, x: ops.scan(lambda y, row: (y * row, y + row), x[0], x),
        "switch": lambda ops, x: ops.switch(1, [ops.sin, lambda x: x * x], x),
        "vectorize": lambda ops, x: ops.vectorize(lambda y: y * y)(x),
        "vectorized_map": lambda ops, x: ops.vectorized_map(lambda row: row * row, x),
        "while_loop": lambda ops, x: ops.while_loop(
            lambda i, y: i < 3,
            lambda i, y: (i + 1, y * x),
            (ops.convert_to_tensor(0), x),
            maximum_iterations=5,
        ),
    }
    formulas = {"associative_scan": np.cumprod}  # its values are float32 on PyTorch, in Keras 3.15
    return [whole(op, "regular", ROW[:3], call=call, formula=formulas.get(op)) for op, call in calls.items()]

"""The audit's points of ops of neural networks."""

import itertools
import math
from typing import Any

import numpy as np

from audit.cases import IMAGE, MATRIX, ROW, Call, Case, passing, weights, whole

W = weights(4)
LABELS = np.array([[1, 2]], "int32")
SEQUENCE = np.array([[[0.5, -1.0, 2.0], [1.5, 0.25, -0.75], [0.25, 0.5, 1.0], [-0.5, 1.0, 0.75]]])
LOGITS = np.array([[2.0, -1.0, 0.5]])


def network_cases() -> list[Case]:
    """Return the cases of activations along an axis, normalizations, losses, layers and images."""
    return [*along_an_axis(), *_normalizations(), *_losses(), *_layers(), *_images()]


def along_an_axis() -> list[Case]:
    """Return the cases of activations along an axis."""
    cases, logits = [], LOGITS
    for op in ("softmax", "log_softmax", "sparsemax"):
        cases += [whole(op, "regular", logits), whole(op, "large", logits * 50.0)]
    cases.append(whole("softmax", "equal", np.zeros((1, 3))))
    cases.append(
        whole(
            "softmax",
            "-inf among others",
            np.array([[-math.inf, 0.0, 0.0]]),
            first=_softmax_slope(),
            orders=(1,),
        )
    )
    cases.append(whole("glu", "regular", ROW))
    return cases


def _normalizations() -> list[Case]:
    cases = [whole("layer_normalization", "regular", MATRIX)]
    w = weights(3)
    cases += [
        whole(
            "layer_normalization",
            "constant",
            np.ones((1, 3)),
            first=(w - w.mean()) / math.sqrt(1e-7),
            second=0.0,
        ),
        whole("rms_normalization", "regular", MATRIX),
        whole(
            "batch_normalization",
            "regular",
            MATRIX,
            call=lambda ops, x: ops.batch_normalization(x, ops.mean(x, axis=0), ops.var(x, axis=0), axis=-1),
        ),
        whole("moments", "regular", MATRIX, call=passing("moments", axes=[0])),
    ]
    return cases


def _losses() -> list[Case]:
    cases, logits = [], LOGITS
    target = np.array([[0.0, 1.0, 0.0]])
    simplex = np.array([[0.2, 0.5, 0.3]])

    def loss(op: str, y: Any, **options: Any) -> Any:
        return lambda ops, x: getattr(ops, op)(ops.convert_to_tensor(y, _dtype(x, y)), x, **options)

    for op in ("binary_crossentropy", "categorical_crossentropy"):
        cases.append(whole(op, "regular", simplex, call=loss(op, target)))
        for name, x in (("regular", logits), ("large", logits * 50.0), ("zeros", np.zeros((1, 3)))):
            cases.append(whole(op, f"logits, {name}", x, call=loss(op, target, from_logits=True)))
    op = "sparse_categorical_crossentropy"
    index = np.array([1], "int32")
    cases.append(whole(op, "regular", simplex, call=loss(op, index)))
    cases.append(whole(op, "logits", logits, call=loss(op, index, from_logits=True)))
    cases.append(whole("psnr", "regular", MATRIX, MATRIX * 0.5, call=lambda ops, a, b: ops.psnr(a, b, 1.0)))
    lengths = np.array([2], "int32"), np.array([4], "int32")
    cases.append(
        whole(
            "ctc_loss",
            "regular",
            SEQUENCE,
            call=lambda ops, x: ops.ctc_loss(LABELS, x, *lengths),
            formula=ctc_formula,
        )
    )
    return cases


def ctc_formula(logits: np.ndarray) -> np.ndarray:
    """Return the loss of the labels: the probability of all sequences that collapse to them.

    A sequence collapses by removing repetitions, and then the blanks, which are class 0.
    """
    probabilities = np.exp(logits[0]) / np.sum(np.exp(logits[0]), axis=-1, keepdims=True)
    total = 0.0
    for path in itertools.product(range(logits.shape[-1]), repeat=logits.shape[1]):
        collapsed = [c for c, _ in itertools.groupby(path) if c]
        if collapsed == LABELS[0].tolist():
            total += np.prod(probabilities[np.arange(len(path)), path])
    return np.array([-np.log(total)])


def _layers() -> list[Case]:
    cases: list[Case] = []
    kernel = np.array([0.5, -1.0, 2.0, 0.25]).reshape(2, 2, 1, 1)
    small = IMAGE[:, :3, :3]
    cases += [whole(op, "regular", small, kernel) for op in ("conv", "depthwise_conv", "conv_transpose")]
    for op in ("average_pool", "max_pool"):
        cases += [whole(op, "regular", IMAGE, call=passing(op, pool_size=2, strides=2))]
    cases.append(
        whole(
            "max_pool",
            "tie",
            np.zeros((1, 2, 2, 1)),
            call=lambda ops, x: ops.max_pool(x, 2, strides=2),
            choice=[W[0], 0.0, 0.0, 0.0],
        )
    )
    for op in ("adaptive_average_pool", "adaptive_max_pool"):
        cases += [whole(op, "regular", IMAGE, call=passing(op, output_size=2))]
    # The first element of each window.
    tie = np.kron(W.reshape(2, 2), [[1.0, 0.0], [0.0, 0.0]])
    call = passing("adaptive_max_pool", output_size=2)
    cases.append(whole("adaptive_max_pool", "tie", np.zeros((1, 4, 4, 1)), call=call, choice=tie))
    point = np.array([[[[0.5, -2.0]]]])
    cases.append(whole("separable_conv", "regular", IMAGE[:, :3, :3], kernel, point))
    query = np.array([0.5, -1.0, 2.0, 0.75]).reshape(1, 2, 1, 2)
    arrays = (query, query[:, ::-1], 2.0 * query)
    # JAX computes its values in float32, which is too coarse for differences.
    cases.append(whole("dot_product_attention", "regular", *arrays, formula=_attention))
    return cases


def _attention(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    scores = np.einsum("bthd,bshd->bhts", query, key) / math.sqrt(query.shape[-1])
    weights_of = np.exp(scores) / np.sum(np.exp(scores), axis=-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", weights_of, value)


def _images() -> list[Case]:
    colors = np.array([[[0.2, 0.5, 0.9], [0.7, 0.3, 0.1]]])
    image = IMAGE[:, :3, :3]
    shift = np.array([[1.0, 0.0, 0.3, 0.0, 1.0, 0.2, 0.0, 0.0]])
    corners = np.array([[[0.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 2.0]]])
    calls: dict[str, Call] = {
        "affine_transform": lambda ops, x: ops.image.affine_transform(x, shift.astype("float32")),
        "crop_images": lambda ops, x: ops.image.crop_images(x, 1, 1, target_height=2, target_width=2),
        "extract_patches": lambda ops, x: ops.image.extract_patches(x, 2, 1),
        "extract_patches_3d": lambda ops, x: ops.image.extract_patches_3d(x[:, None], (1, 2, 2), 1),
        "gaussian_blur": lambda ops, x: ops.image.gaussian_blur(x),
        "pad_images": lambda ops, x: ops.image.pad_images(x, 1, 1, target_height=5, target_width=5),
        "perspective_transform": lambda ops, x: ops.image.perspective_transform(
            x, corners.astype("float32"), (corners + 0.25).astype("float32")
        ),
        "resize": lambda ops, x: ops.image.resize(x, (5, 2)),
        "scale_and_translate": lambda ops, x: ops.image.scale_and_translate(
            x, (1, 4, 4, 1), ops.array([1.5, 1.5]), ops.array([0.25, 0.25]), (1, 2), "linear"
        ),
        "sobel_edges": lambda ops, x: ops.image.sobel_edges(x),
    }
    grid = np.arange(3.0)
    # TensorFlow resizes and transforms in float32, which is too coarse for differences.
    formulas: dict[str, Any] = {
        "affine_transform": lambda x: _sample(x, grid + 0.2, grid + 0.3),
        "perspective_transform": lambda x: _sample(x, grid - 0.25, grid - 0.25),
        "resize": lambda x: _sample(
            x, np.clip((np.arange(5.0) + 0.5) * 0.6 - 0.5, 0.0, 2.0), (np.arange(2.0) + 0.5) * 1.5 - 0.5
        ),
    }
    cases = [
        whole(f"image.{op}", "regular", image, call=call, formula=formulas.get(op))
        for op, call in calls.items()
    ]
    named = ("rgb_to_grayscale", "rgb_to_hsv", "hsv_to_rgb")
    cases += [whole(f"image.{op}", "regular", colors) for op in named]
    places = np.array([[0.4, 1.6], [1.3, 0.7]])
    cases += [
        whole(
            "image.map_coordinates",
            "regular",
            image[0, :, :, 0],
            places,
            call=lambda ops, x, at: ops.image.map_coordinates(x, at, 1),
        ),
        whole(
            "image.ssim",
            "regular",
            0.5 + 0.2 * image,
            0.4 - 0.1 * image,
            call=passing("image.ssim", filter_size=3),
        ),
    ]
    return cases


def _softmax_slope() -> np.ndarray:
    w = weights(3)
    half = (w[1] - w[2]) / 4
    return np.array([[0.0, half, -half]])


def _dtype(x: Any, y: Any) -> Any:
    return y.dtype.name if y.dtype.kind == "i" else x.dtype


def _sample(image: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return an image at other places, by linear interpolation, with zeros outside."""

    def matrix(places: np.ndarray, size: int) -> np.ndarray:
        return np.maximum(0.0, 1.0 - np.abs(places[:, None] - np.arange(size)))

    _, height, width, _ = image.shape
    return matrix(rows, height) @ image[0, :, :, 0] @ matrix(columns, width).T

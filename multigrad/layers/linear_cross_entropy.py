"""The layer for `linear_cross_entropy`."""

import copy
from typing import Any

import keras
from keras import ops

from multigrad.common.errors import unusable
from multigrad.ops.arguments import is_integer, to_python, with_rank_of
from multigrad.ops.dtypes import dtype_of
from multigrad.ops.vocabulary.linear_cross_entropy import check_options, linear_cross_entropy

_NAME = "LinearCrossEntropy"
_INITIALIZERS = ("kernel_initializer", "bias_initializer")


@keras.saving.register_keras_serializable("multigrad")
class LinearCrossEntropy(keras.layers.Layer):
    """The last linear layer of a classifier, and its cross entropy, without storing all logits.

    ```python
    import keras
    import numpy as np
    from multigrad import layers

    tokens, labels = keras.Input((3,), dtype="int32"), keras.Input((3,), dtype="int32")
    features, head = keras.layers.Embedding(10, 4)(tokens), layers.LinearCrossEntropy(10)
    training = keras.Model([tokens, labels], head(features, labels))
    training.compile("adam")  # without a loss: the layer adds its own
    history = training.fit([np.array([[1, 2, 0]], "int32"), np.array([[2, 0, 1]], "int32")], verbose=0)
    inference = keras.Model(tokens, head(features))  # shares the weights
    print(inference(np.array([[1, 2, 0]], "int32")).shape)  # (1, 3, 10)
    ```

    With labels, it adds the loss of `multigrad.ops.linear_cross_entropy` to the losses of the model, and
    returns the features. Without labels, it returns the logits.

    Arguments:
        classes: the number of classes. The default is the number of rows of `embedding`.
        embedding: a `keras.layers.Embedding` whose transposed matrix is the kernel (tied weights), or None if
            the layer has its own kernel.
        use_bias: whether to add a bias to the logits.
        reduction, label_smoothing, logit_softcap, z_loss, ignore_index, block_size: as for the op.
        kernel_initializer, bias_initializer: as for `keras.layers.Dense`.

    Call arguments:
        features: a floating tensor of shape `(..., d)`.
        labels: integers of shape `(...)`, or None.
        sample_weight: numbers of shape `(...)`, or None.
        class_weight: numbers of shape `(classes,)`, or None.

        Tokens that the Keras mask of the features excludes are ignored, like tokens with the label
        `ignore_index`.

    Weights:
        `kernel`, of shape `(d, classes)`, unless an embedding is given, and `bias`, of shape `(classes,)`. A
        `keras.distribution.LayoutMap` can shard them.

    Raises:
        TypeError: if `embedding` is not an Embedding, or an option has the wrong type.
        ValueError: if `classes` is not positive, or an option is out of range.
    """

    def __init__(
        self,
        classes: int | None = None,
        embedding: Any = None,
        use_bias: bool = False,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_softcap: float | None = None,
        z_loss: float = 0.0,
        ignore_index: int | None = None,
        block_size: int | None = None,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        if embedding is not None and not isinstance(embedding, keras.layers.Embedding):
            required, fix = "a keras.layers.Embedding, or None", "pass the layer, not its weight"
            raise unusable(TypeError, _NAME, "embedding", required=required, got=embedding, fix=fix)
        rows = None if embedding is None else embedding.input_dim
        classes = rows if classes is None else to_python(classes)
        if classes is None or not is_integer(classes) or classes < 1 or rows not in (None, classes):
            required = "a positive integer" if rows is None else f"{rows}, the rows of the embedding, or None"
            fix = "write LinearCrossEntropy(32000), for example, or pass an embedding"
            raise unusable(ValueError, _NAME, "classes", required=required, got=classes, fix=fix)
        if reduction in (None, "none"):
            required, fix = "a reduction to one number", "call multigrad.ops.linear_cross_entropy"
            raise unusable(ValueError, _NAME, "reduction", required=required, got=reduction, fix=fix)
        self._options: dict[str, Any] = {"reduction": reduction} | {
            "label_smoothing": to_python(label_smoothing), "logit_softcap": to_python(logit_softcap),
            "z_loss": to_python(z_loss), "block_size": to_python(block_size),
        }  # fmt: skip
        check_options(_NAME, **self._options, ignore_index=to_python(ignore_index))
        self.classes, self.embedding, self.use_bias = classes, embedding, use_bias
        self.ignore_index = to_python(ignore_index)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel: Any = None
        self.bias: Any = None

    def build(self, features_shape: Any, *others: Any, **more: Any) -> None:
        width = features_shape[-1]
        if self.embedding is None:
            self.kernel = self.add_weight((width, self.classes), self.kernel_initializer, name="kernel")
        elif width != self.embedding.output_dim:
            required = f"a last axis of size {self.embedding.output_dim}, the width of the embedding"
            fix = "project the features to the width of the embedding"
            raise unusable(ValueError, _NAME, "features", required=required, got=features_shape, fix=fix)
        elif not self.embedding.built:
            self.embedding.build()
        if self.use_bias:
            self.bias = self.add_weight((self.classes,), self.bias_initializer, name="bias")

    def call(
        self,
        features: Any,
        labels: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        features_mask: Any = None,
    ) -> Any:
        kernel = self.kernel if self.embedding is None else ops.transpose(self.embedding.embeddings)
        if labels is None:
            return self._logits(features, ops.cast(kernel, features.dtype))
        ignored = self.ignore_index
        if features_mask is not None:
            if dtype_of(labels) in ("uint8", "uint16"):
                labels = ops.cast(labels, "int32")
            if ignored is None:  # -1 marks masked tokens; no other token has this label
                ignored, labels = -1, ops.where(ops.equal(labels, -1), -2 * ops.ones_like(labels), labels)
            labels = ops.where(features_mask, labels, ignored * ops.ones_like(labels))
        weights = {"sample_weight": sample_weight, "class_weight": class_weight}
        loss = linear_cross_entropy(
            features, kernel, labels, self.bias, **weights, **self._options, ignore_index=ignored
        )
        self.add_loss(loss)
        return features

    def _logits(self, features: Any, kernel: Any) -> Any:
        logits, cap = ops.matmul(features, kernel), self._options["logit_softcap"]
        if self.bias is not None:
            logits = logits + with_rank_of(ops.cast(self.bias, logits.dtype), logits)
        return logits if cap is None else cap * ops.tanh(logits / cap)

    def get_config(self) -> dict[str, Any]:
        embedding = None if self.embedding is None else keras.saving.serialize_keras_object(self.embedding)
        own = {"classes": self.classes, "embedding": embedding, "use_bias": self.use_bias}
        own |= {name: keras.initializers.serialize(getattr(self, name)) for name in _INITIALIZERS}
        return {**super().get_config(), **own, **self._options, "ignore_index": self.ignore_index}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        embedding = copy.deepcopy(config["embedding"])  # because Keras modifies the config
        if embedding is not None:
            embedding = keras.saving.deserialize_keras_object(embedding)
        return cls(**{**config, "embedding": embedding})

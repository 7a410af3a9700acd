"""The layer `LinearCrossEntropy`: it trains its kernel, shares an embedding, and is saved."""

import keras
import numpy as np
import pytest
from keras import ops
from support import array, close, numpy

from multigrad import layers
from multigrad.ops import linear_cross_entropy

TOKENS = np.array([[1, 2, 0], [0, 5, 6]], "int32")
LABELS = np.array([[2, 3, 1], [4, 0, 6]], "int32")
OPTIONS = {"label_smoothing": 0.1, "logit_softcap": 5.0, "z_loss": 0.01}


def models(head, embedding=None):
    """Return a model for training and one for inference, with the same weights."""
    tokens, labels = keras.Input((3,), dtype="int32"), keras.Input((3,), dtype="int32")
    features = (embedding or keras.layers.Embedding(7, 4))(tokens)
    return keras.Model([tokens, labels], head(features, labels)), keras.Model(tokens, head(features))


@pytest.mark.parametrize("eager", [True, False])
def test_fit_trains_the_kernel_as_plain_code_does(eager):
    keras.utils.set_random_seed(0)
    head = layers.LinearCrossEntropy(7, use_bias=True)
    training, inference = models(head)
    start = [numpy(weight) for weight in inference.get_weights()]
    training.compile(keras.optimizers.SGD(0.5), run_eagerly=eager)
    first, *_, last = training.fit([TOKENS, LABELS], batch_size=2, epochs=3, verbose=0).history["loss"]
    assert last < first
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(7, 4), keras.layers.Dense(7)])
    plain.set_weights(start)
    plain.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    plain.fit(TOKENS, LABELS, batch_size=2, epochs=3, verbose=0)
    close([array(w) for w in inference.get_weights()], [array(w) for w in plain.get_weights()])
    assert not np.array_equal(numpy(head.kernel), start[1])
    close(inference(TOKENS), plain(TOKENS))


def test_a_shared_embedding_is_saved_once_and_trained(tmp_path):
    embedding = keras.layers.Embedding(7, 4)
    head = layers.LinearCrossEntropy(embedding=embedding, **OPTIONS)
    training, inference = models(head, embedding)
    assert len(training.trainable_variables) == 1
    training.compile(keras.optimizers.SGD(0.5))
    training.fit([TOKENS, LABELS], epochs=2, verbose=0)
    training.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert len(loaded.trainable_variables) == 1
    close(
        array(loaded.evaluate([TOKENS, LABELS], verbose=0)),
        array(training.evaluate([TOKENS, LABELS], verbose=0)),
    )
    cap = OPTIONS["logit_softcap"]
    wanted = embedding(array(TOKENS, dtype="int32")) @ ops.transpose(
        ops.convert_to_tensor(embedding.embeddings)
    )
    close(inference(TOKENS), cap * ops.tanh(wanted / cap))


def test_training_in_mixed_precision():
    training, _ = models(layers.LinearCrossEntropy(7, dtype="mixed_bfloat16"))
    training.compile(keras.optimizers.SGD(1.0))
    first, *_, last = training.fit([TOKENS, LABELS], epochs=10, verbose=0).history["loss"]
    assert last < 0.7 * first


def test_the_loss_is_that_of_the_op():
    head, x = (
        layers.LinearCrossEntropy(7, reduction="sum", ignore_index=0, **OPTIONS),
        array(np.ones((2, 3, 4))),
    )
    given = {"sample_weight": array(np.arange(6.0).reshape(2, 3)), "class_weight": array(np.arange(7.0))}
    head(x, LABELS, **given)
    options = OPTIONS | given | {"ignore_index": 0}
    close(head.losses[0], linear_cross_entropy(x, head.kernel, LABELS, reduction="sum", **options))


def test_masked_tokens_are_ignored():
    embedding = keras.layers.Embedding(7, 4, mask_zero=True)
    head = layers.LinearCrossEntropy(7)
    head(embedding(TOKENS), LABELS)
    kept = np.where(TOKENS == 0, -100, LABELS)
    features = ops.convert_to_tensor(embedding(TOKENS))
    wanted = linear_cross_entropy(features, head.kernel, kept, ignore_index=-100, reduction="mean")
    close(head.losses[0], wanted)
    with pytest.raises(ValueError, match="a label is out of range"):
        head(embedding(np.ones_like(TOKENS)), LABELS - 1)

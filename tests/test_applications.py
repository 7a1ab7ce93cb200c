"""Networks that nobody here wrote train under a strategy as on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from harness.data import Data
from harness.training import Case, assert_same_training

pytestmark = pytest.mark.slow

# Behind some hundred layers, with a batch normalization after each convolution and
# few values to normalize over, the last bits of float32 grow: a difference of 1e-7 in
# the input of EfficientNetB0 alone changes its gradients by 1e-4. What a wrong mean
# or a forgotten row does is a hundred times larger.
DEEP_TOLERANCE = 2e-3


def pictures(rows: int) -> Data:
    rng = np.random.default_rng(5)
    x = rng.uniform(0, 255, size=(rows, 32, 32, 3)).astype("float32")
    return Data(x, rng.integers(0, 4, rows))


def application(name: str) -> keras.Model:
    network = getattr(keras.applications, name)
    model = network(weights=None, input_shape=(32, 32, 3), classes=4)
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0  # Replicas are to draw different masks.
    return model


@pytest.mark.parametrize("name", ["MobileNetV2", "EfficientNetB0", "DenseNet121"])
def test_application(name: str, mirrored: Any) -> None:
    case = Case(
        name,
        model=lambda: application(name),
        data=pictures,
        rows=7,
        batch=4,
        epochs=1,
        optimizer=lambda: keras.optimizers.SGD(1e-3),
        tolerance=DEEP_TOLERANCE,
    )
    assert_same_training(case, mirrored)


def sentences(rows: int) -> Data:
    rng = np.random.default_rng(6)
    words = rng.integers(1, 50, (rows, 8))
    lengths = rng.integers(2, 9, rows)
    there = np.arange(8) < lengths[:, None]
    x = {
        "token_ids": np.where(there, words, 0).astype("int32"),
        "segment_ids": np.zeros((rows, 8), "int32"),
        "padding_mask": there.astype("int32"),
    }
    return Data(x, rng.integers(0, 3, rows))


def bert() -> keras.Model:
    keras_hub = pytest.importorskip("keras_hub", reason="keras_hub is not installed")
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=50,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=8,
        dropout=0.0,
    )
    return keras_hub.models.BertTextClassifier(backbone, num_classes=3, dropout=0.0)


def test_transformer_of_keras_hub(mirrored: Any) -> None:
    case = Case(
        "bert",
        model=bert,
        data=sentences,
        rows=11,
        batch=4,
        epochs=1,
        optimizer=lambda: keras.optimizers.SGD(0.01),
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # Two layers deep only, but the key biases of attention have no gradient but
        # rounding.
        tolerance=1e-4,
    )
    assert_same_training(case, mirrored)

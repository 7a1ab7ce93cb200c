"""A network of keras_hub, as a case."""

from __future__ import annotations

import keras
import numpy as np
from harness.case import Case
from harness.data import Data


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
    import keras_hub

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


CASES = [
    Case(
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
        module="exactness.keras_hub_cases",
    )
]

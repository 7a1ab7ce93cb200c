"""Cases of layers of Keras."""

from __future__ import annotations

from keras import layers

from keras_strategies.rows.row_placements import MEAN, SAME
from row_proofs import case_layers as own
from row_proofs.row_case import ids, mixing, rows

KERAS_LAYERS = [
    rows(
        "batch norm of images",
        lambda: layers.BatchNormalization(),
        (5, 5, 3),
        updates=(SAME, SAME),
    ),
    rows(
        "batch norm and a loss",
        lambda: own.Regularized(),
        losses=(MEAN,),
        updates=(SAME, SAME),
    ),
    rows(
        "spectral norm",
        lambda: layers.SpectralNormalization(layers.Dense(4)),
        updates=(SAME, SAME),
    ),
    rows(
        "dropout shared by the batch", lambda: layers.Dropout(0.3, noise_shape=(1, 6))
    ),
    rows("conv2d dilated", lambda: layers.Conv2D(4, 3, dilation_rate=2), (9, 9, 3)),
    rows(
        "attention dropout", lambda: own.SelfAttention(dropout=0.2), (5, 8), draws=True
    ),
    rows("masked LSTM", lambda: own.masked(lambda: layers.LSTM(4)), ids(5)),
    mixing("stateful GRU", lambda: layers.GRU(4, stateful=True), (5, 3)),
    rows(
        "activity regularizer",
        lambda: layers.Dense(3, activity_regularizer="l2"),
        losses=(MEAN,),
    ),
    rows("kernel regularizer", lambda: layers.Dense(3, kernel_regularizer="l2")),
    rows(
        "transformer of two blocks with dropout",
        lambda: own.transformer(2, rate=0.1),
        ids(5),
        draws=True,
    ),
]

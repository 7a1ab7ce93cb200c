"""Models in shards on Torch, a process for each device."""

from __future__ import annotations

import keras
import numpy as np

import keras_strategies as ks


def cut(layout_map="fsdp", width=1):
    """The grid of the one device of each worker."""
    return ks.ModelParallelStrategy(layout_map, ["cpu:0"], width, min_shard_bytes=0)


def network(strategy):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, "tanh"),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(4),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def rows():
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(22, n)).astype("float32") for n in (8, 4))


def fit(model, callbacks=None):
    x, y = rows()
    history = model.fit(
        x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks
    )
    return history.history["loss"]

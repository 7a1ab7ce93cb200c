"""Scripts of `keras.distribution` and `tf.distribute`, and mistakes in them."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np


def model_of(fault: str, devices: int) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers: list[Any] = [keras.layers.Dense(8, "tanh")]
    if fault == "dropout":
        layers.append(keras.layers.Dropout(0.5))
    if fault == "batch_norm":
        layers.append(keras.layers.BatchNormalization())
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
    rate = 0.1 * devices if fault == "scaled_rate" else 0.1
    clip = 0.01 if fault == "clipped" else None
    model.compile(keras.optimizers.SGD(rate, clipnorm=clip), "mse", metrics=["mae"])
    return model


def data() -> dict[str, Any]:
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(20, n)).astype("float32") for n in (6, 1))
    return {"x": x, "y": y, "batch_size": 8, "shuffle": False, "verbose": 0}


def keras_distribution(fault: str = "") -> None:
    """`DataParallel` over all devices of JAX."""
    import jax
    import keras

    devices = jax.local_devices()
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model_of(fault, len(devices)).fit(**data(), epochs=2)


def tf_distribute(fault: str = "") -> None:
    """`MirroredStrategy` over all devices of TensorFlow."""
    import tensorflow as tf

    names = [each.name for each in tf.config.list_logical_devices("CPU")]
    strategy: Any = contextlib.nullcontext()
    if len(names) > 1:
        strategy = tf.distribute.MirroredStrategy(names)
    with strategy.scope() if len(names) > 1 else strategy:
        model = model_of(fault, len(names))
    own = data()
    if fault != "uneven":
        own |= {"x": own["x"][:16], "y": own["y"][:16]}
    else:
        own |= {"x": own["x"][:19], "y": own["y"][:19]}
    model.fit(**own, epochs=2)

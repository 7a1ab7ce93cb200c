"""A transformer with variables that are sharded over a mesh of devices.

    KERAS_BACKEND=jax python examples/sharded_transformer.py --model-parallel 2
    KERAS_BACKEND=tensorflow python examples/sharded_transformer.py --layout fsdp

It plans the model before there is one, trains it to reverse sequences of letters,
saves it in parts, and prints how far its loss is from that of one device.
"""

from __future__ import annotations

import argparse
import os
import tempfile

LETTERS, LENGTH = 32, 12


def sequences(rows, seed=0):
    """Letters of shape (rows, LENGTH), and the same backwards."""
    import numpy as np

    letters = np.random.default_rng(seed).integers(0, LETTERS, (rows, LENGTH))
    return letters.astype("int32"), letters[:, ::-1].astype("int32")


def transformer(width=64, blocks=2, heads=4):
    """A compiled model that gives a letter for each place."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(1)
    letters = keras.Input((LENGTH,), dtype="int32")
    places = keras.ops.arange(LENGTH)
    x = layers.Embedding(LETTERS, width, name="letters")(letters)
    x = x + layers.Embedding(LENGTH, width, name="places")(places)
    for i in range(blocks):
        attention = layers.MultiHeadAttention(heads, width // heads, name=f"block{i}")
        x = layers.LayerNormalization()(x + attention(x, x))
        wide = layers.Dense(4 * width, "gelu", name=f"up{i}")(x)
        x = layers.LayerNormalization()(x + layers.Dense(width, name=f"down{i}")(wide))
    model = keras.Model(letters, layers.Dense(LETTERS, name="scores")(x))
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(strategy, rows, epochs):
    """A trained model and the losses of its epochs."""
    with strategy.scope():
        model = transformer()
    x, y = sequences(rows)
    history = model.fit(x, y, batch_size=64, epochs=epochs, shuffle=False, verbose=0)
    return model, history.history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layout", default="auto", choices=["auto", "fsdp"])
    parser.add_argument("--model-parallel", type=int)
    parser.add_argument("--devices", default="cpu:0,cpu:1,cpu:2,cpu:3")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    os.environ.setdefault("KERAS_BACKEND", "jax")

    import keras_strategies as ks

    devices = options.devices.split(",")
    strategy = ks.ModelParallelStrategy(
        options.layout, devices, options.model_parallel, min_shard_bytes=4096
    )
    print(strategy.plan(transformer, ((64, LENGTH), (64, LENGTH))))
    model, logs = train(strategy, options.rows, options.epochs)
    _, alone = train(ks.OneDeviceStrategy(devices[0]), options.rows, options.epochs)
    gap = max(
        abs(a - b) / abs(b) for a, b in zip(logs["loss"], alone["loss"], strict=True)
    )
    print(f"loss: {logs['loss'][0]:.3f} to {logs['loss'][-1]:.3f}")
    print(f"accuracy: {logs['accuracy'][-1]:.3f}")
    print(f"largest difference to one device: {gap:.1e}")
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        with tempfile.TemporaryDirectory() as directory:
            number = strategy.save_sharded(model, directory)
            print(f"saved in parts as checkpoint {number}")


if __name__ == "__main__":
    main()

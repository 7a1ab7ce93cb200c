"""A causal language model, sharded, whose dense layers are tuned by adapters (LoRA).

    KERAS_BACKEND=jax python examples/adapters.py
    KERAS_BACKEND=tensorflow python examples/adapters.py --devices cpu:0,cpu:1

The model learns to count, is quantized to int8 where it is frozen, and its adapters
learn to count by twos. Planned bytes are printed beside those that are in use.
"""

from __future__ import annotations

import argparse
import math
import os

LETTERS, LENGTH = 32, 12


def counting(rows, step, seed=0):
    """Letters of shape (rows, LENGTH) with a constant step, and the next ones."""
    import numpy as np

    first = np.random.default_rng(seed).integers(0, LETTERS, (rows, 1))
    letters = (first + step * np.arange(LENGTH + 1)) % LETTERS
    return letters[:, :-1].astype("int32"), letters[:, 1:].astype("int32")


def language_model(width=64, heads=4):
    """A model that gives the scores of the next letter at each place."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(1)
    letters = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(LETTERS, width, name="letters")(letters)
    places = keras.ops.cumsum(keras.ops.ones_like(letters), axis=1) - 1
    x = x + layers.Embedding(LENGTH, width, name="places")(places)
    attention = layers.MultiHeadAttention(heads, width // heads)
    x = layers.LayerNormalization()(x + attention(x, x, use_causal_mask=True))
    x = x + layers.Dense(width, name="down")(layers.Dense(4 * width, "gelu")(x))
    return keras.Model(letters, layers.Dense(LETTERS, name="scores")(x))


def prepare(model):
    """Compiles a model, as it is trained before and after."""
    import keras

    model.compile(
        keras.optimizers.Adam(1e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def with_adapters(model, rank=4):
    """Freezes a model but for adapters of its dense layers."""
    from keras import layers

    model.quantize("int8", filters=lambda layer: isinstance(layer, layers.Dense))
    for layer in model.layers:
        layer.trainable = isinstance(layer, layers.Dense)
        if layer.trainable:
            layer.enable_lora(rank)
            layer.bias.trainable = False
    return prepare(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", default="cpu:0,cpu:1,cpu:2,cpu:3")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    os.environ.setdefault("KERAS_BACKEND", "jax")

    import keras_strategies as ks

    strategy = ks.ModelParallelStrategy(
        "fsdp", options.devices.split(","), min_shard_bytes=4096
    )
    shapes = (64, LENGTH), (64, LENGTH)
    plan = strategy.plan(lambda: with_adapters(language_model()), shapes)
    kinds = ("weight", "slot", "metric")
    planned = sum(sum(plan.bytes_per_device(kind).values()) for kind in kinds)
    with strategy.scope():
        model = prepare(language_model())
    given = {"batch_size": 64, "epochs": options.epochs, "verbose": 0}
    before = model.fit(*counting(options.rows, 1), **given).history
    with strategy.scope():
        with_adapters(model)
    x, y = counting(options.rows, 2)
    start = model.evaluate(x, y, verbose=0, return_dict=True)
    after = model.fit(x, y, **given).history
    used = sum(strategy.describe(model).totals.values())
    print(f"accuracy by ones: {before['accuracy'][-1]:.3f}")
    print(f"accuracy by twos: {start['accuracy']:.3f} to {after['accuracy'][-1]:.3f}")
    trained = sum(math.prod(v.shape) for v in model.trainable_variables)
    print(f"trained parameters: {trained} of {model.count_params()}")
    print(f"bytes on all devices: {planned} planned, {used} in use")


if __name__ == "__main__":
    main()

"""A custom training loop, the same on JAX, Torch and TensorFlow.

    KERAS_BACKEND=jax python examples/custom_loop.py --check

`--check` trains on one device as well and compares the weights. The last batch is
uneven on purpose: 1,437 rows in batches of 64 leave 29.
"""

from __future__ import annotations

import argparse
import os

BATCH_SIZE = 64


def load_digits():
    """Scikit-learn's 8x8 digits as rows of 64 numbers between 0 and 1."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype("float32")[:1437], labels.astype("int32")[:1437]


def train(strategy, data, epochs):
    """Trains under a strategy; returns the losses of the epochs and the weights."""
    import keras
    from keras import layers

    import keras_strategies as ks

    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(64, activation="relu"),
                layers.LayerNormalization(),
                layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )

    def replica_step(images, labels):
        def loss_fn():
            scores = model(images, training=True)
            accuracy.update_state(labels, scores)
            # This replica's part of the mean over the global batch.
            return ks.compute_average_loss(cross_entropy(labels, scores))

        variables = model.trainable_variables
        loss, gradients = ks.value_and_grad(loss_fn, variables)()
        optimizer.apply(gradients, variables)
        return loss

    @ks.function
    def step(images, labels):
        losses = strategy.run(replica_step, args=(images, labels))
        return strategy.reduce("SUM", losses, axis=None)

    dataset = strategy.experimental_distribute_dataset(data, batch_size=BATCH_SIZE)
    history = []
    for epoch in range(epochs):
        accuracy.reset_state()
        losses = [float(step(*batch)) for batch in dataset]
        history.append(sum(losses) / len(losses))
        print(f"{epoch + 1:5d}  {history[-1]:.4f}  {float(accuracy.result()):.4f}")
    return history, model.get_weights()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default=os.environ.get("KERAS_BACKEND", "jax"))
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    os.environ["KERAS_BACKEND"] = arguments.backend

    import numpy as np

    import keras_strategies as ks

    devices = arguments.devices.split(",")
    strategy = ks.MirroredStrategy(devices)
    data = load_digits()
    print(f"{arguments.backend}, {strategy}\nepoch  loss    accuracy")
    _, weights = train(strategy, data, arguments.epochs)
    if arguments.check:
        print("one device\nepoch  loss    accuracy")
        alone = ks.OneDeviceStrategy(devices[0])
        _, expected = train(alone, data, arguments.epochs)
        pairs = zip(weights, expected, strict=True)
        gap = max(float(np.abs(a - b).max()) for a, b in pairs)
        print(f"largest difference to one device: {gap:.2g}")


if __name__ == "__main__":
    main()

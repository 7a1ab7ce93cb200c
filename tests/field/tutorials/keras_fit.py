"""Distributed training with Keras's own loop: fit, callbacks, save and load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from common import folder, largest_difference, load_digits, report

import keras_strategies as ks

BATCH_SIZE = 64
EPOCHS = 4


def datasets() -> tuple[Any, Any]:
    """Batches of the global batch size; the last ones are smaller."""
    train, test = (tf.data.Dataset.from_tensor_slices(part) for part in load_digits())
    return train.cache().batch(BATCH_SIZE), test.batch(BATCH_SIZE)


def build_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(learning_rate=0.01),
        metrics=["accuracy"],
    )
    return model


def decay(epoch: int) -> float:
    return 1e-2 if epoch < 2 else 1e-3


class RecordRates(keras.callbacks.Callback):
    """The learning rate at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate))


def train(strategy: Any, where: Path) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    train_dataset, test_dataset = datasets()
    with strategy.scope():
        model = build_model()
    rates = RecordRates()
    callbacks = [
        keras.callbacks.TensorBoard(log_dir=str(where / "logs")),
        keras.callbacks.ModelCheckpoint(
            str(where / "checkpoint_{epoch}.weights.h5"), save_weights_only=True
        ),
        keras.callbacks.LearningRateScheduler(decay),
        rates,
    ]
    history = model.fit(train_dataset, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    last = model.get_weights()
    model.load_weights(where / f"checkpoint_{EPOCHS}.weights.h5")
    return {
        "model": model,
        "rates": rates.rates,
        "losses": history.history["loss"],
        "weights": model.get_weights(),
        "restored": largest_difference(last, model.get_weights()),
        "test": model.evaluate(test_dataset, verbose=0),
    }


def main() -> None:
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    found = train(strategy, folder() / "mirrored")
    expected = train(ks.get_strategy(), folder() / "alone")

    _, test_dataset = datasets()
    path = folder() / "model.keras"
    found["model"].save(path)
    unreplicated = keras.models.load_model(path)
    with strategy.scope():
        replicated = keras.models.load_model(path)
    tests = [m.evaluate(test_dataset, verbose=0) for m in (unreplicated, replicated)]
    report(
        replicas=strategy.num_replicas_in_sync,
        weights=largest_difference(expected["weights"], found["weights"]),
        losses=largest_difference([expected["losses"]], [found["losses"]]),
        test=largest_difference([expected["test"]], [found["test"]]),
        restored=found["restored"],
        loaded=largest_difference([found["test"]] * 2, tests),
        accuracy=found["test"][1],
        rates=found["rates"],
        events=len(os.listdir(folder() / "mirrored" / "logs")),
    )


if __name__ == "__main__":
    main()

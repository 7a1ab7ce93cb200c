"""Several workers with Keras's own loop: sharding, saving by the chief, backups.

The same script trains alone where no TF_CONFIG says who the workers are.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from common import folder, load_digits, report

import keras_strategies as ks

GLOBAL_BATCH_SIZE = 64
STEPS = 10


def digits_dataset(batch_size: int) -> Any:
    dataset = tf.data.Dataset.from_tensor_slices(load_digits()[0])
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return dataset.repeat().batch(batch_size).with_options(options)


def build_and_compile() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=0.05),
        metrics=["accuracy"],
    )
    return model


def write_path(path: Path, is_chief: bool, task: int) -> Path:
    """Every worker saves; all but the chief to a folder that is thrown away."""
    if is_chief:
        return path
    temporary = path.parent / f"worker_{task}"
    temporary.mkdir(exist_ok=True)
    return temporary / path.name


def main() -> None:
    strategy = ks.MultiWorkerMirroredStrategy()
    task = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {"index": 0})
    is_chief = task["index"] == 0

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_and_compile()
    backup = keras.callbacks.BackupAndRestore(str(folder() / "backup"))
    history = model.fit(
        digits_dataset(GLOBAL_BATCH_SIZE),
        epochs=3,
        steps_per_epoch=STEPS,
        callbacks=[backup],
        verbose=2,
    )
    images, labels = load_digits()[1]
    test = model.evaluate(images, labels, batch_size=GLOBAL_BATCH_SIZE, verbose=0)

    path = folder() / "model.keras"
    own_path = write_path(path, is_chief, task["index"])
    model.save(own_path)
    if not is_chief:
        shutil.rmtree(own_path.parent)
    else:
        np.savez(folder() / "weights.npz", *model.get_weights())
        report(
            replicas=strategy.num_replicas_in_sync,
            losses=history.history["loss"],
            accuracies=history.history["accuracy"],
            test=test,
            saved=path.exists(),
        )


if __name__ == "__main__":
    main()

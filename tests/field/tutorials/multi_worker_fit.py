"""Several workers with Keras's own loop: sharding, saving by the chief, backups.

The same script trains alone where no TF_CONFIG says who the workers are.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from common import (
    compile_digits_model,
    digits_model,
    folder,
    load_digits,
    report,
    task_index,
)

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


def write_path(path: Path, is_chief: bool, task: int) -> Path:
    """Every worker saves; all but the chief to a folder that is thrown away."""
    if is_chief:
        return path
    temporary = path.parent / f"worker_{task}"
    temporary.mkdir(exist_ok=True)
    return temporary / path.name


def main() -> None:
    strategy = ks.MultiWorkerMirroredStrategy()
    task = task_index()
    is_chief = task == 0

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = digits_model(pooled=False)
        compile_digits_model(model, keras.optimizers.SGD(learning_rate=0.05))
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
    own_path = write_path(path, is_chief, task)
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

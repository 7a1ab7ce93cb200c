"""Several workers with a custom loop: an input function, checkpoints, resuming.

The same script trains alone where no TF_CONFIG says who the workers are. It stops
after the number of epochs that it is given, and goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from common import folder, load_digits, report
from keras import ops

import keras_strategies as ks

PER_REPLICA_BATCH_SIZE = 32
GLOBAL_BATCH_SIZE = 64
STEPS_PER_EPOCH = 6


def dataset_fn(context: Any) -> Any:
    """A worker's share of the rows, in batches of its replica."""
    batch_size = context.get_per_replica_batch_size(GLOBAL_BATCH_SIZE)
    dataset = tf.data.Dataset.from_tensor_slices(load_digits()[0])
    dataset = dataset.repeat(3)
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.batch(batch_size)


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    strategy = ks.MultiWorkerMirroredStrategy()
    task = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {"index": 0})
    epochs = int(sys.argv[2])

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model()
        dataset = strategy.distribute_datasets_from_function(dataset_fn)
        optimizer = keras.optimizers.SGD(0.05)
        train_accuracy = keras.metrics.SparseCategoricalAccuracy()
        # Sums of what is computed in `run`, as a metric does it.
        epoch = keras.Variable(0, dtype="int32", trainable=False, name="epoch")
        # One file holds the model, the optimizer and the epoch.
        model.compile(optimizer)
        model.epoch = epoch
    loss_object = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )

    def replica_fn(inputs: Any) -> Any:
        images, labels = inputs

        def forward() -> Any:
            predictions = model(images, training=True)
            train_accuracy.update_state(labels, predictions)
            return ops.sum(loss_object(labels, predictions)) / GLOBAL_BATCH_SIZE

        variables = model.trainable_variables
        loss, gradients = ks.value_and_grad(forward, variables)()
        optimizer.apply(gradients, variables)
        return loss

    @ks.function
    def train_step(inputs: Any) -> Any:
        losses = strategy.run(replica_fn, args=(inputs,))
        return strategy.reduce(ks.ReduceOp.SUM, losses, axis=None)

    optimizer.build(model.trainable_variables)
    latest = folder() / "latest.weights.h5"
    if latest.exists():
        model.load_weights(latest)
        epoch.assign(int((folder() / "epoch").read_text()))
    begun = int(epoch)

    history = []
    while int(epoch) < begun + epochs:
        iterator = iter(dataset)
        losses = [float(train_step(next(iterator))) for _ in range(STEPS_PER_EPOCH)]
        history.append([sum(losses) / len(losses), float(train_accuracy.result())])
        train_accuracy.reset_state()
        epoch.assign(int(epoch) + 1)
        model.save_weights(latest)
        if task["index"] == 0:
            (folder() / "epoch").write_text(str(int(epoch)))

    if task["index"] == 0:
        np.savez(folder() / "weights.npz", *model.get_weights())
        report(
            replicas=strategy.num_replicas_in_sync,
            begun=begun,
            epoch=int(epoch),
            history=history,
            iterations=int(optimizer.iterations),
        )


if __name__ == "__main__":
    main()

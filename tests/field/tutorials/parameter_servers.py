"""Parameter servers: fit, a custom loop with a coordinator, evaluation."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from common import folder, report

import keras_strategies as ks

EPOCHS, STEPS = 5, 20
COLORS = ["black", "blue", "green", "red", "white", "yellow"]
BATCH_SIZE = 16


# --- Training with fit --------------------------------------------------------


def linear_data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.uniform(size=(160, 10)).astype("float32")
    return x, x @ random.normal(size=(10, 1)).astype("float32")


def linear_model(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse", **options)
    return model


def loss_on_one_device() -> float:
    """The loss after as many steps, one after the other, without a strategy."""
    x, y = linear_data()
    model = linear_model()
    epochs = EPOCHS * STEPS * BATCH_SIZE // len(x)
    model.fit(x, y, batch_size=BATCH_SIZE, epochs=epochs, shuffle=False, verbose=0)
    return float(model.evaluate(x, y, batch_size=BATCH_SIZE, verbose=0))


def train_with_fit(strategy: Any) -> dict[str, Any]:
    x, y = linear_data()

    def dataset_fn(context: Any) -> Any:
        size = context.get_per_replica_batch_size(BATCH_SIZE)

        def batches() -> Any:
            while True:
                for start in range(0, len(x), size):
                    yield x[start : start + size], y[start : start + size]

        return batches()

    with strategy.scope():
        model = linear_model(steps_per_execution=10)
    callbacks = [
        keras.callbacks.ModelCheckpoint(str(folder() / "checkpoint_{epoch}.keras")),
        keras.callbacks.BackupAndRestore(str(folder() / "backup")),
    ]
    history = model.fit(
        ks.DatasetCreator(dataset_fn),
        epochs=EPOCHS,
        steps_per_epoch=STEPS,
        callbacks=callbacks,
        verbose=0,
    )
    # Inline evaluation reads the values at that moment, and each row once.
    logged = model.evaluate(x, y, batch_size=BATCH_SIZE, verbose=0)
    kernel, bias = model.get_weights()
    restored = keras.models.load_model(folder() / "checkpoint_5.keras")
    return {
        "losses": history.history["loss"],
        "iterations": int(model.optimizer.iterations),
        "evaluated": logged,
        "alone": loss_on_one_device(),
        "expected": float(np.mean((x @ kernel + bias - y) ** 2)),
        "restored": float(np.abs(restored.get_weights()[0] - kernel).max()),
    }


# --- Training with a custom loop ----------------------------------------------


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of colors in a table of 4,096 rows, and whether the color is bright."""
    random = np.random.default_rng(1)
    chosen = random.integers(0, len(COLORS), count)
    bright = np.isin(chosen, [4, 5]).astype("float32")
    return (chosen * 601).astype("int32")[:, None], bright[:, None]


def train_with_a_coordinator(strategy: Any) -> dict[str, Any]:
    coordinator = ks.ClusterCoordinator(strategy)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        ids = keras.Input((1,), dtype="int32")
        table = keras.layers.Embedding(4096, 16, name="table")
        vector = keras.layers.Flatten()(table(ids))
        model = keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(vector))
        optimizer = keras.optimizers.RMSprop(0.05)
        accuracy = keras.metrics.BinaryAccuracy()
    cross_entropy = keras.losses.BinaryCrossentropy(reduction=None)

    def replica_fn(ids: Any, labels: Any) -> Any:
        def forward() -> Any:
            predictions = model(ids, training=True)
            accuracy.update_state(labels, predictions)
            return ks.compute_average_loss(cross_entropy(labels, predictions))

        variables = model.trainable_variables
        loss, gradients = ks.value_and_grad(forward, variables)()
        optimizer.apply(gradients, variables)
        return loss

    def step_fn(iterator: Any) -> Any:
        losses = strategy.run(replica_fn, args=next(iterator))
        return strategy.reduce(ks.ReduceOp.SUM, losses, axis=None)

    def dataset_fn() -> Any:
        x, y = rows(64)
        while True:
            for start in range(0, 64, BATCH_SIZE):
                yield x[start : start + BATCH_SIZE], y[start : start + BATCH_SIZE]

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    first = float(coordinator.schedule(step_fn, args=(iterator,)).fetch())
    accuracies = []
    for _ in range(3):
        accuracy.reset_state()
        for _ in range(STEPS):
            coordinator.schedule(step_fn, args=(iterator,))
        # Waits until all scheduled steps are done.
        coordinator.join()
        accuracies.append(float(accuracy.result()))
    last = float(coordinator.schedule(step_fn, args=(iterator,)).fetch())

    # Evaluation by scheduled functions, one for each batch.
    with strategy.scope():
        test_accuracy = keras.metrics.BinaryAccuracy()

    def eval_step(start: int) -> None:
        x, y = rows(64)
        part = slice(start, start + BATCH_SIZE)
        test_accuracy.update_state(y[part], model(x[part], training=False))

    for start in range(0, 64, BATCH_SIZE):
        coordinator.schedule(eval_step, args=(start,))
    coordinator.join()
    return {
        "first": first,
        "last": last,
        "accuracies": accuracies,
        "iterations": int(optimizer.iterations),
        "test": float(test_accuracy.result()),
        "places": [
            row[3] for row in strategy.describe(model).rows if "table" in row[0]
        ],
    }


def main() -> None:
    resolver = ks.cluster_resolver.LocalClusterResolver(workers=2, ps=2)
    partitioner = ks.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=64 << 10, max_shards=2
    )
    with ks.ParameterServerStrategy(resolver, partitioner) as strategy:
        fitted = train_with_fit(strategy)
        loop = train_with_a_coordinator(strategy)
    report(fit=fitted, loop=loop)


if __name__ == "__main__":
    main()

"""Distributed input: rebatching, partial batches, functions, specs, values."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from common import largest_difference, load_digits, report
from keras import ops

import keras_strategies as ks

GLOBAL_BATCH_SIZE = 16


def numbers(strategy: Any, value: Any) -> list[list[float]]:
    """What each replica gets."""
    parts = strategy.experimental_local_results(value)
    return [ops.convert_to_numpy(part).ravel().tolist() for part in parts]


def rebatching(strategy: Any) -> list[Any]:
    """Batches of the global size are split; the last one is smaller."""
    dataset = tf.data.Dataset.range(10).batch(4)
    distributed = strategy.experimental_distribute_dataset(dataset)
    return [numbers(strategy, batch) for batch in distributed]


def by_function(strategy: Any) -> list[Any]:
    """The function's batches are a replica's; nothing is rebatched."""

    def dataset_fn(context: Any) -> Any:
        size = context.get_per_replica_batch_size(8)
        dataset = tf.data.Dataset.range(16)
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.batch(size).prefetch(2)

    distributed = strategy.distribute_datasets_from_function(dataset_fn)
    return [numbers(strategy, batch) for batch in distributed]


def specification(strategy: Any) -> list[str]:
    """The structure of what iteration gives, with shapes and types."""
    data = (np.ones((6, 3), "float32"), np.zeros((6,), "int32"))
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(4)
    spec = strategy.experimental_distribute_dataset(dataset).element_spec
    return [type(spec).__name__, *(str(part) for part in spec)]


def other_values(strategy: Any) -> dict[str, Any]:
    """Values that are not datasets: by replica, and from a generator."""

    def value_fn(context: Any) -> Any:
        return ops.convert_to_tensor(np.float32(context.replica_id_in_sync_group))

    values = strategy.experimental_distribute_values_from_function(value_fn)
    doubled = strategy.run(lambda x: x * 2, args=(values,))

    def generator() -> Any:
        for _ in range(10):
            yield np.random.default_rng(0).random((4, 2)).astype("float32")

    distributed = strategy.experimental_distribute_dataset(generator())
    sums = []
    for batch in distributed:
        total = strategy.run(lambda x: ops.sum(x), args=(batch,))
        sums.append(float(strategy.reduce("SUM", total, axis=None)))
    return {"doubled": numbers(strategy, doubled), "sums": sums}


def train(strategy: Any) -> dict[str, Any]:
    """All ways to iterate, in one model's training."""
    images, labels = load_digits()[0]
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
        )
        optimizer = keras.optimizers.SGD(0.1)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )

    def replica_fn(inputs: Any) -> Any:
        images, labels = inputs

        def forward() -> Any:
            losses = cross_entropy(labels, model(images, training=True))
            return ks.compute_average_loss(losses)

        loss, gradients = ks.value_and_grad(forward, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @ks.function
    def train_step(inputs: Any) -> Any:
        losses = strategy.run(replica_fn, args=(inputs,))
        return strategy.reduce(ks.ReduceOp.SUM, losses, axis=None)

    dataset = tf.data.Dataset.from_tensor_slices((images[:71], labels[:71]))
    dataset = dataset.batch(GLOBAL_BATCH_SIZE)
    distributed = strategy.experimental_distribute_dataset(dataset)
    losses = [float(train_step(batch)) for batch in distributed]
    iterator = iter(distributed)
    for _ in range(2):
        losses.append(float(train_step(next(iterator))))
    while True:
        optional = iterator.get_next_as_optional()
        if not optional.has_value():
            break
        losses.append(float(train_step(optional.get_value())))
    return {"losses": losses, "weights": model.get_weights()}


def main() -> None:
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    found, expected = train(strategy), train(ks.OneDeviceStrategy("cpu:0"))
    report(
        rebatching=rebatching(strategy),
        by_function=by_function(strategy),
        specification=specification(strategy),
        steps=len(found["losses"]),
        losses=largest_difference([expected["losses"]], [found["losses"]]),
        weights=largest_difference(expected["weights"], found["weights"]),
        **other_values(strategy),
    )


if __name__ == "__main__":
    main()

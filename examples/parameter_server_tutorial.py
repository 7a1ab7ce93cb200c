"""TensorFlow's tutorial on parameter servers, with strings and lookup tables.

    KERAS_BACKEND=tensorflow python examples/parameter_server_tutorial.py

The custom loop of https://www.tensorflow.org/tutorials/distribute/parameter_server_training
on a local cluster: `tf.distribute` is replaced by `ks`, Keras 2 by Keras 3. Workers map
strings to numbers in their datasets, by layers with lookup tables of the coordinator.
"""

from __future__ import annotations

import argparse
import random

import keras
import tensorflow as tf

import keras_strategies as ks

FEATURES = [
    "avenger",
    "ironman",
    "batman",
    "hulk",
    "spiderman",
    "kingkong",
    "wonder_woman",
]
LABELS = ["yes", "no"]


def examples(rows: int, seed: int) -> dict[str, list[list[str]]]:
    """Three words in each row; the label is "yes" if "avenger" is one of them."""
    draw = random.Random(seed)
    features = [draw.sample(FEATURES, 3) for _ in range(rows)]
    labels = [["yes" if "avenger" in row else "no"] for row in features]
    return {"features": features, "label": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ps", type=int, default=2, help="parameter servers")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="steps of each epoch")
    parser.add_argument("--width", type=int, default=16384, help="of the embedding")
    options = parser.parse_args()

    keras.utils.set_random_seed(0)
    strategy = ks.ParameterServerStrategy(
        ks.cluster_resolver.LocalClusterResolver(options.workers, options.ps),
        variable_partitioner=ks.experimental.partitioners.MinSizePartitioner(
            min_shard_bytes=256 << 10, max_shards=options.ps
        ),
    )
    with strategy, strategy.scope():
        train(strategy, options)


def train(strategy: ks.ParameterServerStrategy, options: argparse.Namespace) -> None:
    feature_lookup = keras.layers.StringLookup(vocabulary=FEATURES, mask_token=None)
    label_lookup = keras.layers.StringLookup(
        vocabulary=LABELS, num_oov_indices=0, mask_token=None
    )
    raw_features = keras.Input((3,), dtype="string", name="features")
    feature_stage = keras.Model(
        {"features": raw_features}, feature_lookup(raw_features)
    )
    raw_label = keras.Input((1,), dtype="string", name="label")
    label_stage = keras.Model({"label": raw_label}, label_lookup(raw_label))

    def dataset_fn(context: ks.InputContext | None) -> tf.data.Dataset:
        raw = tf.data.Dataset.from_tensor_slices(examples(200, seed=1))

        def numbers(
            rows: dict[str, tf.Tensor],
        ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
            features = feature_stage({"features": rows["features"]})
            return {"features": features}, label_stage({"label": rows["label"]})

        return raw.shuffle(200).batch(32).map(numbers).repeat()

    ids = keras.Input((3,), dtype="int64", name="features")
    size = len(feature_lookup.get_vocabulary())
    rows = keras.layers.Embedding(size, options.width)(ids)
    dense = keras.layers.Dense(
        1, activation="sigmoid", kernel_regularizer=keras.regularizers.L2(1e-4)
    )
    model = keras.Model({"features": ids}, dense(keras.ops.mean(rows, axis=1)))
    optimizer = keras.optimizers.RMSprop(learning_rate=0.01)
    accuracy = keras.metrics.Accuracy()
    loss_of = keras.losses.BinaryCrossentropy(reduction=None)

    def predicted(probabilities: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.greater(probabilities, 0.5), tf.int64)

    def replica_step(batch: dict[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            probabilities = model(batch, training=True)
            loss = tf.nn.compute_average_loss(loss_of(labels, probabilities))
            loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        accuracy.update_state(labels, predicted(probabilities))
        return loss

    @tf.function
    def step_fn(iterator: tf.data.Iterator) -> tf.Tensor:
        batch, labels = next(iterator)
        losses = strategy.run(replica_step, args=(batch, labels))
        return strategy.reduce("SUM", losses, axis=None)

    coordinator = ks.ClusterCoordinator(strategy)

    @tf.function
    def per_worker_dataset_fn() -> ks.DistributedDataset:
        return strategy.distribute_datasets_from_function(dataset_fn)

    per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
    iterator = iter(per_worker_dataset)
    for epoch in range(options.epochs):
        accuracy.reset_state()
        for _ in range(options.steps):
            coordinator.schedule(step_fn, args=(iterator,))
        # Waits until all scheduled functions are done.
        coordinator.join()
        print(f"Finished epoch {epoch}, accuracy is {float(accuracy.result()):.3f}.")

    loss = coordinator.schedule(step_fn, args=(iterator,))
    print(f"Final loss is {float(loss.fetch()):.6f}.")

    # Inline evaluation, on the coordinator.
    raw = examples(64, seed=2)
    features = feature_lookup(tf.constant(raw["features"]))
    labels = label_lookup(tf.constant(raw["label"]))
    test = keras.metrics.Accuracy()
    test.update_state(labels, predicted(model({"features": features})))
    print(f"Evaluation accuracy: {float(test.result()):.3f}.")


if __name__ == "__main__":
    main()

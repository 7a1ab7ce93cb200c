"""The custom loop of `before.py` on Keras 3: `tf.distribute` is `ks`, `tf.keras` is
`keras`.

Run it with `KERAS_BACKEND=tensorflow`.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_strategies as ks

strategy = ks.MirroredStrategy()
GLOBAL_BATCH_SIZE = 64

images, labels = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices(((images / 16).astype("float32"), labels))
dataset = strategy.experimental_distribute_dataset(dataset.batch(GLOBAL_BATCH_SIZE))

with strategy.scope():
    model = keras.Sequential(
        [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    )
    optimizer = keras.optimizers.SGD(0.1)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_object = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )


def compute_loss(labels, predictions):
    per_example_loss = loss_object(labels, predictions)
    return ks.compute_average_loss(
        per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE
    )


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    accuracy.update_state(labels, predictions)
    return loss


@tf.function
def distributed_train_step(inputs):
    per_replica_losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(ks.ReduceOp.SUM, per_replica_losses, axis=None)


for epoch in range(3):
    total_loss, num_batches = 0.0, 0
    for inputs in dataset:
        total_loss += float(distributed_train_step(inputs))
        num_batches += 1
    mean_loss, result = total_loss / num_batches, float(accuracy.result())
    print(f"epoch {epoch + 1}, loss {mean_loss:.4f}, accuracy {result:.4f}")
    accuracy.reset_state()

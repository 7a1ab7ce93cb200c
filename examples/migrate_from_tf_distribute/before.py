"""A custom loop for `tf.distribute` and Keras 2: what `after.py` was made from.

It is here to be read; it needs Keras 2 (`tf_keras`) as `tf.keras`, which `make env`
does not install: `pip install --no-deps tf_keras==2.21.0`.
"""

import tensorflow as tf
from sklearn.datasets import load_digits

strategy = tf.distribute.MirroredStrategy()
GLOBAL_BATCH_SIZE = 64

images, labels = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices(((images / 16).astype("float32"), labels))
dataset = strategy.experimental_distribute_dataset(dataset.batch(GLOBAL_BATCH_SIZE))

with strategy.scope():
    model = tf.keras.Sequential(
        [tf.keras.layers.Dense(64, activation="relu"), tf.keras.layers.Dense(10)]
    )
    optimizer = tf.keras.optimizers.SGD(0.1)
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )


def compute_loss(labels, predictions):
    per_example_loss = loss_object(labels, predictions)
    return tf.nn.compute_average_loss(
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
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


for epoch in range(3):
    total_loss, num_batches = 0.0, 0
    for inputs in dataset:
        total_loss += float(distributed_train_step(inputs))
        num_batches += 1
    mean_loss, result = total_loss / num_batches, float(accuracy.result())
    print(f"epoch {epoch + 1}, loss {mean_loss:.4f}, accuracy {result:.4f}")
    accuracy.reset_state()

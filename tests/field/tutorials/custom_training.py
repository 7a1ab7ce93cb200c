"""A custom training loop: per-replica losses, metrics, checkpoints, iterators."""

from __future__ import annotations

from typing import Any

import keras
from common import folder, largest_difference, load_digits, report

import keras_strategies as ks

GLOBAL_BATCH_SIZE = 64
EPOCHS = 3


def create_model() -> keras.Model:
    penalty = keras.regularizers.L2(1e-3)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu", kernel_regularizer=penalty),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu", kernel_regularizer=penalty),
            keras.layers.Dense(10),
        ]
    )


class Loop:
    """What the script defines at its top level, once for each strategy."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        train, test = load_digits()
        self.train_data = strategy.experimental_distribute_dataset(
            train, batch_size=GLOBAL_BATCH_SIZE
        )
        self.test_data = strategy.experimental_distribute_dataset(
            test, batch_size=GLOBAL_BATCH_SIZE
        )
        keras.utils.set_random_seed(0)
        with strategy.scope():
            self.loss_object = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=None
            )
            self.test_loss = keras.metrics.Mean(name="test_loss")
            self.train_accuracy = keras.metrics.SparseCategoricalAccuracy()
            self.test_accuracy = keras.metrics.SparseCategoricalAccuracy()
            self.model = create_model()
            self.optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        self.distributed_train_step = ks.function(self._distributed_train_step)
        self.distributed_test_step = ks.function(self._distributed_test_step)

    def compute_loss(self, labels: Any, predictions: Any) -> Any:
        loss = ks.compute_average_loss(self.loss_object(labels, predictions))
        if self.model.losses:
            loss = loss + ks.scale_regularization_loss(self.model.losses)
        return loss

    def train_step(self, inputs: Any) -> Any:
        images, labels = inputs

        def forward() -> Any:
            predictions = self.model(images, training=True)
            self.train_accuracy.update_state(labels, predictions)
            return self.compute_loss(labels, predictions)

        variables = self.model.trainable_variables
        loss, gradients = ks.value_and_grad(forward, variables)()
        self.optimizer.apply(gradients, variables)
        return loss

    def test_step(self, inputs: Any) -> None:
        images, labels = inputs
        predictions = self.model(images, training=False)
        self.test_loss.update_state(self.loss_object(labels, predictions))
        self.test_accuracy.update_state(labels, predictions)

    def _distributed_train_step(self, inputs: Any) -> Any:
        losses = self.strategy.run(self.train_step, args=(inputs,))
        return self.strategy.reduce(ks.ReduceOp.SUM, losses, axis=None)

    def _distributed_test_step(self, inputs: Any) -> None:
        self.strategy.run(self.test_step, args=(inputs,))

    def train(self) -> dict[str, Any]:
        history = []
        for epoch in range(EPOCHS):
            losses = [float(self.distributed_train_step(x)) for x in self.train_data]
            for inputs in self.test_data:
                self.distributed_test_step(inputs)
            history.append(
                [
                    sum(losses) / len(losses),
                    float(self.train_accuracy.result()),
                    float(self.test_loss.result()),
                    float(self.test_accuracy.result()),
                ]
            )
            path = folder() / f"{type(self.strategy).__name__}_{epoch}.weights.h5"
            self.model.save_weights(path)
            self.test_loss.reset_state()
            self.train_accuracy.reset_state()
            self.test_accuracy.reset_state()
        # By an iterator of one's own, for a number of steps instead of an epoch.
        iterator = iter(self.train_data)
        some = [float(self.distributed_train_step(next(iterator))) for _ in range(3)]
        return {
            "history": history,
            "some": some,
            "checkpoint": path,
            "weights": self.model.get_weights(),
        }


def evaluate_without_strategy(checkpoint: Any) -> float:
    """The checkpoint's accuracy in a model that no strategy made."""
    model = create_model()
    model.load_weights(checkpoint)
    (_, _), (images, labels) = load_digits()
    predictions = model.predict(images, verbose=0)
    return float((predictions.argmax(axis=1) == labels).mean())


def main() -> None:
    found = Loop(ks.MirroredStrategy(["cpu:0", "cpu:1"])).train()
    expected = Loop(ks.OneDeviceStrategy("cpu:0")).train()
    report(
        weights=largest_difference(expected["weights"], found["weights"]),
        history=largest_difference(expected["history"], found["history"]),
        some=largest_difference([expected["some"]], [found["some"]]),
        accuracy=found["history"][-1][3],
        accuracy_of_checkpoint=evaluate_without_strategy(found["checkpoint"]),
    )


if __name__ == "__main__":
    main()

"""The guide: each strategy of one machine, in fit and in a custom loop."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from common import largest_difference, report

import keras_strategies as ks

GLOBAL_BATCH_SIZE = 10
X = np.linspace(-1, 1, 25, dtype="float32")[:, None]
Y = 2 * X + 0.5


def strategies() -> dict[str, Any]:
    devices = ["cpu:0", "cpu:1"]
    return {
        "mirrored": ks.MirroredStrategy(devices),
        "with cross-device ops": ks.MirroredStrategy(
            devices, cross_device_ops=ks.HierarchicalCopyAllReduce()
        ),
        "central storage": ks.experimental.CentralStorageStrategy(devices),
        "one device": ks.OneDeviceStrategy("cpu:1"),
        "default": ks.get_strategy(),
        "one worker": ks.MultiWorkerMirroredStrategy(
            communication_options=ks.experimental.CommunicationOptions(
                implementation=ks.experimental.CommunicationImplementation.AUTO
            )
        ),
    }


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(
                4, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-2)
            ),
            keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(1e-2)),
        ]
    )


def with_fit(strategy: Any) -> list[Any]:
    with strategy.scope():
        model = make_model()
        model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.1))
    options = {"batch_size": GLOBAL_BATCH_SIZE, "shuffle": False, "verbose": 0}
    history = model.fit(X, Y, epochs=3, **options)
    logged = model.evaluate(X, Y, batch_size=GLOBAL_BATCH_SIZE, verbose=0)
    return [*model.get_weights(), history.history["loss"], logged]


def with_a_loop(strategy: Any) -> list[Any]:
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.SGD(0.1)
    dataset = strategy.experimental_distribute_dataset(
        (X, Y), batch_size=GLOBAL_BATCH_SIZE
    )
    loss_object = keras.losses.MeanSquaredError(reduction=None)

    def train_step(inputs: Any) -> Any:
        features, labels = inputs

        def forward() -> Any:
            predictions = model(features, training=True)
            loss = ks.compute_average_loss(loss_object(labels, predictions))
            if model.losses:
                loss = loss + ks.scale_regularization_loss(model.losses)
            return loss

        variables = model.trainable_variables
        loss, gradients = ks.value_and_grad(forward, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    @ks.function
    def distributed_train_step(inputs: Any) -> Any:
        per_replica_losses = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(ks.ReduceOp.SUM, per_replica_losses, axis=None)

    losses = [float(distributed_train_step(x)) for _ in range(3) for x in dataset]
    return [*model.get_weights(), losses]


def by_hand() -> list[Any]:
    """The loop's weights by Keras alone: the same losses, through `fit`."""
    model = make_model()
    model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.1))
    options = {"batch_size": GLOBAL_BATCH_SIZE, "shuffle": False, "verbose": 0}
    model.fit(X, Y, epochs=3, **options)
    return model.get_weights()


def main() -> None:
    ks.set_virtual_cpu_devices(2)
    plain = by_hand()
    expected = with_fit(ks.get_strategy())
    fits, loops, replicas = {}, {}, {}
    for name, strategy in strategies().items():
        fits[name] = largest_difference(expected, with_fit(strategy))
        loops[name] = largest_difference(plain, with_a_loop(strategy)[:-1])
        replicas[name] = strategy.num_replicas_in_sync
    report(fits=fits, loops=loops, replicas=replicas)


if __name__ == "__main__":
    main()

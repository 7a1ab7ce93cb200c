"""Saving and loading: with and without a strategy, custom classes, exports."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from common import folder, largest_difference, load_digits, report

import keras_strategies as ks


def get_model(strategy: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(8, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
            metrics=["accuracy"],
        )
    return model


@keras.saving.register_keras_serializable("field")
class SubclassedModel(keras.Model):
    """A model without a graph of layers; its configuration makes it again."""

    def __init__(self, units: int = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.flatten = keras.layers.Flatten()
        self.dense = keras.layers.Dense(units)

    def call(self, inputs: Any) -> Any:
        return self.dense(self.flatten(inputs))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def fit(model: keras.Model) -> list[float]:
    images, labels = load_digits()[0]
    options = {"batch_size": 64, "epochs": 1, "shuffle": False, "verbose": 0}
    return model.fit(images, labels, **options).history["loss"]


def train_save_and_go_on(strategy: Any, name: str) -> dict[str, Any]:
    """Trains, saves, and goes on training with what was loaded in three ways."""
    path = folder() / f"{name}.keras"
    model = get_model(strategy)
    losses = fit(model)
    model.save(path)
    images = load_digits()[1][0]
    before = model.predict(images, verbose=0)

    unreplicated = keras.models.load_model(path)
    other = ks.OneDeviceStrategy("cpu:1")
    with other.scope():
        elsewhere = keras.models.load_model(path)
    with strategy.scope():
        replicated = keras.models.load_model(path)
    loaded = (unreplicated, elsewhere, replicated)
    predictions = [m.predict(images, verbose=0) for m in loaded]
    went_on = [fit(m) for m in loaded]
    return {
        "losses": losses,
        "predictions": largest_difference([before] * 3, predictions),
        "went_on": largest_difference([went_on[0]] * 3, went_on),
        "weights": [w for m in loaded for w in m.get_weights()],
    }


def weights_between_strategies() -> float:
    """Saved weights of one strategy's model in the model of another."""
    model = get_model(ks.MirroredStrategy(["cpu:0", "cpu:1"]))
    fit(model)
    path = folder() / "only.weights.h5"
    model.save_weights(path)
    other = get_model(ks.CentralStorageStrategy(["cpu:0", "cpu:1"]))
    other.load_weights(path)
    return largest_difference(model.get_weights(), other.get_weights())


def subclassed(strategy: Any) -> float:
    with strategy.scope():
        model = SubclassedModel(name="subclassed")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
    fit(model)
    path = folder() / "subclassed.keras"
    model.save(path)
    with strategy.scope():
        loaded = keras.models.load_model(path)
    images = load_digits()[1][0]
    return largest_difference(
        [model.predict(images, verbose=0)], [loaded.predict(images, verbose=0)]
    )


def exported(strategy: Any) -> float | None:
    """The SavedModel for serving, on TensorFlow."""
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    model = get_model(strategy)
    fit(model)
    path = str(folder() / "serving")
    model.export(path, verbose=False)
    images = load_digits()[1][0]
    # Its functions do not keep their variables.
    loaded = tf.saved_model.load(path)
    served = loaded.serve(images)
    return largest_difference([model.predict(images, verbose=0)], [np.asarray(served)])


def main() -> None:
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    found = train_save_and_go_on(strategy, "mirrored")
    expected = train_save_and_go_on(ks.get_strategy(), "alone")
    report(
        losses=largest_difference([expected["losses"]], [found["losses"]]),
        predictions=found["predictions"],
        went_on=found["went_on"],
        weights=largest_difference(expected["weights"], found["weights"]),
        between_strategies=weights_between_strategies(),
        subclassed=subclassed(strategy),
        exported=exported(strategy),
    )


if __name__ == "__main__":
    main()

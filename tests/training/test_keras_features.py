"""Features of Keras that people use in their first days, beside plain Keras.

Each is trained by Keras alone and on two replicas, from one seed; histories, weights
and predictions are equal. What other tests compare is not repeated:
`pages/features.py` has all of them.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import assert_arrays
from keras import callbacks, layers

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

BACKEND = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(70, 8)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")
OPTIONS: dict[str, Any] = {"batch_size": 16, "verbose": 0, "shuffle": False}


def build(optimizer: Any = "sgd", hidden: int = 8) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(hidden, "tanh"), layers.Dense(2)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def both(train: Callable[[Any, Callable[..., Any]], Any]) -> None:
    """Compares what a function returns for plain Keras and for two replicas.

    Args:
        train: gets a function that makes a model, and returns a structure of numbers.
    """
    found = []
    for strategy in (None, ks.MirroredStrategy(["cpu:0", "cpu:1"])):

        def made(make: Callable[[], Any], strategy: Any = strategy) -> Any:
            keras.utils.set_random_seed(1)
            if strategy is None:
                return make()
            with strategy.scope():
                return make()

        found.append(train(strategy, made))
    alone, together = map(keras.tree.flatten, found)
    assert_arrays(together, alone, 2e-4, 2e-5)


CALLBACKS: dict[str, Callable[[Path], Any]] = {
    "swap_ema": lambda path: callbacks.SwapEMAWeights(swap_on_epoch=True),
    "terminate_on_nan": lambda path: callbacks.TerminateOnNaN(),
    "csv_logger": lambda path: callbacks.CSVLogger(str(path / "log.csv")),
    "schedule": lambda path: callbacks.LearningRateScheduler(lambda n, r: r * 0.5**n),
    "plateau": lambda path: callbacks.ReduceLROnPlateau(
        "loss", patience=0, min_delta=9
    ),
    "early_stopping": lambda path: callbacks.EarlyStopping(
        "loss", patience=1, min_delta=9, restore_best_weights=True
    ),
    "checkpoint": lambda path: callbacks.ModelCheckpoint(
        str(path / "best.keras"), "loss", save_best_only=True
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CALLBACKS)
def test_callback(name: str, tmp_path: Path) -> None:
    def train(strategy: Any, made: Any) -> Any:
        folder = tmp_path / ("plain" if strategy is None else "mirrored")
        folder.mkdir()
        optimizer = {"use_ema": True} if name == "swap_ema" else {}
        model = made(lambda: build(keras.optimizers.SGD(0.1, **optimizer)))
        callback = CALLBACKS[name](folder)
        history = model.fit(X, Y, epochs=3, callbacks=[callback], **OPTIONS).history
        found = [history["loss"], model.get_weights()]
        if name == "csv_logger":
            rows = (folder / "log.csv").read_text().splitlines()[1:]
            found.append([float(row.split(",")[2]) for row in rows])
        if name == "checkpoint":
            best = keras.saving.load_model(folder / "best.keras")
            found.append(best.get_weights())
        return found

    both(train)


@pytest.mark.nightly
def test_images_of_a_folder(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for i in range(9):
            image = np.random.default_rng(i).integers(0, 255, (8, 8, 3))
            keras.utils.save_img(tmp_path / label / f"{i}.png", image)

    def train(strategy: Any, made: Any) -> Any:
        dataset = keras.utils.image_dataset_from_directory(
            tmp_path, image_size=(8, 8), batch_size=5, shuffle=False, verbose=False
        )

        def make() -> keras.Model:
            parts = [layers.Rescaling(1 / 255), layers.Conv2D(2, 3), layers.Flatten()]
            model = keras.Sequential([keras.Input((8, 8, 3)), *parts, layers.Dense(2)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss)
            return model

        model = made(make)
        losses = model.fit(dataset, epochs=2, verbose=0).history["loss"]
        return losses, model.get_weights(), model.predict(dataset, verbose=0)

    both(train)


@pytest.mark.nightly
def test_a_time_series() -> None:
    def train(strategy: Any, made: Any) -> Any:
        dataset = keras.utils.timeseries_dataset_from_array(
            X[:, :1], X[5:, 0], sequence_length=5, batch_size=9
        )

        def make() -> keras.Model:
            model = keras.Sequential([keras.Input((5, 1)), layers.LSTM(4)])
            model.add(layers.Dense(1))
            model.compile("sgd", "mse")
            return model

        model = made(make)
        return model.fit(dataset, epochs=2, verbose=0).history, model.get_weights()

    both(train)


@pytest.mark.nightly
def test_text() -> None:
    texts = np.array(
        [
            " ".join("abcdefgh"[n % 8] for n in range(i, i + 4))
            for i in X[:, 0].argsort()
        ]
    )
    vectorized = layers.TextVectorization(output_sequence_length=4, max_tokens=20)
    vectorized.adapt(texts)
    numbers = np.asarray(vectorized(texts))

    def train(strategy: Any, made: Any) -> Any:
        def make() -> keras.Model:
            model = keras.Sequential([keras.Input((4,)), layers.Embedding(20, 4)])
            model.add(layers.GlobalAveragePooling1D())
            model.add(layers.Dense(2))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss)
            return model

        model = made(make)
        history = model.fit(numbers, Y, epochs=2, **OPTIONS).history
        return history, model.get_weights()

    both(train)


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(when: str) -> None:
    def train(strategy: Any, made: Any) -> Any:
        model = made(build)
        if when == "after":
            model.fit(X, Y, **OPTIONS)

        def adapt() -> None:
            model.layers[0].enable_lora(2)
            model.compile(
                keras.optimizers.SGD(0.1),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )

        made(adapt)
        history = model.fit(X, Y, epochs=2, **OPTIONS).history
        return history, model.predict(X, verbose=0)

    both(train)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_predictions_of_integer_weights(kind: str) -> None:
    def train(strategy: Any, made: Any) -> Any:
        model = made(lambda: build(hidden=32))
        model.fit(X, Y, **OPTIONS)
        model.quantize(kind)
        return model.predict(X, verbose=0)

    both(train)


COPIES: dict[str, Callable[[Any, Path], Any]] = {
    "saved": lambda model, path: _loaded(model, path),
    "pickle": lambda model, path: pickle.loads(pickle.dumps(model)),
    "deepcopy": lambda model, path: copy.deepcopy(model),
    "json": lambda model, path: keras.models.model_from_json(model.to_json()),
    "weights": lambda model, path: _with_weights(model, path),
}


def _loaded(model: Any, path: Path) -> Any:
    model.save(path / "model.keras")
    return keras.saving.load_model(path / "model.keras")


def _with_weights(model: Any, path: Path) -> Any:
    model.save_weights(path / "model.weights.h5")
    other = build(keras.optimizers.Adam(0.01))
    other.load_weights(path / "model.weights.h5")
    return other


@pytest.mark.nightly
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_trains_on(name: str, tmp_path: Path) -> None:
    def train(strategy: Any, made: Any) -> Any:
        model = made(lambda: build(keras.optimizers.Adam(0.01)))
        model.fit(X, Y, **OPTIONS)
        other = made(lambda: COPIES[name](model, tmp_path))
        history = other.fit(X, Y, epochs=2, **OPTIONS).history
        return history, other.get_weights(), model.get_weights()

    both(train)


@pytest.mark.nightly
def test_scikit_learn() -> None:
    from keras.wrappers import SKLearnClassifier
    from sklearn.model_selection import cross_val_score

    def train(strategy: Any, made: Any) -> Any:
        def make(X: Any, y: Any) -> Any:
            def model() -> keras.Model:
                model = keras.Sequential(
                    [keras.Input((8,)), layers.Dense(2, "softmax")]
                )
                model.compile("sgd", "categorical_crossentropy")
                return model

            return made(model)

        classifier = SKLearnClassifier(make, fit_kwargs={"epochs": 3, "verbose": 0})
        return cross_val_score(classifier, X, Y, cv=2, error_score="raise")

    both(train)


@pytest.mark.nightly
@pytest.mark.one_backend("jax", "tensorflow")
@pytest.mark.skipif(BACKEND == "torch", reason="Keras exports no SavedModel on Torch")
def test_a_saved_model_predicts(tmp_path: Path) -> None:
    import tensorflow as tf

    def train(strategy: Any, made: Any) -> Any:
        model = made(build)
        model.fit(X, Y, **OPTIONS)
        folder = str(tmp_path / ("plain" if strategy is None else "mirrored"))
        model.export(folder, verbose=False)
        loaded = tf.saved_model.load(folder)  # Its function needs it.
        served = loaded.serve(X)
        np.testing.assert_allclose(served, model.predict(X, verbose=0), atol=1e-5)
        return np.asarray(served)

    both(train)

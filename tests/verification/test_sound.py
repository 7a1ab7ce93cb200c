"""`ks.verify` raises no alarm on models that are sound, and says what it has done."""

from __future__ import annotations

import json
import re
from typing import Any

import keras
import numpy as np
import pytest
from harness import data as datasets
from harness import models
from verification import planted_in_fit, planted_in_loops
from verification.planted_in_fit import compiled, data, dense, loss_of

import keras_strategies as ks
from keras_strategies.verification.picture import BEHIND, DIFFERENT, EQUAL
from keras_strategies.verification.trainings import KINDS

pytestmark = pytest.mark.one_backend

NIGHTLY = pytest.mark.nightly


def mirrored(**options: Any) -> Any:
    return ks.MirroredStrategy(["cpu:0", "cpu:1"], **options)


def of(make: Any, **options: Any) -> Any:
    options = {"loss": "sparse_categorical_crossentropy"} | options
    return lambda: compiled(make(), **options)


def weighted(make: Any) -> Any:
    """Uneven batches with weights."""

    def arguments() -> dict[str, Any]:
        found = make(13)
        own = {"x": found.x, "y": found.y, "batch_size": 7}
        return own if found.w is None else {**own, "sample_weight": found.w}

    return arguments


def convolutional() -> Any:
    """Digits, with dropout and batch normalization."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(3, activation="softmax"),
        ]
    )


def recurrent() -> Any:
    embedding = keras.layers.Embedding(11, 4, mask_zero=True)
    last = [keras.layers.LSTM(4), keras.layers.Dense(3, activation="softmax")]
    return keras.Sequential([keras.Input((5,), dtype="int32"), embedding, *last])


def transformer() -> Any:
    layers = keras.layers
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(11, 4, mask_zero=True)(tokens)
    attended = layers.MultiHeadAttention(2, 2, dropout=0.2)(x, x)
    x = layers.LayerNormalization()(layers.Add()([x, attended]))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(3, activation="softmax")(x))


class Subclassed(keras.Model):
    """Built by its first batch, with a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = keras.layers.Dense(4), keras.layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(keras.ops.tanh(self.hidden(x)))


def mobile() -> Any:
    return keras.applications.MobileNetV2(
        (32, 32, 3), alpha=0.35, weights=None, classes=3
    )


def large_images() -> dict[str, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(6, 32, 32, 3)).astype("float32")
    return {"x": x, "y": random.integers(0, 3, 6), "batch_size": 3}


adam = keras.optimizers.Adam
MODELS = {
    "convolutional": (
        of(convolutional, metrics=["accuracy"]),
        weighted(datasets.images),
    ),
    "recurrent": (of(recurrent), weighted(datasets.tokens)),
    "transformer": (
        lambda: of(transformer, optimizer=adam(), metrics=["accuracy"])(),
        weighted(datasets.tokens),
    ),
    "subclassed": (of(Subclassed, loss=loss_of()), weighted(datasets.classes)),
    "shuffled": (dense, lambda: {**data(), "shuffle": True}),
    "bfloat16": (lambda: dense(keras.layers.Dense(4, dtype="mixed_bfloat16")), data),
    "mobile": (of(mobile), large_images),
}
BY_DAY = {
    "jax": {"convolutional"},
    "torch": {"transformer", "recurrent", "subclassed", "shuffled"},
    "tensorflow": {"subclassed"},
}[keras.backend.backend()]


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in BY_DAY else [NIGHTLY]) for name in MODELS],
)
def test_no_alarm_on_a_sound_model(name: str) -> None:
    build, arguments = MODELS[name]
    report = ks.verify(build, arguments, mirrored(), steps=2)
    assert report, report
    assert report.cause == ""


@pytest.mark.nightly
def test_no_alarm_under_a_strategy(strategy) -> None:
    ks.verify(dense, data, strategy, steps=3).raise_if_different()


def test_no_alarm_on_a_sound_loop() -> None:
    case = planted_in_loops.SOUND
    assert case.build is not None
    report = ks.verify(case.build, case.data, mirrored(), steps=2, step=case.step)
    assert report, report


class Rising(keras.callbacks.Callback):
    """Keeps the rate as an attribute and assigns it in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rate *= 1.5
        self.model.optimizer.learning_rate = self.rate


@pytest.mark.slow(seconds=15)
def test_an_interruption_changes_nothing() -> None:
    """With slots, dropout and an epoch that shuffles."""
    build = lambda: dense(keras.layers.Dropout(0.3), optimizer=adam())  # noqa: E731
    arguments = lambda: {**data(), "shuffle": True}  # noqa: E731
    report = ks.verify(build, arguments, mirrored(), steps=5, resume_after=2)
    assert report, report
    assert "equal in 5 steps" in str(report)


@pytest.mark.slow(seconds=15)
def test_what_a_snapshot_lacks_is_found_and_named() -> None:
    arguments = lambda: {**data(), "callbacks": [Rising()]}  # noqa: E731
    report = ks.verify(dense, arguments, mirrored(), steps=4, resume_after=2)
    assert (report.cause, report.first and report.first.step) == ("lost_at_resume", 3)


def boxes(report: Any) -> dict[str, str]:
    """The colors of the kinds in the picture of a notebook."""
    shown = r'fill="(#\w+)"/><text [^>]*>([^<]+)<'
    return {kind: color for color, kind in re.findall(shown, report._repr_html_())}


def test_the_picture_shows_where_the_first_difference_is() -> None:
    report = ks.verify(planted_in_fit.scaled_clipping, data, mirrored(), steps=1)
    expected = {"setting": DIFFERENT} | dict.fromkeys(KINDS[1:], BEHIND)
    assert boxes(report) == expected
    report = ks.verify(dense, planted_in_fit.batch_per_replica, mirrored(), steps=1)
    assert list(boxes(report).values())[:4] == [EQUAL, EQUAL, DIFFERENT, BEHIND]


def test_a_report_is_text_a_table_and_a_file(tmp_path) -> None:
    calls = []

    class Counting(keras.Sequential):
        def train_step(self, *args: Any) -> Any:
            calls.append(1)
            return super().train_step(*args)

    report = ks.verify(lambda: dense(kind=Counting), data, mirrored(), steps=3)
    assert report.raise_if_different() is report
    assert "equal in 3 steps" in str(report)
    assert "<table>" in report._repr_html_()
    assert boxes(report) == dict.fromkeys(KINDS, EQUAL)
    report.save(tmp_path / "report.json")
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["equal"] and found["seed"] == 0
    assert found["versions"]["keras"] == keras.__version__
    assert {"first batch, one device", "variables, strategy"} <= set(found["checksums"])
    # Below three steps for each step that is compared: two.
    assert sum(report.steps_taken.values()) == 2 * 3
    if keras.backend.backend() == "torch":  # Programs are traced.
        assert len(calls) == 2 * 3


def test_the_data_may_be_a_dataset_and_no_iterator() -> None:
    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            rows = slice(7 * index, 7 * index + 7)
            return data()["x"][rows], data()["y"][rows]

    assert ks.verify(dense, Batches(), mirrored(), steps=2)
    with pytest.raises(ValueError, match="read several times"):
        ks.verify(dense, iter([]), mirrored())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"build": 3}, "must be a function"),
        ({"build": lambda: 3}, "must return a `keras.Model`"),
        ({"build": lambda: keras.Sequential()}, "not compiled"),
        ({"strategy": "mirrored"}, "must be a strategy"),
        ({"steps": 0}, "1 or more"),
        ({"tolerance": 0.0}, "above 0"),
        ({"resume_after": 4}, "before the last one"),
    ],
)
def test_bad_input_is_an_error_at_once(arguments: dict[str, Any], text: str) -> None:
    given = {"build": dense, "data": data, "strategy": mirrored()} | arguments
    with pytest.raises(ValueError, match=text):
        ks.verify(**given)


@pytest.mark.nightly
def test_it_uses_the_harness_models() -> None:
    build = of(models.dense)
    assert ks.verify(build, weighted(datasets.classes), mirrored(), steps=2)

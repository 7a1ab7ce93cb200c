"""Snapshots: verification, errors, callbacks, finished trainings, times."""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
from harness.training import assert_arrays

import keras_strategies as ks
from keras_strategies.errors import CheckpointError
from keras_strategies.training.resume import resume_callback
from keras_strategies.training.resume.snapshot_files import SnapshotDirectory, parsed

pytestmark = pytest.mark.one_backend

X = np.random.default_rng(3).normal(size=(16, 3)).astype("float32")
Y = X[:, :1] - X[:, 1:2]


@pytest.fixture(autouse=True)
def other_process() -> Iterator[None]:
    """Lets a directory be used again, as in another process."""
    yield
    resume_callback.finished_directories.clear()


def model_of(units: int = 1, optimizer: Any = "adam", rate: float = 0.0) -> Any:
    """A model; with a rate, its optimizer is SGD."""
    optimizer = keras.optimizers.SGD(rate) if rate else optimizer
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(units), keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse")
    return model


def fit(model: Any, resume: Any, *callbacks: Any, epochs: int = 3) -> Any:
    resume_callback.finished_directories.clear()
    callbacks = (*callbacks, resume)
    return model.fit(X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=callbacks)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("snapshot-*.zip"))


def test_a_full_disk_is_a_warning_and_training_continues(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match="file"):
        fit(model_of(), ks.callbacks.Resume(tmp_path / "file" / "runs"))
    full = OSError(errno.ENOSPC, "No space left on device")
    resume = ks.callbacks.Resume(tmp_path, every_steps=2)
    with (
        mock.patch.object(SnapshotDirectory, "write", side_effect=full),
        pytest.warns(UserWarning, match="could not be written") as found,
    ):
        history = fit(model_of(), resume)
    assert len(history.history["loss"]) == 3
    (message,) = {str(w.message) for w in found if "written" in str(w.message)}
    assert str(tmp_path) in message and "No space left" in message
    assert "Training continues" in message
    assert not files(tmp_path)


def test_a_finished_training_has_nothing_to_do_unless_there_are_more_epochs(
    tmp_path: Path,
) -> None:
    first, again, resume = model_of(), model_of(), ks.callbacks.Resume(tmp_path)
    history = fit(first, ks.callbacks.Resume(tmp_path)).history
    assert fit(again, resume).history == history
    assert resume.pauses == ()
    assert_arrays(again.get_weights(), first.get_weights())
    assert int(again.optimizer.iterations) == 12
    # A directory is of one `fit`; without it, the model trains as ever.
    with pytest.raises(ValueError, match="has ended in this process"):
        again.fit(X, Y, verbose=0, callbacks=[ks.callbacks.Resume(tmp_path)])
    assert len(again.fit(X, Y, epochs=2, verbose=0).history["loss"]) == 2
    whole = fit(model_of(), ks.callbacks.Resume(tmp_path / "whole"), epochs=5)
    found = fit(model_of(), ks.callbacks.Resume(tmp_path), epochs=5)
    np.testing.assert_allclose(found.history["loss"], whole.history["loss"], rtol=1e-6)
    assert found.epoch == [0, 1, 2, 3, 4]


def test_a_training_that_was_stopped_stays_so(tmp_path: Path) -> None:
    first, again = model_of(), model_of()
    options = {"min_delta": 10, "patience": 2, "restore_best_weights": True}

    def history_of(model: Any) -> Any:
        stopping = keras.callbacks.EarlyStopping("loss", **options)
        return fit(model, ks.callbacks.Resume(tmp_path), stopping, epochs=9).history

    history, found = history_of(first), history_of(again)
    assert found == history and len(found["loss"]) < 9
    assert_arrays(again.get_weights(), first.get_weights())


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"units": 2}, r"another model.*shape \(3, 2\), the snapshot .* \(3, 1\)"),
        ({"optimizer": "rmsprop"}, "another model.*has variable"),
        # Its variables are equal.
        ({"optimizer": "adamw"}, r"optimizer is AdamW, in .* Adam\."),
    ],
)
def test_a_snapshot_of_another_model_is_an_error(
    other: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    fit(model_of(), ks.callbacks.Resume(tmp_path))
    with pytest.raises(CheckpointError, match=difference):
        fit(model_of(**other), ks.callbacks.Resume(tmp_path))


class Counter(keras.callbacks.Callback):
    """A callback with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Any = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1

    def get_state(self) -> Any:
        return {"count": self.count}

    def set_state(self, state: Any) -> None:
        self.count = state["count"]


def test_a_callback_with_two_methods_takes_part(tmp_path: Path) -> None:
    fit(model_of(), ks.callbacks.Resume(tmp_path), Counter())
    counter = Counter()
    fit(model_of(), ks.callbacks.Resume(tmp_path), counter, epochs=4)
    assert counter.count == 16
    stopping = keras.callbacks.EarlyStopping("loss", patience=9)
    with pytest.warns(UserWarning) as found:
        fit(model_of(), ks.callbacks.Resume(tmp_path), stopping, epochs=4)
    texts = " ".join(str(warning.message) for warning in found)
    assert "EarlyStopping has no state in the snapshot" in texts
    assert "states of callbacks that `fit` was not given: Counter" in texts
    counter.get_state = lambda: {"count": object()}  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"callback Counter\['count'\] is of type obj"):
        fit(model_of(), ks.callbacks.Resume(tmp_path / "other"), counter)


def test_two_positions_are_an_error(tmp_path: Path) -> None:
    for kind in (keras.callbacks.BackupAndRestore, ks.callbacks.Resume):
        with pytest.raises(ValueError, match="Pass one of them"):
            fit(model_of(), ks.callbacks.Resume(tmp_path), kind(tmp_path / "other"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_steps": 0}, "1 or more"),
        ({"every_steps": 1.5}, "1 or more"),
        ({"every_seconds": -1}, "0 or more"),
        ({"every_seconds": float("nan")}, "0 or more"),
        ({"every_seconds": None}, "both None"),
        ({"stream": "replay"}, "'raise', 'skip' or 'continue'"),
    ],
)
def test_bad_arguments(arguments: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        ks.callbacks.Resume(tmp_path, **arguments)


def test_a_loss_scale_is_resumed(tmp_path: Path) -> None:
    scaled, sgd = keras.optimizers.LossScaleOptimizer, keras.optimizers.SGD
    first, again = (model_of(optimizer=scaled(sgd(), scale)) for scale in (8.0, 2.0))
    fit(first, ks.callbacks.Resume(tmp_path))
    first_scale = float(first.optimizer.dynamic_scale)
    first_count = int(first.optimizer.step_counter)
    assert first_count > 0
    with without_warnings():
        fit(again, ks.callbacks.Resume(tmp_path))
    assert float(again.optimizer.dynamic_scale) == first_scale == 8.0
    assert int(again.optimizer.step_counter) == first_count


def fitted(
    folder: Path,
    x: Any = X,
    y: Any = Y,
    epochs: int = 2,
    model: Any = None,
    **arguments: Any,
) -> Any:
    resume_callback.finished_directories.clear()
    model = model or model_of()
    resume = ks.callbacks.Resume(folder)
    arguments = {"batch_size": 4, "verbose": 0, "callbacks": [resume], **arguments}
    model.fit(x, y, epochs=epochs, **arguments)
    return model


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"x": X[:-1], "y": Y[:-1]}, f"had {len(X)} rows .* has {len(X) - 1} now"),
        ({"x": X[::-1].copy()}, "other values in array 0 of 2"),
        ({"y": Y + 1}, "other values in array 1 of 2"),
        ({"y": np.tile(Y, (1, 2))}, "rows of shape"),
        ({"sample_weight": np.ones(len(X))}, "had 2 arrays .* has 3 now"),
        ({"batch_size": 5}, "had 4 rows in a batch .* has 5 now"),
    ],
    ids=["fewer rows", "order", "labels", "shape", "weights", "batch size"],
)
def test_other_data_are_an_error(
    change: dict[str, Any], difference: str, shuffle: bool, tmp_path: Path
) -> None:
    fitted(tmp_path, epochs=1, shuffle=shuffle)
    with pytest.raises(CheckpointError, match=difference):
        fitted(tmp_path, **{"shuffle": shuffle, **change})


def test_a_changed_learning_rate_counts_and_is_named(tmp_path: Path) -> None:
    fitted(tmp_path, model=model_of(rate=0.01), epochs=1)
    other = model_of(rate=0.05)
    text = r"learning_rate is 0\.05, in the snapshot 0\.01\. Those of the script count"
    with pytest.warns(UserWarning, match=text):
        fitted(tmp_path, model=other)
    assert float(other.optimizer.learning_rate) == pytest.approx(0.05)
    again = model_of(rate=0.05)
    with without_warnings():
        fitted(tmp_path, model=again, epochs=3)
    # As a training that changes it after the first epoch.
    expected = model_of(rate=0.01)
    schedule = keras.callbacks.LearningRateScheduler(lambda e: 0.05 if e else 0.01)
    resume = ks.callbacks.Resume(tmp_path / "other")
    fitted(tmp_path, model=expected, epochs=3, callbacks=[schedule, resume])
    assert_arrays(again.get_weights(), expected.get_weights(), 1e-5, 1e-6)


def test_a_rate_that_a_callback_has_changed_is_that_of_the_snapshot(tmp_path) -> None:
    rates = []
    for _ in range(2):
        plateau = keras.callbacks.ReduceLROnPlateau("loss", 0.5, 1, min_delta=9)
        model = model_of(rate=0.08)
        callbacks = [plateau, ks.callbacks.Resume(tmp_path)]
        with without_warnings():
            fitted(tmp_path, model=model, epochs=3, callbacks=callbacks)
        rates.append(float(model.optimizer.learning_rate))
    assert rates[0] == pytest.approx(rates[1]) and rates[0] < 0.08


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        ({"loss": "mse"}, {"loss": "mae"}, "loss is mae, in the snapshot mse"),
        (
            {},
            {"momentum": 0.9, "clipnorm": 1.0},
            r"clipnorm is 1, in the snapshot None; momentum is 0\.9, .* 0\.5",
        ),
        (
            {"loss": keras.losses.Huber(1.0)},
            {"loss": keras.losses.Huber(2.0)},
            r"loss is .*Huber.*2\.0.* in the snapshot .*Huber.*1\.0",
        ),
    ],
)
def test_other_settings_of_compile_are_named(
    before: dict[str, Any], now: dict[str, Any], text: str, tmp_path: Path
) -> None:
    def compiled(loss: Any = "mse", **optimizer: Any) -> Any:
        sgd = keras.optimizers.SGD(0.01, **{"momentum": 0.5, **optimizer})
        model = model_of()
        model.compile(sgd, loss)
        return model

    fitted(tmp_path, model=compiled(**before), epochs=1)
    with pytest.warns(UserWarning, match=text):
        fitted(tmp_path, model=compiled(**now))


def test_an_older_state_does_not_replace_a_newer_snapshot(tmp_path):
    """As of a worker that was cut off, while the others train on."""
    resume = ks.callbacks.Resume(tmp_path, every_steps=100, every_seconds=None)
    directory = SnapshotDirectory(tmp_path)
    found: list[Any] = []

    class Saves(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 2 and not found:
                found.append(resume.save(0, 2))
                state = parsed(directory.read() or b"")
                state["point"]["done"] = 3
                found.append(directory.write(state))
                found.append(resume.save(0, 2))
                found.append(files(tmp_path)[-1])

    fit(model_of(), resume, Saves(), epochs=1)
    assert found == [tmp_path, found[1], None, found[1]]

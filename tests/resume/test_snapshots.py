"""Snapshots: verification, errors, callbacks, finished trainings, times."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.errors import CheckpointError, DamagedCheckpointError
from keras_strategies.training.resume import resume_callback
from keras_strategies.training.resume.snapshot_clock import SnapshotClock
from keras_strategies.training.resume.snapshot_files import (
    SnapshotDirectory,
    parsed,
)

X = np.random.default_rng(3).normal(size=(16, 3)).astype("float32")
Y = X[:, :1] - X[:, 1:2]
STATE = {
    "numbers": [1, 2.5, float("inf"), None, True, "text"],
    "tuple": (1, (2.0, {3: "three"})),
    "array": np.arange(6, dtype="int32").reshape(2, 3),
    "scalar": np.float32(1.5),
}


@pytest.fixture(autouse=True)
def other_process() -> Iterator[None]:
    """Lets a directory be used again, as in another process."""
    yield
    resume_callback.finished_directories.clear()


def model_of(units: int = 1, optimizer: Any = "adam") -> Any:
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(units), keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse")
    return model


def fit(model: Any, resume: Any, *callbacks: Any, epochs: int = 3) -> Any:
    resume_callback.finished_directories.clear()
    return model.fit(
        X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=[*callbacks, resume]
    )


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("snapshot-*.zip"))


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    directory = SnapshotDirectory(tmp_path)
    directory.write(STATE)
    data = directory.read()
    assert data is not None
    found = parsed(data)
    assert found["numbers"] == STATE["numbers"]
    assert found["tuple"] == STATE["tuple"]
    assert found["array"].dtype == "int32"
    np.testing.assert_array_equal(found["array"], STATE["array"])
    assert found["scalar"] == 1.5 and found["scalar"].dtype == "float32"


def test_two_generations_are_kept(tmp_path: Path) -> None:
    directory = SnapshotDirectory(tmp_path / "new")
    assert directory.read() is None
    directory.check_writable()
    for number in range(4):
        directory.write({"number": number})
    assert len(files(tmp_path / "new")) == 2 == len(list(directory.directory.iterdir()))
    assert parsed(directory.read() or b"")["number"] == 3


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        data = data[: len(data) // 2]
    elif kind == "empty":
        data = bytearray()
    else:
        data[data.index(b"NUMPY") + 200] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["truncated", "empty", "one bit"])
def test_a_damaged_snapshot_is_not_used(kind: str, tmp_path: Path) -> None:
    directory = SnapshotDirectory(tmp_path)
    for number in range(2):
        directory.write({"number": number, "array": np.zeros(100)})
    first, second = files(tmp_path)
    damage(second, kind)
    with pytest.warns(UserWarning, match=rf"{second.name}.* is damaged.*{first.name}"):
        data = directory.read()
    assert data is not None and parsed(data)["number"] == 0
    damage(first, kind)
    with pytest.raises(DamagedCheckpointError, match=r"So is the snapshot before it"):
        directory.read()
    first.unlink()
    with pytest.raises(DamagedCheckpointError, match="There is no other snapshot"):
        directory.read()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    part = tmp_path / ".part-a1b2c3d4" / "snapshot-00000001.zip"
    part.parent.mkdir()
    part.write_bytes(b"part")
    SnapshotDirectory(tmp_path).check_writable()
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match="file"):
        fit(model_of(), ks.callbacks.Resume(tmp_path / "file" / "runs"))


def test_a_full_disk_is_a_warning_and_training_continues(tmp_path: Path) -> None:
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


def test_a_finished_training_has_nothing_to_do(tmp_path: Path) -> None:
    first = model_of()
    history = fit(first, ks.callbacks.Resume(tmp_path)).history
    again = model_of()
    resume = ks.callbacks.Resume(tmp_path)
    assert fit(again, resume).history == history
    assert resume.pauses == ()
    for mine, other in zip(again.get_weights(), first.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert int(again.optimizer.iterations) == 12


def test_more_epochs_continue_a_finished_training(tmp_path: Path) -> None:
    whole = fit(model_of(), ks.callbacks.Resume(tmp_path / "whole"), epochs=5)
    fit(model_of(), ks.callbacks.Resume(tmp_path / "parts"), epochs=3)
    found = fit(model_of(), ks.callbacks.Resume(tmp_path / "parts"), epochs=5)
    np.testing.assert_allclose(found.history["loss"], whole.history["loss"], rtol=1e-6)
    assert found.epoch == [0, 1, 2, 3, 4]


def test_a_training_that_was_stopped_stays_so(tmp_path: Path) -> None:
    def stopping() -> Any:
        return keras.callbacks.EarlyStopping(
            "loss", min_delta=10, patience=2, restore_best_weights=True
        )

    first = model_of()
    history = fit(first, ks.callbacks.Resume(tmp_path), stopping(), epochs=9).history
    again = model_of()
    found = fit(again, ks.callbacks.Resume(tmp_path), stopping(), epochs=9).history
    assert found == history and len(found["loss"]) < 9
    for mine, other in zip(again.get_weights(), first.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_directory_is_of_one_fit(tmp_path: Path) -> None:
    model = model_of()
    fit(model, ks.callbacks.Resume(tmp_path))
    with pytest.raises(ValueError, match="has ended in this process"):
        model.fit(X, Y, verbose=0, callbacks=[ks.callbacks.Resume(tmp_path)])
    # Without it, the model trains as ever.
    assert len(model.fit(X, Y, epochs=2, verbose=0).history["loss"]) == 2


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"units": 2}, r"shape \(3, 2\), the snapshot .* of shape \(3, 1\)"),
        ({"optimizer": "rmsprop"}, "has variable"),
    ],
)
def test_a_snapshot_of_another_model_is_an_error(
    other: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    fit(model_of(), ks.callbacks.Resume(tmp_path))
    with pytest.raises(CheckpointError, match=f"of another model.*{difference}"):
        fit(model_of(**other), ks.callbacks.Resume(tmp_path))


def test_another_optimizer_with_equal_variables_is_an_error(tmp_path: Path) -> None:
    fit(model_of(optimizer=keras.optimizers.Adam()), ks.callbacks.Resume(tmp_path))
    other = model_of(optimizer=keras.optimizers.AdamW())
    with pytest.raises(CheckpointError, match=r"optimizer is AdamW, in .* Adam\."):
        fit(other, ks.callbacks.Resume(tmp_path))


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


def test_a_state_that_cannot_be_saved_names_the_callback(tmp_path: Path) -> None:
    counter = Counter()
    counter.get_state = lambda: {"count": object()}  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"callback Counter\['count'\] is of type obj"):
        fit(model_of(), ks.callbacks.Resume(tmp_path), counter)


def test_other_callbacks_than_before_are_a_warning(tmp_path: Path) -> None:
    fit(model_of(), ks.callbacks.Resume(tmp_path), Counter())
    stopping = keras.callbacks.EarlyStopping("loss", patience=9)
    with pytest.warns(UserWarning) as found:
        fit(model_of(), ks.callbacks.Resume(tmp_path), stopping)
    texts = " ".join(str(warning.message) for warning in found)
    assert "EarlyStopping has no state in the snapshot" in texts
    assert "states of callbacks that `fit` was not given: Counter" in texts


@pytest.mark.parametrize("kind", ["backup", "preemption", "resume"])
def test_two_positions_are_an_error(kind: str, tmp_path: Path) -> None:
    model = model_of()
    if kind == "backup":
        other: Any = keras.callbacks.BackupAndRestore(tmp_path / "other")
    elif kind == "resume":
        other = ks.callbacks.Resume(tmp_path / "other")
    else:
        handler = ks.PreemptionCheckpointHandler(None, model, tmp_path / "other")
        handler.close()
        other = handler.callback()
    with pytest.raises(ValueError, match="Pass one of them"):
        fit(model, ks.callbacks.Resume(tmp_path), other)


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


def test_a_log_that_was_shortened_is_a_warning(tmp_path: Path) -> None:
    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    fit(model_of(), ks.callbacks.Resume(tmp_path), logger)
    (tmp_path / "log.csv").write_text("epoch")
    again = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    with pytest.warns(UserWarning, match="It lacks rows of earlier epochs"):
        fit(model_of(), ks.callbacks.Resume(tmp_path), again)


def test_a_pause_delays_the_next_snapshot() -> None:
    clock = SnapshotClock(None, every_seconds=0)
    clock.tick()
    assert clock.is_due
    clock.taken(pause=0)
    clock.tick()
    assert clock.is_due
    clock.taken(pause=1000)
    clock.tick()
    assert not clock.is_due, "100 pauses are the least time"


def test_steps_between_snapshots() -> None:
    clock = SnapshotClock(3, every_seconds=float("inf"))
    due = []
    for _ in range(7):
        clock.tick()
        due.append(clock.is_due)
        if clock.is_due:
            clock.taken(pause=0)
    assert due == [False, False, True, False, False, True, False]


def test_a_loss_scale_is_resumed(tmp_path: Path) -> None:
    def scaled() -> Any:
        optimizer = keras.optimizers.SGD(0.01)
        return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)

    first = model_of(optimizer=scaled())
    fit(first, ks.callbacks.Resume(tmp_path))
    first_scale = float(first.optimizer.dynamic_scale)
    again = model_of(optimizer=scaled())
    again.optimizer.initial_scale = 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(again, ks.callbacks.Resume(tmp_path))
    assert float(again.optimizer.dynamic_scale) == first_scale == 8.0

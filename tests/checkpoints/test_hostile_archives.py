"""Hostile archives are an error, before memory is taken; the one before is used."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from checkpoints.hostile_archives import (
    ATTACKS,
    BOMB_BYTES,
    DAMAGE,
    members_of,
    write_members,
)
from harness.training import assert_arrays

import keras_strategies as ks
from keras_strategies.errors import DamagedCheckpointError
from keras_strategies.parameter_server.server.record_files import (
    RecordReader,
    write_record,
)
from keras_strategies.parameter_server.server.request_handler import ParameterServer
from keras_strategies.training.resume import resume_callback

pytestmark = pytest.mark.one_backend("jax")

X = np.arange(24, dtype="float32").reshape(12, 2)


def model_of() -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def _bounded() -> Iterator[None]:
    """Fails if the test takes as much memory as a member expands to."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < BOMB_BYTES // 2
    finally:
        tracemalloc.stop()


def attacked(path: Path, attack: str) -> str:
    """Changes an archive; returns what the error names."""
    change, named = (ATTACKS | DAMAGE)[attack]
    before = path.read_bytes()
    # Not a part of what is measured.
    tracemalloc.stop()
    change(path)
    tracemalloc.start()
    assert path.read_bytes() != before
    return named


def attacked_description(path: Path, attack: str) -> str:
    """Changes the first record of a snapshot of a server, with a checksum that fits."""
    description = path.with_name("description")
    with path.open("rb") as file:
        reader = RecordReader(file, path)
        description.write_bytes(reader.read(reader.next() or 0))
        rest = file.read()
    named = attacked(description, attack)
    with path.open("wb", buffering=0) as file:
        write_record(file, description.read_bytes())
        file.write(rest)
    description.unlink()
    return named


# Servers' descriptions are such archives, too.
@pytest.mark.nightly(unless=["a member that expands", "4 TB", "no state", *DAMAGE])
@pytest.mark.usefixtures("_bounded")
@pytest.mark.parametrize("attack", [*ATTACKS, *DAMAGE])
def test_a_checkpoint(attack: str, tmp_path: Path) -> None:
    model = model_of()
    manager = ks.CheckpointManager(ks.Checkpoint(model=model), tmp_path)
    manager.save()
    first = model.get_weights()
    model.set_weights([value + 1 for value in first])
    manager.save()
    model.set_weights([value + 2 for value in first])
    path = tmp_path / "ckpt-2.ckpt"
    named = attacked(path, attack)
    with pytest.raises(DamagedCheckpointError, match=named) as raised:
        manager.checkpoint.restore(path)
    assert str(path) in str(raised.value)
    assert_arrays(model.get_weights(), [value + 2 for value in first])
    with pytest.warns(UserWarning, match=r"(?s)ckpt-2\.ckpt.* Using the previous"):
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1.ckpt")
    assert_arrays(model.get_weights(), first)


@pytest.mark.usefixtures("_bounded")
@pytest.mark.parametrize(
    "attack",
    [
        *("a member that expands", "4 TB", "another attribute", "brackets", "no state"),
        *DAMAGE,
    ],
)
def test_a_snapshot_of_fit(attack: str, tmp_path: Path) -> None:
    def fit(epochs: int) -> Any:
        resume_callback.finished_directories.clear()
        model = model_of()
        resume = ks.callbacks.Resume(tmp_path)
        arguments = {"batch_size": 4, "verbose": 0, "callbacks": [resume]}
        history = model.fit(X, X[:, :1], epochs=epochs, **arguments)
        return model, history.history["loss"]

    fit(1)
    expected, losses = fit(2)
    _, newest = sorted(tmp_path.glob("*.zip"))
    named = attacked(newest, attack)
    with pytest.warns(UserWarning, match=rf"(?s){newest.name}.*{named}.*before it"):
        found, again = fit(2)
    assert again == pytest.approx(losses)
    assert_arrays(found.get_weights(), expected.get_weights(), 1e-6)
    attacked(max(tmp_path.glob("*.zip")), attack)
    with pytest.raises(DamagedCheckpointError, match=named):
        fit(2)


@pytest.mark.usefixtures("_bounded")
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_snapshot_of_a_parameter_server(attack: str, tmp_path: Path) -> None:
    server = ParameterServer(0, str(tmp_path))
    server.handle(("begin", "me"))
    server.handle(("create", [((i, 0), np.zeros(5, "float32")) for i in range(2)]))
    for number in (1, 2):
        server.handle(("snapshot", None))
        values = np.full(5, number, "float32")
        server.handle(("add", ((0, 0), values, str(number), number - 1)))
    path = tmp_path / "ps-0.2.snapshot"
    named = attacked_description(path, attack)
    again = ParameterServer(0, str(tmp_path))
    assert again.is_restored and "restored the previous snapshot" in again.damage
    assert str(path) in again.damage
    assert re.search(named, again.damage)


def test_a_checkpoint_with_values_of_another_shape(tmp_path: Path) -> None:
    """Two arrays of a checkpoint are exchanged."""
    model, path = model_of(), tmp_path / "a.ckpt"
    ks.Checkpoint(model=model).save(path)
    members = members_of(path)
    members["arrays/0.npy"], members["arrays/1.npy"] = (
        members["arrays/1.npy"],
        members["arrays/0.npy"],
    )
    write_members(path, members)
    before = model.get_weights()
    with pytest.raises(DamagedCheckpointError, match="has other values"):
        ks.Checkpoint(model=model).restore(path)
    assert_arrays(model.get_weights(), before)

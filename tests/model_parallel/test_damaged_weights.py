"""Weights that do not load: the error names the file or the variable, with numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
from keras import layers

import keras_strategies as ks
from keras_strategies.errors import DamagedCheckpointError

pytestmark = pytest.mark.one_backend

WIDTH = 64


def strategy() -> Any:
    if keras.backend.backend() == "torch":
        return ks.OneDeviceStrategy("cpu:0")
    return ks.ModelParallelStrategy("fsdp", ["cpu:0", "cpu:1"], min_shard_bytes=0)


def made(last: int = WIDTH) -> Any:
    with strategy().scope():
        hidden = [layers.Dense(WIDTH) for _ in range(3)]
        last = layers.Dense(last, name="last")
        return keras.Sequential([keras.Input((WIDTH,)), *hidden, last])


@pytest.fixture
def model() -> Any:
    return made()


def halve(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def test_a_truncated_file(model, tmp_path) -> None:
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    halve(path)
    text = rf"(?s){path}.*eof = {path.stat().st_size}"
    with pytest.raises(DamagedCheckpointError, match=text):
        model.load_weights(path)


def test_truncated_and_missing_files_of_an_index(model, tmp_path) -> None:
    index = tmp_path / "model.weights.json"
    model.save_weights(index, max_shard_size=40_000 / 2**30)
    assert len(list(tmp_path.glob("*.h5"))) == 2
    file = index.with_name("model_00001.weights.h5")
    halve(file)
    with pytest.raises(DamagedCheckpointError) as error:
        model.load_weights(index)
    size = file.stat().st_size
    for text in ("one of 2 files of 'model.weights.json'", str(file), f"eof = {size}"):
        assert text in str(error.value)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=str(file)):
        model.load_weights(index)
    halve(index)
    with pytest.raises(DamagedCheckpointError, match=str(index)):
        model.load_weights(index)


@pytest.mark.parametrize("ending", ["h5", "json"])
def test_a_weight_of_another_shape(model, tmp_path, ending) -> None:
    path = tmp_path / f"model.weights.{ending}"
    model.save_weights(path, max_shard_size=1 if ending == "json" else None)
    with pytest.raises(ValueError, match="last/kernel") as error:
        made(WIDTH // 2).load_weights(path)
    assert f"({WIDTH}, {WIDTH // 2})" in str(error.value)
    assert f"{WIDTH}, {WIDTH}" in str(error.value)

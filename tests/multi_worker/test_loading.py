"""Files of a model are loaded into shards, and saved, without the file in memory."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from keras import layers
from multi_worker.memory_peaks import above_what_stays

import keras_strategies as ks

TORCH = keras.backend.backend() == "torch"
UNITS, COUNT = 2048, 12
#: Bytes of the model.
SIZE = 4 * COUNT * UNITS**2


def network() -> Any:
    hidden = [layers.Dense(UNITS, use_bias=False) for _ in range(COUNT)]
    model = keras.Sequential([keras.Input((UNITS,)), *hidden])
    model.compile("sgd", "mse")
    return model


def strategy() -> Any:
    devices = ["cpu:0"] if TORCH else ["cpu:0", "cpu:1"]
    return ks.ModelParallelStrategy("fsdp", devices, min_shard_bytes=0)


def loaded(path: str) -> Any:
    with strategy().scope():
        if path.endswith(".keras"):
            return keras.models.load_model(path)
        model = network()
    model.load_weights(path)
    return model


def measure(path: str) -> tuple[int, int, float]:
    """Bytes above what stays of loading and of saving, and an entry of a weight."""
    found: list[Any] = []
    loading = above_what_stays(lambda: found.append(loaded(path)))
    [model] = found
    saving = above_what_stays(lambda: model.save(f"{path}.again.keras"))
    return loading, saving, float(model.layers[-1].kernel.numpy()[5, 7])


def saved(folder: Any, name: str) -> tuple[str, float]:
    """A file of the model of one device, and the entry of a weight."""
    keras.utils.set_random_seed(1)
    with ks.OneDeviceStrategy("cpu:0").scope():
        alone = network()
    path = str(folder / name)
    (alone.save if name.endswith(".keras") else alone.save_weights)(path)
    return path, float(keras.ops.convert_to_numpy(alone.layers[-1].kernel)[5, 7])


@pytest.mark.skipif(TORCH, reason="a process has one device")
@pytest.mark.parametrize(
    "name", ["model.keras", pytest.param("model.weights.h5", marks=pytest.mark.nightly)]
)
def test_the_file_is_never_in_memory(name, tmp_path) -> None:
    """With it, a process had the bytes of the model twice."""
    path, expected = saved(tmp_path, name)
    loading, saving, value = measure(path)
    assert value == expected
    assert loading < SIZE / 2
    assert saving < SIZE / 2


@pytest.mark.skipif(not TORCH, reason="a process has all devices")
def test_the_file_is_in_the_memory_of_no_process(cluster, tmp_path) -> None:
    path, expected = saved(tmp_path, "model.keras")
    for loading, saving, value in cluster(lambda strategy: measure(path)):
        assert value == expected
        assert loading < SIZE / 2
        assert saving < SIZE / 2

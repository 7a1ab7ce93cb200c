"""Files of a model are loaded into shards, and saved, without the file in memory."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import pytest
from keras import layers
from multi_worker.memory_peaks import peak_of, return_large_blocks

import keras_strategies as ks
from keras_strategies.communication.joined_workers import joined_workers

TORCH = keras.backend.backend() == "torch"
UNITS, COUNT = 2048, 12
#: Bytes of the model.
SIZE = 4 * COUNT * UNITS**2
NAMES = ["model.keras", "model.weights.json", "model.weights.h5"]


def network(scope: Any) -> Any:
    with scope:
        hidden = [layers.Dense(UNITS, use_bias=False) for _ in range(COUNT)]
        model = keras.Sequential([keras.Input((UNITS,)), *hidden])
        model.compile("sgd", "mse")
    return model


def entry(model: Any) -> float:
    return float(keras.ops.convert_to_numpy(model.layers[-1].kernel)[5, 7])


def measure(path: str) -> tuple[int, int, float]:
    """Bytes that loading and saving take above the model, and an entry of a weight."""
    return_large_blocks()
    devices = ["cpu:0", "cpu:1"] if joined_workers() is None else ["cpu:0"]
    strategy = ks.ModelParallelStrategy("fsdp", devices, min_shard_bytes=0)
    found: list[Any] = []

    def load() -> None:
        if path.endswith(".keras"):
            with strategy.scope():
                found.append(keras.models.load_model(path))
        else:
            found.append(network(strategy.scope()))
            found[0].load_weights(path)

    _, loading = peak_of(load)
    saving, _ = peak_of(lambda: found[0].save(f"{path}.again.keras"))
    return loading, saving, entry(found[0])


def saved(folder: Any, name: str) -> tuple[str, float]:
    """A file of the model of one device, and the entry of a weight."""
    # Before the model: else its memory is kept, and loading would take it uncounted.
    return_large_blocks()
    keras.utils.set_random_seed(1)
    alone = network(contextlib.nullcontext())
    path = str(folder / name)
    if name.endswith(".keras"):
        alone.save(path)
    else:
        in_files = SIZE / 3 / 2**30 if name.endswith(".json") else None
        alone.save_weights(path, max_shard_size=in_files)
    return path, entry(alone)


@pytest.mark.one_backend("jax", "tensorflow")
@pytest.mark.nightly(unless=["model.keras"])
@pytest.mark.slow(seconds=18)
@pytest.mark.skipif(TORCH, reason="a process has one device")
@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_never_in_memory(name, tmp_path) -> None:
    """With it, a process had the bytes of the model twice."""
    path, expected = saved(tmp_path, name)
    loading, saving, value = measure(path)
    assert value == expected
    assert loading < SIZE / 2 and saving < SIZE / 2


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["two-model.weights.json"])
@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("name", NAMES[:2] if TORCH else [])
def test_the_file_is_in_the_memory_of_no_process(cluster, tmp_path, name) -> None:
    path, expected = saved(tmp_path, name)
    for loading, saving, value in cluster(lambda strategy: measure(path)):
        assert value == expected
        # The chief has one value at a time, in a few copies of a twelfth of the bytes.
        assert loading < SIZE / 2 and saving < SIZE / 2

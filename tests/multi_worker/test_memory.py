"""The memory of a worker falls with the number of workers; files are never in it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from multi_worker.memory_peaks import (
    peak_of,
    return_large_blocks,
    tensorflow_counts_memory,
)

import keras_strategies as ks
from keras_strategies.communication.joined_workers import joined_workers

BACKEND = keras.backend.backend()
TORCH = BACKEND == "torch"
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


ROWS, WIDTH, CLASSES = 48, 32, 19


def peak_of_tensors(epoch: Callable[[], None]) -> int:
    """The bytes of tensors that an epoch makes and are alive at once."""
    if BACKEND == "torch":
        from keras_strategies.engines.torch.compat import memory_tracker, tracked_bytes

        with memory_tracker() as tracker:
            epoch()
        return tracked_bytes(tracker, "peak")
    import tensorflow as tf

    gc.collect()
    # Of tests before, too.
    kept = tf.config.experimental.get_memory_info("CPU:0")["current"]

    def peak_of_an_epoch() -> int:
        tf.config.experimental.reset_memory_stats("CPU:0")
        epoch()
        return int(tf.config.experimental.get_memory_info("CPU:0")["peak"]) - kept

    # Its threads take operations in orders that keep up to a third more alive.
    return min(peak_of_an_epoch() for _ in range(8))


def peak_of_fit(strategy: Any) -> int:
    """That of an epoch of a model with large outputs."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        conv = {"kernel_size": 3, "activation": "relu", "padding": "same"}
        hidden = [keras.layers.Conv2D(32, **conv) for _ in range(2)]
        last = keras.layers.Conv2D(CLASSES, 1)
        model = keras.Sequential([keras.Input((WIDTH, WIDTH, 3)), *hidden, last])
        model.compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["sparse_categorical_accuracy"],
        )
    x = np.random.default_rng(0).random((ROWS, WIDTH, WIDTH, 3), dtype="float32")
    y = np.zeros((ROWS, WIDTH, WIDTH), "int32")

    def epoch() -> None:
        model.fit(x, y, batch_size=ROWS, epochs=2, verbose=0)

    epoch()
    return peak_of_tensors(epoch)


def peaks(strategy: Any) -> tuple[int, int]:
    """Those of this worker, and of the same global batch on one device."""
    return peak_of_fit(strategy), peak_of_fit(ks.OneDeviceStrategy("cpu:0"))


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has one program of all workers")
@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.nightly(unless=["two"])
@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize("cluster", ["two", "three"], indirect=True, scope="session")
def test_the_memory_of_a_step_is_divided(cluster: Any) -> None:
    if BACKEND == "tensorflow" and not tensorflow_counts_memory():
        pytest.skip("TensorFlow counts memory with TF_ENABLE_ONEDNN_OPTS=1 only here")
    share = 1 / cluster.replicas
    for own, alone in cluster(peaks):
        assert own < (share + 0.15) * alone, (own, alone)

"""Files of a model are loaded into shards, and saved, without the file in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
from keras import layers
from multi_worker.memory_peaks import (
    Allocated,
    above_what_stays,
    allocated_by,
    return_large_blocks,
)

import keras_strategies as ks
from keras_strategies.communication.joined_workers import joined_workers
from keras_strategies.keras_compat.variables.loaded_variables import values_of_files
from keras_strategies.runtime.state import cross_worker_values

TORCH = keras.backend.backend() == "torch"
UNITS, COUNT = 2048, 12
#: Bytes of the model.
SIZE = 4 * COUNT * UNITS**2
#: On Torch, their loading is that of the others.
OTHERS = [] if TORCH else ["model.weights.h5"]


def network() -> Any:
    hidden = [layers.Dense(UNITS, use_bias=False) for _ in range(COUNT)]
    model = keras.Sequential([keras.Input((UNITS,)), *hidden])
    model.compile("sgd", "mse")
    return model


def strategy() -> Any:
    is_alone = joined_workers() is None
    devices = ["cpu:0", "cpu:1"] if is_alone else ["cpu:0"]
    return ks.ModelParallelStrategy("fsdp", devices, min_shard_bytes=0)


def loaded(path: str) -> Any:
    with strategy().scope():
        if path.endswith(".keras"):
            return keras.models.load_model(path)
        model = network()
    model.load_weights(path)
    return model


def measure(path: str) -> tuple[int, Allocated, float]:
    """Bytes above what stays of loading, those of saving, and an entry of a weight."""
    return_large_blocks()
    found: list[Any] = []
    loading = above_what_stays(lambda: found.append(loaded(path)))
    [model] = found
    saving = allocated_by(lambda: model.save(f"{path}.again.keras"))
    return loading, saving, float(model.layers[-1].kernel.numpy()[5, 7])


def saved(folder: Any, name: str) -> tuple[str, float]:
    """A file of the model of one device, and the entry of a weight."""
    # Before the model: else its memory is kept, and loading would take it uncounted.
    return_large_blocks()
    keras.utils.set_random_seed(1)
    with ks.OneDeviceStrategy("cpu:0").scope():
        alone = network()
    path = str(folder / name)
    if name.endswith(".keras"):
        alone.save(path)
    else:
        is_in_files = name.endswith(".json")
        alone.save_weights(
            path, max_shard_size=SIZE / 3 / 2**30 if is_in_files else None
        )
        assert len(list(folder.iterdir())) == (5 if is_in_files else 1)
    return path, float(keras.ops.convert_to_numpy(alone.layers[-1].kernel)[5, 7])


@pytest.fixture
def everywhere(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Calls a function in this process, which has all devices; on Torch, on workers."""
    if not TORCH:
        return lambda function, path: [function(path)]
    cluster = request.getfixturevalue("pool_of")(2).cluster(1)
    return lambda function, path: cluster(lambda strategy: function(path))


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["model.weights.json" if TORCH else "model.keras"])
@pytest.mark.slow(seconds=18)
@pytest.mark.parametrize("name", ["model.keras", "model.weights.json", *OTHERS])
def test_the_file_is_never_in_memory(everywhere, name, tmp_path) -> None:
    """With it, a process had the bytes of the model twice."""
    path, expected = saved(tmp_path, name)
    for loading, saving, value in everywhere(measure, path):
        assert value == expected
        assert loading < SIZE / 2
        # On Torch, the chief has one value at a time, in a few copies of a twelfth of
        # the bytes.
        assert saving.making - saving.before < SIZE / 2
        # JAX keeps a value that it has read in the array.
        assert saving.after - saving.before < SIZE / 4


# Files that a loop of the user's, or of keras-hub, reads.


def read_into_shards(path: str) -> tuple[int, float]:
    """Bytes above what stays of reading tensors, and an entry of a weight."""
    from safetensors import safe_open

    return_large_blocks()
    found: list[Any] = []

    def read() -> None:
        with strategy().scope():
            model = network()
        if keras.backend.backend() == "jax":
            # Initial values, in the making of which JAX holds more, are there.
            for variable in model.variables:
                variable.value.block_until_ready()
        with safe_open(path, "np") as file:
            for i, layer in enumerate(model.layers):
                # As the converters of keras-hub.
                layer.kernel.assign(file.get_tensor(str(i)).T)
        found.append(model)

    memory = allocated_by(read)
    [model] = found
    kernel = keras.ops.convert_to_numpy(model.layers[-1].kernel)
    return memory.loading - memory.after, float(kernel[5, 7])


def tensors_in(folder: Any) -> tuple[str, float]:
    """A file of the model's weights, transposed, and the entry of one."""
    numpy = pytest.importorskip("safetensors.numpy", reason="not installed")
    rng = np.random.default_rng(0)
    tensors = {
        str(i): rng.normal(size=(UNITS, UNITS)).astype("float32") for i in range(COUNT)
    }
    path = str(folder / "model.safetensors")
    numpy.save_file(tensors, path)
    return path, float(tensors[str(COUNT - 1)][7, 5])


@pytest.mark.one_backend("jax")
def test_a_preset_maps_files_of_a_module_that_it_imports(tmp_path, monkeypatch) -> None:
    path, expected = tensors_in(tmp_path)
    for name in [name for name in sys.modules if name.startswith("safetensors")]:
        monkeypatch.delitem(sys.modules, name)
    with values_of_files():
        import safetensors

        with safetensors.safe_open(path, "np") as file:
            tensor = file.get_tensor(str(COUNT - 1))
    assert isinstance(tensor.base, np.memmap)
    assert tensor[7, 5] == np.float32(expected)


#: The tensor, and on Torch no copy of it. JAX has the old value, too, until it has the
#: new one, and a copy of a shard, half of a tensor here.
MOST = {"torch": 1.75, "tensorflow": 2, "jax": 2.75}


@pytest.mark.one_backend("tensorflow", "torch")
def test_tensors_are_read_one_by_one(everywhere, tmp_path) -> None:
    path, expected = tensors_in(tmp_path)
    for above, value in everywhere(read_into_shards, path):
        assert value == expected
        assert above < MOST[keras.backend.backend()] * SIZE / COUNT


#: Files of two workers that load them into shards, in bytes; the sample of rows that
#: workers of one machine compare has no row 1.
ROWS = np.arange(256 * 8, dtype="float32").reshape(256, 8)
CHANGED = np.concatenate([ROWS[:1], ROWS[1:2] + 1, ROWS[2:]])
FILES = {"one": [ROWS], "copies": [ROWS, ROWS], "different": [ROWS, CHANGED]}


@pytest.mark.skipif(TORCH, reason="the chief's values count")
def test_files_of_workers_are_compared(cluster, tmp_path) -> None:
    """One file is read in full by none of them, and files with other values refused."""
    for name, files in FILES.items():
        for i, values in enumerate(files):
            values.tofile(tmp_path / f"{name}{i}")

    def program(strategy: Any) -> dict[str, Any]:
        found = {}
        read: list[int] = []
        original = cross_worker_values.checksum

        def checksum(value: Any) -> int:
            read.append(value.nbytes)
            return original(value)

        with mock.patch.object(cross_worker_values, "checksum", checksum):
            for name, files in FILES.items():
                own = ks.ModelParallelStrategy("fsdp", ["cpu:0"], min_shard_bytes=0)
                place = strategy.workers.group.index % len(files)
                path = tmp_path / f"{name}{place}"
                values = np.memmap(path, "float32", "c", 0, ROWS.shape)
                with own.scope(), values_of_files():
                    layer = layers.Dense(len(ROWS), use_bias=False, dtype="bfloat16")
                    model = keras.Sequential([keras.Input((8,)), layer])
                    layer.kernel.assign(values.view(np.ndarray).T)
                read.clear()
                try:
                    model.predict(np.eye(8, dtype="float32"), verbose=0)
                except ks.errors.WorkerError as error:
                    found[name] = str(error), sum(read)
                else:
                    kernel = keras.ops.convert_to_numpy(layer.kernel)
                    found[name] = np.asarray(kernel, "float32"), sum(read)
        return found

    expected = np.asarray(keras.ops.cast(ROWS.T, "bfloat16"), "float32")
    for found in cluster(program):
        for name, read in (("one", 0), ("copies", ROWS.nbytes)):
            np.testing.assert_array_equal(found[name][0], expected)
            assert found[name][1] == read
        text, read = found["different"]
        assert "assigned different values to it" in text
        assert read == ROWS.nbytes


@pytest.mark.skipif(not TORCH, reason="a process has all devices")
def test_the_values_of_the_chief_count(cluster, tmp_path) -> None:
    """A worker has changed the part of the file in its memory."""
    path = str(tmp_path / "values")
    np.arange(256 * 8, dtype="float32").tofile(path)

    def program(strategy: Any) -> list[np.ndarray]:
        own = ks.ModelParallelStrategy("fsdp", ["cpu:0"], min_shard_bytes=0)
        with own.scope():
            layer = keras.layers.Dense(256, use_bias=False)
            layer.build((None, 8))
        found = []
        for factor in (1.0, 2.0):
            values = np.memmap(path, "float32", "c", 0, (256, 8))
            values *= 1.0 if strategy.workers.is_chief else factor
            layer.kernel.assign(values.view(np.ndarray).T)
            found.append(np.array(keras.ops.convert_to_numpy(layer.kernel)))
        return found

    expected = np.arange(256 * 8, dtype="float32").reshape(256, 8).T
    for found in cluster(program):
        for value in found:
            np.testing.assert_array_equal(value, expected)

"""`save_sharded` and `load_sharded`: each device writes and reads its own parts."""

from __future__ import annotations

import json
import time

import keras
import numpy as np
import pytest
from harness.forker import Forker
from harness.strategies import MODEL_PARALLEL, STRATEGIES
from keras import layers

import keras_strategies as ks

BACKEND = keras.backend.backend()
JAX = BACKEND == "jax"
#: Torch shards variables over processes: see `multi_worker/test_torch_model_parallel`.
one_process = pytest.mark.skipif(
    BACKEND == "torch", reason="each device needs a process"
)
TIMEOUT = 60.0


def made(strategy, units=16):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(units, "tanh"),
                layers.Dropout(0.5, seed=1),
            ]
        )
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def fit(model):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(16, 8)), random.normal(size=(16, model.output_shape[1]))
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)


def state(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(v) for v in variables]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a 2 x 2 mesh, what it holds, and that after more training."""
    folder = tmp_path_factory.mktemp("saved")
    strategy = MODEL_PARALLEL["model_2x2"].make()
    model = made(strategy)
    fit(model)
    assert strategy.save_sharded(model, folder) == 1
    before = state(model)
    fit(model)
    return folder, before, state(model)


TARGETS = {
    "model_1x4": "smaller parts",
    "fsdp_2x2": "parts along another axis",
    "mirrored_2": "unsharded, a copy on each device",
    "one_device": "unsharded, Keras's own variables",
}


@pytest.mark.one_backend("tensorflow")
@pytest.mark.nightly(unless=["mirrored_2", "one_device"])
@one_process
@pytest.mark.parametrize("target", TARGETS)
def test_a_checkpoint_goes_on_under_another_mesh(target, saved) -> None:
    folder, before, after = saved
    strategy = {**STRATEGIES, **MODEL_PARALLEL}[target].make()
    other = made(strategy)
    layout = strategy.describe(other).rows
    assert strategy.load_sharded(other, folder) == 1
    assert strategy.describe(other).rows == layout
    for a, b in zip(before, state(other), strict=True):
        np.testing.assert_array_equal(a, b)
    fit(other)
    # The seeds went on too: dropout draws the same masks.
    for a, b in zip(after, state(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not JAX, reason="files of Orbax")
def test_parts_are_written_as_they_lie(tmp_path) -> None:
    strategy = MODEL_PARALLEL["fsdp_2x2"].make()
    model = made(strategy)
    strategy.save_sharded(model, tmp_path)
    text = (tmp_path / "1/state/array_metadatas/process_0").read_text()
    written = {
        about["array_metadata"]["param_name"]: about["array_metadata"]["write_shape"]
        for about in json.loads(text)["array_metadatas"]
    }
    (kernel,) = {s.data.shape for s in model.weights[0].value.addressable_shards}
    assert kernel == (4, 8)
    assert tuple(written["model.000000"]) == kernel


@pytest.mark.skipif(BACKEND != "tensorflow", reason="files of TensorFlow")
def test_shards_are_slices_in_the_files_of_tensorflow(tmp_path) -> None:
    import tensorflow as tf

    strategy = MODEL_PARALLEL["fsdp_2x2"].make()
    model = made(strategy)
    strategy.save_sharded(model, tmp_path)
    reader = tf.train.load_checkpoint(str(tmp_path / "1/state"))
    kernel = reader.get_tensor("model/000000")
    np.testing.assert_array_equal(kernel, model.get_weights()[0])
    for shard in model.weights[0].value.by_device.values():
        assert shard.shape == (4, 8)


def test_old_checkpoints_go(tmp_path) -> None:
    strategy = STRATEGIES["mirrored_2"].make()
    model = made(strategy)
    assert [strategy.save_sharded(model, tmp_path, keep=2) for _ in range(3)] == [
        1,
        2,
        3,
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


#: Files of a checkpoint that is being written.
UNFINISHED = {
    "jax": "*tmp*/state*",
    "torch": "*.part/*.distcp",
    "tensorflow": "*.part/state*",
}[BACKEND]
SAVER = """
import sys
import keras, numpy as np, keras_strategies as ks
devices = [f"cpu:{i}" for i in range(4)]
if keras.backend.backend() != "torch":
    strategy = ks.ModelParallelStrategy("auto", devices)
else:
    strategy = ks.MirroredStrategy(devices)
with strategy.scope():
    layer = keras.layers.Dense(4_000_000, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((4,)), layer])
number = 0
while True:
    number += 1
    model.set_weights([np.full(w.shape, number, "float32") for w in model.weights])
    print(strategy.save_sharded(model, sys.argv[1]), flush=True)
"""


@pytest.mark.one_backend
def test_a_process_killed_while_it_saves_leaves_the_last_one(tmp_path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    script = tmp_path / "saver.py"
    script.write_text(SAVER)
    until = time.monotonic() + TIMEOUT
    with Forker() as forker:
        process = forker.start(tmp_path / "log", str(script), str(folder))
        # In the middle of a later one than the first.
        while "1\n" not in process.text() or not list(folder.glob(UNFINISHED)):
            assert process.ended() is None and time.monotonic() < until, process.text()
            time.sleep(0.0005)
        process.kill()
    assert list(folder.glob(UNFINISHED)), "it was not in the middle"
    devices = [f"cpu:{i}" for i in range(2)]
    if BACKEND != "torch":
        strategy = ks.ModelParallelStrategy("auto", devices)
    else:
        strategy = ks.CentralStorageStrategy(devices, "cpu:0")
    with strategy.scope():
        layer = layers.Dense(4_000_000, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((4,)), layer])
    number = strategy.load_sharded(model, folder)
    assert number >= 1
    for weight in model.get_weights():
        assert np.all(weight == number)


def test_what_cannot_be_loaded(tmp_path) -> None:
    cases = {**STRATEGIES, **MODEL_PARALLEL}
    strategy = cases["mirrored_2" if BACKEND == "torch" else "model_2x2"].make()
    model = made(strategy)
    with pytest.raises(ValueError, match="no directory"):
        strategy.load_sharded(model, tmp_path / "none")
    with pytest.raises(ValueError, match="no finished checkpoint"):
        strategy.load_sharded(model, tmp_path)
    strategy.save_sharded(model, tmp_path)
    with pytest.raises(ValueError, match="of another model") as caught:
        strategy.load_sharded(made(strategy, units=12), tmp_path)
    assert "of shape [8, 16] in the checkpoint" in str(caught.value)
    with strategy.scope():
        unbuilt = keras.Sequential([keras.Input((8,)), layers.Dense(16)])
    with pytest.raises(ValueError, match="of another model"):
        strategy.load_sharded(unbuilt, tmp_path)
    with pytest.raises(ValueError, match="`keep` must be a number"):
        strategy.save_sharded(model, tmp_path, keep=0)
    with pytest.raises(RuntimeError, match="was not created in the scope"):
        cases["one_device" if BACKEND == "torch" else "model_1x4"].make().save_sharded(
            model, tmp_path
        )

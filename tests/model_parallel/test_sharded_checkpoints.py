"""`save_sharded` and `load_sharded`: each device writes and reads its own parts."""

from __future__ import annotations

import inspect
import time

import keras
import numpy as np
import pytest
from harness.forker import Forker
from harness.strategies import MODEL_PARALLEL, STRATEGIES
from keras import layers

import keras_strategies as ks

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    pytest.skip("it has none: see `multi_worker`", allow_module_level=True)

#: Torch shards variables over processes: see `multi_worker/test_torch_model_parallel`.
one_process = pytest.mark.skipif(
    BACKEND == "torch", reason="each device needs a process"
)
TIMEOUT = 60.0


def made(strategy, units=16):
    with strategy.scope():
        hidden = [layers.Dense(units, "tanh"), layers.Dropout(0.5, seed=1)]
        model = keras.Sequential([keras.Input((8,)), *hidden])
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


# Smaller parts, parts along another axis, and unsharded ones.
TARGETS = ("model_1x4", "fsdp_2x2", "mirrored_2", "one_device")


@pytest.mark.one_backend("jax")
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


#: Files of a checkpoint that is being written.
UNFINISHED = {"jax": "*tmp*/state*", "torch": "*.part/*.distcp"}[BACKEND]


def large(strategy):
    with strategy.scope():
        layer = keras.layers.Dense(4_000_000, kernel_initializer="zeros")
        return keras.Sequential([keras.Input((4,)), layer])


SAVER = f"""
import sys
import keras, numpy as np, keras_strategies as ks
{inspect.getsource(large)}
devices = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
if keras.backend.backend() != "torch":
    strategy = ks.ModelParallelStrategy("auto", devices)
else:
    strategy = ks.MirroredStrategy(devices)
model = large(strategy)
number = 0
while True:
    number += 1
    model.set_weights([np.full(w.shape, number, "float32") for w in model.weights])
    print(strategy.save_sharded(model, sys.argv[1]), flush=True)
"""


@pytest.mark.one_backend("jax", "torch")
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
    model = large(strategy)
    number = strategy.load_sharded(model, folder)
    assert number >= 1
    for weight in model.get_weights():
        assert np.all(weight == number)


def test_what_cannot_be_loaded(tmp_path) -> None:
    cases = {**STRATEGIES, **MODEL_PARALLEL}
    strategy = cases["mirrored_2" if BACKEND == "torch" else "model_2x2"].make()
    other = cases["one_device" if BACKEND == "torch" else "model_1x4"].make()
    model, wider = made(strategy), made(strategy, units=12)
    with strategy.scope():
        unbuilt = keras.Sequential([keras.Input((8,)), layers.Dense(16)])
    with pytest.raises(ValueError, match="no finished checkpoint"):
        strategy.load_sharded(model, tmp_path)
    numbers = [strategy.save_sharded(model, tmp_path, keep=2) for _ in range(3)]
    assert numbers == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    load, save = strategy.load_sharded, strategy.save_sharded
    shapes = r"of another model.*of shape \[8, 16\] in the checkpoint"
    for call, text in (
        (lambda: load(model, tmp_path / "none"), "no directory"),
        (lambda: load(wider, tmp_path), shapes),
        (lambda: load(unbuilt, tmp_path), "of another model"),
        (lambda: save(model, tmp_path, keep=0), "`keep` must be a number"),
        (lambda: other.save_sharded(model, tmp_path), "not created in the scope"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=f"(?s){text}"):
            call()

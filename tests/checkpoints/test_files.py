"""Files that are saved under a strategy: whole, or as they were before."""

from __future__ import annotations

import time
import zipfile

import keras
import numpy as np
import pytest
from harness.forker import Forker, run_code
from keras import layers

import keras_strategies as ks

TIMEOUT = 60.0

# Saves a model of 64 MB again and again; all weights say how often it has done so.
SAVER = """
import sys
import keras, numpy as np, keras_strategies as ks
ks.set_virtual_cpu_devices(2)
with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4_000_000)])
number = 0
while True:
    number += 1
    model.set_weights([np.full(w.shape, number, "float32") for w in model.weights])
    getattr(model, sys.argv[1])(sys.argv[2])
    print(number, flush=True)
"""


@pytest.mark.by_day
# Both write a part beside the file, and rename it.
@pytest.mark.parametrize(
    "way, name",
    [
        ("save", "m.keras"),
        pytest.param("save_weights", "m.weights.h5", marks=pytest.mark.nightly),
    ],
)
def test_a_process_killed_while_it_saves_leaves_the_last_file(way, name, tmp_path):
    path, script = tmp_path / name, tmp_path / "saver.py"
    script.write_text(SAVER)
    until = time.monotonic() + TIMEOUT
    with Forker() as forker:
        process = forker.start(tmp_path / "log", str(script), way, str(path))
        while "2\n" not in process.text():
            assert process.ended() is None and time.monotonic() < until, process.text()
            time.sleep(0.01)
        # In the middle of a later one: a part has begun and is not finished.
        while not any(p.stat().st_size > 2**20 for p in tmp_path.glob(".part-*")):
            assert time.monotonic() < until
            time.sleep(0.001)
        process.kill()
    assert list(tmp_path.glob(".part-*")), "it was not in the middle"
    if way == "save":
        model = keras.models.load_model(path)
    else:
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4_000_000)])
        model.load_weights(path)
    kernel, bias = model.get_weights()
    assert kernel[0, 0] >= 2
    assert np.all(kernel == kernel[0, 0]) and np.all(bias == kernel[0, 0])


def dropout_model(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dropout(0.5, seed=3), layers.Dense(2)]
        )
        model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5"])
def test_seed_generators_go_on(name, tmp_path):
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    x, y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")
    model = dropout_model(strategy)
    model.fit(x, y, verbose=0)
    (model.save if name.endswith(".keras") else model.save_weights)(tmp_path / name)
    if name.endswith(".keras"):
        with strategy.scope():
            other = keras.models.load_model(tmp_path / name)
    else:
        other = dropout_model(strategy)
        other.load_weights(tmp_path / name)
    for one in (model, other):
        one.fit(x, y, verbose=0)
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_files_are_ordinary_ones(tmp_path):
    """What Keras reads of a file is what it reads without a strategy."""
    model = dropout_model(ks.MirroredStrategy(["cpu:0", "cpu:1"]))
    model.save(tmp_path / "m.keras")
    with zipfile.ZipFile(tmp_path / "m.keras") as archive:
        names = set(archive.namelist())
    assert names - {"keras_strategies_seeds.json"} == {
        "config.json",
        "metadata.json",
        "model.weights.h5",
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.keras"]
    # The library is not needed.
    code = (
        "import sys; sys.modules['keras_strategies'] = None\n"
        "import keras; print(keras.models.load_model(sys.argv[1]).count_params())\n"
    )
    printed = run_code(tmp_path, code, str(tmp_path / "m.keras"))
    assert printed.splitlines()[-1] == "10"


def test_an_error_while_saving_leaves_the_old_file(tmp_path, monkeypatch):
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    model = dropout_model(strategy)
    model.save(tmp_path / "m.keras")
    before = (tmp_path / "m.keras").read_bytes()

    def broken(store):
        raise OSError("no space left")

    monkeypatch.setattr(model.layers[-1], "save_own_variables", broken)
    with pytest.raises(OSError, match="no space left"):
        model.save(tmp_path / "m.keras")
    assert (tmp_path / "m.keras").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1

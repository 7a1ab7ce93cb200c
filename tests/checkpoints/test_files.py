"""Files that are saved under a strategy: whole, or as they were before."""

from __future__ import annotations

import errno
import functools
import os
import stat
import time
import zipfile

import keras
import numpy as np
import pytest
from harness.forker import Forker, run_code
from harness.training import assert_arrays
from keras import layers

import keras_strategies as ks

pytestmark = pytest.mark.one_backend("jax")

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


WAYS = [
    *(("save", "m.keras"), ("save_weights", "m.weights.h5")),
    *(("save", "m.h5"), ("ckpt", "m.ckpt")),
]


# Both write a part beside the file, and rename it.
@pytest.mark.slow(seconds=6)
@pytest.mark.nightly(unless=["save-m.keras"])
@pytest.mark.parametrize("way, name", WAYS[:2])
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
        while not any(p.stat().st_size > 2**20 for p in tmp_path.glob(".part-*/*")):
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


def small_model():
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dropout(0.5, seed=3), layers.Dense(2)]
        )
        model.compile("sgd", "mse")
    return model


def test_files_are_ordinary_ones(tmp_path):
    """What Keras reads of a file is what it reads without a strategy."""
    model = small_model()
    model.save(tmp_path / "m.keras")
    with zipfile.ZipFile(tmp_path / "m.keras") as archive:
        names = set(archive.namelist())
    assert names == {"config.json", "metadata.json", "model.weights.h5"}
    # The library is not needed.
    code = (
        "import sys; sys.modules['keras_strategies'] = None\n"
        "import keras; print(keras.models.load_model(sys.argv[1]).count_params())\n"
    )
    printed = run_code(tmp_path, code, str(tmp_path / "m.keras"))
    assert printed.splitlines()[-1] == "10"


def no_space(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


def saver_of(model, way):
    return ks.Checkpoint(model=model).save if way == "ckpt" else getattr(model, way)


@pytest.mark.parametrize("kind", ["file", "link", "link to a link"])
@pytest.mark.parametrize(("way", "name"), WAYS)
def test_an_error_while_saving_leaves_the_old_file(
    way, name, kind, tmp_path, monkeypatch
):
    real = tmp_path / name
    if kind != "file":
        (tmp_path / "real").mkdir()
        real = tmp_path / "real" / f"x{name}"
        (tmp_path / name).symlink_to("second" if "to" in kind[5:] else real)
        (tmp_path / "second").symlink_to(real)
    model = small_model()
    save = saver_of(model, way)
    save(tmp_path / name)
    before = real.read_bytes()
    assert before and (tmp_path / name).is_symlink() == (kind != "file")

    # In the middle; Keras's older format, and checkpoints, have writers of their own.
    monkeypatch.setattr(model.layers[-1], "save_own_variables", no_space)
    monkeypatch.setattr(np.lib.format, "write_array", no_space)
    if name == "m.h5":
        monkeypatch.setattr(model, "get_config", no_space)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / name)
    assert real.read_bytes() == before
    assert not list(tmp_path.rglob(".part-*"))
    monkeypatch.undo()
    model.set_weights([w + 1 for w in model.get_weights()])
    save(tmp_path / name)
    assert real.read_bytes() != before
    assert (tmp_path / name).is_symlink() == (kind != "file")
    assert not list(tmp_path.rglob(".part-*"))


@pytest.mark.parametrize("way", ["save", "ckpt"])
def test_permissions_are_those_of_the_old_file_or_of_the_umask(way, tmp_path):
    model, path = small_model(), tmp_path / "m.keras"
    save = saver_of(model, way)
    before = os.umask(0o027)
    try:
        save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_an_error_names_the_path_of_the_user(tmp_path):
    model = small_model()
    (tmp_path / "no.txt").write_text("no folder")
    for save, path in (
        (model.save, tmp_path / "missing" / "m.keras"),
        (model.save_weights, tmp_path / "no.txt" / "m.weights.h5"),
    ):
        with pytest.raises(OSError) as raised:
            save(path)
        assert str(path) in str(raised.value) and ".part" not in str(raised.value)
        assert raised.value.filename == str(path)


@pytest.mark.parametrize("name", ["m.weights.json", "m.weights.h5"])
def test_sharded_weights_are_replaced_when_all_are_written(name, tmp_path, monkeypatch):
    model = small_model()
    save = functools.partial(model.save_weights, tmp_path / name, max_shard_size=3.1e-8)
    save()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    shards = {f"m_0000{i}.weights.h5" for i in range(2)}
    assert before.keys() == {"m.weights.json", *shards}
    model.set_weights([w + 1 for w in model.get_weights()])
    monkeypatch.setattr(model.layers[-1], "save_own_variables", no_space)
    with pytest.raises(OSError, match="No space left"):
        save()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    monkeypatch.undo()
    save()
    other = small_model()
    other.load_weights(tmp_path / "m.weights.json")
    assert_arrays(other.get_weights(), model.get_weights())


@pytest.mark.parametrize("answer", ["n", "y"])
@pytest.mark.parametrize(("way", "name"), WAYS[:2])
def test_a_file_is_not_replaced_without_a_question(
    way, name, answer, tmp_path, monkeypatch
):
    model = small_model()
    save = functools.partial(getattr(model, way), tmp_path / name, overwrite=False)
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: (asked.append(text), answer)[1])
    save()
    before = (tmp_path / name).read_bytes()
    assert not asked
    model.set_weights([w + 1 for w in model.get_weights()])
    save()
    assert len(asked) == 1 and str(tmp_path / name) in asked[0]
    assert ((tmp_path / name).read_bytes() == before) == (answer == "n")

"""Large models' files of HDF5 are written and read at their place in the archive."""

from __future__ import annotations

import resource
import signal
import zipfile
from types import SimpleNamespace

import h5py
import keras
import numpy as np
import pytest

from keras_strategies.keras_compat.saving import streaming

pytestmark = pytest.mark.one_backend

NAME = "model.weights.h5"


@pytest.fixture
def model(monkeypatch):
    """A model that counts as large, outside of a strategy."""
    monkeypatch.setattr(streaming, "is_streamed", lambda variable: False)
    monkeypatch.setattr(streaming, "_is_of_mesh", lambda variable: True)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.set_weights([np.arange(12.0).reshape(4, 3), np.arange(3.0)])
    return model


@pytest.fixture
def path(model, tmp_path):
    path = tmp_path / "m.keras"
    with streaming.streamed_files():
        model.save(path)
    return path


def assert_weights(model) -> None:
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(model.weights[0]), np.arange(12.0).reshape(4, 3)
    )


def test_the_file_is_an_ordinary_one(path, tmp_path):
    """Keras opens it, and one that was compressed later is read as Keras reads it."""
    assert_weights(keras.saving.load_model(path))
    packed = tmp_path / "packed.keras"
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as other:
            for name in archive.namelist():
                other.writestr(name, archive.read(name))
    for each in (path, packed):
        with streaming.streamed_files():
            assert_weights(keras.saving.load_model(each))


def test_no_copy_is_made(model, path, tmp_path, monkeypatch):
    for name in ("extract", "read", "write", "writestr"):
        original = getattr(zipfile.ZipFile, name)

        def copy(self, member, *rest, original=original):
            assert NAME not in str(member), "copied"
            return original(self, member, *rest)

        monkeypatch.setattr(zipfile.ZipFile, name, copy)
    with streaming.streamed_files():
        model.save(tmp_path / "n.keras")
        assert_weights(keras.saving.load_model(tmp_path / "n.keras"))


def test_flipped_and_missing_bytes_are_found(path):
    content = path.read_bytes()
    place = content.index(np.arange(3.0).astype("float32").tobytes())
    path.write_bytes(content[:place] + b"\1" + content[place + 1 :])
    with streaming.streamed_files(), pytest.raises(zipfile.BadZipFile, match="CRC-32"):
        keras.saving.load_model(path)


@pytest.mark.parametrize("nbytes", [200, 2000, 20_000])
def test_the_error_of_a_full_disk(tmp_path, nbytes):
    """Of the first bytes, of the rows, and of those that HDF5 writes at its end."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with (
            (tmp_path / "m.keras").open("wb") as file,
            zipfile.ZipFile(file, "w") as archive,
        ):
            archive.writestr("config.json", "{}")
            store = SimpleNamespace(mode="w", archive=archive, io_file=None)
            store.h5_file = streaming.open_file(h5py.File, store, NAME)
            if nbytes == 2000:
                resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
                with pytest.raises(OSError, match="too large"):
                    store.h5_file["rows"] = np.zeros(10_000)
            else:
                for i in range(200):
                    store.h5_file[str(i)] = np.zeros(10)
                resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
            with pytest.raises(OSError, match="too large"):
                streaming.close_file(None, store)
            assert archive.namelist() == ["config.json"]
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)

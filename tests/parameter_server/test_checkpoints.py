"""Files: saved by parameter servers, and opened by anything else."""

from __future__ import annotations

import textwrap
import tracemalloc

import keras
import numpy as np
import pytest
from harness.forker import run_code

import keras_strategies as ks
from parameter_server import clusters

pytestmark = [pytest.mark.one_backend, pytest.mark.multiprocess]

OPTIONS = {"batch_size": 8, "shuffle": False, "verbose": 0}


def build():
    """No dropout: its masks would start over after loading."""
    keras.utils.set_random_seed(1)
    dense = keras.Input((4,))
    codes = keras.Input((3,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(40, 4)(codes))
    x = keras.layers.Concatenate()([keras.layers.Dense(8, "relu")(dense), rows])
    model = keras.Model([dense, codes], keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def uninterrupted():
    """Weights and losses of one device: after two epochs, and of the second."""
    x, y = clusters.clicks()
    model = build()
    losses = model.fit(x, y, epochs=2, **OPTIONS).history["loss"]
    return clusters.values(model.weights), losses


@pytest.fixture(scope="module")
def saved(synchronous, tmp_path_factory):
    """A model after one epoch on parameter servers, and its file."""
    x, y = clusters.clicks()
    with synchronous.scope():
        model = build()
    model.fit(x, y, epochs=1, **OPTIONS)
    path = tmp_path_factory.mktemp("saved") / "model.keras"
    model.save(path)
    return model, path


def assert_goes_on(model, uninterrupted) -> None:
    x, y = clusters.clicks()
    weights, losses = uninterrupted
    history = model.fit(x, y, epochs=1, **OPTIONS).history
    np.testing.assert_allclose(history["loss"], losses[1:], rtol=1e-4)
    for found, expected in zip(clusters.values(model.weights), weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly(unless=["3"])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_training_goes_on_with_another_number_of_parts(
    synchronous, saved, uninterrupted, count
) -> None:
    with clusters.parts(synchronous, count), synchronous.scope():
        model = keras.saving.load_model(saved[1])
    table = next(v for v in model.weights if v.shape == (40, 4))
    assert len(synchronous.registry.describe(table).shards) == count
    assert_goes_on(model, uninterrupted)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ks.OneDeviceStrategy("cpu:0"),
        lambda: ks.MirroredStrategy(["cpu:0", "cpu:1"]),
    ],
    ids=["one_device", "mirrored"],
)
def test_training_goes_on_under_another_strategy(saved, uninterrupted, make) -> None:
    with make().scope():
        model = keras.saving.load_model(saved[1])
    assert_goes_on(model, uninterrupted)


def test_what_another_strategy_saved_goes_on_here(
    synchronous, uninterrupted, tmp_path
) -> None:
    x, y = clusters.clicks()
    model = build()
    model.fit(x, y, epochs=1, **OPTIONS)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    with synchronous.scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        only_weights = build()
    assert_goes_on(loaded, uninterrupted)
    only_weights.load_weights(tmp_path / "model.weights.h5")
    for ours, theirs in zip(
        clusters.values(only_weights.weights),
        clusters.values(model.weights),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


# Elsewhere Torch is the other backend, which compiles the loaded model for minutes.
@pytest.mark.one_backend("torch")
@pytest.mark.slow(seconds=8)
def test_training_goes_on_on_another_backend(saved, uninterrupted, tmp_path) -> None:
    """A process with another backend and no strategy."""
    other = "torch" if keras.backend.backend() != "torch" else "jax"
    np.savez(tmp_path / "weights.npz", *uninterrupted[0])
    script = f"""
        import keras, numpy as np
        data = np.load({str(tmp_path / "data.npz")!r})
        model = keras.saving.load_model({str(saved[1])!r})
        history = model.fit(
            [data["dense"], data["codes"]], data["y"], batch_size=8, shuffle=False,
            verbose=0).history
        np.testing.assert_allclose(history["loss"], [{uninterrupted[1][1]}], rtol=1e-4)
        expected = np.load({str(tmp_path / "weights.npz")!r})
        for i, variable in enumerate(model.weights):
            found = keras.ops.convert_to_numpy(variable.value)
            np.testing.assert_allclose(found, expected[f"arr_{{i}}"], rtol=1e-4,
                                       atol=1e-4)
        print("went on with", keras.backend.backend())
    """
    x, y = clusters.clicks()
    np.savez(tmp_path / "data.npz", dense=x[0], codes=x[1], y=y)
    printed = run_code(tmp_path, textwrap.dedent(script), backend=other, timeout=500)
    assert f"went on with {other}" in printed


def test_checkpoints_of_callbacks(synchronous, uninterrupted, tmp_path) -> None:
    x, y = clusters.clicks()
    with synchronous.scope():
        model = build()
    callbacks = [
        keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras"),
        keras.callbacks.BackupAndRestore(tmp_path / "backup"),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: 1 / epoch),
    ]
    with pytest.raises(ZeroDivisionError):
        model.fit(x, y, epochs=2, callbacks=callbacks, **OPTIONS)
    with synchronous.scope():
        again = build()
    history = again.fit(x, y, epochs=2, callbacks=callbacks[:2], **OPTIONS)
    assert history.epoch == [1]
    weights, losses = uninterrupted
    np.testing.assert_allclose(history.history["loss"], losses[1:], rtol=1e-4)
    from_file = keras.saving.load_model(tmp_path / "2.keras")
    for found, expected in zip(
        clusters.values(from_file.weights), weights, strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly(unless=["float32-w.weights.json"])
@pytest.mark.parametrize("name", ["w.weights.h5", "w.keras", "w.weights.json"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_variables_are_streamed(
    synchronous, tmp_path, monkeypatch, name, dtype
) -> None:
    """Neither saving nor loading holds a whole table."""
    rows, columns, piece = 20_000, 64, 64 << 10
    table_bytes = rows * columns * (4 if dtype == "float32" else 2)
    monkeypatch.setattr(
        "keras_strategies.keras_compat.saving.streaming._PIECE_BYTES", piece
    )
    monkeypatch.setattr(
        "keras_strategies.parameter_server.wire.server_connections._CHUNK_BYTES", piece
    )
    monkeypatch.setattr(
        "keras_strategies.parameter_server.variables.variable_registry._LOCAL_BYTES",
        piece,
    )
    monkeypatch.setattr(synchronous.registry, "streamed_bytes", piece)

    def numbers(tensor):
        return np.asarray(keras.ops.convert_to_numpy(tensor), "float32")

    def build():
        model = keras.Sequential(
            [
                keras.Input((1,), dtype="int32"),
                keras.layers.Embedding(rows, columns, dtype=dtype),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    with synchronous.scope():
        model, other = build(), build()
    row = np.arange(columns)
    registry = synchronous.registry
    slot = model.optimizer.variables[-1]
    registry.write_pieces(slot, [(7, np.full((1, columns), 3.0))])
    last = row[None].astype("float32")
    registry.write_pieces(model.weights[0], [(rows - 1, last)])

    def peak(function) -> int:
        """The smallest peak of three: imports and other threads allocate too."""
        peaks = []
        for _ in range(3):
            tracemalloc.start()
            try:
                function()
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
        return min(peaks)

    path = tmp_path / name
    if name.endswith("keras"):
        assert peak(lambda: model.save(path)) < table_bytes / 2
        with synchronous.scope():
            found = []
            load = lambda: found.append(keras.saving.load_model(path))  # noqa: E731
            assert peak(load) < table_bytes / 2
        other = found[-1]
        slot = other.optimizer.variables[-1]
        np.testing.assert_array_equal(numbers(slot[7]), 3.0)
    else:
        options = {"max_shard_size": 1.0} if name.endswith("json") else {}
        assert peak(lambda: model.save_weights(path, **options)) < table_bytes / 2
        assert peak(lambda: other.load_weights(path)) < table_bytes / 2
    np.testing.assert_array_equal(numbers(other.weights[0][rows - 1]), row)
    np.testing.assert_array_equal(
        numbers(other.weights[0][:100]),
        numbers(model.weights[0][:100]),
    )
    if dtype == "float32" and name.endswith("keras"):
        alone = keras.saving.load_model(path)
        np.testing.assert_array_equal(clusters.values(alone.weights)[0][-1], row)

"""Torch: files of models in shards."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from multi_worker.torch_shards import cut, fit, network, rows

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("shards of Torch", allow_module_level=True)


def test_the_ordinary_file_goes_on_anywhere(cluster, tmp_path):
    def program(strategy, folder):
        model = network(cut())
        first = fit(
            model, [keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.keras")]
        )
        own = cut("auto", 2)
        with own.scope():
            other = keras.models.load_model(f"{folder}/2.keras")
        return first, model.get_weights(), fit(model), fit(other)

    found = cluster(program, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.keras", "2.keras"]
    here = keras.models.load_model(tmp_path / "2.keras")
    weights = here.get_weights()
    for _, own, on, other in found:
        for one, two in zip(weights, own, strict=True):
            np.testing.assert_array_equal(one, two)
        assert on != other  # Dropout goes on from the process's random numbers,
        assert np.isfinite(other).all()
    x, y = rows()
    scores = [here.evaluate(x, y, verbose=0)]

    def score(strategy, folder):
        with cut("auto", 2).scope():
            model = keras.models.load_model(f"{folder}/2.keras")
        return model.evaluate(x, y, verbose=0)

    scores += cluster(score, str(tmp_path))
    np.testing.assert_allclose(scores, scores[0], rtol=1e-5)


def test_a_file_is_loaded_into_shards(cluster, tmp_path):
    """Each process keeps its part of a weight that it reads; nothing is sent."""

    def build():
        model = keras.Sequential([keras.Input((16,))])
        for _ in range(3):
            model.add(keras.layers.Dense(16))
        return model

    keras.utils.set_random_seed(3)
    alone = build()
    path = str(tmp_path / "whole.weights.h5")
    alone.save_weights(path)

    def program(strategy, path):
        from keras_strategies.engines.torch.model_parallel import process_mesh

        sent = []
        original = process_mesh.distribute_tensor
        process_mesh.distribute_tensor = lambda *args: sent.append(args)
        try:
            keras.utils.set_random_seed(5)
            with cut().scope():
                model = build()
            model.load_weights(path)
        finally:
            process_mesh.distribute_tensor = original
        kernel = model.layers[0].kernel.value.to_local()
        memory = kernel.untyped_storage().nbytes()
        return len(sent), memory, model.get_weights()

    for sent, memory, weights in cluster(program, path):
        assert sent == 0
        assert memory == 16 * 16 * 4 // 2
        for one, other in zip(weights, alone.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)


def test_each_process_writes_and_reads_its_shards(cluster, tmp_path):
    """A checkpoint goes on under another layout, on all weights, and in one process."""

    def save(strategy, folder):
        own = cut()
        model = network(own, rate=0.0)
        fit(model)
        assert [own.save_sharded(model, folder, keep=2) for _ in range(3)] == [1, 2, 3]
        saved = model.get_weights()
        return saved, fit(model), model.get_weights()

    def load(strategy, folder, layout_map, width):
        own = strategy if layout_map is None else cut(layout_map, width)
        model = network(own, rate=0.0)
        assert own.load_sharded(model, folder) == 3
        return model.get_weights(), fit(model), model.get_weights()

    (saved, losses, after), *_ = cluster(save, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    files = {path.name: path.stat().st_size for path in (tmp_path / "3").iterdir()}
    parts = [size for name, size in files.items() if name.endswith(".distcp")]
    assert len(parts) == 2
    assert max(parts) < 0.7 * sum(parts)
    found = cluster(load, str(tmp_path), "auto", 2)
    found += cluster(load, str(tmp_path), None, 1)
    found.append(load(ks.OneDeviceStrategy("cpu:0"), tmp_path, None, 1))
    for weights, losses_of, last in found:
        for value, expected in zip(weights, saved, strict=True):
            np.testing.assert_array_equal(value, expected)
        np.testing.assert_allclose(losses_of, losses, rtol=1e-5)
        for value, expected in zip(last, after, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)

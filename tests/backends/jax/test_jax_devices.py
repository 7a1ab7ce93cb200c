"""Devices, placement of batches and collectives on JAX."""

from __future__ import annotations

import textwrap

import keras
import numpy as np
import pytest
from harness.forker import run_code

import keras_strategies as ks

if keras.backend.backend() != "jax":
    pytest.skip("tests of the JAX backend", allow_module_level=True)

import jax

from keras_strategies.engines.jax.batch_placement import MeshPlacer

ks.set_virtual_cpu_devices(4)


def test_batches_of_any_structure_are_placed():
    devices = set(jax.devices()[:2])
    placer = MeshPlacer(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("batch",)))
    structure, _ = placer.place(({"a": np.ones((8, 2)), "b": (np.ones(8), None)}, None))
    assert structure["b"][1] is None
    for array in (structure["a"], structure["b"][0]):
        assert array.sharding.spec == jax.P("batch")
        assert array.devices() == devices
    (array,) = placer.place((np.zeros((0, 2)),))
    assert array.is_fully_replicated
    assert array.devices() == devices
    # Shards are equal, so rows that do not divide are padded.
    (seven,) = placer.place((np.ones((7, 2), "float32"),))
    assert (seven.shape, seven.dtype) == ((7, 2), "float32")
    assert seven.array.sharding.spec == jax.P("batch")
    np.testing.assert_array_equal(seven.array, [[1, 1]] * 7 + [[0, 0]])
    assert placer.place((seven,))[0] is seven


def test_a_strategy_makes_the_devices_it_names(tmp_path):
    code = """
        import keras_strategies as ks
        from keras_strategies.engines import get_engine
        from jax._src import xla_bridge
        assert get_engine().cpu_device_count() == 1
        assert not xla_bridge.backends_are_initialized()
        print(ks.MirroredStrategy(["cpu:0", "cpu:2"]).num_replicas_in_sync)
    """
    printed = run_code(tmp_path, textwrap.dedent(code))
    assert printed.splitlines()[-1] == "2"

"""`TPUStrategy`: the same path on devices that stand in for TPU cores."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from harness.training import ADAM_TOLERANCE, assert_same, numbers

import keras_strategies as ks
from keras_strategies.devices import Device
from keras_strategies.engines import get_engine
from keras_strategies.runtime.engine import Feature

pytestmark = pytest.mark.one_backend

BACKEND = keras.backend.backend()
PAIRS = [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]


def train(strategy):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 64)).astype("float32")
    y = rng.integers(0, 3, 16)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        dense = [keras.layers.Dense(512, "relu"), keras.layers.Dense(3, "softmax")]
        model = keras.Sequential([keras.Input((64,)), *dense])
        model.compile("adam", "sparse_categorical_crossentropy")
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model, numbers(model, history)


@pytest.fixture(scope="module")
def expected():
    return train(ks.OneDeviceStrategy("cpu:0"))[1]


def test_without_a_tpu_it_says_what_was_looked_for():
    with pytest.raises(RuntimeError, match="No TPU was found") as error:
        ks.TPUStrategy()
    assert all(t in str(error.value) for t in ("cpu:0", BACKEND, "DeviceAssignment"))


def test_an_engine_that_lacks_tpus(monkeypatch) -> None:
    engine = get_engine()
    monkeypatch.setattr(engine, "lacks", {Feature.TPUS: "Use JAX."})
    with pytest.raises(ks.errors.BackendError, match=r"No TPU was found.* Use JAX\."):
        ks.TPUStrategy()
    monkeypatch.setattr(engine, "local_devices", lambda: (Device("tpu", 0),))
    with pytest.raises(ks.errors.BackendError, match=r"on TPUs is not .* Use JAX\."):
        ks.TPUStrategy()


def test_an_assignment_gives_each_replica_its_core(expected):
    strategy = ks.TPUStrategy(
        experimental_device_assignment=ks.DeviceAssignment([["cpu:1"], ["cpu:2"]])
    )
    assert strategy.num_replicas_in_sync == 2
    assert strategy.extended.worker_devices == ("cpu:1", "cpu:2")
    _, found = train(strategy)
    assert_same(expected, found, ADAM_TOLERANCE, f"{strategy!r}")


@pytest.mark.one_backend("jax", "tensorflow")
@pytest.mark.skipif(BACKEND == "torch", reason="a process has one device")
def test_spmd_partitioning_cuts_variables_over_the_cores_of_a_replica(expected):
    assignment = ks.DeviceAssignment(PAIRS)
    strategy = ks.TPUStrategy(None, assignment, experimental_spmd_xla_partitioning=True)
    assert strategy.num_replicas_in_sync == 2
    model, found = train(strategy)
    assert_same(expected, found, ADAM_TOLERANCE, f"{strategy!r}")
    kernel = model.layers[0].kernel
    copies = strategy.drivers.fit.copies(kernel)
    assert {copy.nbytes for copy in copies} == {64 * 512 * 4 // 2}


@pytest.mark.one_backend("jax", "tensorflow")
@pytest.mark.skipif(BACKEND == "torch", reason="a process has one device")
def test_without_partitioning_the_first_core_of_a_replica_computes():
    strategy = ks.TPUStrategy(None, ks.DeviceAssignment(PAIRS))
    assert strategy.extended.worker_devices == ("cpu:0", "cpu:2")


def test_other_assignments_are_refused():
    for devices in ([], [[]], [["cpu:0"], ["cpu:1", "cpu:2"]]):
        with pytest.raises(ValueError, match="the same number for all"):
            ks.DeviceAssignment(devices)
    with pytest.raises(ValueError, match=r"ks\.DeviceAssignment"):
        ks.TPUStrategy(None, [["cpu:0"]])
    with pytest.raises(ValueError, match="'cpu:0' 2 times"):
        ks.TPUStrategy(None, ks.DeviceAssignment([["cpu:0"], ["cpu:0"]]))

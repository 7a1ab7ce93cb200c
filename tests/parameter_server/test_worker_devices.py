"""Workers compute on accelerators; servers and the coordinator on the CPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.devices import Device
from keras_strategies.engines import get_engine
from keras_strategies.parameter_server.coordinator import process_cluster
from keras_strategies.parameter_server.coordinator.cluster_processes import (
    gpu_environment,
)
from keras_strategies.parameter_server.engines import parameter_server_engine
from keras_strategies.processes.local_cluster import LocalTask
from parameter_server import accelerated_worker, clusters

pytestmark = pytest.mark.one_backend

OPTIONS = {"batch_size": 8, "shuffle": False, "verbose": 0}
ACCELERATOR = str(accelerated_worker.ACCELERATOR)


def without_dropout(optimizer):
    """A model with steps that Torch records."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    head = [layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dense(1)]
    tokens = [keras.Input((3,), dtype="int32"), layers.Embedding(40, 4)]
    model = keras.Sequential([*tokens, layers.Flatten(), *head])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


#: Models, and their part of the input.
MODELS = {
    "two inputs": (clusters.two_inputs, lambda dense, ids: [dense, ids]),
    "without dropout": (without_dropout, lambda dense, ids: ids),
}


def assert_trains_as_one_device(strategy, name: str, tolerance: float) -> None:
    """Compares weights, losses and predictions of a model with all kinds of values."""
    (dense, ids), y = clusters.clicks(48)
    make, inputs = MODELS[name]
    # The last of 6 batches is smaller.
    x, y = inputs(dense[:44], ids[:44]), y[:44]
    weights = np.linspace(0.5, 1.5, len(y)).astype("float32")
    found, initial = [], None
    for scope in (contextlib.nullcontext, strategy.scope):
        with scope():
            model = make(keras.optimizers.Adam(0.01, clipnorm=1.0))
        # A GPU draws other numbers than the CPU of the coordinator, on Torch.
        initial = initial or model.get_weights()
        model.set_weights(initial)
        history = model.fit(x, y, sample_weight=weights, epochs=2, **OPTIONS)
        found.append(
            [
                *clusters.values(model.weights),
                *clusters.values(model.optimizer.variables),
                np.array(history.history["loss"]),
                np.array(model.evaluate(x, y, batch_size=8, verbose=0)),
                model.predict(x, batch_size=8, verbose=0),
            ]
        )
    for expected, ours in zip(*found, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=tolerance, atol=tolerance)


def devices_in_status(strategy) -> dict[str, str]:
    status = ks.ClusterCoordinator(strategy).status()
    return {row[0]: row[-1] for row in status.rows}


@pytest.fixture(scope="module")
def accelerated(forks):
    """A cluster with an accelerator on its worker that any machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_cluster, "run_worker", accelerated_worker.run_worker)
        with clusters.start_synchronous() as strategy:
            yield strategy


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["without dropout"])
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", MODELS)
def test_steps_on_an_accelerator_equal_those_of_one_device(accelerated, name) -> None:
    assert_trains_as_one_device(accelerated, name, 1e-4)
    names = {"worker 0": ACCELERATOR, "ps 0": "cpu:0", "ps 1": "cpu:0"}
    assert devices_in_status(accelerated) == names
    assert accelerated.extended.worker_devices == (
        f"/job:worker/replica:0/task:0/device:{ACCELERATOR.upper()}",
    )


@pytest.mark.multiprocess
def test_scheduled_functions_are_on_the_accelerator(accelerated) -> None:
    with accelerated.scope():
        table = keras.Variable(np.arange(12.0).reshape(6, 2), dtype="float32")

    def step(ids):
        return keras.ops.sum(keras.ops.take(table, ids, axis=0))

    def scheduled():
        context = ks.get_strategy()
        tensor = keras.ops.ones(3)
        total = context.run(step, args=(np.array([1, 4]),))
        return str(get_engine().device_of(tensor)), float(total)

    found = ks.ClusterCoordinator(accelerated).schedule(scheduled).fetch()
    assert found == (ACCELERATOR, 22.0)


def test_servers_stay_on_the_cpu(monkeypatch) -> None:
    outer = {
        "jax": lambda: get_engine().on_device(Device("cpu", 1)),
        "torch": lambda: keras.device("meta"),
        "tensorflow": lambda: get_engine().on_device(Device("cpu", 1)),
    }[keras.backend.backend()]
    if keras.backend.backend() == "jax":
        import jax

        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    if keras.backend.backend() == "tensorflow":
        from keras_strategies.parameter_server.engines import tensorflow_engine

        def refuse(*arguments):
            raise RuntimeError("in use")

        found = (Device("gpu", 0), Device("cpu", 0))
        monkeypatch.setattr(tensorflow_engine, "local_devices", lambda: found)
        monkeypatch.setattr(tensorflow_engine.tf.config, "set_visible_devices", refuse)
    with outer(), parameter_server_engine().on_cpu():
        assert get_engine().device_of(keras.ops.ones(3)) == Device("cpu", 0)


@pytest.mark.one_backend("jax")
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="buffers of JAX")
def test_buffers_are_read_on_the_cpu_only(monkeypatch) -> None:
    from keras_strategies.parameter_server.engines import jax_engine

    def refuse(value):
        raise BufferError("Python buffer protocol is only defined for CPU buffers")

    monkeypatch.setattr(jax_engine, "_array", refuse)
    update = parameter_server_engine().compile_update(lambda x: {"sum": x + 1}, True)
    with pytest.raises(BufferError):
        update(np.zeros(2))
    accelerator = SimpleNamespace(platform="gpu")
    monkeypatch.setattr(jax_engine, "default_device", lambda: accelerator)
    found = update(np.zeros(2))["sum"]
    assert isinstance(found, np.ndarray) and found.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "gpus, workers, expected",
    [
        ([], 2, [None, None, None]),
        (["0"], 1, ["0", ""]),
        (["0", "GPU-b"], 2, ["0", "GPU-b", ""]),
        (["3"], 2, ["3", "3", ""]),
    ],
)
def test_workers_have_a_gpu_each_and_servers_none(gpus, workers, expected) -> None:
    tasks = [*(LocalTask("worker", i) for i in range(workers)), LocalTask("ps", 0)]
    found = [gpu_environment(task, gpus) for task in tasks]
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in found] == expected


@pytest.mark.gpu
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", MODELS)
def test_a_worker_on_a_gpu_equals_one_device(forks, name) -> None:
    with clusters.start_synchronous() as strategy:
        # Products on a GPU may be rounded to TensorFloat-32.
        assert_trains_as_one_device(strategy, name, 2e-2)
        names = {"worker 0": "gpu:0", "ps 0": "cpu:0", "ps 1": "cpu:0"}
        assert devices_in_status(strategy) == names

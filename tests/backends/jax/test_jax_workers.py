"""Several workers on JAX: coordination service, programs, shutdown."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import keras
import pytest
from harness.forker import Forker
from harness.processes import write_script

from keras_strategies.cluster.resolvers.local_processes import free_addresses

pytestmark = [
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX only"),
    pytest.mark.multiprocess,
]

TIMEOUT = 120.0

_DATA = """
    import numpy as np, keras, keras_strategies as ks
    rng = np.random.default_rng(1)
    x = rng.normal(size=(26, 5)).astype("float32")
    y = rng.normal(size=(26, 2)).astype("float32")
    def build():
        keras.utils.set_random_seed(2)
        layers = [keras.layers.Dense(8), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model
"""


class Workers:
    """Processes of one cluster, without a launcher that would end them all."""

    def __init__(self, forker: Forker, folder: Path, body: str, count: int = 2):
        script = write_script(folder, textwrap.dedent(body))
        addresses = free_addresses(count)
        self.processes = []
        for i in range(count):
            task = {"type": "worker", "index": i}
            config = json.dumps({"cluster": {"worker": addresses}, "task": task})
            log = folder / f"log{i}"
            self.processes.append(forker.start(log, script, TF_CONFIG=config))

    def log(self, index: int) -> str:
        return self.processes[index].text()

    def wait(self, index: int) -> int:
        return self.processes[index].wait(TIMEOUT)[0]

    def end(self) -> None:
        for process in self.processes:
            process.kill()


@pytest.fixture(scope="module")
def forker():
    with Forker() as made:
        yield made


@pytest.fixture
def start(forker, tmp_path):
    started = []

    def start(body: str, count: int = 2) -> Workers:
        started.append(Workers(forker, tmp_path, body, count))
        return started[-1]

    yield start
    for workers in started:
        workers.end()


def test_jax_must_not_have_been_used_before(start):
    workers = start(
        """
    import jax, keras_strategies as ks
    jax.devices()
    ks.MultiWorkerMirroredStrategy()
    """
    )
    for index in range(2):
        assert workers.wait(index) == 1, workers.log(index)
    logs = workers.log(0) + workers.log(1)
    assert "BackendInUseError: MultiWorkerMirroredStrategy was made after JAX" in logs
    assert "Make the strategy first in the program" in logs


_INITIALIZED = f"""{_DATA}
    import jax
    index = config["task"]["index"]
    jax.distributed.initialize("ADDRESS", 2, INDEX)
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build()
    history = model.fit(x, y, batch_size=7, epochs=2, shuffle=False, verbose=0)
    write(me, json.dumps(history.history["loss"]))
"""


def test_a_trainer_may_have_started_jaxs_cluster(tmp_path, start):
    """Ray's does on GPUs and TPUs."""
    body = _INITIALIZED.replace("ADDRESS", free_addresses(1)[0])
    workers = start(body.replace("INDEX", "index"))
    for index in range(2):
        assert workers.wait(index) == 0, workers.log(index)
    alone: dict = {}
    exec(textwrap.dedent(_DATA), alone)
    history = alone["build"]().fit(
        alone["x"], alone["y"], batch_size=7, epochs=2, shuffle=False, verbose=0
    )
    for index in range(2):
        losses = json.loads((tmp_path / f"worker{index}").read_text())
        assert losses == pytest.approx(history.history["loss"], rel=1e-5)


def test_jaxs_cluster_of_other_processes_is_an_error(start):
    body = _INITIALIZED.replace("ADDRESS", free_addresses(1)[0])
    workers = start(body.replace("INDEX", "1 - index"))
    for index in range(2):
        assert workers.wait(index) == 1, workers.log(index)
        assert "BackendInUseError: This process is in another JAX" in workers.log(index)
        assert f"in its cluster this is not process {index} of 2" in workers.log(index)

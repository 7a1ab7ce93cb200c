"""Workers whose framework is in use already, and one that waits for another."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import keras
import pytest
from harness.forker import Forker
from harness.processes import TIMEOUT, write_script

from keras_strategies.cluster.resolvers.local_processes import free_addresses

BACKEND = keras.backend.backend()
pytestmark = pytest.mark.multiprocess
only_jax = pytest.mark.skipif(BACKEND != "jax", reason="JAX only")


@pytest.fixture
def run_two(tmp_path):
    """Runs a script on two workers; their exit codes and output."""

    def run(body: str) -> list[tuple[int, str]]:
        script = write_script(tmp_path, textwrap.dedent(body))
        logs = [tmp_path / f"log{index}" for index in range(2)]
        with Forker() as forker:
            processes = forker.start_workers(logs, script)
            return [(each.wait(TIMEOUT)[0], each.text()) for each in processes]

    return run


@pytest.mark.skipif(BACKEND == "torch", reason="its use fixes nothing")
def test_a_framework_that_is_in_use_is_refused(run_two) -> None:
    uses = {
        "jax": "import jax; jax.devices()",
        "tensorflow": "import tensorflow as tf; tf.constant(1.0)",
    }
    cures = {"jax": "Make the strategy first", "tensorflow": "right after the imports"}
    body = f"import keras_strategies as ks; {uses[BACKEND]}"
    found = run_two(f"{body}; ks.MultiWorkerMirroredStrategy()")
    assert [code for code, _ in found] == [1, 1], found
    text = "".join(text for _, text in found)
    assert "BackendInUseError" in text and cures[BACKEND] in text, text


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
    fit = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
"""


def initialized(number: str) -> str:
    """A script that has started JAX's own cluster, with this number."""
    address = free_addresses(1)[0]
    return f"""{_DATA}
    import jax
    index = config["task"]["index"]
    jax.distributed.initialize({address!r}, 2, {number})
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build()
    write(me, json.dumps(model.fit(x, y, **fit).history["loss"]))
    """


@only_jax
def test_a_trainer_may_have_started_jaxs_cluster(tmp_path: Path, run_two) -> None:
    """Ray's does on GPUs and TPUs."""
    found = run_two(initialized("index"))
    assert [code for code, _ in found] == [0, 0], found
    alone: dict[str, Any] = {}
    exec(textwrap.dedent(_DATA), alone)
    history = alone["build"]().fit(alone["x"], alone["y"], **alone["fit"])
    for index in range(2):
        losses = json.loads((tmp_path / f"worker{index}").read_text())
        assert losses == pytest.approx(history.history["loss"], rel=1e-5)


@only_jax
def test_jaxs_cluster_of_other_processes_is_an_error(run_two) -> None:
    for index, (code, text) in enumerate(run_two(initialized("1 - index"))):
        assert code == 1, text
        assert "BackendInUseError: This process is in another JAX" in text
        assert f"in its cluster this is not process {index} of 2" in text


@pytest.mark.slow(seconds=8)
@pytest.mark.skipif(BACKEND != "tensorflow", reason="collectives of TensorFlow")
def test_a_step_without_another_worker_is_an_error(run_two) -> None:
    """The other one is alive, and does something else."""
    (_, text), _ = run_two("""
        import numpy as np, keras, keras_strategies as ks
        strategy = ks.MultiWorkerMirroredStrategy(
            communication_options=ks.CommunicationOptions(timeout_seconds=5)
        )
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", run_eagerly=True)
        x, y = np.ones((400, 4), "float32"), np.ones((400, 2), "float32")
        try:
            for batch in range(4):
                begin = time.time()
                while batch == 2 and me == "worker1" and not (here / "told").exists():
                    time.sleep(0.1)
                model.train_on_batch(x, y)
        except ks.errors.WorkerError as error:
            print("told:", time.time() - begin, error, flush=True)
            (here / "told").touch()
    """)
    [line] = [line for line in text.splitlines() if "told:" in line]
    assert float(line.split()[1]) < 5 + 25, text

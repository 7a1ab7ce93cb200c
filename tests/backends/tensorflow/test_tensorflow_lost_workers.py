"""Lost and different workers on TensorFlow: what its own collectives need."""

from __future__ import annotations

import functools
import json
import socket
import textwrap
import time

import keras
import pytest
from harness.forker import Forker

from keras_strategies.cluster.resolvers.local_processes import free_addresses

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of the TensorFlow backend", allow_module_level=True)

import tensorflow as tf

from keras_strategies.engines.tensorflow.workers import (
    worker_collectives,
    worker_server,
)
from keras_strategies.engines.tensorflow.workers.collective_timeouts import (
    CollectiveTimeouts,
)

LIMIT = 80.0


@pytest.fixture(scope="module")
def forker():
    with Forker() as made:
        yield made


BEGINNING = """\
import os, signal, sys, time
import numpy as np
import tensorflow as tf
import keras
import keras_strategies as ks
"""


@pytest.fixture
def run_two(forker, tmp_path):
    """Runs a script on two workers, until the first has ended; what they print."""

    def run(body: str) -> list[str]:
        path = tmp_path / "script.py"
        path.write_text(BEGINNING + textwrap.dedent(body))
        addresses = free_addresses(2)
        processes = []
        for index in range(2):
            task = {"type": "worker", "index": index}
            config = json.dumps({"cluster": {"worker": addresses}, "task": task})
            log = tmp_path / f"log{index}"
            processes.append(forker.start(log, str(path), TF_CONFIG=config))
        try:
            processes[0].wait(LIMIT)
            if "lost:" not in processes[0].text():
                processes[1].wait(LIMIT)
        finally:
            for process in processes:
                process.kill()
        return [process.text() for process in processes]

    return run


def test_a_runtime_that_is_in_use_is_refused(run_two):
    found = run_two(
        """
        tf.constant(1.0)
        try:
            ks.MultiWorkerMirroredStrategy()
        except ks.errors.BackendInUseError as error:
            print("refused:", error, flush=True)
        """
    )
    for text in found:
        assert "refused:" in text and "right after the imports" in text, text


def test_a_killed_worker_is_named(run_two):
    """Noticed in the middle of a program, in which Python can do nothing."""
    found = run_two("""
        strategy = ks.MultiWorkerMirroredStrategy(
            communication_options=ks.CommunicationOptions(timeout_seconds=60)
        )

        @ks.function
        def step(x):
            def fn(x):
                return ks.get_replica_context().all_reduce("SUM", x)

            return strategy.run(fn, (x,))

        try:
            for i in range(100):
                if strategy.workers.group.index == 1 and i == 3:
                    print("time", time.time(), flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
                step(tf.ones([3]))
        except ks.errors.WorkerError as error:
            print("time", time.time(), flush=True)
            print("lost:", error, flush=True)
    """)
    lines = "".join(found).splitlines()
    [message] = [line for line in lines if line.startswith("lost:")]
    assert "Worker 1" in message and "connection ended" in message
    begin, end = (float(line.split()[1]) for line in lines if line.startswith("time"))
    assert end - begin < 10


def test_other_shapes_of_another_worker_are_an_error_of_the_exchange():
    """Which worker hears of it, and when, depends on the order of messages."""
    text = (
        "Shape mismatch in the collective instance 1. Op at device /device:CPU:0 "
        "expected shape [2] but another member in the group expected shape [3]."
    )
    error = tf.errors.InvalidArgumentError(None, None, text)
    assert worker_collectives._of_collective(error) == text
    other = tf.errors.InvalidArgumentError(
        None, None, "indices[0] = 12 is not in [0, 3)"
    )
    assert worker_collectives._of_collective(other) is None


@pytest.mark.slow(seconds=8)
def test_a_step_without_another_worker_is_an_error(run_two):
    """The other one is alive, and does something else."""
    found = run_two("""
        from pathlib import Path

        strategy = ks.MultiWorkerMirroredStrategy(
            communication_options=ks.CommunicationOptions(timeout_seconds=5)
        )
        index = strategy.workers.group.index
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", run_eagerly=True)
        x, y = np.ones((400, 4), "float32"), np.ones((400, 2), "float32")
        told = Path(__file__).parent / "told"
        try:
            for batch in range(4):
                begin = time.time()
                while batch == 2 and index == 1 and not told.exists():
                    time.sleep(0.1)
                model.train_on_batch(x, y)
        except ks.errors.WorkerError as error:
            print("told:", time.time() - begin, error, flush=True)
            told.touch()
    """)
    [line] = [line for line in found[0].splitlines() if "told:" in line]
    assert float(line.split()[1]) < 5 + 25, "\n\n".join(found)


def test_a_server_gets_the_port_that_was_chosen_for_it() -> None:
    """Other sockets cannot take it while workers wait for each other."""
    with worker_server._reserved_port("127.0.0.1") as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with worker_server._shared_ports():
            tf.distribute.Server(
                {"worker": [f"127.0.0.1:{port}"]}, job_name="worker", task_index=0
            )
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        pass


# Timeouts.


@pytest.fixture
def timeouts():
    """Timeouts of 1 second, and when they ended collectives."""
    ended: list[float] = []
    made = CollectiveTimeouts(lambda: 1.0, lambda: ended.append(time.monotonic()))
    made.start()
    yield made, ended
    made.close()


def test_a_collective_that_does_not_end_is_ended_after_its_timeout(timeouts):
    made, ended = timeouts
    begin = time.monotonic()
    value = tf.constant(2.0)

    def pause(value, seconds):
        return tf.py_function(lambda v: time.sleep(seconds) or v, [value], tf.float32)

    for seconds in (0.6, 0.6, 0.6, 1.8):
        value = made.within(value, functools.partial(pause, value, seconds))
    assert float(value) == 2
    # Not by the three before.
    assert ended and ended[0] - begin > 3 * 0.6 + 1


def test_a_collective_of_a_failed_program_does_not_count_as_under_way(timeouts):
    made, ended = timeouts

    def fails():
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        made.within(tf.constant(2.0), fails)
    made.forget()
    time.sleep(1.6)
    assert not ended

"""Clusters of `ks.Server`s, at addresses that are named."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import keras
import pytest

import keras_strategies as ks
from keras_strategies.cluster.local import free_addresses
from keras_strategies.coordinator.transport import Keys, Service
from parameter_server import clusters

pytestmark = pytest.mark.multiprocess
SECRET = "correct horse battery staple"
TASK = """
import keras_strategies as ks
resolver = ks.cluster_resolver.TFConfigClusterResolver()
ks.Server(resolver, coordinator_seconds={seconds}).join()
"""
#: A coordinator that dies in the middle of its work.
CHIEF = """
import os, signal, keras
import keras_strategies as ks
strategy = ks.ParameterServerStrategy()
with strategy.scope():
    total = keras.Variable(100.0, name="total", trainable=False)
coordinator = ks.ClusterCoordinator(strategy)
def step():
    import time
    total.assign_add(1.0)
    time.sleep(0.2)
results = [coordinator.schedule(step) for _ in range(50)]
results[1].fetch()
os.kill(os.getpid(), signal.SIGKILL)
"""


@contextlib.contextmanager
def tasks(cluster, scripts):
    """Processes of a cluster: pairs of a job and what it runs."""

    def start(job: str, script: str) -> subprocess.Popen[str]:
        config = {"cluster": cluster, "task": {"type": job, "index": 0}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
        return subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    processes = [start(job, script) for job, script in scripts]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_tasks_meet_in_any_order_and_outlive_a_coordinator(monkeypatch) -> None:
    chief, worker, ps = free_addresses(3)
    cluster = {"chief": [chief], "worker": [worker], "ps": [ps]}
    monkeypatch.setenv("KS_CLUSTER_SECRET", SECRET)
    task = TASK.format(seconds=60)
    with tasks(cluster, [("worker", task), ("ps", task), ("chief", CHIEF)]) as started:
        assert started[2].wait(clusters.SECONDS) == -signal.SIGKILL
        resolver = ks.cluster_resolver.SimpleClusterResolver(
            cluster, task_type="chief", task_id=0
        )
        with ks.ParameterServerStrategy(resolver, start_seconds=60) as strategy:
            with strategy.scope():
                total = keras.Variable(0.0, name="total", trainable=False)
            coordinator = ks.ClusterCoordinator(strategy)
            with pytest.raises(ks.errors.InvalidArgumentError, match="by others"):
                coordinator.add_worker()
            for _ in range(5):
                coordinator.schedule(lambda: total.assign_add(1.0))
            coordinator.join(clusters.SECONDS)
            # Nothing is left of what the first coordinator had begun.
            assert float(total.numpy()) == 5.0
        assert [process.wait(30) for process in started[:2]] == [0, 0]


def test_tasks_end_when_the_coordinator_stays_away(monkeypatch) -> None:
    chief, worker, ps = free_addresses(3)
    cluster = {"chief": [chief], "worker": [worker], "ps": [ps]}
    monkeypatch.setenv("KS_CLUSTER_SECRET", SECRET)
    task = TASK.format(seconds=1)
    with tasks(cluster, [("worker", task), ("ps", task)]) as started:
        service = Service(f"tcp://{chief}", Keys.from_secret(SECRET))
        come = set()
        try:
            until = time.monotonic() + clusters.SECONDS
            while come != {"hello", "server"} and time.monotonic() < until:
                received = service.receive(1.0)
                if received is not None and received[1][1][0] != "beat":
                    come.add(received[1][1][0])
        finally:
            service.close()
        assert come == {"hello", "server"}
        for process in started:
            _, text = process.communicate(timeout=30)
            assert process.returncode == 1
            assert f"The coordinator at tcp://{chief} is gone" in text
            assert "coordinator_seconds" in text


@pytest.mark.parametrize(
    ("cluster", "job", "message"),
    [
        ({"worker": ["a:1"], "ps": ["b:1"]}, "ps", "has no chief"),
        ({"chief": ["c:1"], "ps": ["b:1"]}, "ps", "has no 'worker'"),
        ({"chief": ["c:1"], "worker": ["a:1"]}, "worker", "has no 'ps'"),
        (
            {"chief": ["c:1"], "worker": ["a:1"], "ps": ["b:1"]},
            "chief",
            "is a 'worker'",
        ),
    ],
)
def test_clusters_that_cannot_be(cluster, job, message) -> None:
    with pytest.raises(ks.errors.ClusterError, match=message):
        ks.Server(cluster, job, 0)


def test_a_cluster_needs_a_secret(monkeypatch) -> None:
    monkeypatch.delenv("KS_CLUSTER_SECRET", raising=False)
    cluster = {"chief": ["c:1"], "worker": ["a:1"], "ps": ["b:1"]}
    with pytest.raises(ks.errors.InvalidArgumentError, match="KS_CLUSTER_SECRET"):
        ks.Server(cluster, "ps", 0)


def test_arguments_of_tensorflows_server(monkeypatch) -> None:
    monkeypatch.setenv("KS_CLUSTER_SECRET", SECRET)
    cluster = {"chief": ["c:1"], "worker": ["a:1"], "ps": ["b:1"]}
    server = ks.Server(cluster, "ps", 0, protocol="grpc", start=False)
    assert repr(server) == "<Server of ps 0 at b:1>"
    assert server.server_def["task_index"] == 0
    with pytest.raises(ks.errors.ContextError, match="start=False"):
        server.join()
    with pytest.raises(ks.errors.InvalidArgumentError, match="no other transport"):
        ks.Server(cluster, "ps", 0, protocol="grpc+verbs")
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=2)
        ks.Server(cluster, "ps", 0, config=config)
        message = "ConfigProto"
    else:
        config, message = object(), "Leave it out"
    with pytest.raises((ks.errors.BackendError, ValueError), match=message):
        ks.Server(cluster, "ps", 0, config=object())
    monkeypatch.delenv("KS_CLUSTER_SECRET")
    local = ks.Server.create_local_server()
    assert local.target in local.server_def["cluster"]["worker"]
    assert set(local.server_def["cluster"]) == {"chief", "worker", "ps"}

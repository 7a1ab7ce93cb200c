"""Clusters of `ks.Server`s, at addresses that are named."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator

import keras
import pytest
from harness.forker import Forked

import keras_strategies as ks
from keras_strategies.cluster.resolvers.local_processes import free_addresses
from keras_strategies.engines import get_engine
from keras_strategies.parameter_server.wire.cluster_keys import Keys
from keras_strategies.parameter_server.wire.request_service import Service
from keras_strategies.runtime.engine import Feature
from parameter_server import clusters

pytestmark = [
    pytest.mark.one_backend("jax"),
    pytest.mark.multiprocess,
]
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


@pytest.fixture
def tasks(forker, tmp_path) -> Iterator[Callable[..., list[Forked]]]:
    """Starts the processes of a cluster, from pairs of a job and what it runs."""
    started: list[Forked] = []

    def start(cluster, scripts) -> list[Forked]:
        for job, script in scripts:
            config = {"cluster": cluster, "task": {"type": job, "index": 0}}
            path = tmp_path / f"{job}.py"
            path.write_text(script)
            started.append(
                forker.start(
                    tmp_path / f"{job}.log",
                    str(path),
                    TF_CONFIG=json.dumps(config),
                    KS_CLUSTER_SECRET=SECRET,
                )
            )
        return started

    yield start
    for process in started:
        process.kill()


def test_tasks_meet_in_any_order_and_outlive_a_coordinator(tasks, monkeypatch) -> None:
    chief, worker, ps = free_addresses(3)
    cluster = {"chief": [chief], "worker": [worker], "ps": [ps]}
    monkeypatch.setenv("KS_CLUSTER_SECRET", SECRET)
    task = TASK.format(seconds=60)
    started = tasks(cluster, [("worker", task), ("ps", task), ("chief", CHIEF)])
    assert started[2].wait(clusters.SECONDS)[0] == -signal.SIGKILL
    resolver = ks.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="chief", task_id=0
    )
    with ks.ParameterServerStrategy(resolver, start_seconds=60) as strategy:
        with strategy.scope():
            total = keras.Variable(0.0, name="total", trainable=False)
        coordinator = ks.ClusterCoordinator(strategy)
        with pytest.raises(
            ks.errors.InvalidArgumentError, match="local clusters and on Ray"
        ):
            coordinator.add_worker()
        for _ in range(5):
            coordinator.schedule(lambda: total.assign_add(1.0))
        coordinator.join(clusters.SECONDS)
        # Nothing is left of what the first coordinator had begun.
        assert float(total.numpy()) == 5.0
    assert [process.wait(30)[0] for process in started[:2]] == [0, 0]


def test_tasks_end_when_the_coordinator_stays_away(tasks, monkeypatch) -> None:
    chief, worker, ps = free_addresses(3)
    cluster = {"chief": [chief], "worker": [worker], "ps": [ps]}
    monkeypatch.setenv("KS_CLUSTER_SECRET", SECRET)
    task = TASK.format(seconds=1)
    started = tasks(cluster, [("worker", task), ("ps", task)])
    service = Service(f"tcp://{chief}", Keys.from_secret(SECRET))
    come = set()
    try:
        until = time.monotonic() + clusters.SECONDS
        while come != {"worker", "server"} and time.monotonic() < until:
            received = service.receive(1.0)
            if received is not None:
                come.add(received[1][1][0])
                come -= {"heartbeat", "memory"}
    finally:
        service.close()
    assert come == {"worker", "server"}
    for process in started:
        assert process.wait(30)[0] == 1
        text = process.text()
        assert f"The coordinator at tcp://{chief} was lost" in text
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
            "must be 'worker'",
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


def test_an_engine_that_lacks_parameter_servers(monkeypatch) -> None:
    lacks = {Feature.PARAMETER_SERVERS: "Use ks.MirroredStrategy."}
    monkeypatch.setattr(get_engine(), "lacks", lacks)
    message = r"ks\.ParameterServerStrategy is not supported with .*\. Use ks\.Mirrored"
    with pytest.raises(ks.errors.BackendError, match=message):
        ks.ParameterServerStrategy()

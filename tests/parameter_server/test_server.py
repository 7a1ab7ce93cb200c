"""Clusters of `ks.Server`s, at addresses that are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import keras
import pytest

import keras_strategies as ks
from keras_strategies.cluster.local import free_addresses
from parameter_server import clusters

pytestmark = pytest.mark.multiprocess
SECRET = "correct horse battery staple"
SCRIPT = """
import keras_strategies as ks
ks.Server(ks.cluster_resolver.TFConfigClusterResolver()).join()
"""


def test_tasks_meet_in_any_order_and_end_with_the_chief(monkeypatch) -> None:
    chief, worker, ps = free_addresses(3)
    cluster = {"chief": [chief], "worker": [worker], "ps": [ps]}
    monkeypatch.setenv("KS_CLUSTER_SECRET", SECRET)

    def start(job: str) -> subprocess.Popen[bytes]:
        config = {"cluster": cluster, "task": {"type": job, "index": 0}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
        return subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment)

    processes = [start("worker"), start("ps")]
    try:
        resolver = ks.cluster_resolver.SimpleClusterResolver(
            cluster, task_type="chief", task_id=0
        )
        with ks.ParameterServerStrategy(resolver) as strategy:
            with strategy.scope():
                total = keras.Variable(0.0, name="total", trainable=False)
            coordinator = ks.ClusterCoordinator(strategy)
            for _ in range(5):
                coordinator.schedule(lambda: total.assign_add(1.0))
            coordinator.join(clusters.SECONDS)
            assert float(total.numpy()) == 5.0
        assert [process.wait(30) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


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

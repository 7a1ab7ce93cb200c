"""`ClusterSpec`, and what a cluster has to have."""

from __future__ import annotations

import json

import pytest
from harness.forker import run_code

import keras_strategies as ks
from keras_strategies.cluster import spec as specs
from keras_strategies.cluster.spec import ClusterSpec

pytestmark = pytest.mark.one_backend("jax")


def test_lists_and_dicts_of_tasks() -> None:
    tasks = {"worker": ["a:1", "b:1"], "ps": {1: "c:1", 3: "d:1"}}
    spec = ClusterSpec({**tasks, "ps": {"1": "c:1", 3: "d:1"}})
    assert spec.jobs == ["worker", "ps"]
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("ps") == [1, 3]
    assert spec.task_address("ps", 3) == "d:1"
    assert spec.job_tasks("ps") == [None, "c:1", None, "d:1"]
    assert spec.as_dict() == tasks
    assert spec == tasks
    for equal in (ClusterSpec(spec), ClusterSpec(dict(reversed(tasks.items())))):
        assert (spec, hash(spec)) == (equal, hash(equal))
    assert spec != ClusterSpec({"worker": ["a:1", "b:1"]}) and spec != {}
    assert eval(repr(spec)) == spec
    assert "a:1" in repr(spec)
    assert not ClusterSpec({})


CLUSTERS = [
    {},
    {"worker": ["a:1", "b:1"], "ps": ["c:1"], "chief": ["d:1"]},
    {"worker": {"1": "a:1", "3": "b:1"}},
    {"worker": {"1": "b:1", "0": "a:1"}},
]
TENSORFLOW = """
import json, sys
from tensorflow.train import ClusterSpec
found = []
for cluster in json.loads(sys.argv[1]):
    spec = ClusterSpec(cluster)
    found.append([
        spec.jobs, repr(spec), bool(spec),
        [[spec.num_tasks(j), spec.task_indices(j)] for j in spec.jobs],
        [spec.job_tasks(j) for j in spec.jobs if spec.num_tasks(j)],
    ])
with open(sys.argv[2], "w") as file:
    json.dump(found, file)
"""


def test_it_says_what_tensorflows_says(tmp_path) -> None:
    file = tmp_path / "found.json"
    given = (json.dumps(CLUSTERS), str(file))
    run_code(tmp_path, TENSORFLOW, *given, imports_strategies=True, timeout=300)
    for cluster, theirs in zip(CLUSTERS, json.loads(file.read_text()), strict=True):
        spec = ClusterSpec(cluster)
        sizes = [[spec.num_tasks(job), spec.task_indices(job)] for job in spec.jobs]
        tasks = [spec.job_tasks(job) for job in spec.jobs if spec.num_tasks(job)]
        assert [spec.jobs, repr(spec), bool(spec), sizes, tasks] == theirs


@pytest.mark.parametrize(
    "given, message",
    [
        ("worker", "a dict from job names"),
        ({"worker": "a:1"}, "a list of addresses"),
        ({"worker": [1]}, "the address 1"),
        ({"worker": {"x": "a:1"}}, "the task 'x'"),
        ({3: ["a:1"]}, "Job names must be strings"),
        ({"worker": ["a:1"], "ps": ["a:1"]}, "'a:1' is used by both worker 0 and ps 0"),
    ],
)
def test_what_is_no_cluster(given, message) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterSpec(given)


def test_asking_for_what_is_not_there() -> None:
    spec = ClusterSpec({"worker": ["a:1"]})
    with pytest.raises(ValueError, match=r"no job 'ps'. Its jobs are \['worker'\]"):
        spec.num_tasks("ps")
    with pytest.raises(ValueError, match=r"no task 4; its tasks are \[0\]"):
        spec.task_address("worker", 4)


@pytest.mark.parametrize(
    "cluster, message",
    [
        ({"chief": ["a:1", "b:1"], "worker": ["c:1"]}, "2 chiefs"),
        ({"ps": ["a:1"]}, "has no worker"),
        ({"worker": ["a:1"], "evaluator": ["b:1", "c:1"]}, "2 evaluators"),
        ({"worker": ["a:1"], "master": ["b:1"]}, r"the unknown jobs \['master'\]"),
    ],
)
def test_each_mistake_has_its_message(cluster, message) -> None:
    with pytest.raises(ValueError, match=message):
        specs.check_training_cluster(ClusterSpec(cluster))


def test_the_chief_and_the_places_of_workers() -> None:
    led = ClusterSpec({"worker": ["b:1", "c:1"], "chief": ["a:1"]})
    assert specs.is_chief(led, "chief", 0)
    assert not specs.is_chief(led, "worker", 0)
    assert specs.worker_count(led) == 3
    assert specs.id_in_cluster(led, "chief", 0) == 0
    assert specs.id_in_cluster(led, "worker", 1) == 2
    assert specs.worker_addresses(led) == ["a:1", "b:1", "c:1"]
    equal = ClusterSpec({"worker": ["b:1", "c:1"], "ps": ["d:1"]})
    assert specs.is_chief(equal, "worker", 0)
    assert not specs.is_chief(equal, "worker", 1)
    assert not specs.is_chief(equal, "ps", 0)
    assert specs.id_in_cluster(equal, "evaluator", 0) == 0
    with pytest.raises(ValueError, match="no task 2"):
        specs.id_in_cluster(equal, "worker", 2)
    with pytest.raises(ValueError, match="is not a worker"):
        specs.id_in_cluster(equal, "ps", 0)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a.b:2222", ("a.b", 2222)),
        ("grpc://10.0.0.1:1", ("10.0.0.1", 1)),
        ("[fe80::1]:65535", ("fe80::1", 65535)),
    ],
)
def test_addresses(text, expected) -> None:
    assert specs.split_address(text) == expected


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:0", "a:65536", "a:b", "rank-1"])
def test_what_is_no_address(text) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is not a task address"):
        specs.split_address(text)


def test_it_is_public() -> None:
    assert ks.cluster_resolver.ClusterSpec is ClusterSpec
    assert ks.cluster_resolver.id_in_cluster is specs.id_in_cluster
    for name in ks.cluster_resolver.__all__:
        assert getattr(ks.cluster_resolver, name).__doc__

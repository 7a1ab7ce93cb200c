"""The resolver of SLURM against the variables of `srun`."""

from __future__ import annotations

import os

import pytest
from harness.launcher_variables import SLURM

from keras_strategies import cluster
from keras_strategies.cluster.resolvers.environment.slurm import expand_node_list

pytestmark = [
    pytest.mark.one_backend("jax"),
    pytest.mark.usefixtures("environment"),
]


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("node1", ["node1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-10],login2", ["gpu08", "gpu09", "gpu10", "login2"]),
        ("a[1,3-4]b,c", ["a1b", "a3b", "a4b", "c"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("ip-10-0-0-[1-2].eu", ["ip-10-0-0-1.eu", "ip-10-0-0-2.eu"]),
    ],
)
def test_node_lists(text, hosts) -> None:
    assert expand_node_list(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n]1[", "n[3-1]", "n[a-b]", "a,,b"])
def test_node_lists_that_are_none(text) -> None:
    with pytest.raises(ValueError, match="node"):
        expand_node_list(text)


def test_slurm(environment) -> None:
    environment(**SLURM)
    resolver = cluster.SlurmClusterResolver()
    workers = ["gpu01:8888", "gpu01:8889", "gpu02:8888", "gpu02:8889", "gpu03:8888"]
    assert resolver.cluster_spec().job_tasks("worker") == workers
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert resolver.num_accelerators() == {"GPU": 2}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_slurm_with_several_jobs_and_a_share_of_gpus(environment) -> None:
    environment(**SLURM)
    resolver = cluster.SlurmClusterResolver(
        jobs={"ps": 1, "worker": 4}, port_base=9000, gpus_per_node=2, gpus_per_task=1
    )
    assert resolver.cluster_spec().as_dict() == {
        "ps": ["gpu01:9000"],
        "worker": ["gpu01:9001", "gpu02:9000", "gpu02:9001", "gpu03:9000"],
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_share_of_gpus_is_not_shared_again(environment) -> None:
    environment(**SLURM)
    for _ in range(2):
        resolver = cluster.SlurmClusterResolver()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    # Another choice starts from what SLURM gave, not from the last share.
    cluster.SlurmClusterResolver(gpus_per_task=1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    # A person's own choice is what is there to share.
    environment(CUDA_VISIBLE_DEVICES="7,8")
    cluster.SlurmClusterResolver()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "8"
    environment(CUDA_VISIBLE_DEVICES="0,1,2,3")
    resolver = cluster.SlurmClusterResolver(auto_set_gpu=False)
    assert resolver.num_accelerators() == {"GPU": 2}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_gpus_that_srun_has_bound_are_left(environment) -> None:
    # `srun --gpus-per-task=1`: each task sees its own.
    environment(**{**SLURM, "CUDA_VISIBLE_DEVICES": "3"}, SLURM_GPUS_PER_TASK="1")
    assert cluster.SlurmClusterResolver().num_accelerators() == {"GPU": 1}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize(
    "variables, places",
    [
        ({}, ["n1:8888", "n1:8889", "n1:8890", "n2:8888", "n3:8888", "n3:8889"]),
        (
            {"SLURM_DISTRIBUTION": "cyclic"},
            ["n1:8888", "n2:8888", "n3:8888", "n1:8889", "n3:8889", "n1:8890"],
        ),
        (
            {"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "2"},
            ["n1:8888", "n1:8889", "n2:8888", "n3:8888", "n3:8889", "n1:8890"],
        ),
    ],
)
def test_slurm_places_tasks_as_its_distribution_says(
    environment, variables, places
) -> None:
    environment(SLURM_STEP_NODELIST="n[1-3]", SLURM_STEP_TASKS_PER_NODE="3,1,2")
    environment(SLURM_PROCID="5", **variables)
    resolver = cluster.SlurmClusterResolver()
    assert resolver.cluster_spec().job_tasks("worker") == places
    counts = {"n1": 3, "n2": 1, "n3": 2}
    same = cluster.SlurmClusterResolver(tasks_per_node=counts)
    assert same.cluster_spec() == resolver.cluster_spec()


def test_slurm_without_tasks_per_node_and_without_gpus(environment) -> None:
    environment(SLURM_JOB_NODELIST="n[1-2]", SLURM_NTASKS="3", SLURM_PROCID="2")
    resolver = cluster.SlurmClusterResolver()
    addresses = resolver.cluster_spec().job_tasks("worker")
    assert addresses == ["n1:8888", "n1:8889", "n2:8888"]
    assert resolver.num_accelerators() == {"GPU": 0}
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(
    "arguments, changes, message",
    [
        ({"jobs": {"worker": 4}}, {}, "have 4 tasks, but SLURM runs 5"),
        ({"tasks_per_node": [1, 1]}, {}, "3 nodes"),
        ({"gpus_per_task": 3}, {}, "3 GPUs each, but there are 4"),
        ({}, {"SLURM_PROCID": "5"}, "SLURM_PROCID is 5"),
        ({}, {"SLURM_PROCID": "two"}, "SLURM_PROCID is 'two', not a number"),
        ({"tasks_per_node": {"x": 5}}, {}, r"names the nodes \['x'\]"),
        ({}, {"SLURM_NODEID": "2"}, "on node 1 .gpu02. as its task 1 .*NODEID is 2"),
        ({}, {"SLURM_LOCALID": "0"}, "SLURM_LOCALID is 0"),
        ({}, {"SLURM_STEP_TASKS_PER_NODE": "2(3)"}, r"'2\(3\)' is not a list of tasks"),
        (
            {},
            {"SLURM_PROCID": ""},
            r"None of the environment variables \['SLURM_PROCID'\]",
        ),
    ],
)
def test_slurm_that_does_not_fit(environment, arguments, changes, message) -> None:
    environment(**{**SLURM, **changes})
    with pytest.raises(ValueError, match=message):
        cluster.SlurmClusterResolver(**arguments)

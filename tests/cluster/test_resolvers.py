"""Each resolver against what its system really sets."""

from __future__ import annotations

import json
import random
import socket

import pytest
from harness.launcher_variables import SLURM

from keras_strategies import cluster
from keras_strategies.cluster import ClusterSpec, find_cluster
from keras_strategies.cluster.environment import cluster_variables
from keras_strategies.cluster.resolvers import local_processes
from keras_strategies.processes.local_cluster import LocalCluster

pytestmark = [
    pytest.mark.one_backend("jax"),
    pytest.mark.usefixtures("environment"),
]

# --- TF_CONFIG ----------------------------------------------------------------

TASKS = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


def tf_config(**changes) -> str:
    config = {"cluster": TASKS, "task": {"type": "worker", "index": 1}}
    return json.dumps({**config, **changes})


def test_tf_config(environment) -> None:
    environment(TF_CONFIG=tf_config(rpc_layer="grpc", environment="cloud"))
    resolver = cluster.TFConfigClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec(TASKS)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.rpc_layer == "grpc"
    assert resolver.environment == "cloud"
    assert resolver.master() == "grpc://c:1"
    assert resolver.master("ps", 0, "http") == "http://d:1"
    assert resolver.num_workers == 3
    assert not resolver.is_chief


def test_arguments_win_over_tf_config(environment) -> None:
    environment(TF_CONFIG=tf_config(rpc_layer="grpc"))
    resolver = cluster.TFConfigClusterResolver("ps", 0, "http", "here")
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert resolver.master() == "http://d:1"
    assert resolver.environment == "here"


# An evaluator need not be in the cluster, and an index may be a string.
@pytest.mark.parametrize("job, index", [("evaluator", 0), ("worker", "0")])
def test_tasks_of_tf_config(environment, job, index) -> None:
    environment(TF_CONFIG=tf_config(task={"type": job, "index": index}))
    resolver = cluster.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == (job, 0)
    assert not resolver.is_chief


def test_the_task_can_be_set_afterwards(environment) -> None:
    environment(TF_CONFIG=tf_config())
    resolver = cluster.TFConfigClusterResolver()
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 0, "grpc"
    assert resolver.master() == "grpc://d:1"


@pytest.mark.parametrize("text", ["", "{}", '{"cluster": {}}'])
def test_no_cluster_is_one_worker(environment, text) -> None:
    environment(TF_CONFIG=text)
    resolver = cluster.TFConfigClusterResolver()
    assert not resolver.cluster_spec()
    assert resolver.num_workers == 1
    assert resolver.is_chief
    assert resolver.master() == ""


@pytest.mark.parametrize(
    "text, message",
    [
        ("{'cluster': 1}", "is not JSON"),
        ("[1]", "it must be a JSON object"),
        (tf_config(task=3), '"task" must be a dict'),
        (tf_config(task={"type": "worker", "index": "x"}), '"index" of "task"'),
        (tf_config(task={"type": "boss", "index": 0}), "the task 'boss' 0"),
        (tf_config(task={"type": "worker", "index": 2}), "has 2 of them"),
        (tf_config(task={}), "the task of this process is unknown"),
        (tf_config(cluster={"worker": "b:1"}), "a list of addresses"),
    ],
)
def test_tf_config_that_cannot_be_is_shown(environment, text, message) -> None:
    environment(TF_CONFIG=text)
    with pytest.raises(ValueError, match=message) as error:
        cluster.TFConfigClusterResolver()
    assert repr(text) in str(error.value)


# --- Simple, union, local -----------------------------------------------------


def test_simple() -> None:
    resolver = cluster.SimpleClusterResolver(
        TASKS, task_type="chief", task_id=0, num_accelerators={"GPU": 2}
    )
    assert resolver.is_chief
    assert resolver.master() == "a:1"
    assert resolver.num_accelerators() == {"GPU": 2}
    named = cluster.SimpleClusterResolver(TASKS, master="x:1")
    assert named.master() == "x:1"
    assert named.master("worker", 0) == "b:1"
    with pytest.raises(ValueError, match="the task 'worker' 7"):
        cluster.SimpleClusterResolver(TASKS, task_type="worker", task_id=7)


def test_union() -> None:
    workers = cluster.SimpleClusterResolver({"worker": ["a:1"]})
    more = cluster.SimpleClusterResolver(
        {"worker": ["b:1"], "ps": ["c:1"]}, task_type="ps", task_id=0, rpc_layer="grpc"
    )
    union = cluster.UnionResolver(workers, more)
    assert union.cluster_spec().as_dict() == {"worker": ["a:1", "b:1"], "ps": ["c:1"]}
    assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 0, "grpc")
    own = cluster.UnionResolver(workers, more, task_type="worker", task_id=1)
    assert own.master() == "grpc://b:1"
    at_two = cluster.SimpleClusterResolver({"worker": {2: "x:1"}})
    assert cluster.UnionResolver(workers, at_two).cluster_spec().as_dict() == {
        "worker": {0: "a:1", 2: "x:1"}
    }
    other = cluster.SimpleClusterResolver({"worker": {2: "y:1"}})
    with pytest.raises(ValueError, match=r"'x:1' in one .* 'y:1' in another"):
        cluster.UnionResolver(at_two, other).cluster_spec()
    with pytest.raises(ValueError, match="at least one resolver"):
        cluster.UnionResolver()
    with pytest.raises(TypeError, match="of type dict"):
        cluster.UnionResolver({})


def test_local_addresses_are_free_and_on_the_loopback() -> None:
    resolver = cluster.LocalClusterResolver(workers=3, ps=2)
    spec = resolver.cluster_spec()
    counts = {"chief": 1, "worker": 3, "ps": 2}
    assert {job: spec.num_tasks(job) for job in spec.jobs} == counts
    assert resolver.is_chief
    for job in spec.jobs:
        for address in spec.job_tasks(job):
            host, port = address.split(":")
            assert host == "127.0.0.1"
            with socket.socket() as free:
                free.bind((host, int(port)))
    with pytest.raises(ValueError, match="workers=0"):
        cluster.LocalClusterResolver(workers=0)


def test_local_ports_are_not_those_that_the_system_chooses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        chosen = [server.getsockname()[1]]
        with socket.create_connection(server.getsockname()) as client:
            chosen.append(client.getsockname()[1])
    ports = [int(each.split(":")[1]) for each in local_processes.free_addresses(50)]
    assert len(set(ports)) == 50
    assert set(ports) <= set(local_processes.PORTS)
    assert not set(chosen) & set(local_processes.PORTS)
    # Processes with one seed find different ports.
    random.seed(1)
    first = local_processes.free_addresses(5)
    random.seed(1)
    assert first != local_processes.free_addresses(5)


def test_where_local_ports_are_in_use_others_are_found(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(local_processes, "PORTS", [taken])
        found = local_processes.free_addresses(3)
    assert len(set(found)) == 3
    assert f"127.0.0.1:{taken}" not in found


# --- torchrun -----------------------------------------------------------------

# `torchrun --nnodes=2 --nproc-per-node=2`, the third process.
TORCHRUN = {
    "RANK": "2",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
}


def test_torchrun(environment) -> None:
    environment(**TORCHRUN)
    resolver = cluster.TorchrunClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.num_workers == 4
    assert resolver.cluster_spec().task_address("worker", 0) == "10.0.0.7:29500"
    assert not resolver.is_chief


# --- Keras and MPI -------------------------------------------------------------

KERAS = {
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": "10.0.0.1:1234,10.0.0.2:2345",
    "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
    "KERAS_DISTRIBUTION_PROCESS_ID": "1",
}


@pytest.mark.parametrize(
    "addresses, size, workers",
    [
        ("10.0.0.1:1234, 10.0.0.2:2345", "2", ["10.0.0.1:1234", "10.0.0.2:2345"]),
        ("10.0.0.1:1234", "3", ["10.0.0.1:1234", "rank-1", "rank-2"]),
    ],
)
def test_variables_of_keras(environment, addresses, size, workers) -> None:
    first, second, _ = KERAS
    environment(**{**KERAS, first: addresses, second: size})
    resolver = find_cluster()
    assert isinstance(resolver, cluster.KerasDistributionClusterResolver)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.cluster_spec().as_dict() == {"worker": workers}


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("Torchrun", {"RANK": ""}, "RANK.* not set"),
        ("Torchrun", {"RANK": "two"}, "RANK is 'two'"),
        ("Torchrun", {"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4"),
        ("Torchrun", {"LOCAL_RANK": "2"}, "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE is 2"),
        ("Torchrun", {"MASTER_ADDR": ""}, r"\['MASTER_ADDR'\] are not set"),
        (
            *("Keras", {"PROCESS_ID": ""}),
            r"PROCESS_ID'\] are not set, but .*JOB_ADDRESSES is '10",
        ),
        ("Keras", {"PROCESS_ID": "2"}, "PROCESS_ID is 2 and .*NUM_PROCESSES is 2"),
        ("Keras", {"NUM_PROCESSES": "two"}, "NUM_PROCESSES is 'two', not a number"),
        ("Keras", {"NUM_PROCESSES": "3"}, "has 2 addresses, .*NUM_PROCESSES is 3"),
        ("Keras", {"JOB_ADDRESSES": "10.0.0.1"}, "'10.0.0.1' is not a task address"),
    ],
)
def test_variables_that_cannot_be(environment, kind, changes, message) -> None:
    resolver, variables = cluster.TorchrunClusterResolver, TORCHRUN
    if kind == "Keras":
        resolver, variables = cluster.KerasDistributionClusterResolver, KERAS
        changes = {f"KERAS_DISTRIBUTION_{name}": text for name, text in changes.items()}
    environment(**{**variables, **changes})
    # What is half set is no reason to train alone on every machine.
    for find in (resolver, find_cluster):
        with pytest.raises(ValueError, match=message):
            find()


# `mpirun -n 4 --map-by ppr:2:node`, the third process.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
# `mpiexec -n 4 -ppn 2` of MPICH and Intel MPI.
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4", **MPICH}


@pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH, MVAPICH])
def test_variables_of_mpi(environment, launcher) -> None:
    environment(**launcher, MASTER_ADDR="node1", MASTER_PORT="4711")
    resolver = find_cluster()
    assert isinstance(resolver, cluster.MPIClusterResolver)
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    workers = ["node1:4711", "rank-1", "rank-2", "rank-3"]
    assert resolver.cluster_spec().as_dict() == {"worker": workers}


def test_the_first_host_of_mpi_without_an_address(environment) -> None:
    environment(**OPEN_MPI)
    with pytest.raises(ValueError, match=r"_RANK=2 and .*mpirun -x MASTER_ADDR"):
        find_cluster()
    environment(SLURM_JOB_NODELIST="gpu[03-04]")
    assert find_cluster().master("worker", 0) == "gpu03:29500"
    environment(OMPI_COMM_WORLD_LOCAL_SIZE="4")
    assert find_cluster().master("worker", 0) == "127.0.0.1:29500"


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"PMI_RANK": "0"}, "PMI_RANK is '0', but PMI_SIZE is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({"KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1"}, "NUM_PROCESSES'.*are not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is '2', but RANK is not set"),
    ],
)
def test_half_of_a_launchers_variables(environment, variables, message) -> None:
    environment(**variables)
    with pytest.raises(ValueError, match=message):
        find_cluster()
    # It says nothing against a complete description.
    environment(**SLURM)
    assert isinstance(find_cluster(), cluster.SlurmClusterResolver)
    environment(TF_CONFIG=tf_config())
    assert isinstance(find_cluster(), cluster.TFConfigClusterResolver)


def test_mpi_without_a_launcher() -> None:
    with pytest.raises(ValueError, match="PMI_RANK and PMI_SIZE is set"):
        cluster.MPIClusterResolver()


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"TF_CONFIG": tf_config(), "PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_SIZE=2"),
        ({"TF_CONFIG": tf_config(), **KERAS}, "NUM_PROCESSES=2"),
        ({**KERAS, **OPEN_MPI}, "JOB_ADDRESSES describes 2 tasks, .*_SIZE=4"),
        ({**KERAS, "RANK": "0", "WORLD_SIZE": "4"}, "RANK=0 and WORLD_SIZE=4"),
    ],
)
def test_descriptions_that_contradict_each_other(
    environment, variables, message
) -> None:
    environment(**variables)
    with pytest.raises(ValueError, match=message):
        find_cluster()
    # A resolver that is given reads its own variables only.
    if "TF_CONFIG" in variables:
        assert cluster.TFConfigClusterResolver().num_workers == 3
    if set(KERAS) <= set(variables):
        assert cluster.KerasDistributionClusterResolver().num_workers == 2


def test_one_launcher_in_another(environment) -> None:
    # `srun --mpi=pmi2`: the same processes, with addresses from SLURM.
    environment(**SLURM, PMI_RANK=SLURM["SLURM_PROCID"])
    environment(PMI_SIZE=SLURM["SLURM_STEP_NUM_TASKS"])
    assert isinstance(find_cluster(), cluster.SlurmClusterResolver)
    # `mpirun` in a job: its step has a task on each node.
    environment(**OPEN_MPI)
    assert isinstance(find_cluster(), cluster.MPIClusterResolver)
    # torchrun on each node.
    environment(**{**TORCHRUN, "RANK": "9", "WORLD_SIZE": "16"})
    assert isinstance(find_cluster(), cluster.TorchrunClusterResolver)
    # An evaluator, not among the four tasks.
    environment(TF_CONFIG=tf_config(task={"type": "evaluator", "index": 0}))
    environment(**{**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "5"}, RANK="", WORLD_SIZE="")
    assert isinstance(find_cluster(), cluster.TFConfigClusterResolver)
    environment(TF_CONFIG="", **{**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"})
    environment(OMPI_COMM_WORLD_RANK="0", SLURM_PROCID="", PMI_RANK="", PMI_SIZE="")
    assert find_cluster() is None


def test_our_launcher_does_not_pass_on_the_numbers_of_another() -> None:
    outer = {**KERAS, **OPEN_MPI, **TORCHRUN, "SLURM_PROCID": "1", "HOME": "/"}
    for inner in LocalCluster(workers=2).environments(outer).values():
        assert not set(inner) & {*KERAS, "RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"}
        assert inner["HOME"] == "/" and inner["SLURM_PROCID"] == "1"


# --- SageMaker ----------------------------------------------------------------


def test_sagemaker(environment) -> None:
    hosts = '["algo-1", "algo-2"]'
    environment(SM_HOSTS=hosts, SM_CURRENT_HOST="algo-2", SM_NUM_GPUS="8")
    resolver = cluster.SageMakerClusterResolver()
    assert resolver.cluster_spec().job_tasks("worker") == ["algo-1:2223", "algo-2:2223"]
    assert resolver.task_id == 1
    assert resolver.num_accelerators() == {"GPU": 8}
    other = cluster.SageMakerClusterResolver(80, "worker", 0, "grpc", "here")
    assert other.master() == "grpc://algo-1:80"
    assert other.environment == "here"
    # Hosts are counted alike everywhere.
    environment(SM_HOSTS='["algo-2", "algo-1"]', SM_CURRENT_HOST="algo-2")
    assert cluster.SageMakerClusterResolver().task_id == 1


@pytest.mark.parametrize(
    "hosts, current, message",
    [
        ("", "a", r"\['SM_HOSTS'\] are not set"),
        ("a,b", "a", "must be a JSON list"),
        ('["a"]', "b", "'b', which is not among"),
    ],
)
def test_sagemaker_that_cannot_be(environment, hosts, current, message) -> None:
    environment(SM_HOSTS=hosts, SM_CURRENT_HOST=current)
    with pytest.raises(ValueError, match=message):
        cluster.SageMakerClusterResolver()


# --- What is set decides ------------------------------------------------------


def test_what_is_found(environment) -> None:
    assert find_cluster() is None
    environment(SM_HOSTS='["a"]', SM_CURRENT_HOST="a")
    assert isinstance(find_cluster(), cluster.SageMakerClusterResolver)
    environment(**SLURM)
    assert isinstance(find_cluster(), cluster.SlurmClusterResolver)
    environment(**OPEN_MPI, MASTER_ADDR="a")
    assert isinstance(find_cluster(), cluster.MPIClusterResolver)
    environment(**TORCHRUN)
    assert isinstance(find_cluster(), cluster.TorchrunClusterResolver)
    environment(**{**KERAS, "KERAS_DISTRIBUTION_NUM_PROCESSES": "4"})
    environment(KERAS_DISTRIBUTION_JOB_ADDRESSES="a:1")
    assert isinstance(find_cluster(), cluster.KerasDistributionClusterResolver)
    environment(TF_CONFIG=tf_config())
    assert isinstance(find_cluster(), cluster.TFConfigClusterResolver)


def test_what_is_set_is_shown(environment) -> None:
    assert cluster_variables() == {}
    environment(**TORCHRUN, SLURM_PROCID="0", SLURM_OTHER="1", TF_CONFIG="{}")
    assert cluster_variables() == {**TORCHRUN, "SLURM_PROCID": "0", "TF_CONFIG": "{}"}


def test_one_process_in_a_slurm_job_is_no_cluster(environment) -> None:
    environment(**{**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
    assert find_cluster() is None

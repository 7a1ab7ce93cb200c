"""Detection of the cluster from environment variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.resolvers.environment import (
    keras_distribution,
    local_number,
    mpi,
    sagemaker,
    slurm,
    tf_config,
    torchrun,
)
from keras_strategies.cluster.resolvers.environment.process_numbers import (
    RankAndSize,
)
from keras_strategies.errors import ClusterError

#: Number of virtual CPU devices of a process without accelerators; set by the launcher
#: for `--devices-per-worker`.
DEVICES_PER_WORKER = "KS_DEVICES_PER_WORKER"

#: Minimum and number of workers of an elastic group, such as `1:4`; set by the launcher
#: for `--elastic`.
ELASTIC = "KS_ELASTIC"

#: The address of the first worker, and that of the lead which a launcher has started
#: for its cluster, with a space in between.
LEAD = "KS_LEAD"

#: Random name of a run, which all of its workers have; set by Ray's resolver.
RUN_ID = "KS_RUN_ID"

#: The addresses of a strategy's processes, one for each device, and the number of this
#: one; set by the first of them.
DEVICE_PROCESS = "KS_DEVICE_PROCESS"

#: Shared secret of the tasks of a cluster.
SECRET = "KS_CLUSTER_SECRET"

#: Minimum number of its characters.
SECRET_CHARACTERS = 16

#: Defaults of log levels in processes that this package starts: engines print warnings
#: and errors only.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "1"}

#: Defaults of glibc's allocator in processes that this package starts: they keep memory
#: that was freed, as the allocators of GPUs do, for the next step. By its own defaults
#: large arrays of each step are returned to the system, and come back as pages that
#: the system has to clear: a third of a step of Torch on CPUs with large outputs.
KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(16 << 20),
}


#: Variables with the number of a process. A launcher removes them from the environment
#: of its processes, which have others.
RANK_VARIABLES = (
    *keras_distribution.ALL,
    torchrun.RANK,
    torchrun.WORLD_SIZE,
    torchrun.LOCAL_RANK,
    torchrun.LOCAL_WORLD_SIZE,
    *mpi.NUMBERS,
    *mpi.LOCAL_NUMBERS,
    slurm.PLACE,
)


def find_cluster() -> ClusterResolver | None:
    """The resolver for the environment variables of this process.

    Variables are checked in this order:

    1. `TF_CONFIG`, which `keras-strategies launch` sets too;
    2. those of `keras.distribution.initialize`, `KERAS_DISTRIBUTION_JOB_ADDRESSES`,
       `KERAS_DISTRIBUTION_NUM_PROCESSES` and `KERAS_DISTRIBUTION_PROCESS_ID`;
    3. torchrun's, if `RANK` and `WORLD_SIZE` are set;
    4. MPI's, such as `OMPI_COMM_WORLD_RANK` and `PMI_RANK`, of more than one process;
    5. SLURM's, of a job step with more than one task. The GPUs of a node are then
       shared among its tasks (see `SlurmClusterResolver`);
    6. SageMaker's.

    If one launcher starts another, the inner one takes precedence: torchrun in
    processes of MPI, both in a job step of SLURM. SLURM's variables, which have
    addresses, take precedence over MPI's of the same processes (`srun --mpi=pmi2`).

    Resolvers of Kubernetes, Compute Engine and TPUs are never chosen automatically.

    Returns:
        A `ClusterResolver`; None if no variable is set, which means one worker.

    Raises:
        ValueError: if a variable is invalid; if only some variables of a launcher are
            set and no others describe the cluster; if `TF_CONFIG` or Keras's variables
            have another number of processes than a launcher has started.

    Example:

    >>> resolver = ks.cluster_resolver.find_cluster()
    >>> resolver.num_workers if resolver else 1
    1
    """
    for place, kind in enumerate(_KINDS):
        if kind.is_set():
            resolver = kind.resolver()
            if kind.name:
                _check_launchers(kind.name, resolver, _KINDS[place + 1 :])
            return resolver
    _check_incomplete()
    return None


def is_port_shared(resolver: ClusterResolver) -> bool:
    """Whether a launcher listens at the port of the first worker's address."""
    # The agent of torchrun listens at MASTER_PORT itself.
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return has_agent and isinstance(resolver, torchrun.TorchrunClusterResolver)


def run_identifier(addresses: Sequence[str], num_workers: int) -> str:
    """An identifier of the run, the same on all workers and another in a later run."""
    if os.environ.get(RUN_ID):
        # Elastic workers may have other addresses later.
        return os.environ[RUN_ID]
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID")
    found = [os.environ.get(name, "") for name in names]
    return "|".join([addresses[0], str(num_workers), *found])


def find_local_number() -> RankAndSize | None:
    """The number of this process among those that its launcher runs on this machine.

    It is that of torchrun, MPI or SLURM, in the order of `find_cluster`, also if
    `TF_CONFIG` or Keras's variables describe the cluster.

    Returns:
        A `RankAndSize`; None if no launcher has set it.

    Raises:
        ValueError: if a variable is invalid.
    """
    for kind in _KINDS:
        if kind.is_set() and (found := kind.local()) is not None:
            return found
    return None


def cluster_variables() -> dict[str, str]:
    """The variables of `find_cluster` that are set."""
    exact = {
        tf_config.VARIABLE,
        *keras_distribution.ALL,
        *torchrun.ALL,
        *mpi.ALL,
        *slurm.ALL,
        sagemaker.HOSTS,
        sagemaker.CURRENT_HOST,
    }
    return {k: text for k, text in sorted(os.environ.items()) if k in exact}


@dataclass(frozen=True)
class _Kind:
    """Variables that describe a cluster.

    Args:
        is_set: callable, whether they describe one of several processes.
        resolver: callable that reads them.
        number: callable, this process's number in them.
        local: callable, this process's number among those of its machine.
        name: str, their name in errors if users set them; empty for variables of
            launchers and schedulers.
    """

    is_set: Callable[[], bool]
    resolver: Callable[[], ClusterResolver]
    number: Callable[[], RankAndSize | None] = lambda: None
    local: Callable[[], RankAndSize | None] = lambda: None
    name: str = ""


def _has(*names: str) -> Callable[[], bool]:
    return lambda: all(os.environ.get(name) for name in names)


def _number_of_torchrun() -> RankAndSize | None:
    return RankAndSize.read(torchrun.RANK, torchrun.WORLD_SIZE)


def _is_started_by_mpi() -> bool:
    process = mpi.process_number() if mpi.is_complete() else None
    if process is None or process.size == 1:
        return False
    numbers = (str(process.rank), str(process.size))
    in_slurm = (os.environ.get(slurm.PROCESS), os.environ.get(_STEP_SIZE))
    return not _is_in_a_slurm_step() or numbers != in_slurm


def _is_in_a_slurm_step() -> bool:
    # `salloc` and notebooks in a job have a node list too, but one process.
    count = os.environ.get(_STEP_SIZE, "")
    return bool(os.environ.get(slurm.PROCESS)) and count.isdigit() and int(count) > 1


_STEP_SIZE = slurm.NUM_TASKS[0]

_KINDS = (
    _Kind(
        _has(tf_config.VARIABLE),
        tf_config.TFConfigClusterResolver,
        name=tf_config.VARIABLE,
    ),
    _Kind(
        _has(*keras_distribution.ALL),
        keras_distribution.KerasDistributionClusterResolver,
        lambda: RankAndSize.read(keras_distribution.RANK, keras_distribution.SIZE),
        name=keras_distribution.ADDRESSES,
    ),
    _Kind(
        _has(torchrun.RANK, torchrun.WORLD_SIZE),
        torchrun.TorchrunClusterResolver,
        _number_of_torchrun,
        local_number.of_torchrun,
    ),
    _Kind(
        _is_started_by_mpi,
        mpi.MPIClusterResolver,
        mpi.process_number,
        local_number.of_mpi,
    ),
    _Kind(
        _is_in_a_slurm_step,
        slurm.SlurmClusterResolver,
        local=local_number.of_slurm,
    ),
    _Kind(
        _has(sagemaker.HOSTS, sagemaker.CURRENT_HOST),
        sagemaker.SageMakerClusterResolver,
    ),
)


def _check_incomplete() -> None:
    """Raises if only some of a launcher's variables are set.

    Otherwise each process would train alone. It is not called if other variables are
    complete: scripts of SLURM may set some for Torch.
    """
    if any(os.environ.get(name) for name in keras_distribution.ALL):
        keras_distribution.KerasDistributionClusterResolver()
    _number_of_torchrun()
    mpi.process_number()


def _check_launchers(
    name: str, resolver: ClusterResolver, others: Sequence[_Kind]
) -> None:
    """Checks that as many processes were started as the cluster has tasks."""
    spec = resolver.cluster_spec()
    tasks = sum(spec.num_tasks(job) for job in spec.jobs)
    # An evaluator need not be among the tasks.
    sizes = {tasks} if "evaluator" in spec.jobs else {tasks, tasks + 1}
    for other in others:
        process = None
        # An incomplete set of variables does not contradict a complete one.
        with contextlib.suppress(ClusterError):
            process = other.number()
        if spec and process and process.size > 1 and process.size not in sizes:
            raise ClusterError(
                f"{name} describes {tasks} tasks, {spec!r}, but a launcher has started "
                f"this process with {process.variables}. Unset the variables that do "
                "not describe this run, or pass a resolver of ks.cluster_resolver to "
                "the strategy."
            )

"""Detection of the cluster from environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable

from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.resolvers.environment import (
    sagemaker,
    slurm,
    tf_config,
    torchrun,
)

#: Number of virtual CPU devices of a process without accelerators; set by the launcher
#: for `--devices-per-worker`.
DEVICES_PER_WORKER = "KS_DEVICES_PER_WORKER"

#: Minimum and number of workers of an elastic group, such as `1:4`; set by the launcher
#: for `--elastic`.
ELASTIC = "KS_ELASTIC"

#: Shared secret of the tasks of a cluster with parameter servers.
SECRET = "KS_CLUSTER_SECRET"

#: Defaults of log levels in processes that this package starts: engines print warnings
#: and errors only.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "1"}


def find_cluster() -> ClusterResolver | None:
    """The resolver for the environment variables of this process.

    Variables are checked in this order:

    1. `TF_CONFIG`, which our launcher sets too;
    2. `torchrun`'s `RANK` and `WORLD_SIZE`, which need the other variables then;
    3. SLURM's, of a job step with more than one task. The GPUs of a node are shared
       among its tasks then (see `SlurmClusterResolver`);
    4. SageMaker's.

    Resolvers of Kubernetes, Compute Engine and TPUs are never chosen automatically.

    Returns:
        A `ClusterResolver`; None if no variable is set, which means one worker.

    Raises:
        ValueError: if a variable is invalid.

    Example:

    >>> resolver = ks.cluster_resolver.find_cluster()
    >>> resolver.num_workers if resolver else 1
    1
    """
    for is_set, resolver in _KINDS:
        if is_set():
            return resolver()
    return None


def cluster_variables() -> dict[str, str]:
    """The variables of `find_cluster` that are set."""
    exact = {tf_config.VARIABLE, *torchrun.ALL, sagemaker.HOSTS, sagemaker.CURRENT_HOST}
    return {
        name: text
        for name, text in sorted(os.environ.items())
        if name in exact or name in slurm.ALL
    }


def _has_all(*names: str) -> Callable[[], bool]:
    return lambda: all(os.environ.get(name) for name in names)


def _in_a_slurm_step() -> bool:
    # `salloc` and notebooks in a job have a node list too, but one process.
    count = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    return bool(os.environ.get(slurm.PROCESS)) and count.isdigit() and int(count) > 1


_KINDS: tuple[tuple[Callable[[], bool], Callable[[], ClusterResolver]], ...] = (
    (_has_all(tf_config.VARIABLE), tf_config.TFConfigClusterResolver),
    (_has_all(torchrun.RANK, torchrun.WORLD_SIZE), torchrun.TorchrunClusterResolver),
    (_in_a_slurm_step, slurm.SlurmClusterResolver),
    (
        _has_all(sagemaker.HOSTS, sagemaker.CURRENT_HOST),
        sagemaker.SageMakerClusterResolver,
    ),
)

"""Which cluster this process belongs to, from what is set around it."""

from __future__ import annotations

import os
from collections.abc import Callable

from keras_strategies.cluster import sagemaker, slurm, tf_config, torchrun
from keras_strategies.cluster.resolver import ClusterResolver

#: How many virtual CPU devices a process without accelerators is to make. Our
#: launcher sets it for `--devices-per-worker`.
DEVICES_PER_WORKER = "KS_DEVICES_PER_WORKER"


def find_cluster() -> ClusterResolver | None:
    """The resolver for what is set in the environment.

    It is looked for in this order: `TF_CONFIG` (which our launcher sets too),
    `torchrun`'s variables, SLURM's of a job step with more than one task, and
    SageMaker's.

    Returns:
        A `ClusterResolver`; None where nothing is set, or only one worker is.

    Raises:
        ValueError: if what is set cannot be right.
    """
    for is_set, resolver in _KINDS:
        if is_set():
            return resolver()
    return None


def _has_all(*names: str) -> Callable[[], bool]:
    return lambda: all(os.environ.get(name) for name in names)


def _in_a_slurm_step() -> bool:
    # `salloc` and notebooks in a job have a node list too, but one process.
    count = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    return bool(os.environ.get(slurm.PROCESS)) and count.isdigit() and int(count) > 1


_KINDS: tuple[tuple[Callable[[], bool], Callable[[], ClusterResolver]], ...] = (
    (_has_all(tf_config.VARIABLE), tf_config.TFConfigClusterResolver),
    (_has_all(*torchrun.NEEDED), torchrun.TorchrunClusterResolver),
    (_in_a_slurm_step, slurm.SlurmClusterResolver),
    (
        _has_all(sagemaker.HOSTS, sagemaker.CURRENT_HOST),
        sagemaker.SageMakerClusterResolver,
    ),
)

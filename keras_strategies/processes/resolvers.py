"""The cluster of this process: of its environment, or of Ray Train."""

from __future__ import annotations

from keras_strategies import cluster
from keras_strategies.cluster import ClusterResolver, LocalClusterResolver
from keras_strategies.errors import ClusterError
from keras_strategies.processes.ray.ray_resolver import RayClusterResolver
from keras_strategies.processes.ray.train_context import is_train_worker


def find_resolver() -> ClusterResolver | None:
    """The resolver of the cluster that started this process; None without one."""
    if is_train_worker():
        # Before the environment variables, which are those of the trainer's engine.
        return RayClusterResolver()
    return cluster.find_cluster()


def check_has_started(resolver: ClusterResolver) -> None:
    """Raises for the resolver of workers that this process still has to start.

    Raises:
        ValueError: with how to start them.
    """
    if isinstance(resolver, LocalClusterResolver):
        raise ClusterError(
            "LocalClusterResolver describes processes that ParameterServerStrategy "
            "starts itself. Start workers of MultiWorkerMirroredStrategy with "
            "`keras-strategies launch --workers N script.py` or ks.launch."
        )
    if isinstance(resolver, RayClusterResolver) and resolver.is_driver:
        raise ClusterError(
            "RayClusterResolver starts the workers of MultiWorkerMirroredStrategy with "
            "its method `run`: make the strategy in a function `train`, and call "
            "`resolver.run(train)`."
        )

"""Names of `tf.distribute.experimental.coordinator`."""

from keras_strategies.parameter_server.coordinator.cluster_coordinator import (
    ClusterCoordinator,
    PerWorkerValues,
    RemoteValue,
    get_current_worker_index,
)

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValues",
    "RemoteValue",
    "get_current_worker_index",
]


def __dir__() -> list[str]:
    return __all__

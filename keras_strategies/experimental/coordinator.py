"""Names of `tf.distribute.experimental.coordinator`."""

from keras_strategies.parameter_server.cluster_coordinator import (
    ClusterCoordinator,
    get_current_worker_index,
)
from keras_strategies.parameter_server.coordinator.remote_values import (
    PerWorkerValues,
    RemoteValue,
)

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValues",
    "RemoteValue",
    "get_current_worker_index",
]


def __dir__() -> list[str]:
    return __all__

"""Names of `tf.distribute.coordinator`.

>>> coordinator = ks.coordinator.ClusterCoordinator(strategy)
>>> coordinator.schedule(step_fn).fetch()
"""

from keras_strategies.parameter_server.cluster_coordinator import (
    ClusterCoordinator,
    experimental_get_current_worker_index,
    get_current_worker_index,
)
from keras_strategies.parameter_server.coordinator.remote_values import (
    PerWorkerValue,
    PerWorkerValues,
    RemoteValue,
)

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
    "get_current_worker_index",
]


def __dir__() -> list[str]:
    return __all__

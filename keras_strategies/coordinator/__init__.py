"""Parameter servers, their workers, and `ks.coordinator`, the names of the coordinator.

>>> coordinator = ks.coordinator.ClusterCoordinator(strategy)
>>> coordinator.schedule(step_fn).fetch()
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from keras_strategies.coordinator.cluster_coordinator import (
        ClusterCoordinator,
        PerWorkerValue,
        PerWorkerValues,
        RemoteValue,
        experimental_get_current_worker_index,
        get_current_worker_index,
    )

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
    "get_current_worker_index",
]


def __getattr__(name: str) -> object:
    # Servers and workers import modules of this package without the coordinator's.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module(f"{__name__}.cluster_coordinator")
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__

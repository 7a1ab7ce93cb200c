"""Distribution strategies for Keras 3 on JAX, Torch and TensorFlow.

>>> import keras, keras_strategies as ks
>>> strategy = ks.MirroredStrategy()
>>> with strategy.scope():
...     model = keras.Sequential([keras.layers.Dense(1)])
...     model.compile("adam", "mse")
>>> model.fit(x, y, batch_size=256)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from keras_strategies import cluster as cluster_resolver
from keras_strategies import errors
from keras_strategies.cli.function import launch

if TYPE_CHECKING:
    from keras_strategies import experimental
    from keras_strategies.api import *

__version__ = "0.1.0.dev0"

__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "ClusterCoordinator",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "DatasetCreator",
    "DefaultStrategy",
    "Description",
    "DeviceAssignment",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "Evaluation",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "ModelParallelStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "PerWorkerValues",
    "Plan",
    "PreemptionCheckpointHandler",
    "ReduceOp",
    "ReductionToOneDevice",
    "RemoteValue",
    "ReplicaContext",
    "Server",
    "SidecarEvaluator",
    "Status",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "VariableAggregation",
    "VariableCopy",
    "VariableSynchronization",
    "cluster_resolver",
    "compute_average_loss",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "function",
    "get_current_worker_index",
    "get_replica_context",
    "get_strategy",
    "gradients_are_aggregated",
    "has_strategy",
    "in_cross_replica_context",
    "launch",
    "scale_regularization_loss",
    "set_virtual_cpu_devices",
    "value_and_grad",
]


if not TYPE_CHECKING:  # A type checker takes the names from `api`.

    def __getattr__(name: str) -> Any:
        """Imports Keras with the first name that needs it.

        The launcher and the resolvers run without it: Keras imports a framework,
        which takes seconds, memory and, at its first use, devices.
        """
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "experimental":
            return importlib.import_module("keras_strategies.experimental")
        value = getattr(importlib.import_module("keras_strategies.api"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

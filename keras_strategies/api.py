"""Everything public that needs Keras, gathered; `__init__` hands it out.

Importing this module imports Keras and with it the backend's framework.
"""

from keras_strategies.backends.base import VariableCopy
from keras_strategies.collectives import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from keras_strategies.context import (
    ReplicaContext,
    has_strategy,
    in_cross_replica_context,
)
from keras_strategies.coordinator.cluster_coordinator import (
    ClusterCoordinator,
    PerWorkerValues,
    RemoteValue,
    get_current_worker_index,
)
from keras_strategies.coordinator.status import Status
from keras_strategies.input.dataset import DistributedDataset, DistributedIterator
from keras_strategies.strategies.base import Strategy, ValueContext
from keras_strategies.strategies.central_storage import CentralStorageStrategy
from keras_strategies.strategies.current import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
)
from keras_strategies.strategies.default import DefaultStrategy
from keras_strategies.strategies.describe import Description
from keras_strategies.strategies.devices import set_virtual_cpu_devices
from keras_strategies.strategies.extended import StrategyExtended
from keras_strategies.strategies.mirrored import MirroredStrategy
from keras_strategies.strategies.model_parallel import ModelParallelStrategy
from keras_strategies.strategies.multi_worker import MultiWorkerMirroredStrategy
from keras_strategies.strategies.one_device import OneDeviceStrategy
from keras_strategies.strategies.parameter_server import ParameterServerStrategy
from keras_strategies.strategies.plan import Plan
from keras_strategies.strategies.server import Server
from keras_strategies.strategies.tpu import DeviceAssignment, TPUStrategy
from keras_strategies.training.hooks import gradients_are_aggregated
from keras_strategies.training.losses import (
    compute_average_loss,
    scale_regularization_loss,
)
from keras_strategies.training.model_input import DatasetCreator
from keras_strategies.training.preemption import (
    PreemptionCheckpointHandler,
    TerminationConfig,
)
from keras_strategies.training.sidecar import Evaluation, SidecarEvaluator
from keras_strategies.training.steps import function, value_and_grad
from keras_strategies.types import (
    AutoShardPolicy,
    CommunicationImplementation,
    CommunicationOptions,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from keras_strategies.values import DistributedValues, Mirrored, PerReplica

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
    "compute_average_loss",
    "experimental_set_strategy",
    "function",
    "get_current_worker_index",
    "get_replica_context",
    "get_strategy",
    "gradients_are_aggregated",
    "has_strategy",
    "in_cross_replica_context",
    "scale_regularization_loss",
    "set_virtual_cpu_devices",
    "value_and_grad",
]

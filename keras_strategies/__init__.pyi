# The public names of this package and their modules. This is the only list of them:
# `__init__.py` reads it, and so do type checkers.

from keras_strategies import callbacks as callbacks
from keras_strategies import cluster_resolver as cluster_resolver
from keras_strategies import coordinator as coordinator
from keras_strategies import errors as errors
from keras_strategies import experimental as experimental
from keras_strategies import layers as layers
from keras_strategies.collectives import CrossDeviceOps as CrossDeviceOps
from keras_strategies.collectives import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from keras_strategies.collectives import NcclAllReduce as NcclAllReduce
from keras_strategies.collectives import ReductionToOneDevice as ReductionToOneDevice
from keras_strategies.errors import WorkersChanged as WorkersChanged
from keras_strategies.input.distributed_dataset import (
    DistributedDataset as DistributedDataset,
)
from keras_strategies.input.distributed_dataset import (
    DistributedIterator as DistributedIterator,
)
from keras_strategies.input.row_dataset import RowDataset as RowDataset
from keras_strategies.parameter_server.cluster_coordinator import (
    ClusterCoordinator as ClusterCoordinator,
)
from keras_strategies.parameter_server.cluster_coordinator import (
    get_current_worker_index as get_current_worker_index,
)
from keras_strategies.parameter_server.coordinator.cluster_status import (
    Status as Status,
)
from keras_strategies.parameter_server.coordinator.remote_values import (
    PerWorkerValues as PerWorkerValues,
)
from keras_strategies.parameter_server.coordinator.remote_values import (
    RemoteValue as RemoteValue,
)
from keras_strategies.parameter_server.parameter_server_strategy import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from keras_strategies.parameter_server.task_server import Server as Server
from keras_strategies.parameter_server.variables.sharded_variable import (
    ShardedVariable as ShardedVariable,
)
from keras_strategies.parameter_server.variables.sharded_variable import (
    VariableShard as VariableShard,
)
from keras_strategies.processes.launch_function import launch as launch
from keras_strategies.reports.describe import Description as Description
from keras_strategies.reports.plan import Plan as Plan
from keras_strategies.reports.rulecheck import RowReport as RowReport
from keras_strategies.reports.rulecheck import rulecheck as rulecheck
from keras_strategies.reports.worker_status import TrainingStatus as TrainingStatus
from keras_strategies.reports.worker_status import WorkerStatus as WorkerStatus
from keras_strategies.rows.declarations import row_wise as row_wise
from keras_strategies.runtime.context import has_strategy as has_strategy
from keras_strategies.runtime.context import (
    in_cross_replica_context as in_cross_replica_context,
)
from keras_strategies.runtime.placement import VariableCopy as VariableCopy
from keras_strategies.runtime.replica_context import ReplicaContext as ReplicaContext
from keras_strategies.strategies.base.strategy import Strategy as Strategy
from keras_strategies.strategies.base.strategy_extended import (
    StrategyExtended as StrategyExtended,
)
from keras_strategies.strategies.base.strategy_input import ValueContext as ValueContext
from keras_strategies.strategies.central_storage import (
    CentralStorageStrategy as CentralStorageStrategy,
)
from keras_strategies.strategies.current import (
    experimental_set_strategy as experimental_set_strategy,
)
from keras_strategies.strategies.current import (
    get_replica_context as get_replica_context,
)
from keras_strategies.strategies.current import get_strategy as get_strategy
from keras_strategies.strategies.default import DefaultStrategy as DefaultStrategy
from keras_strategies.strategies.device_selection import (
    set_virtual_cpu_devices as set_virtual_cpu_devices,
)
from keras_strategies.strategies.fit_into import MemoryFit as MemoryFit
from keras_strategies.strategies.fit_into import TrainingChoice as TrainingChoice
from keras_strategies.strategies.fit_into import fit_into as fit_into
from keras_strategies.strategies.mirrored import MirroredStrategy as MirroredStrategy
from keras_strategies.strategies.model_parallel import (
    ModelParallelStrategy as ModelParallelStrategy,
)
from keras_strategies.strategies.multi_worker import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from keras_strategies.strategies.one_device import (
    OneDeviceStrategy as OneDeviceStrategy,
)
from keras_strategies.strategies.tpu import DeviceAssignment as DeviceAssignment
from keras_strategies.strategies.tpu import TPUStrategy as TPUStrategy
from keras_strategies.training.custom_loops import function as function
from keras_strategies.training.custom_loops import value_and_grad as value_and_grad
from keras_strategies.training.dataset_creator import DatasetCreator as DatasetCreator
from keras_strategies.training.losses import (
    compute_average_loss as compute_average_loss,
)
from keras_strategies.training.losses import (
    scale_regularization_loss as scale_regularization_loss,
)
from keras_strategies.training.model_hooks import (
    gradients_are_aggregated as gradients_are_aggregated,
)
from keras_strategies.training.saving.checkpoints import Checkpoint as Checkpoint
from keras_strategies.training.saving.checkpoints import (
    CheckpointManager as CheckpointManager,
)
from keras_strategies.training.saving.preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from keras_strategies.training.saving.preemption import (
    TerminationConfig as TerminationConfig,
)
from keras_strategies.training.saving.sidecar_evaluator import Evaluation as Evaluation
from keras_strategies.training.saving.sidecar_evaluator import (
    SidecarEvaluator as SidecarEvaluator,
)
from keras_strategies.types import AutoShardPolicy as AutoShardPolicy
from keras_strategies.types import (
    CommunicationImplementation as CommunicationImplementation,
)
from keras_strategies.types import CommunicationOptions as CommunicationOptions
from keras_strategies.types import Elastic as Elastic
from keras_strategies.types import InputContext as InputContext
from keras_strategies.types import InputOptions as InputOptions
from keras_strategies.types import InputReplicationMode as InputReplicationMode
from keras_strategies.types import ReduceOp as ReduceOp
from keras_strategies.types import RunOptions as RunOptions
from keras_strategies.types import VariableAggregation as VariableAggregation
from keras_strategies.types import VariableSynchronization as VariableSynchronization
from keras_strategies.values import DistributedValues as DistributedValues
from keras_strategies.values import Mirrored as Mirrored
from keras_strategies.values import PerReplica as PerReplica
from keras_strategies.verification.processes.records import observe as observe
from keras_strategies.verification.processes.verify_processes import (
    verify_processes as verify_processes,
)
from keras_strategies.verification.report import (
    VerificationReport as VerificationReport,
)
from keras_strategies.verification.verify import verify as verify

__version__: str

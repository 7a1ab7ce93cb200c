"""Clusters: specification of tasks, resolvers, and the group of connected workers."""

from keras_strategies.cluster.environment import find_cluster
from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.resolvers.environment.keras_distribution import (
    KerasDistributionClusterResolver,
)
from keras_strategies.cluster.resolvers.environment.mpi import MPIClusterResolver
from keras_strategies.cluster.resolvers.environment.sagemaker import (
    SageMakerClusterResolver,
)
from keras_strategies.cluster.resolvers.environment.slurm import SlurmClusterResolver
from keras_strategies.cluster.resolvers.environment.tf_config import (
    TFConfigClusterResolver,
)
from keras_strategies.cluster.resolvers.environment.torchrun import (
    TorchrunClusterResolver,
)
from keras_strategies.cluster.resolvers.local_processes import LocalClusterResolver
from keras_strategies.cluster.resolvers.services.cloud_tpu import TPUClusterResolver
from keras_strategies.cluster.resolvers.services.gce import GCEClusterResolver
from keras_strategies.cluster.resolvers.services.kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from keras_strategies.cluster.resolvers.simple import SimpleClusterResolver
from keras_strategies.cluster.resolvers.union import UnionResolver
from keras_strategies.cluster.spec import (
    ClusterSpec,
    id_in_cluster,
    is_chief,
    worker_count,
)

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "KerasDistributionClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "LocalClusterResolver",
    "MPIClusterResolver",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TorchrunClusterResolver",
    "UnionResolver",
    "find_cluster",
    "id_in_cluster",
    "is_chief",
    "worker_count",
]

"""Who is who in a cluster: the specification, and a resolver for each kind."""

from keras_strategies.cluster.environment import find_cluster
from keras_strategies.cluster.gce import GCEClusterResolver
from keras_strategies.cluster.kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from keras_strategies.cluster.local import LocalClusterResolver
from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.sagemaker import SageMakerClusterResolver
from keras_strategies.cluster.simple import SimpleClusterResolver
from keras_strategies.cluster.slurm import SlurmClusterResolver
from keras_strategies.cluster.spec import (
    ClusterSpec,
    id_in_cluster,
    is_chief,
    worker_count,
)
from keras_strategies.cluster.tf_config import TFConfigClusterResolver
from keras_strategies.cluster.torchrun import TorchrunClusterResolver
from keras_strategies.cluster.tpu import TPUClusterResolver
from keras_strategies.cluster.union import UnionResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "LocalClusterResolver",
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

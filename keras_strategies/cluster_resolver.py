"""Names of `tf.distribute.cluster_resolver`, and resolvers of other clusters.

Importing this module imports the standard library only.
"""

from keras_strategies import cluster
from keras_strategies.cluster import *
from keras_strategies.processes.ray.ray_resolver import RayClusterResolver

__all__ = [*cluster.__all__, "RayClusterResolver"]


def __dir__() -> list[str]:
    return __all__

"""Names of `tf.distribute.cluster_resolver`, and resolvers of other clusters.

Importing it imports the standard library only.
"""

from keras_strategies.cluster import *
from keras_strategies.cluster import __all__


def __dir__() -> list[str]:
    return __all__

"""Names of `tf.distribute.experimental.partitioners`."""

from keras_strategies.parameter_server.variables.variable_partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
]


def __dir__() -> list[str]:
    return __all__

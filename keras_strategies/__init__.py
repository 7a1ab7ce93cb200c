"""Distribution strategies for Keras 3 on JAX, Torch and TensorFlow."""

from keras_strategies.context import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from keras_strategies.strategies.base import Strategy
from keras_strategies.strategies.central_storage import CentralStorageStrategy
from keras_strategies.strategies.default import get_default_strategy
from keras_strategies.strategies.devices import set_virtual_cpu_devices
from keras_strategies.strategies.mirrored import MirroredStrategy
from keras_strategies.strategies.one_device import OneDeviceStrategy
from keras_strategies.training import hooks as _hooks

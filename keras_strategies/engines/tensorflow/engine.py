"""The TensorFlow engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.communication.communicator import Communicator
from keras_strategies.devices import Device
from keras_strategies.engines.tensorflow import composite_values
from keras_strategies.engines.tensorflow.compat.gradients import is_any_tape_active
from keras_strategies.engines.tensorflow.compiled_function import (
    function,
    value_and_grad,
)
from keras_strategies.engines.tensorflow.data_parallel.rollback import (
    after_gradients,
)
from keras_strategies.engines.tensorflow.devices import (
    device_of,
    hide_others,
    local_devices,
    set_virtual_cpus,
    tf_device,
)
from keras_strategies.engines.tensorflow.random_numbers.global_random import (
    random_state,
    set_random_state,
)
from keras_strategies.engines.tensorflow.replicas.replica_run import TensorFlowRun
from keras_strategies.engines.tensorflow.sharding.gathering_trainer import (
    GatheringTrainer,
)
from keras_strategies.engines.tensorflow.sharding.shard_updates import by_shards
from keras_strategies.engines.tensorflow.tensor_primitives import PRIMITIVES
from keras_strategies.engines.tensorflow.trainer import TensorFlowTrainer
from keras_strategies.engines.tensorflow.workers.worker_collectives import (
    TensorFlowCommunicator,
)
from keras_strategies.errors import OutOfRangeError
from keras_strategies.runtime.drivers import Drivers
from keras_strategies.runtime.engine import Engine, Feature
from keras_strategies.types import CommunicationOptions, ReduceOp

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class TensorFlowOutOfRangeError(OutOfRangeError, tf.errors.OutOfRangeError):
    """`OutOfRangeError` of this package and of TensorFlow."""

    def __init__(self, message: str):
        tf.errors.OutOfRangeError.__init__(self, None, None, message)


class TensorFlowEngine(Engine):
    """TensorFlow on CPU and GPU devices."""

    name = "tensorflow"
    lacks = MappingProxyType(
        {
            Feature.SHARDED_CHECKPOINTS: "Use `model.save_weights` on every worker, of "
            "which the chief writes the file, one variable after the other, and "
            "`model.load_weights` before `fit`.",
            Feature.TPUS: "TensorFlow runs on TPUs by tf.distribute.TPUStrategy only, "
            "which this package does not use. Set KERAS_BACKEND=jax.",
        }
    )
    gathers_shards = True
    has_text_and_ragged_tensors = True
    spec_class = tf.TensorSpec
    out_of_range_error = TensorFlowOutOfRangeError
    end_errors = (*Engine.end_errors, tf.errors.OutOfRangeError)

    def __init__(self) -> None:
        composite_values.register()

    def when_differentiated(
        self, tensors: Sequence[Any], call: Callable[[], None]
    ) -> None:
        if is_any_tape_active():
            call()

    def local_devices(self) -> tuple[Device, ...]:
        return local_devices()

    def set_virtual_cpu_devices(self, count: int) -> None:
        set_virtual_cpus(count)

    def _kept(self, chosen: Device) -> Device | None:
        return hide_others(chosen)

    def to_device(self, value: Any, device: Device) -> Any:
        with tf.device(tf_device(device)):
            return tf.identity(keras.ops.convert_to_tensor(value))

    def device_of(self, tensor: Any) -> Device:
        return device_of(tensor)

    def on_device(self, device: Device) -> contextlib.AbstractContextManager[Any]:
        return tf.device(tf_device(device))  # type: ignore[no-any-return]

    def in_program(self) -> bool:
        return not tf.executing_eagerly()

    def all_reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
        with tf.device(tf_device(device_of(tensors[0]))):
            reduced = PRIMITIVES.reduce(op, tensors)
        return [self.to_device(reduced, device_of(tensor)) for tensor in tensors]

    def connect(
        self, group: WorkerGroup, options: CommunicationOptions
    ) -> Communicator:
        return TensorFlowCommunicator(group, options)

    @property
    def random_state(self) -> bytes:
        return random_state()

    @random_state.setter
    def random_state(self, state: bytes) -> None:
        set_random_state(state)

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        return value_and_grad(fn, variables, has_aux)

    def function(
        self, fn: Callable[..., Any], jit_compile: bool | None
    ) -> Callable[..., Any]:
        return function(fn, jit_compile)

    def drivers(self, strategy: StrategyCore) -> Drivers:
        if strategy.placement.mesh is None:
            fit, sharding = TensorFlowTrainer(strategy), None
        else:
            fit = sharding = GatheringTrainer(strategy)
        run = TensorFlowRun(strategy, fit.engine)
        return Drivers(fit, run, sharding, rollback=fit.rollback)

    def optimizer_apply(
        self, optimizer: Any, apply: Callable[..., Any]
    ) -> Callable[..., Any]:
        own = by_shards(optimizer, apply)
        return own if tf.executing_eagerly() else after_gradients(own)

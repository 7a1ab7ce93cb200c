"""The TensorFlow backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.devices import Device
from keras_strategies.engines.tensorflow.compiled_function import (
    function,
    value_and_grad,
)
from keras_strategies.engines.tensorflow.devices import (
    cpu_count,
    device_of,
    local_devices,
    set_virtual_cpus,
    tf_device,
)
from keras_strategies.engines.tensorflow.global_random import (
    random_state,
    set_random_state,
)
from keras_strategies.engines.tensorflow.program_iteration import (
    ProgramIterator,
    loop_over,
)
from keras_strategies.engines.tensorflow.tensor_primitives import PRIMITIVES
from keras_strategies.engines.tensorflow.trainer import TensorFlowTrainer
from keras_strategies.engines.tensorflow.worker_collectives import TensorFlowWorkers
from keras_strategies.errors import BackendError, OutOfRangeError
from keras_strategies.runtime.engine import Engine, TrainerAdapter
from keras_strategies.runtime.workers import Workers
from keras_strategies.types import CommunicationOptions, ReduceOp

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class TensorFlowOutOfRangeError(OutOfRangeError, tf.errors.OutOfRangeError):
    """What scripts written for TensorFlow catch, and what all others do."""

    def __init__(self, message: str):
        tf.errors.OutOfRangeError.__init__(self, None, None, message)


class TensorFlowEngine(Engine):
    """TensorFlow on CPU and GPU devices."""

    name = "tensorflow"

    def local_devices(self) -> tuple[Device, ...]:
        return local_devices()

    def set_virtual_cpu_devices(self, count: int) -> None:
        set_virtual_cpus(count)

    def cpu_device_count(self) -> int:
        return cpu_count()

    def is_tensor(self, value: Any) -> bool:
        return bool(tf.is_tensor(value))

    def to_numpy(self, tensor: Any) -> Any:
        return keras.ops.convert_to_numpy(tensor)

    def to_device(self, value: Any, device: Device) -> Any:
        with tf.device(tf_device(device)):
            return tf.identity(keras.ops.convert_to_tensor(value))

    def row_dataset(self, rows: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(rows.arrays)

    def tensor_spec(self, shape: tuple[int | None, ...], dtype: str) -> Any:
        return tf.TensorSpec(shape, dtype)

    def out_of_range(self, message: str) -> Exception:
        return TensorFlowOutOfRangeError(message)

    def device_of(self, tensor: Any) -> Device:
        return device_of(tensor)

    def on_device(self, device: Device) -> contextlib.AbstractContextManager[Any]:
        return tf.device(tf_device(device))  # type: ignore[no-any-return]

    def in_program(self) -> bool:
        return not tf.executing_eagerly()

    def program_iterator(
        self,
        start: Callable[[], Iterator[Any]],
        spec: Callable[[], Any],
        devices: Sequence[Device] | None,
    ) -> Any:
        where = None if devices is None else [tf_device(device) for device in devices]
        with tf.init_scope():  # A dataset may have to read a batch for it.
            found = spec()
        return ProgramIterator(start, found, where)

    def loops_over(self, iterable: type, in_program: Callable[[Any], Any]) -> None:
        loop_over(iterable, in_program)

    def all_reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
        with tf.device(tf_device(device_of(tensors[0]))):
            reduced = PRIMITIVES.reduce(op, tensors)
        return self.broadcast(reduced, [device_of(tensor) for tensor in tensors])

    def all_gather(self, tensors: Sequence[Any], axis: int) -> list[Any]:
        with tf.device(tf_device(device_of(tensors[0]))):
            gathered = tf.concat(list(tensors), axis)
        return self.broadcast(gathered, [device_of(tensor) for tensor in tensors])

    def broadcast(self, tensor: Any, devices: Sequence[Device]) -> list[Any]:
        return [self.to_device(tensor, device) for device in devices]

    def connect(self, group: WorkerGroup, options: CommunicationOptions) -> Workers:
        return TensorFlowWorkers(group, options)

    def random_state(self) -> bytes:
        return random_state()

    def set_random_state(self, state: bytes) -> None:
        set_random_state(state)

    def run_replicas(
        self,
        strategy: StrategyCore,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        return strategy.trainer.run(fn, args, kwargs)  # type: ignore[attr-defined]

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        return value_and_grad(fn, variables, has_aux)

    def function(
        self, fn: Callable[..., Any], jit_compile: bool | None
    ) -> Callable[..., Any]:
        return function(fn, jit_compile)

    def check_model_parallel(self) -> None:
        raise BackendError(
            "ks.ModelParallelStrategy was made with KERAS_BACKEND='tensorflow'. Keras "
            "cuts variables over devices on JAX only: on TensorFlow a layer's kernel "
            "is one `tf.Variable`, on one device. Set KERAS_BACKEND=jax; a model that "
            "is saved there opens here. What works on TensorFlow: "
            "ks.MirroredStrategy, with all variables on every device, and "
            "ks.CentralStorageStrategy, which keeps them, and the optimizer's slots, "
            "on one device that may be larger than the others, such as 'cpu:0'."
        )

    def trainer(self, strategy: StrategyCore) -> TrainerAdapter:
        return TensorFlowTrainer(strategy)

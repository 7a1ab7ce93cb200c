"""The JAX engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.communication.communicator import Communicator
from keras_strategies.devices import Device
from keras_strategies.engines.jax import compat, device_collectives, devices
from keras_strategies.engines.jax.array_placement import local_value
from keras_strategies.engines.jax.batch_transfer import BatchTransfer
from keras_strategies.engines.jax.fit.central_storage_trainer import (
    CentralStorageTrainer,
)
from keras_strategies.engines.jax.fit.mesh_trainer import MeshTrainer
from keras_strategies.engines.jax.fit.one_device_trainer import OneDeviceTrainer
from keras_strategies.engines.jax.function import compiled_function, trace_state
from keras_strategies.engines.jax.pool_gradients import use_unsharded_windows
from keras_strategies.engines.jax.run import value_and_grad
from keras_strategies.engines.jax.run.run_driver import JaxRun
from keras_strategies.engines.jax.run.traceable_optimizers import traceable_apply
from keras_strategies.engines.jax.sharding.model_parallel_trainer import (
    ModelParallelTrainer,
)
from keras_strategies.engines.jax.sort_gradients import use_signed_indices
from keras_strategies.engines.jax.workers.jax_workers import JaxCommunicator
from keras_strategies.keras_compat.backends.keras_on_jax import sync_jax_state
from keras_strategies.runtime.drivers import Drivers
from keras_strategies.runtime.engine import (
    Engine,
    Feature,
    Transfer,
)
from keras_strategies.types import CommunicationOptions, ReduceOp

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class JaxEngine(Engine):
    """JAX on CPU, GPU and TPU devices."""

    name = "jax"
    lacks = MappingProxyType(
        {
            Feature.SEPARATE_BATCH_NORM: "It needs replicas that are separate "
            "computations, as on Torch and TensorFlow. On JAX a step is one program, "
            "which normalizes over the global batch. Omit it.",
        }
    )

    def when_differentiated(
        self, tensors: Sequence[Any], call: Callable[[], None]
    ) -> None:
        if compat.is_differentiating():
            call()

    def local_devices(self) -> tuple[Device, ...]:
        return devices.local_devices()

    def set_virtual_cpu_devices(self, count: int) -> None:
        devices.set_virtual_cpu_devices(count)

    def cpu_device_count(self) -> int:
        return devices.cpu_device_count()

    def keep_accelerator(
        self, choose: Callable[[Sequence[Device]], Device | None]
    ) -> Device | None:
        if devices.devices_are_fixed():
            return super().keep_accelerator(choose)
        devices.keep_gpu(choose)
        return None  # The only one when devices are listed.

    def to_device(self, value: Any, device: Device) -> jax.Array:
        if isinstance(value, jax.core.Tracer):
            return value  # The compiler places traced values.
        return jax.device_put(local_value(value), devices.jax_device(device))

    def movable(self, tensor: Any) -> Any:
        # JAX moves uncommitted arrays to the device of the committed ones.
        if not isinstance(tensor, jax.Array) or isinstance(tensor, jax.core.Tracer):
            return tensor
        is_on_one = len(tensor.sharding.device_set) == 1
        return compat.uncommitted(tensor) if is_on_one else tensor

    def transfers(self, targets: Sequence[Device]) -> Transfer:
        return BatchTransfer([devices.jax_device(target) for target in targets])

    def stored_dtype(self, dtype: str) -> str:
        # Without `jax_enable_x64`, JAX makes 64-bit arrays 32-bit ones.
        return str(jax.dtypes.canonicalize_dtype(dtype).name)

    def device_of(self, tensor: jax.Array) -> Device:
        # The first of several.
        return devices.device_of(tensor.addressable_shards[0].device)

    def on_device(self, device: Device) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = jax.default_device(
            devices.jax_device(device)
        )
        return context

    def in_program(self) -> bool:
        return trace_state.in_trace()

    def all_reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
        program = trace_state.current_program()
        if program is None:
            return device_collectives.all_reduce(op, tensors)
        # The components of a sharded array: their reduction is one all-reduce.
        stacked = program.joined(tensors).reshape(len(tensors), *tensors[0].shape)
        return [device_collectives.reduced(op, stacked)] * len(tensors)

    def connect(
        self, group: WorkerGroup, options: CommunicationOptions
    ) -> Communicator:
        return JaxCommunicator(group, options)

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        return value_and_grad.value_and_grad(fn, variables, has_aux)

    def optimizer_apply(
        self, optimizer: Any, apply: Callable[..., Any]
    ) -> Callable[..., Any]:
        return traceable_apply(optimizer, apply) if trace_state.in_trace() else apply

    def function(
        self, fn: Callable[..., Any], jit_compile: bool | None
    ) -> Callable[..., Any]:
        return compiled_function.function(fn, jit_compile)

    def sync_variables(self, model: Any) -> None:
        sync_jax_state(model)

    def drivers(self, strategy: StrategyCore) -> Drivers:
        placement = strategy.placement
        if placement.is_single:
            one = OneDeviceTrainer(strategy)
            return Drivers(one, JaxRun(strategy), checkpoints=one)
        use_signed_indices()
        use_unsharded_windows()
        if placement.mesh is not None:
            sharded = ModelParallelTrainer(strategy)
            run = JaxRun(strategy, lambda: sharded.mesh, sharded.sharding_of)
            return Drivers(sharded, run, sharded, sharded)
        kind = MeshTrainer if placement.mirrored else CentralStorageTrainer
        fit = kind(strategy)
        run = JaxRun(strategy, lambda: fit.mesh)
        return Drivers(fit, run, fit, fit, rollback=fit.rollback)

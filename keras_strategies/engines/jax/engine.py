"""The JAX backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.devices import Device
from keras_strategies.engines.jax import device_collectives, devices
from keras_strategies.engines.jax.array_placement import local_value
from keras_strategies.engines.jax.fit.central_storage_trainer import (
    CentralStorageTrainer,
)
from keras_strategies.engines.jax.fit.mesh_trainer import MeshTrainer
from keras_strategies.engines.jax.fit.one_device_trainer import OneDeviceTrainer
from keras_strategies.engines.jax.function import compiled_function, trace_state
from keras_strategies.engines.jax.run import value_and_grad
from keras_strategies.engines.jax.run.traceable_optimizers import traceable_apply
from keras_strategies.engines.jax.sharding.model_parallel_trainer import (
    ModelParallelTrainer,
)
from keras_strategies.engines.jax.workers.jax_workers import JaxWorkers
from keras_strategies.errors import BackendError, ContextError
from keras_strategies.runtime.engine import Engine, TrainerAdapter
from keras_strategies.runtime.placement import Placement
from keras_strategies.runtime.workers import Workers
from keras_strategies.types import CommunicationOptions, ReduceOp

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class JaxEngine(Engine):
    """JAX on CPU, GPU and TPU devices."""

    name = "jax"

    def local_devices(self) -> tuple[Device, ...]:
        return devices.local_devices()

    def set_virtual_cpu_devices(self, count: int) -> None:
        devices.set_virtual_cpu_devices(count)

    def cpu_device_count(self) -> int:
        return devices.cpu_device_count()

    def check_options(
        self, placement: Placement, cross_device_ops: Any, sync_batch_norm: bool
    ) -> None:
        if cross_device_ops is not None:
            raise BackendError(
                f"`cross_device_ops` is {cross_device_ops!r}, a custom reduction. On "
                "JAX a step is one program for all devices, in which XLA inserts the "
                "all-reduces; `fit` would never call it. Omit it, or use "
                "ks.NcclAllReduce(), ks.HierarchicalCopyAllReduce() or "
                "ks.ReductionToOneDevice() without `accumulation_fn`; on Torch and "
                "TensorFlow a strategy takes any CrossDeviceOps."
            )
        if not sync_batch_norm and placement.share.total > 1:
            raise BackendError(
                "`sync_batch_norm=False` needs replicas that are separate "
                "computations, as on Torch and TensorFlow. On JAX a step is one "
                "program, which normalizes over the global batch. Omit it."
            )

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, jax.Array)

    def to_numpy(self, tensor: Any) -> Any:
        return np.asarray(tensor)

    def to_device(self, value: Any, device: Device) -> jax.Array:
        if isinstance(value, jax.core.Tracer):
            return value  # The compiler places traced values.
        return jax.device_put(local_value(value), devices.jax_device(device))

    def transfer(
        self, parts: Sequence[Any], targets: Sequence[Device]
    ) -> Callable[[], list[Any]]:
        # One asynchronous transfer of all components.
        targets_of_jax = [devices.jax_device(target) for target in targets]
        moved = jax.device_put(
            [jax.tree.map(local_value, p) for p in parts], targets_of_jax
        )
        return lambda: moved

    def tensor_spec(self, shape: tuple[int | None, ...], dtype: str) -> Any:
        # Without `jax_enable_x64`, JAX makes 64-bit arrays 32-bit ones.
        canonical = jax.dtypes.canonicalize_dtype(dtype)
        return super().tensor_spec(shape, canonical.name)

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

    def program_iterator(
        self,
        start: Callable[[], Iterator[Any]],
        spec: Callable[[], Any],
        devices: Sequence[Device] | None,
    ) -> Any:
        raise ContextError(
            "A distributed dataset was iterated while JAX traces a program: in a "
            "`ks.function`, or in a function that `run` calls. Its batches would be "
            "constants of the program. Iterate outside, and call the function with "
            "each batch: `for batch in dataset: step(batch)`."
        )

    def all_reduce(self, op: ReduceOp, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        return device_collectives.all_reduce(op, tensors)

    def all_gather(self, tensors: Sequence[jax.Array], axis: int) -> list[jax.Array]:
        return device_collectives.all_gather(tensors, axis)

    def broadcast(self, tensor: Any, targets: Sequence[Device]) -> list[jax.Array]:
        return [self.to_device(tensor, device) for device in targets]

    def connect(self, group: WorkerGroup, options: CommunicationOptions) -> Workers:
        return JaxWorkers(group, options)

    def sees_all_replicas(self, strategy: StrategyCore) -> bool:
        return trace_state.sees_all_replicas(strategy)

    def run_replicas(
        self,
        strategy: StrategyCore,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        return strategy.trainer.run_replicas(fn, args, kwargs)  # type: ignore[attr-defined]

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        return value_and_grad.value_and_grad(fn, variables, has_aux)

    def optimizer_apply(
        self, optimizer: Any, apply: Callable[..., Any]
    ) -> Callable[..., Any]:
        return traceable_apply(optimizer, apply) if trace_state.in_trace() else apply

    def initial_value(self, value: Any, shape: Any, dtype: Any) -> tuple[Any, Any, Any]:
        return trace_state.initial_value(value, shape, dtype)

    def function(
        self, fn: Callable[..., Any], jit_compile: bool | None
    ) -> Callable[..., Any]:
        return compiled_function.function(fn, jit_compile)

    def check_model_parallel(self) -> None:
        pass  # XLA partitions programs over any mesh.

    def trainer(self, strategy: StrategyCore) -> TrainerAdapter:
        placement = strategy.placement
        if placement.mesh is not None:
            return ModelParallelTrainer(strategy)
        if placement.is_single:
            return OneDeviceTrainer(strategy)
        if placement.mirrored:
            return MeshTrainer(strategy)
        return CentralStorageTrainer(strategy)

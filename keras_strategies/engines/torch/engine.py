"""The Torch backend."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import torch

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.devices import Device
from keras_strategies.engines.torch.devices import (
    accelerators,
    device_of,
    torch_device,
)
from keras_strategies.engines.torch.replicas.nccl_reduce import nccl_all_reduce
from keras_strategies.engines.torch.tensor_primitives import PRIMITIVES
from keras_strategies.engines.torch.trainer import TorchTrainer
from keras_strategies.engines.torch.worker_collectives import TorchWorkers
from keras_strategies.errors import BackendError
from keras_strategies.runtime.engine import Engine, TrainerAdapter
from keras_strategies.runtime.workers import Workers
from keras_strategies.types import CommunicationOptions, ReduceOp

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class TorchEngine(Engine):
    """Torch on CPU, CUDA, MPS and XPU devices."""

    name = "torch"

    def __init__(self) -> None:
        self._virtual_cpus = 1

    def local_devices(self) -> tuple[Device, ...]:
        cpus = [Device("cpu", i) for i in range(self._virtual_cpus)]
        return (*accelerators(), *cpus)

    def set_virtual_cpu_devices(self, count: int) -> None:
        # Nothing of torch's is fixed by this: all of them are its one CPU.
        self._virtual_cpus = count

    def memories(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        # All virtual CPUs are torch's one CPU.
        first = {torch_device(device): device for device in reversed(devices)}
        return tuple(device for device in devices if device in first.values())

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def to_numpy(self, tensor: Any) -> Any:
        return keras.ops.convert_to_numpy(tensor)

    def to_device(self, value: Any, device: Device) -> torch.Tensor:
        with keras.device(str(torch_device(device))):
            return keras.ops.convert_to_tensor(value)

    def device_of(self, tensor: torch.Tensor) -> Device:
        return device_of(tensor)

    def on_device(self, device: Device) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = keras.device(
            str(torch_device(device))
        )
        return context

    def all_reduce(
        self, op: ReduceOp, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        by_nccl = nccl_all_reduce(op, tensors) if len(tensors) > 1 else None
        if by_nccl is not None:
            return by_nccl
        reduced = PRIMITIVES.reduce(op, [t.to(tensors[0].device) for t in tensors])
        return [reduced.to(t.device) for t in tensors]

    def all_gather(
        self, tensors: Sequence[torch.Tensor], axis: int
    ) -> list[torch.Tensor]:
        gathered = torch.cat([t.to(tensors[0].device) for t in tensors], dim=axis)
        return [gathered.to(t.device) for t in tensors]

    def broadcast(
        self, tensor: torch.Tensor, devices: Sequence[Device]
    ) -> list[torch.Tensor]:
        return [tensor.to(torch_device(device)) for device in devices]

    def connect(self, group: WorkerGroup, options: CommunicationOptions) -> Workers:
        return TorchWorkers(group, options)

    def random_state(self) -> bytes:
        return bytes(torch.get_rng_state().numpy())

    def set_random_state(self, state: bytes) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

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
        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with torch.enable_grad():
                result = fn(*args, **kwargs)
            loss = result[0] if has_aux else result
            # In a replica, the values are its own copies, which the loss came from.
            values = [variable.value for variable in variables]
            wanted = [value for value in values if value.requires_grad]
            found = iter(
                torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
            )
            gradients = [next(found) if v.requires_grad else None for v in values]
            loss = loss.detach()
            return ((loss, result[1]) if has_aux else loss), gradients

        return wrapped

    def function(
        self, fn: Callable[..., Any], jit_compile: bool | None
    ) -> Callable[..., Any]:
        return torch.compile(fn) if jit_compile else fn

    def check_model_parallel(self) -> None:
        version = keras.version()
        if tuple(int(part) for part in version.split(".")[:2]) < (3, 16):
            raise BackendError(
                "ks.ModelParallelStrategy was made with KERAS_BACKEND='torch', "
                "where sharded variables (DTensors) need Keras 3.16 or newer; Keras "
                f"{version} is installed. Update Keras, or set KERAS_BACKEND=jax; a "
                "model that is saved there loads here. This version supports "
                "ks.MirroredStrategy and, for optimizer slots too large for the "
                "accelerators, ks.CentralStorageStrategy."
            )

    def mesh_devices(
        self, devices: tuple[Device, ...], is_chosen: bool
    ) -> tuple[Device, ...]:
        rank = os.environ.get("LOCAL_RANK", "")
        if not is_chosen and devices[0].kind != "cpu" and rank.isdigit():
            # Torchrun's number of this process on its machine.
            devices = devices[int(rank) :][:1] or devices
        if len(devices) == 1:
            return devices
        raise BackendError(
            "ks.ModelParallelStrategy was made with KERAS_BACKEND='torch', where "
            "each device of the mesh needs its own process (torch.distributed with "
            f"Keras {keras.version()}). This process has {len(devices)}: "
            f"{', '.join(map(str, devices))}. Start one process for each with "
            f"`keras-strategies launch --workers {len(devices)} --devices-per-worker "
            "1 script.py` or torchrun, and omit `devices` or name one; or set "
            "KERAS_BACKEND=jax, where one process uses all devices."
        )

    def trainer(self, strategy: StrategyCore) -> TrainerAdapter:
        if strategy.placement.mesh is not None:
            # torch.distributed.tensor takes a second to import.
            from keras_strategies.engines.torch.model_parallel.sharded_call import (
                ShardedTrainer,
            )

            return ShardedTrainer(strategy)
        return TorchTrainer(strategy)

"""The Torch engine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import keras
import torch

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.communication.communicator import Communicator
from keras_strategies.devices import Device
from keras_strategies.engines.torch.devices import (
    accelerators,
    device_of,
    torch_device,
)
from keras_strategies.engines.torch.replicas.nccl_reduce import nccl_all_reduce
from keras_strategies.engines.torch.replicas.replica_run import TorchRun
from keras_strategies.engines.torch.sharded_checkpoints import TorchCheckpoints
from keras_strategies.engines.torch.tensor_primitives import PRIMITIVES
from keras_strategies.engines.torch.trainer import TorchTrainer
from keras_strategies.engines.torch.worker_collectives import TorchCommunicator
from keras_strategies.keras_compat.thread_state import current_torch_device
from keras_strategies.runtime.drivers import Drivers
from keras_strategies.runtime.engine import (
    Engine,
    Feature,
)
from keras_strategies.types import CommunicationOptions, ReduceOp

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class TorchEngine(Engine):
    """Torch on CPU, CUDA, MPS and XPU devices."""

    name = "torch"
    has_python_per_device = True
    gathers_shards = True
    lacks = MappingProxyType(
        {
            Feature.TPUS: "Torch runs on TPUs by torch_xla only, which this package "
            "does not use. Set KERAS_BACKEND=jax.",
        }
    )

    def __init__(self) -> None:
        self._virtual_cpus = 1

    def when_differentiated(
        self, tensors: Sequence[Any], call: Callable[[], None]
    ) -> None:
        # Torch records every call, also of a model that only predicts or is exported.
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: call())

    def local_devices(self) -> tuple[Device, ...]:
        cpus = [Device("cpu", i) for i in range(self._virtual_cpus)]
        return (*accelerators(), *cpus)

    def set_virtual_cpu_devices(self, count: int) -> None:
        # Always possible: to torch, all virtual CPUs are one CPU device.
        self._virtual_cpus = count

    def _kept(self, chosen: Device) -> Device | None:
        if chosen.kind == "gpu":
            # The device of "cuda", and of the context that pins memory.
            module = torch.get_device_module(torch_device(chosen))
            module.set_device(chosen.index)
        return chosen

    def to_device(self, value: Any, device: Device) -> torch.Tensor:
        with keras.device(str(torch_device(device))):
            return keras.ops.convert_to_tensor(value)

    def device_of(self, tensor: torch.Tensor) -> Device:
        return device_of(tensor)

    def on_device(self, device: Device) -> contextlib.AbstractContextManager[Any]:
        name = str(torch_device(device))
        if current_torch_device() == name:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = keras.device(name)
        return context

    def on_device_of(
        self, tensor: torch.Tensor
    ) -> contextlib.AbstractContextManager[Any]:
        return self.on_device(device_of(tensor))

    def all_reduce(
        self, op: ReduceOp, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        by_nccl = nccl_all_reduce(op, tensors) if len(tensors) > 1 else None
        if by_nccl is not None:
            return by_nccl
        reduced = PRIMITIVES.reduce(op, [t.to(tensors[0].device) for t in tensors])
        return [reduced.to(t.device) for t in tensors]

    def connect(
        self, group: WorkerGroup, options: CommunicationOptions
    ) -> Communicator:
        return TorchCommunicator(group, options)

    @property
    def random_state(self) -> bytes:
        return bytes(torch.get_rng_state().numpy())

    @random_state.setter
    def random_state(self, state: bytes) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with torch.enable_grad():
                result = fn(*args, **kwargs)
            loss = result[0] if has_aux else result
            # On a replica, these are its copies of the variables, as in the loss.
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

    def drivers(self, strategy: StrategyCore) -> Drivers:
        checkpoints = TorchCheckpoints(strategy.placement)
        if strategy.placement.mesh is not None:
            # torch.distributed.tensor takes a second to import.
            from keras_strategies.engines.torch.model_parallel.sharded_trainer import (
                ShardedTrainer,
            )

            sharded = ShardedTrainer(strategy)
            run = TorchRun(strategy, sharded.by_rows.threads, sharded.by_rows.variables)
            return Drivers(sharded, run, sharded, checkpoints)
        fit = TorchTrainer(strategy)
        run = TorchRun(strategy, fit.threads, fit.variables)
        return Drivers(fit, run, checkpoints=checkpoints, rollback=fit.rollback)

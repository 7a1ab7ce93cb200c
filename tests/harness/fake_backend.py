"""A backend of NumPy arrays with as many replicas as one likes, one after another.

It lets the logic of strategies be tested in milliseconds: contexts, placement,
regrouping, device lists. It cannot train.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_strategies import context, engines
from keras_strategies.devices import Device
from keras_strategies.runtime.engine import Communicator, Engine, TrainerAdapter
from keras_strategies.runtime.placement import VariableCopy
from keras_strategies.strategies import default
from keras_strategies.types import ReduceOp

_REDUCE = {
    ReduceOp.SUM: np.sum,
    ReduceOp.MEAN: np.mean,
    ReduceOp.MIN: np.min,
    ReduceOp.MAX: np.max,
}


class FakeArray(np.ndarray):
    """An array that knows on which pretend device it is."""

    device: Device

    @classmethod
    def on(cls, device: Device, value: Any) -> FakeArray:
        array = np.array(value).view(cls)
        array.device = device
        return array


class FakeBackend(Engine):
    """`gpus` pretend accelerators and `cpus` pretend CPU devices.

    Args:
        gpus, cpus: int, how many devices there are.
        fixed: bool, whether it is too late to make virtual CPU devices.
    """

    name = "fake"

    def __init__(self, gpus: int = 0, cpus: int = 1, fixed: bool = False):
        self.gpus = gpus
        self.cpus = cpus
        self.fixed = fixed
        self.trainers: list[FakeTrainer] = []

    def local_devices(self) -> tuple[Device, ...]:
        gpus = [Device("gpu", i) for i in range(self.gpus)]
        return (*gpus, *(Device("cpu", i) for i in range(self.cpus)))

    def set_virtual_cpu_devices(self, count: int) -> None:
        if self.fixed:
            from keras_strategies.errors import BackendInUseError

            raise BackendInUseError("The pretend devices are fixed.")
        self.cpus = count

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def to_numpy(self, tensor: Any) -> Any:
        return np.asarray(tensor)

    def to_device(self, value: Any, device: Device) -> FakeArray:
        return FakeArray.on(device, value)

    def device_of(self, tensor: FakeArray) -> Device:
        return tensor.device

    def all_reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
        reduced = _REDUCE[op](np.stack([np.asarray(t) for t in tensors]), axis=0)
        return [FakeArray.on(tensor.device, reduced) for tensor in tensors]

    def all_gather(self, tensors: Sequence[Any], axis: int) -> list[Any]:
        gathered = np.concatenate([np.asarray(t) for t in tensors], axis=axis)
        return [FakeArray.on(tensor.device, gathered) for tensor in tensors]

    def broadcast(self, tensor: Any, devices: Sequence[Device]) -> list[Any]:
        return [FakeArray.on(device, tensor) for device in devices]

    def lone_replica(self) -> Communicator:
        return FakeCommunicator()

    def run_replicas(
        self,
        strategy: Any,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        results = []
        for i, (own_args, own_kwargs) in enumerate(zip(args, kwargs, strict=True)):
            replica = context.ReplicaContext(strategy, i, FakeCommunicator())
            with context.on_replica(replica):
                results.append(fn(*own_args, **own_kwargs))
        return results

    def trainer(self, strategy: Any) -> FakeTrainer:
        self.trainers.append(FakeTrainer(strategy))
        return self.trainers[-1]


class FakeCommunicator(Communicator):
    """The collectives of a replica that is alone."""

    def all_reduce(self, replica_id: int, op: ReduceOp, value: Any) -> Any:
        return value

    def all_gather(self, replica_id: int, value: Any, axis: int) -> Any:
        return value

    def merge_call(
        self,
        replica_id: int,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        strategy = context.current_strategy()
        assert strategy is not None
        with context.merged_replicas(strategy):
            return merge_fn(strategy, *args, **kwargs)


class FakeTrainer(TrainerAdapter):
    """Counts the scopes that are open, and leaves steps to Keras."""

    open_scopes = 0

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        self.open_scopes += 1
        try:
            yield
        finally:
            self.open_scopes -= 1

    def step_function(
        self, model: Any, kind: str, make: Callable[[bool], Any], force: bool
    ) -> None:
        make(force)

    def copies(self, variable: Any) -> list[VariableCopy]:
        where = self.placement.replicas if self.placement.mirrored else ()
        devices = dict.fromkeys((self.placement.variables, *where))
        nbytes = int(np.prod(variable.shape)) * np.dtype(variable.dtype).itemsize
        return [
            VariableCopy(str(device), nbytes, "variable", variable)
            for device in devices
        ]


@contextlib.contextmanager
def installed(backend: FakeBackend) -> Iterator[FakeBackend]:
    """Makes strategies use a fake backend, whatever Keras runs on."""
    load = engines._load
    engines._load = lambda name: backend
    try:
        yield backend
    finally:
        engines._load = load
        default.DefaultStrategy._singletons.pop(backend, None)

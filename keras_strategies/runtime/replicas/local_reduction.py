"""Reductions between the replicas of a process by a strategy's `CrossDeviceOps`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.devices import Device
from keras_strategies.runtime.frames import merged_replicas
from keras_strategies.types import ReduceOp
from keras_strategies.values import DistributedValues, PerReplica

if TYPE_CHECKING:
    from keras_strategies.communication.communicator import Communicator
    from keras_strategies.runtime.engine import StrategyCore


class LocalReduction:
    """Reduces values of the replicas of this process with a `CrossDeviceOps`.

    Args:
        strategy: the strategy of the replicas.
        cross_device_ops: how values are combined.
    """

    def __init__(self, strategy: StrategyCore, cross_device_ops: Any):
        self._strategy = strategy
        self._ops = cross_device_ops
        self._replicas = strategy.placement.replicas

    @classmethod
    def of(cls, strategy: StrategyCore) -> LocalReduction | None:
        """The user's reduction of a strategy; None for the backend's own."""
        ops = strategy.reduction
        return None if ops is None else cls(strategy, ops)

    def sums(self, columns: Sequence[Sequence[Any]]) -> list[Any]:
        """Sums gradients onto the device of the variables, in one batch.

        Args:
            columns: for each variable the gradient of each replica: a tensor, or None
                for zeros. Replicas that took no part are missing at the end.

        Returns:
            list of tensors; None where no replica has a gradient.
        """
        results: list[Any] = [None] * len(columns)
        present = {
            i: self._filled(column)
            for i, column in enumerate(columns)
            if any(tensor is not None for tensor in column)
        }
        home = (self._strategy.placement.variables,)
        found = self._reduce(ReduceOp.SUM, list(present.values()), home)
        for i, (total,) in zip(present, found, strict=True):
            results[i] = total
        return results

    def all_reduce(
        self,
        op: ReduceOp,
        values: Sequence[Sequence[Any]],
        workers: Communicator | None,
        total: int,
    ) -> list[list[Any]]:
        """Reduces tensors over the local replicas, then over other workers.

        Args:
            op: the operation.
            values: for each local replica a list of tensors.
            workers: the engine between workers; None without other workers.
            total: int, the replicas of all workers.

        Returns:
            For each local replica the list of reduced tensors, on its device.
        """
        devices = self._replicas[: len(values)]
        columns = list(zip(*values, strict=True))
        is_mean = op is ReduceOp.MEAN and workers is not None
        own = ReduceOp.SUM if is_mean else op
        found = self._reduce(own, columns, devices)
        if workers is not None:
            sums = workers.all_reduce(own, [column[0] for column in found])
            sums = [tensor / total for tensor in sums] if is_mean else sums
            found = [[self._to(tensor, d) for d in devices] for tensor in sums]
        return [list(row) for row in zip(*found, strict=True)]

    def _reduce(
        self,
        op: ReduceOp,
        columns: Sequence[Sequence[Any]],
        devices: tuple[Device, ...],
    ) -> list[list[Any]]:
        """The reduction of each column, on each of the devices."""
        if not columns:
            return []
        names = [str(device) for device in devices]
        pairs = [(PerReplica(column), names) for column in columns]
        with merged_replicas(self._strategy):
            results = self._ops.batch_reduce(op, pairs)
        found = []
        for result in results:
            is_several = isinstance(result, DistributedValues)
            tensors = result.values if is_several else [result] * len(devices)
            found.append(
                [self._to(t, d) for t, d in zip(tensors, devices, strict=True)]
            )
        return found

    def _to(self, tensor: Any, device: Device) -> Any:
        return self._strategy.engine.to_device(tensor, device)

    def _filled(self, column: Sequence[Any]) -> list[Any]:
        """A tensor of each replica, zeros where one has none."""
        like = next(tensor for tensor in column if tensor is not None)
        given = [*column, *[None] * (len(self._replicas) - len(column))]
        with self._strategy.engine.on_device_of(like):
            zeros = keras.ops.zeros_like(like)
        return [
            self._to(zeros, device) if tensor is None else tensor
            for tensor, device in zip(given, self._replicas, strict=True)
        ]

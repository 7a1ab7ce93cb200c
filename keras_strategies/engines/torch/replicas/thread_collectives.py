"""Collectives between replicas that are threads of one process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import torch

from keras_strategies import context
from keras_strategies.collectives.replica_ops import LocalReduction
from keras_strategies.devices import Device
from keras_strategies.errors import (
    GatherError,
    ReplicaAbortedError,
    ReplicaMismatchError,
)
from keras_strategies.runtime.base import Communicator, Workers
from keras_strategies.types import ReduceOp
from keras_strategies.values import regroup, select_replica


@dataclass(frozen=True)
class ActiveReplicas:
    """The replicas of a computation, on all workers.

    Args:
        workers: the engine between workers; None where there is one worker.
        counts: how many replicas take part on each worker.
        first: int, the number of this worker's first replica.
    """

    workers: Workers | None
    counts: tuple[int, ...]
    first: int

    @property
    def total(self) -> int:
        return sum(self.counts)

    def reduce(self, op: ReduceOp, values: Sequence[Any]) -> list[torch.Tensor]:
        """Reduces the local replicas' tensors, and those of other workers.

        Args:
            op: the operation.
            values: for each local replica a list of tensors.
        """
        lead = [tensor.device for tensor in values[0]]
        columns = zip(*values, strict=True)
        moved = [
            [t.to(device) for t in column]
            for device, column in zip(lead, columns, strict=True)
        ]
        if self.workers is None:
            return [reduce_tensors(op, column) for column in moved]
        mean = op is ReduceOp.MEAN
        own = ReduceOp.SUM if mean else op
        local = [reduce_tensors(own, column) for column in moved]
        found = self.workers.all_reduce(own, local)
        return [tensor / self.total for tensor in found] if mean else found

    def gather(
        self, values: Sequence[Any], axis: int
    ) -> tuple[list[torch.Tensor], list[list[int]]]:
        """Concatenates tensors of all replicas; also returns the lengths."""
        gathered, lengths = [], []
        for column in zip(*values, strict=True):
            parts = [part.to(column[0].device) for part in column]
            sizes = [part.shape[axis] for part in parts]
            if self.workers is None:
                gathered.append(torch.cat(parts, dim=axis))
            else:
                whole, sizes = self._gather(parts, sizes, axis)
                gathered.append(whole)
            lengths.append(sizes)
        return gathered, lengths

    def everywhere(
        self, columns: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[torch.Tensor]]:
        """The values of all replicas, from those of the local ones.

        Args:
            columns: for each of several things, a tensor of each local replica, of
                equal shapes. They travel in one message for each dtype.
        """
        if self.workers is None:
            return [list(column) for column in columns]
        found: list[Any] = [None] * len(columns)
        for kind in dict.fromkeys(column[0].dtype for column in columns):
            places = [i for i, column in enumerate(columns) if column[0].dtype == kind]
            flat = [
                torch.stack(list(columns[i])).reshape(len(columns[i]), -1)
                for i in places
            ]
            rows = self.workers.gather_rows(torch.cat(flat, dim=1), self.counts)
            widths = [part.shape[1] for part in flat]
            for i, part in zip(places, rows.split(widths, dim=1), strict=True):
                shape = columns[i][0].shape
                found[i] = [value.reshape(shape) for value in part]
        return found

    def _gather(
        self, parts: list[torch.Tensor], sizes: list[int], axis: int
    ) -> tuple[torch.Tensor, list[int]]:
        assert self.workers is not None
        own = torch.tensor(sizes, dtype=torch.int64)
        found: list[int] = self.workers.gather_rows(own, self.counts).tolist()
        remaining = iter(found)
        rows = [sum(itertools.islice(remaining, count)) for count in self.counts]
        joined = torch.cat(parts, dim=axis).movedim(axis, 0)
        return self.workers.gather_rows(joined, rows).movedim(0, axis), found


class _Slot:
    """Values of the replicas in one collective."""

    def __init__(self, kind: str, count: int):
        self.kind = kind
        self.values: list[Any] = [None] * count
        self.missing = set(range(count))
        self.result: Any = None


class ThreadCommunicator(Communicator):
    """Collectives between the threads of one computation.

    The n-th collective of a replica matches the n-th of the others; in the backward
    pass, collectives match by the number of their forward call.

    Args:
        devices: the device of each replica.
        is_sequential: bool, whether replicas run one at a time, in their order, from
            one collective to the next, so that the first one creates shared objects.
        team: the replicas of other processes, None where there are none.
        reduction: the strategy's `CrossDeviceOps`; None for torch's own sums.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        is_sequential: bool = False,
        team: ActiveReplicas | None = None,
        reduction: LocalReduction | None = None,
    ):
        self.reduction = reduction
        self._devices = tuple(devices)
        self._team = team or ActiveReplicas(None, (len(self._devices),), 0)
        # The replica that runs; None if they run concurrently.
        self._turn: int | None = 0 if is_sequential else None
        self._condition = threading.Condition()
        self._slots: dict[Any, _Slot] = {}
        self._counters = [itertools.count() for _ in devices]
        self._finished: set[int] = set()
        self.error: BaseException | None = None
        #: bool, whether the replicas have completed a collective.
        self.has_exchanged = False

    @property
    def team(self) -> ActiveReplicas:
        """All replicas that take part."""
        return self._team

    # Meeting.

    def _next(self, replica_id: int) -> int:
        return next(self._counters[replica_id])

    def restart(self) -> None:
        """Restarts the same replicas, for the backward pass."""
        self._finished.clear()

    def fail(self, error: BaseException) -> None:
        """Stops all replicas; the first error is the one that is reported."""
        with self._condition:
            if self.error is None or (
                isinstance(self.error, ReplicaAbortedError)
                and not isinstance(error, ReplicaAbortedError)
            ):
                self.error = error
            self._condition.notify_all()

    def start(self, replica_id: int) -> None:
        """Waits until this replica may begin."""
        with self._condition:
            self._wait_for_turn(replica_id, "run")

    def finish(self, replica_id: int) -> None:
        with self._condition:
            self._finished.add(replica_id)
            self._pass_turn(replica_id)
            self._condition.notify_all()

    def _wait_for_turn(self, replica_id: int, kind: str) -> None:
        while self._turn is not None and self._turn != replica_id:
            if self.error is not None:
                raise ReplicaAbortedError(
                    f"Stopped in `{kind}`: another replica failed."
                )
            self._condition.wait()

    def _pass_turn(self, replica_id: int) -> None:
        if self._turn != replica_id:
            return
        count = len(self._devices)
        others = ((replica_id + i) % count for i in range(1, count + 1))
        going = (other for other in others if other not in self._finished)
        self._turn = next(going, replica_id)
        self._condition.notify_all()

    def exchange(
        self,
        replica_id: int,
        key: Any,
        kind: str,
        value: Any,
        merge: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        """Exchanges a value with the other replicas and returns all of them.

        With `merge`, the last one to arrive calls it on the values for all.
        """
        with self._condition:
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = _Slot(kind, len(self._devices))
            if slot.kind != kind:
                raise ReplicaMismatchError(
                    f"Replica {replica_id} called `{kind}` where another replica "
                    f"called `{slot.kind}`. All replicas must make the same "
                    "collective calls in the same order."
                )
            slot.values[replica_id] = value
            slot.missing.discard(replica_id)
            self._pass_turn(replica_id)
            if not slot.missing:
                del self._slots[key]
                self.has_exchanged = True
                slot.result = merge(slot.values) if merge else slot.values
                slot.missing.add(-1)  # Marks the result as being there.
                self._condition.notify_all()
            while slot.missing != {-1}:
                self._check(slot)
                self._condition.wait()
            self._wait_for_turn(replica_id, kind)
            return slot.result

    def _check(self, slot: _Slot) -> None:
        if self.error is not None:
            raise ReplicaAbortedError(
                f"Stopped in `{slot.kind}`: another replica failed."
            )
        gone = sorted(slot.missing & self._finished)
        if gone:
            raise ReplicaMismatchError(
                f"Replica {gone[0]} ended without calling `{slot.kind}`, in which "
                "the others wait. All replicas must make the same collective calls; "
                "check for branches that depend on the replica or its data."
            )

    def merged(self, merge_fn: Callable[[], Any]) -> Any:
        """Calls the function of a `merge_call` in the last replica's thread."""
        return merge_fn()

    # Collectives.

    def all_reduce(self, replica_id: int, op: ReduceOp, value: Any) -> Any:
        replica_id -= self._team.first
        leaves = _tensors(value)
        number = self._next(replica_id)
        reduced = _AllReduce.apply(self, replica_id, number, op, *leaves)
        return keras.tree.pack_sequence_as(value, list(reduced))

    def all_gather(self, replica_id: int, value: Any, axis: int) -> Any:
        replica_id -= self._team.first
        leaves = _tensors(value)
        number = self._next(replica_id)
        gathered = _AllGather.apply(self, replica_id, number, axis, *leaves)
        return keras.tree.pack_sequence_as(value, list(gathered))

    def merge_call(
        self,
        replica_id: int,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        replica_id -= self._team.first
        replica = context.current_replica()
        assert replica is not None
        strategy = replica.strategy

        def merge(calls: list[tuple[Any, Any]]) -> Any:
            merged_args, merged_kwargs = regroup(calls)
            with context.merged_replicas(strategy):
                return self.merged(
                    lambda: merge_fn(strategy, *merged_args, **merged_kwargs)
                )

        number = self._next(replica_id)
        result = self.exchange(
            replica_id, number, "merge_call", (tuple(args), dict(kwargs)), merge
        )
        return select_replica(replica_id, result)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [keras.ops.convert_to_tensor(leaf) for leaf in keras.tree.flatten(value)]


class _AllReduce(torch.autograd.Function):
    """A reduction whose gradient is the same reduction of the gradients."""

    @staticmethod
    def forward(ctx, communicator, replica_id, number, op, *tensors):  # type: ignore[no-untyped-def]
        ctx.call = (communicator, replica_id, number, op)
        return _reduced(communicator, replica_id, number, op, tensors)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        communicator, replica_id, number, op = ctx.call
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise GatherError(
                f"`all_reduce` with {op.name} has no gradient. Use SUM or MEAN, or "
                "stop the gradient of its argument."
            )
        key = ("backward", number)
        return (
            None,
            None,
            None,
            None,
            *_reduced(communicator, replica_id, key, op, gradients),
        )


def _reduced(
    communicator: ThreadCommunicator,
    replica_id: int,
    key: Any,
    op: ReduceOp,
    tensors: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    team, reduction = communicator.team, communicator.reduction
    if reduction is not None:
        rows = communicator.exchange(
            replica_id,
            key,
            "all_reduce",
            tensors,
            lambda all: reduction.all_reduce(op, all, team.workers, team.total),
        )
        pairs = zip(rows[replica_id], tensors, strict=True)
        return tuple(found.to(own.device, copy=True) for found, own in pairs)
    if team.workers is None:
        values = communicator.exchange(replica_id, key, "all_reduce", tensors)
        # Each on its own device, at the same time.
        return tuple(
            reduce_tensors(op, [v.to(own.device) for v in column])
            for own, column in zip(tensors, zip(*values, strict=True), strict=True)
        )
    reduced = communicator.exchange(
        replica_id, key, "all_reduce", tensors, lambda all: team.reduce(op, all)
    )
    return tuple(
        found.to(own.device, copy=True)
        for own, found in zip(tensors, reduced, strict=True)
    )


def reduce_tensors(op: ReduceOp, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduces tensors of one device, in their order."""
    stacked = torch.stack(list(tensors))
    if op is ReduceOp.SUM:
        return stacked.sum(0)
    if op is ReduceOp.MEAN:
        return stacked.mean(0)
    return stacked.amin(0) if op is ReduceOp.MIN else stacked.amax(0)


class _AllGather(torch.autograd.Function):
    """A concatenation; each replica's part gets the sum of the gradients of it."""

    @staticmethod
    def forward(ctx, communicator, replica_id, number, axis, *tensors):  # type: ignore[no-untyped-def]
        team = communicator.team
        found, lengths = communicator.exchange(
            replica_id,
            number,
            "all_gather",
            tensors,
            lambda values: team.gather(values, axis),
        )
        ctx.call = (communicator, replica_id, number, axis)
        ctx.lengths = lengths
        return tuple(
            whole.to(own.device, copy=True)
            for own, whole in zip(tensors, found, strict=True)
        )

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        communicator, replica_id, number, axis = ctx.call
        key = ("backward", number)
        team = communicator.team
        total = communicator.exchange(
            replica_id,
            key,
            "all_gather",
            gradients,
            lambda values: team.reduce(ReduceOp.SUM, values),
        )
        place = team.first + replica_id
        own = [
            whole.narrow(axis, sum(lengths[:place]), lengths[place]).to(own.device)
            for own, whole, lengths in zip(gradients, total, ctx.lengths, strict=True)
        ]
        return (None, None, None, None, *own)

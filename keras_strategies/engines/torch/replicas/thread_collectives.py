"""Collectives between replicas that are threads of one process."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from keras_strategies.devices import Device
from keras_strategies.engines.torch.random_numbers.replica_generators import (
    ReplicaGenerators,
)
from keras_strategies.engines.torch.tensor_primitives import PRIMITIVES
from keras_strategies.errors import (
    GatherError,
    ReplicaAbortedError,
    ReplicaMismatchError,
)
from keras_strategies.runtime.replicas.collectives import (
    MergeArguments,
    ReplicaCollectives,
    call_merged,
)
from keras_strategies.runtime.replicas.replica_set import ReplicaSet
from keras_strategies.types import ReduceOp


class _Slot:
    """Values of the replicas in one collective."""

    def __init__(self, kind: str, count: int):
        self.kind = kind
        self.values: list[Any] = [None] * count
        self.missing = set(range(count))
        self.result: Any = None


class ThreadCollectives(ReplicaCollectives):
    """Collectives between the threads of one computation.

    The n-th collective of a replica matches the n-th of the others; in the backward
    pass, collectives match by the number of their forward call.

    Args:
        devices: the device of each replica.
        is_sequential: bool, whether replicas run one at a time, in their order, from
            one collective to the next, so that the first one creates shared objects.
        replica_set: the replicas of all workers; None for those of one process.
        merging: returns a context manager for functions of `merge_call`.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        is_sequential: bool = False,
        replica_set: ReplicaSet | None = None,
        merging: Callable[
            [], contextlib.AbstractContextManager[None]
        ] = contextlib.nullcontext,
    ):
        self.is_sequential = is_sequential
        self._merging = merging
        self._devices = tuple(devices)
        #: All participating replicas.
        self.replica_set = replica_set or ReplicaSet.local(PRIMITIVES, len(devices))
        self.first = self.replica_set.counts.first
        # The replica that runs; None if they run concurrently.
        self._turn: int | None = 0 if is_sequential else None
        self._condition = threading.Condition()
        self._slots: dict[Any, _Slot] = {}
        self._counters = [itertools.count() for _ in devices]
        self._finished: set[int] = set()
        self._generators: ReplicaGenerators | None = None
        self.error: BaseException | None = None

    # Exchange of values.

    def _next(self, replica_id: int) -> int:
        return next(self._counters[replica_id])

    def restart(self, is_sequential: bool) -> None:
        """Restarts the same replicas, for the backward pass."""
        self._finished.clear()
        self.is_sequential = is_sequential
        self._turn = 0 if self.is_sequential else None

    @contextlib.contextmanager
    def drawing_from(self, generators: ReplicaGenerators) -> Iterator[None]:
        """Context in which each replica, at its turn, draws from its own states."""
        self._generators = generators
        try:
            yield
        finally:
            self._generators = None
            generators.finish()

    def fail(self, error: BaseException) -> None:
        """Stops all replicas; the first error is raised to the caller."""
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
        if self._generators is not None:
            self._generators.begin_turn(replica_id)

    def _pass_turn(self, replica_id: int) -> None:
        if self._turn != replica_id:
            return
        if self._generators is not None:
            self._generators.end_turn(replica_id)
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
        """Exchanges a value with the other replicas; returns the values of all.

        With `merge`, returns its result on the values; the last replica calls it.
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
                slot.result = self._merged(merge, slot.values)
                slot.missing.add(-1)  # Marks the result as complete.
                self._condition.notify_all()
            while slot.missing != {-1}:
                self._check(slot)
                self._condition.wait()
            self._wait_for_turn(replica_id, kind)
            return slot.result

    def _merged(
        self, merge: Callable[[list[Any]], Any] | None, values: list[Any]
    ) -> Any:
        """The result of a function that is called once for all replicas."""
        if merge is None:
            return values
        if self._generators is None:
            return merge(values)
        with self._generators.shared_turn():
            return merge(values)

    def _check(self, slot: _Slot) -> None:
        if self.error is not None:
            raise ReplicaAbortedError(
                f"Stopped in `{slot.kind}`: another replica failed."
            )
        gone = sorted(slot.missing & self._finished)
        if gone:
            raise ReplicaMismatchError(
                f"Replica {gone[0]} ended without calling `{slot.kind}`, in which "
                "other replicas wait. All replicas must make the same collective "
                "calls; check for a branch on the replica or on its data."
            )

    # Collectives.

    def all_reduce(
        self, replica: int, op: ReduceOp, tensors: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        if self.replica_set.counts.total == 1:
            return tensors
        number = self._next(replica)
        return list(_AllReduce.apply(self, replica, number, op, *tensors))

    def total(self, replica: int, number: int | float) -> int | float | None:
        if self.replica_set.workers is not None:
            return None
        number_of_call = self._next(replica)
        kind = "all_reduce of a number"
        return sum(self.exchange(replica, number_of_call, kind, number))

    def all_gather(
        self,
        replica: int,
        tensors: Sequence[torch.Tensor],
        axis: int,
        are_equal: bool = False,
    ) -> Sequence[torch.Tensor]:
        number = self._next(replica)
        return list(_AllGather.apply(self, replica, number, axis, are_equal, *tensors))

    def merge_call(
        self, replica: int, merge: Callable[..., Any], arguments: MergeArguments
    ) -> Any:
        def merged(arguments: list[MergeArguments]) -> list[Any]:
            with self._merging():
                return call_merged(merge, arguments)

        number = self._next(replica)
        found = self.exchange(replica, number, "merge_call", arguments, merged)
        return found[replica]


class _AllReduce(torch.autograd.Function):
    """A reduction; its gradient is the same reduction of the gradients."""

    @staticmethod
    def forward(ctx, collectives, replica_id, number, op, *tensors):  # type: ignore[no-untyped-def]
        ctx.call = (collectives, replica_id, number, op)
        return reduced(collectives, replica_id, number, op, tensors)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        collectives, replica_id, number, op = ctx.call
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
            *reduced(collectives, replica_id, key, op, gradients),
        )


def reduced(
    collectives: ThreadCollectives,
    replica_id: int,
    key: Any,
    op: ReduceOp,
    tensors: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Tensors that are reduced over replicas."""
    replicas = collectives.replica_set
    if replicas.workers is None:
        values = collectives.exchange(replica_id, key, "all_reduce", tensors)
        # Each on its own device, at the same time.
        return tuple(
            PRIMITIVES.reduce(op, [v.to(own.device) for v in column])
            for own, column in zip(tensors, zip(*values, strict=True), strict=True)
        )
    reduced = collectives.exchange(
        replica_id, key, "all_reduce", tensors, lambda all: replicas.reduce(op, all)
    )
    return tuple(
        found.to(own.device, copy=True)
        for own, found in zip(tensors, reduced, strict=True)
    )


class _AllGather(torch.autograd.Function):
    """A concatenation; the gradient of a part is its sum over replicas."""

    @staticmethod
    def forward(ctx, collectives, replica_id, number, axis, are_equal, *tensors):  # type: ignore[no-untyped-def]
        found, lengths = gathered(
            collectives, replica_id, number, axis, are_equal, tensors
        )
        ctx.call = (collectives, replica_id, ("backward", number), axis, lengths)
        return found

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        collectives, replica_id, key, axis, lengths = ctx.call
        own = gradients_of_own(collectives, replica_id, key, axis, lengths, gradients)
        return (None, None, None, None, None, *own)


def gathered(
    collectives: ThreadCollectives,
    replica_id: int,
    key: Any,
    axis: int,
    are_equal: bool,
    tensors: Sequence[torch.Tensor],
) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Tensors of all replicas, concatenated, and for each the lengths of its parts."""
    replicas = collectives.replica_set
    found, lengths = collectives.exchange(
        replica_id,
        key,
        "all_gather",
        tensors,
        lambda values: replicas.gather(values, axis, are_equal),
    )
    pairs = zip(tensors, found, strict=True)
    return tuple(joined.to(own.device, copy=True) for own, joined in pairs), lengths


def gradients_of_own(
    collectives: ThreadCollectives,
    replica_id: int,
    key: Any,
    axis: int,
    lengths: Sequence[Any],
    gradients: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Gradients of a replica's parts, from those of the concatenated tensors."""
    replicas = collectives.replica_set
    total = collectives.exchange(
        replica_id,
        key,
        "all_gather",
        gradients,
        lambda values: replicas.reduce(ReduceOp.SUM, values),
    )
    place = collectives.first + replica_id
    return [
        joined.narrow(axis, sum(each[:place]), each[place]).to(own.device)
        for own, joined, each in zip(gradients, total, lengths, strict=True)
    ]

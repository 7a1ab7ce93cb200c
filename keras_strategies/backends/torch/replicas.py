"""Replicas as threads of one process, and the collectives between them."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import keras
import torch

from keras_strategies import context, keras_compat
from keras_strategies.backends.base import Communicator
from keras_strategies.backends.torch.devices import torch_device
from keras_strategies.backends.torch.random import ReplicaRandom
from keras_strategies.devices import Device
from keras_strategies.errors import (
    GatherError,
    ReplicaAbortedError,
    ReplicaMismatchError,
)
from keras_strategies.types import ReduceOp
from keras_strategies.values import regroup, select_replica


class ReplicaThreads:
    """One thread for each replica, kept for the life of a strategy.

    Args:
        devices: the device of each replica. CPU replicas share the cores that
            torch may use, so that their kernels do not compete.
    """

    def __init__(self, devices: Sequence[Device]):
        self._devices = tuple(devices)
        cpus = sum(device.kind == "cpu" for device in devices)
        kernels = max(1, torch.get_num_threads() // cpus) if cpus else 0

        def prepare() -> None:
            if kernels:
                torch.set_num_threads(kernels)

        self._pools = [
            ThreadPoolExecutor(1, f"replica-{i}", initializer=prepare)
            for i in range(len(devices))
        ]
        weakref.finalize(self, _shut_down, self._pools)

    def run(
        self,
        tasks: Sequence[Callable[[], Any]],
        communicator: ThreadCommunicator,
        random: ReplicaRandom,
    ) -> list[Any]:
        """Runs one task on each thread and returns the results in order.

        The first exception stops the other replicas where they wait for it, and
        is raised when all have ended; so is an interrupt of this thread.
        """
        state = keras_compat.thread_state()
        grad = torch.is_grad_enabled()

        def replica(task: Callable[[], Any], replica_id: int) -> Any:
            device = str(torch_device(self._devices[replica_id]))
            own = {**state, "torch_device": device}
            try:
                communicator.start(replica_id)
                with (
                    keras_compat.with_thread_state(own),
                    torch.set_grad_enabled(grad),
                    random.numbers(replica_id),
                ):
                    return task()
            except BaseException as error:
                communicator.fail(error)
                raise
            finally:
                communicator.finish(replica_id)

        futures: list[Future[Any]] = [
            pool.submit(replica, task, i)
            for i, (pool, task) in enumerate(zip(self._pools, tasks, strict=False))
        ]
        try:
            wait(futures)
        except BaseException as error:
            communicator.fail(error)
            wait(futures)
            raise
        if communicator.error is not None:
            raise communicator.error
        return [future.result() for future in futures]


def _shut_down(pools: list[ThreadPoolExecutor]) -> None:
    for pool in pools:
        pool.shutdown(wait=False)


class _Slot:
    """Where the replicas leave their values of one collective."""

    def __init__(self, kind: str, count: int):
        self.kind = kind
        self.values: list[Any] = [None] * count
        self.missing = set(range(count))
        self.result: Any = None


class ThreadCommunicator(Communicator):
    """Collectives between the threads of one computation.

    The n-th collective of a replica meets the n-th of the others; in the backward
    pass collectives meet under the number of their forward call.

    Args:
        devices: the device of each replica.
        takes_turns: bool, whether only one replica runs at a time, from one collective
            to the next and in their order, so that the first one makes what all use.
    """

    def __init__(self, devices: Sequence[Device], takes_turns: bool = False):
        self._devices = tuple(devices)
        # The replica whose turn it is; None where they run side by side.
        self._turn: int | None = 0 if takes_turns else None
        self._condition = threading.Condition()
        self._slots: dict[Any, _Slot] = {}
        self._counters = [itertools.count() for _ in devices]
        self._finished: set[int] = set()
        self.error: BaseException | None = None

    # Meeting.

    def _next(self, replica_id: int) -> int:
        return next(self._counters[replica_id])

    def restart(self) -> None:
        """Lets the same replicas run once more, as for the backward pass."""
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
                raise ReplicaAbortedError(f"Stopped in `{kind}`: another one failed.")
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
        """Leaves a value, waits for the others' and returns all of them.

        With `merge`, the last to arrive calls it on the values, for everybody.
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
                f"Replica {gone[0]} has ended without the call of `{slot.kind}` that "
                "the others wait in. All replicas must make the same collective "
                "calls; check for a branch on the replica or on its data."
            )

    def merged(self, merge_fn: Callable[[], Any]) -> Any:
        """Calls the function of a `merge_call`, in the last replica's thread."""
        return merge_fn()

    # Collectives.

    def all_reduce(self, replica_id: int, op: ReduceOp, value: Any) -> Any:
        leaves = _tensors(value)
        number = self._next(replica_id)
        reduced = _AllReduce.apply(self, replica_id, number, op, *leaves)
        return keras.tree.pack_sequence_as(value, list(reduced))

    def all_gather(self, replica_id: int, value: Any, axis: int) -> Any:
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
    values = communicator.exchange(replica_id, key, "all_reduce", tensors)
    return tuple(
        reduce_tensors(op, [v.to(own.device) for v in column])
        for own, column in zip(tensors, zip(*values, strict=True), strict=True)
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
        values = communicator.exchange(replica_id, number, "all_gather", tensors)
        columns = list(zip(*values, strict=True))
        ctx.call = (communicator, replica_id, number, axis)
        ctx.lengths = [[part.shape[axis] for part in column] for column in columns]
        return tuple(
            torch.cat([part.to(own.device) for part in column], dim=axis)
            for own, column in zip(tensors, columns, strict=True)
        )

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        communicator, replica_id, number, axis = ctx.call
        key = ("backward", number)
        values = communicator.exchange(replica_id, key, "all_gather", gradients)
        own = []
        for column, lengths in zip(zip(*values, strict=True), ctx.lengths, strict=True):
            start = sum(lengths[:replica_id])
            device = column[replica_id].device
            parts = [
                gradient.narrow(axis, start, lengths[replica_id]).to(device)
                for gradient in column
            ]
            own.append(reduce_tensors(ReduceOp.SUM, parts))
        return (None, None, None, None, *own)

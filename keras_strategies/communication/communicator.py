"""Interface of collectives between workers."""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from keras_strategies.communication.group_actions import (
    CustomLoop,
    FixedActions,
    GroupActions,
)
from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.communication.worker_steps import WorkerSteps
from keras_strategies.errors import (
    ClusterError,
    WorkerError,
)
from keras_strategies.types import CommunicationOptions, ReduceOp

# Bytes of one tensor of `broadcast_bytes`.
_PIECE_BYTES = 16 << 20

if TYPE_CHECKING:
    from keras_strategies.cluster.group import WorkerGroup


class Communicator(abc.ABC):
    """Communicator between the workers of a cluster.

    Every worker makes the same calls in the same order. When one is lost, the others'
    calls raise `WorkerError`, which names it.

    Args:
        group: the connected workers.
        options: `CommunicationOptions`.
    """

    def __init__(self, group: WorkerGroup, options: CommunicationOptions):
        self.group = group
        self.options = options
        #: The replicas of all workers, set by `with_replicas`.
        self.replica_counts = ReplicaCounts((1,) * group.count, group.index)
        self.steps = WorkerSteps(group)
        #: Whether all read the same global batches, whatever a dataset's policy says:
        #: processes of one machine, of which the script does not know.
        self.are_device_processes = False
        #: bool, whether it is that of a strategy, made by `with_replicas`.
        self.has_replicas = False
        #: The calls in which workers exchange values.
        self.actions: GroupActions = FixedActions(group)

    def start(self) -> None:  # noqa: B027
        """Starts what the engine needs before its devices are listed.

        Called again if a worker is lost meanwhile; then `replace` may have started it.
        """

    def _count_replicas(self, count: int, span: int) -> None:
        """Exchanges the number of replicas between all workers."""
        found = self.group.gather_values("the number of replicas", count)
        self.replica_counts = ReplicaCounts(tuple(found), self.group.index, span)

    def _replicas_set(self) -> None:  # noqa: B027
        """Called when the numbers of replicas of all workers are known."""

    def with_replicas(self, choose: Callable[[], int], span: int = 1) -> Self:
        """The same workers for another strategy.

        Args:
            choose: chooses the devices, and returns the replicas of this worker;
                called again if a worker is lost meanwhile.
            span: int, how many workers form one replica, each with a shard of it.
        """

        def counted() -> Any:
            own = copy.copy(self)
            own.steps = WorkerSteps(self.group)
            own.has_replicas = True
            with self.starting():
                count = choose()
            # Nothing may follow in which a worker is lost: all count them, or none.
            own._count_replicas(count, span)
            return own

        own: Self = self.actions.prepare(counted)
        self.actions.register(own)
        self.actions.prepare(own._replicas_set)
        return own

    def starting(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around the start of the engine's devices.

        Raises:
            WorkerError: in place of the engine's error, if a worker is lost.
        """
        return contextlib.nullcontext()

    def with_options(self, options: CommunicationOptions) -> Self:
        """The same workers, with the options of another strategy.

        Raises:
            ClusterError: for another timeout than the workers have connected with.
        """
        if options == self.options:
            return self
        if options.timeout_seconds not in (None, self.group.timeout):
            raise ClusterError(
                "The workers are already connected with a timeout of "
                f"{self.group.timeout} seconds, shared by all strategies. Received: "
                f"timeout_seconds={options.timeout_seconds}. Pass it to the first "
                "strategy."
            )
        own = copy.copy(self)
        own.options = options
        return own

    @abc.abstractmethod
    def all_reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
        """Reduces each tensor over the workers, in packs; all have equal shapes.

        See `confirm`.
        """

    @abc.abstractmethod
    def gather_rows(self, tensor: Any, rows: Sequence[int]) -> Any:
        """Concatenates the workers' tensors along axis 0; see `confirm`.

        Args:
            tensor: this worker's; of shape `(rows[index], ...)`.
            rows: the rows of each worker's.
        """

    @abc.abstractmethod
    def broadcast(self, tensors: Sequence[Any], source: int = 0) -> list[Any]:
        """A worker's tensors; all workers pass tensors of these shapes and dtypes.

        Args:
            tensors: tensors or NumPy arrays.
            source: int, the worker; 0 is the chief.
        """

    def broadcast_bytes(self, what: str, data: bytes | None, source: int = 0) -> bytes:
        """A worker's bytes on every worker; they do not go through the chief.

        Args:
            what: str, name of the bytes; the same on all workers.
            data: the bytes, on the worker that sends them.
            source: int, the worker.
        """
        is_source = self.group.index == source
        own = len(data or b"") if is_source else 0
        size = int(self.group.gather_values(f"the size of {what}", own)[source])
        given = np.frombuffer((data or b"") if is_source else bytes(size), np.uint8)
        pieces = [
            given[start : start + _PIECE_BYTES].copy()
            for start in range(0, size, _PIECE_BYTES)
        ]
        found = self.broadcast(pieces, source)
        return b"".join(np.asarray(each).tobytes() for each in found)

    def confirm(self) -> None:  # noqa: B027
        """Checks that the collectives before have succeeded; may wait for them.

        Engines that make results available before a collective has ended raise the
        error here. Called before results are returned and at the end of a step.

        Raises:
            WorkerError: if a worker is lost; the results must not be used.
        """

    def use_unconfirmed(self) -> None:
        """Lets the host use results in a step whose end confirms them.

        By default they are confirmed at once.
        """
        self.confirm()

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the connections."""

    @property
    def is_chief(self) -> bool:
        """bool, whether this worker writes files and shows progress."""
        return self.group.is_chief and self.actions.has_joined

    def gather_values(self, what: str, value: Any) -> list[Any]:
        """Every worker's JSON value, on every worker."""
        return self.actions.call(what, lambda: self.group.gather_values(what, value))

    def end_waits(self) -> None:
        """Aborts every wait of this process in a collective, with a `WorkerError`.

        Elastic groups call it when a worker is lost: from any thread, possibly several
        times, and also while no thread waits. It does not block. Later collectives
        raise errors until `replace`.
        """
        raise NotImplementedError

    def replace(self, group: WorkerGroup) -> None:
        """Replaces the communicators by those of another generation of workers.

        Called in the thread that trains, on all members of the new group, with no
        collective under way; also on a new worker, with one member in its group before.

        Args:
            group: the connected workers; there may be one only.

        Raises:
            WorkerError: if a worker is lost meanwhile; then it is called again.
        """
        self._reconnect(group)
        self.group = group
        self.steps.follow(group)
        if self.has_replicas:
            self._count_replicas(self.replica_counts.count, self.replica_counts.span)
            self._replicas_set()
            self._reconnected()

    def _reconnect(self, group: WorkerGroup) -> None:  # noqa: B027
        """Replaces the engine's communicators, before `group` is this object's."""

    def _reconnected(self) -> None:  # noqa: B027
        """Called when `group` is that of the communicator of a strategy."""

    @contextlib.contextmanager
    def method(self, name: str) -> Iterator[bool]:
        """Context manager for a method of a model; see `WorkerSteps.method`."""
        with self.waiting(), self.steps.method(name) as is_outermost:
            yield is_outermost

    def waiting(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around a method, which may wait for other workers."""
        return contextlib.nullcontext()

    def cause(self, error: BaseException) -> BaseException:
        """The error to raise in place of one that a method has raised.

        Returns:
            A `WorkerError` if the engine failed because a worker was lost; else the
            error itself.
        """
        return error


def lost_worker(group: WorkerGroup, error: BaseException) -> WorkerError:
    """The error to raise for an `error` of the engine in a collective."""
    loss = group.loss(wait=min(group.timeout, 5.0))
    if loss is not None:
        return WorkerError(group.describe(loss))
    if group.left is not None:
        return WorkerError(group.describe(group.left))
    if group.has_ended:
        return WorkerError(group.end_text)
    progress = group.progress or "a collective"
    return WorkerError(
        f"Workers could not exchange values at {progress}, although none is "
        f"known to be lost: {type(error).__name__}: "
        f"{str(error).splitlines()[0]}. {group.stall}".rstrip()
        + " Check that all workers make the same calls and that the network connects "
        "them. "
        "`CommunicationOptions(timeout_seconds=...)` sets this timeout."
    )


def is_fixed(workers: Communicator | None) -> bool:
    """Whether the workers, if there are several, stay the same."""
    return workers is None or workers.actions.is_fixed


def loop_of(workers: Communicator | None) -> CustomLoop:
    """The custom loops of workers, or of a process alone."""
    return FixedActions.loop if workers is None else workers.actions.loop

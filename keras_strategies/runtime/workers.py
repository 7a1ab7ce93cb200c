"""Interface of collectives between workers, and checks that batches agree."""

from __future__ import annotations

import abc
import contextlib
import copy
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import keras
import numpy as np

from keras_strategies.errors import (
    ClusterError,
    WorkerError,
)
from keras_strategies.input.worker_shares import Share
from keras_strategies.types import CommunicationOptions, ReduceOp

if TYPE_CHECKING:
    from keras_strategies.cluster.group import WorkerGroup


# Batches of a loop whose contents workers compare, where they may differ.
_COMPARED_BATCHES = 2


def _checksum(leaf: Any) -> int:
    array = leaf
    if not isinstance(leaf, np.ndarray):
        array = keras.ops.convert_to_numpy(leaf)
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


class Workers(abc.ABC):
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
        #: The number of replicas of each worker, from `set_replicas`.
        self.replicas: tuple[int, ...] = (1,) * group.count
        # The workers that make up one replica, where it takes several.
        self._span = 1
        self._method = ""
        self._steps = 0
        self._checks = False

    def set_replicas(self, count: int, span: int = 1) -> None:
        """Exchanges the number of replicas between all workers.

        Args:
            count: int, replicas of this worker.
            span: int, how many workers form one replica, each with a shard of it.
        """
        found = self.group.gather_values("the number of replicas", count)
        self.replicas = tuple(found)
        self._span = span

    def with_replicas(self, count: int, span: int = 1) -> Self:
        """The same workers for another strategy."""
        own = copy.copy(self)
        own.set_replicas(count, span)
        return own

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

    @property
    def is_spanned(self) -> bool:
        """Whether a replica takes the devices of several workers."""
        return self._span > 1

    @property
    def share(self) -> Share:
        """Which of all replicas are those of this worker."""
        if self._span == 1:
            return Share.of_worker(self.replicas, self.group.index)
        total = len(self.replicas) // self._span
        return Share(self.group.index // self._span, 1, total)

    @abc.abstractmethod
    def all_reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
        """Reduces each tensor over the workers, in packs; all have equal shapes."""

    @abc.abstractmethod
    def gather_rows(self, tensor: Any, rows: Sequence[int]) -> Any:
        """Concatenates the workers' tensors along axis 0.

        Args:
            tensor: this worker's; of shape `(rows[index], ...)`.
            rows: the rows of each worker's.
        """

    @abc.abstractmethod
    def broadcast(self, tensors: Sequence[Any]) -> list[Any]:
        """The chief's tensors, in place of those of the same shapes and dtypes."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the connections."""

    @contextlib.contextmanager
    def method(self, name: str) -> Iterator[bool]:
        """Context manager for a method of a model; counts its steps.

        Returns:
            Whether no other method is under way.
        """
        previous = self._method, self._steps, self._checks
        self._method, self._steps, self._checks = name, 0, name.endswith("_on_batch")
        self.group.progress = f"the beginning of {name}"
        try:
            yield not previous[0]
        finally:
            self._method, self._steps, self._checks = previous
            self.group.progress = self._progress()

    def begin_steps(self, count: int = 1) -> None:
        """Starts one or more steps.

        Raises:
            WorkerError: if a worker is lost.
        """
        self._steps += count
        self.group.progress = self._progress()
        self.group.check()

    def check_batches(self, wanted: bool) -> None:
        """Sets whether `check_batch` compares, until the method ends."""
        self._checks = wanted

    def check_batch(self, batch: Any) -> None:
        """Compares a global batch with those that the other workers have read.

        Arrays are compared once, before the loop; what may end or shuffle by itself,
        a generator or a `PyDataset`, with every batch: its rows, and in the first
        batches what is in it.

        Raises:
            WorkerError: if workers have other batches, or one has no more.
        """
        if not self._checks:
            return
        leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
        facts: list[Any] = [[list(leaf.shape) for leaf in leaves]]
        if self._steps <= _COMPARED_BATCHES:
            facts.append([_checksum(leaf) for leaf in leaves])
        found = self.group.gather_values("a batch", facts)
        for other, each in enumerate(found):
            if each[0] != facts[0]:
                raise WorkerError(
                    f"Workers have different batches at {self.group.progress}: "
                    f"worker {self.group.index} has shapes {facts[0]}, worker "
                    f"{other} has {each[0]}. All workers must read the same global "
                    "batches; for separate data per worker, use ks.DatasetCreator "
                    "or `strategy.distribute_datasets_from_function`."
                )
            if each != facts:
                raise WorkerError(
                    f"Workers {self.group.index} and {other} have batches of the "
                    f"same shapes but different contents at {self.group.progress}. "
                    "All workers must read the same global batches: seed shuffling "
                    "and augmentation, or use ks.DatasetCreator for separate data "
                    "per worker."
                )

    def _progress(self) -> str:
        if not self._method:
            return ""
        return f"step {self._steps} of {self._method}"

    def cause(self, error: BaseException) -> BaseException:
        """The error to raise for one that a method has raised.

        Returns:
            A `WorkerError` where the engine has failed because of a lost worker; the
            error itself where it has nothing to do with other workers.
        """
        return error

    def lost(self, error: BaseException) -> WorkerError:
        """The error to raise for an `error` of the engine."""
        loss = self.group.loss(wait=min(self.group.timeout, 5.0))
        if loss is not None:
            return WorkerError(self.group.describe(loss))
        progress = self.group.progress or "a collective"
        return WorkerError(
            f"Workers could not exchange values at {progress}, although none is "
            f"known to be lost: {type(error).__name__}: "
            f"{str(error).splitlines()[0]}. Check that all workers make the same "
            "calls and that the network connects them. "
            "`CommunicationOptions(timeout_seconds=...)` sets this timeout."
        )

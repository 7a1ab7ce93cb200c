"""Feeds: batches for the replicas of this process, step by step, on the host."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.errors import InputError
from keras_strategies.input.batches import (
    check_rows,
    has_rows,
    join_rows,
    take_rows,
    to_host,
)
from keras_strategies.input.sources import JoinedSource, Source


class Feed(abc.ABC):
    """Batches of the local replicas for each step, and global batches for `fit`."""

    @abc.abstractmethod
    def source(self) -> Source:
        """The global batches of this worker."""

    @abc.abstractmethod
    def steps(self, keep: Callable[[Any], bool], copy: bool) -> Iterator[list[Any]]:
        """A pass: for each step, a list of one batch for each local replica.

        Args:
            keep: callable that returns whether a leaf is a tensor of the backend.
            copy: bool, whether a batch may be used after the next one is read.
        """

    #: Whether `source` has the rows of all workers, or of this worker only.
    is_global = False

    @property
    def is_in_memory(self) -> bool:
        """bool, whether batches are slices of arrays in memory."""
        return False

    @property
    def is_read_in_turn(self) -> bool:
        """bool, whether the thread that uses a batch has to read it."""
        return False

    @property
    @abc.abstractmethod
    def cardinality(self) -> int | None:
        """The number of steps; None where it is unknown or without end."""

    @abc.abstractmethod
    def spec(self) -> Any:
        """Shapes and dtypes of a batch, with an open number of rows."""


class SplitFeed(Feed):
    """Splits each global batch over the replicas by its rows.

    Args:
        source: the global batches.
        counts: returns the replicas of all workers, at the beginning of a pass.
        is_global: bool, whether the batches have the rows of all workers.
    """

    def __init__(
        self,
        source: Source,
        counts: Callable[[], ReplicaCounts],
        is_global: bool = True,
    ):
        self._source = source
        self._counts = counts
        self.is_global = is_global

    def source(self) -> Source:
        return self._source

    @property
    def is_in_memory(self) -> bool:
        return self._source.is_in_memory

    @property
    def is_read_in_turn(self) -> bool:
        return self._source.is_read_in_turn

    def steps(self, keep: Callable[[Any], bool], copy: bool) -> Iterator[list[Any]]:
        copy = copy and self._source.may_reuse_memory
        counts = self._counts()
        for batch, ranges in self._source.batches_of(counts):
            local = to_host(batch, keep, copy)
            if len(ranges) == counts.total == 1:
                yield [local]
                continue
            yield [take_rows(local, start, stop) for start, stop in ranges]

    @property
    def cardinality(self) -> int | None:
        return self._source.cardinality

    def spec(self) -> Any:
        return self._source.spec()


class PerReplicaFeed(Feed):
    """Assigns batches of the user's pipelines to replicas without splitting.

    Elements may be values without rows. A replica without a batch in the last step gets
    zero rows; a last step without a value for each replica is omitted.

    Args:
        sources: one pipeline, its batches for the replicas in turn, or one for
            each local replica.
        count: int, the local replicas.
    """

    def __init__(self, sources: Sequence[Source], count: int):
        self._sources = list(sources)
        self._count = count

    def source(self) -> Source:
        for source in self._sources:
            if not source.has_rows:
                # Raises: models train on rows.
                check_rows(source.spec(), source.what)
        if len(self._sources) == self._count == 1:
            return self._sources[0]
        return JoinedSource(
            self._sources[0].given,
            self._global_batches,
            self.cardinality,
            self.spec,
            self._begin,
        )

    def _begin(self) -> None:
        for source in self._sources:
            source.begin()

    def _global_batches(self) -> Iterator[Any]:
        for rounds in self._rounds():
            yield join_rows(rounds)

    def _rounds(self) -> Iterator[list[Any]]:
        """The batches of each step, fewer than replicas in the last one."""
        if len(self._sources) == 1:
            batches = self._sources[0].batches()
            while found := list(itertools.islice(batches, self._count)):
                yield found
            return
        pipelines = [source.batches() for source in self._sources]
        nothing = object()
        while True:
            found = [next(batches, nothing) for batches in pipelines]
            present = [batch for batch in found if batch is not nothing]
            if not present:
                return
            if len(present) < len(found):
                if not has_rows(present[0]):
                    return
                empty = take_rows(present[0], 0, 0)
                found = [empty if batch is nothing else batch for batch in found]
            yield found

    def steps(self, keep: Callable[[Any], bool], copy: bool) -> Iterator[list[Any]]:
        # One pipeline yields the batches of all replicas, and may reuse their memory
        # within a step, also without prefetching.
        several = self._count > len(self._sources)
        for found in self._rounds():
            reuses = self._sources[0].may_reuse_memory and (copy or several)
            parts = [to_host(batch, keep, reuses) for batch in found]
            missing = self._count - len(parts)
            if missing and not has_rows(parts[0]):
                return
            yield parts + [take_rows(parts[0], 0, 0) for _ in range(missing)]

    @property
    def cardinality(self) -> int | None:
        counts = [source.cardinality for source in self._sources]
        if any(count is None for count in counts):
            return None
        has_rows = self._sources[0].has_rows
        if len(counts) > 1:
            return max(counts) if has_rows else min(counts)  # type: ignore[type-var]
        steps, rest = divmod(counts[0], self._count)  # type: ignore[operator]
        return steps + bool(rest and has_rows)

    def spec(self) -> Any:
        return self._sources[0].spec()


_streams = itertools.count()


class EqualStepsFeed(Feed):
    """Equal numbers of steps on workers with different numbers of batches.

    A worker without more batches yields zero rows until all workers have ended.

    Args:
        own: this worker's batches.
        group: the workers.
    """

    def __init__(self, own: Feed, group: WorkerGroup):
        self._own = own
        self._group = group

    def source(self) -> Source:
        return self._own.source()

    def steps(self, keep: Callable[[Any], bool], copy: bool) -> Iterator[list[Any]]:
        # With prefetching, each pass is read by a separate thread: it needs a stream.
        stream = f"steps {next(_streams)}"
        steps = self._own.steps(keep, copy)
        empty: list[Any] | None = None
        of_rows = True
        while True:
            parts = next(steps, None)
            flags = self._group.gather_values("a batch", parts is not None, stream)
            if not any(flags):
                return
            if parts is not None:
                of_rows = has_rows(parts[0])
            if not of_rows and not all(flags):
                return
            if parts is not None:
                if of_rows:
                    empty = [take_rows(part, 0, 0) for part in parts]
                yield parts
            elif empty is not None:
                yield empty
            else:
                raise InputError(
                    f"Worker {self._group.index} has no batches but worker "
                    f"{flags.index(True)} has some, so the structure of an empty "
                    "batch is unknown here. Give each worker at least one batch."
                )

    @property
    def cardinality(self) -> int | None:
        return self._own.cardinality

    def spec(self) -> Any:
        return self._own.spec()

"""This worker's rows of the global batches of a map-style `DataLoader`.

The order of rows is that of the loader's batch sampler, which every worker reads in
full; of the dataset, a worker reads its own rows only. That gives the rows of one
device if each depends on its index alone. Nothing says whether it does, so each read is
checked: if one of the workers finds that it has drawn random numbers, all of them
restore the state before it, and read all rows of this batch and of those that follow.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from keras_strategies.communication.communicator import Communicator
from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.communication.worker_steps import compare_orders
from keras_strategies.engines.torch.own_rows.own_samples import (
    Collated,
    GlobalSampler,
    OwnSamples,
    PassOrder,
    WorkerSampler,
)
from keras_strategies.errors import InputError
from keras_strategies.keras_compat.structures import leaves_of
from keras_strategies.runtime.row_splits import replica_ranges
from keras_strategies.runtime.worker_batch import WorkerBatch, WorkerRows

_logger = logging.getLogger("keras_strategies.own_rows")
# What a worker tells the others, that will share the rows of the next pass again.
_READ_BEFORE = "a worker has read the first batch of this pass for its `element_spec`"


class _Pass:
    """A pass over a loader: loaders for own rows, and for all rows from a step on.

    Args:
        loader: the user's loader.
        rows: those of this worker.
        is_checked: bool, whether the state that reads change is compared.
        is_compared: bool, whether workers compare the order of their batches.
    """

    def __init__(
        self, loader: Any, rows: WorkerRows, is_checked: bool, is_compared: bool
    ):
        self._loader = loader
        self._order = PassOrder(loader.batch_sampler)
        self._samples = OwnSamples(loader.dataset, is_checked, is_compared)
        self.sampler = WorkerSampler(self._order, rows.range_of)
        self._own = _loader_like(
            loader, self._samples, self.sampler, Collated(loader.collate_fn)
        )
        self._all = _loader_like(
            loader, loader.dataset, GlobalSampler(self._order), loader.collate_fn
        )
        self._generators = _LoaderGenerators(loader)
        #: How many passes have read own rows.
        self.count = 0

    def own(self) -> Iterator[Any]:
        self.count += 1
        self._generators = _LoaderGenerators(self._loader)
        return iter(self._own)

    def again(self, indices: list[int]) -> Any:
        """What the loader of own rows yields for a batch, read in this process."""
        return self._own.collate_fn(
            self._samples.__getitems__(self.sampler.own(indices))
        )

    def agreed(self) -> None:
        """The workers use their rows of the last batch; it is not read again."""
        if self._loader.num_workers == 0:
            self._order.forget()

    def all(self) -> Iterator[Any]:
        return iter(self._all)

    def all_from(self, step: int) -> Iterator[Any]:
        """The batches from a step of the pass on, which has been read of own rows.

        Processes of the loader have generators of their own, so that their reads are
        repeated from the beginning of the pass.
        """
        self._order.again()
        with self._generators.as_before():
            batches = iter(self._all)
        if self._loader.num_workers > 0:
            return itertools.islice(batches, step, None)
        if self._samples.before is not None:
            self._samples.before.restore()
        return batches


class LoaderRows:
    """Own rows of the global batches of a loader.

    Args:
        loader: a `torch.utils.data.DataLoader` that `can_read_rows`, or one of Keras
            for arrays.
        workers: the workers.
        rows: those of this worker.
        is_of_arrays: bool, whether it is one of Keras, with the order of the random
            numbers of the process.
    """

    def __init__(
        self,
        loader: Any,
        workers: Communicator,
        rows: WorkerRows,
        is_of_arrays: bool = False,
    ):
        self._loader = loader
        self._workers = workers
        self._rows = rows
        self._is_of_arrays = is_of_arrays
        self._is_known = is_of_arrays or reads_alike(loader.dataset)
        # Workers that join read by themselves: the steps of the others compare.
        self._agrees = not is_of_arrays and workers.actions.is_fixed
        self._reads_all = False
        self._under_way: _Pass | None = None
        # With processes that stay for the next pass.
        self._kept = self._new_pass() if loader.persistent_workers else None

    def _new_pass(self) -> _Pass:
        is_compared = not self._is_of_arrays
        return _Pass(self._loader, self._rows, not self._is_known, is_compared)

    def begin(self, stream: str = "") -> Iterator[Any]:
        """A pass over the global batches: `WorkerBatch`, or all batches in full.

        Iterators of loaders draw from Torch's random numbers when they are made, so
        this one is made now.

        Args:
            stream: str, that in which workers compare reads; see `WorkerGroup.gather`.
        """
        if self._reads_all:
            return iter(self._loader) if self._kept is None else self._kept.all()
        one_pass = self._under_way = self._kept or self._new_pass()
        return self._batches(one_pass, one_pass.own(), stream)

    def read_before(self, stream: str) -> None:
        """Tells the other workers of a pass that this one reads all of its rows.

        Args:
            stream: str, see `begin`.
        """
        if not self._reads_all:
            group = self._workers.group
            found = compare_orders(group, 0, None, _READ_BEFORE, stream)
            self._follow(_first_of(found))

    def read_all(self) -> None:
        """Reads all rows of the batches that follow, also in the pass under way."""
        self._reads_all = True
        if self._under_way is not None:
            self._under_way.sampler.reads_all = True

    def _batches(self, one_pass: _Pass, reads: Any, stream: str) -> Iterator[Any]:
        for step in itertools.count():
            read = next(reads, None)
            change = self._agreed(read, stream) if self._agrees else ""
            if read is None:
                return
            if change:
                if one_pass.count > 1 and change != _READ_BEFORE:
                    raise _changed_later(change)
                _logger.info(
                    "Each worker reads all rows of a DataLoader, which is exact: %s.",
                    change,
                )
                self._follow(change)
                del reads
                yield from one_pass.all_from(step)
                return
            one_pass.agreed()
            yield self._batch(one_pass, read)

    def _batch(self, one_pass: _Pass, read: Any) -> WorkerBatch:
        indices, is_own, order, _, batch = read
        counts = self._workers.replica_counts

        def again() -> WorkerBatch:
            return self._batch(one_pass, one_pass.again(indices))

        every = self._rows.sizes(len(indices)) if is_own else []
        is_compared = self._agrees or self._is_of_arrays
        found = None if is_compared else (len(indices), order)
        return WorkerBatch(batch, every, counts, again, found)

    def _agreed(self, read: Any, stream: str) -> str:
        """What the read of a batch has changed on one of the workers; "" for nothing.

        Raises:
            WorkerError: if these are not reads of the same batch.
        """
        rows, order, change = 0, 0, ""
        if read is not None:
            indices, is_own, order, change, batch = read
            rows = len(indices)
            if is_own and not change:
                change = _problem(batch)
        found = compare_orders(self._workers.group, rows, order, change, stream)
        return _first_of(found)

    def _follow(self, change: str) -> None:
        """After a change, all workers read all rows in later passes, too."""
        if change != _READ_BEFORE:
            self._reads_all = True


def _first_of(changes: list[str]) -> str:
    """What the first worker tells that has found a change; "" if none has."""
    return next(filter(None, changes), "")


def batches_of_worker(
    loader: Any, counts: ReplicaCounts
) -> Iterator[tuple[Any, list[tuple[int, int]]]]:
    """Own rows of each batch, and those of them that each local replica takes.

    Args:
        loader: a loader that `can_read_rows`, of a dataset that `reads_alike`.
        counts: the replicas of all workers.
    """

    def own_range(rows: int) -> tuple[int, int]:
        ranges = replica_ranges(rows, counts)
        first = min(ranges[0][0], rows - 1)
        # A row of a batch of which it has none, for the structure.
        return first, max(ranges[-1][1], first + 1)

    order = PassOrder(loader.batch_sampler)
    samples = OwnSamples(loader.dataset, False, False)
    sampler = WorkerSampler(order, own_range)
    own = _loader_like(loader, samples, sampler, Collated(loader.collate_fn))
    for indices, _, _, _, batch in own:
        order.forget()
        ranges = replica_ranges(len(indices), counts)
        first, _ = own_range(len(indices))
        yield batch, [(a - first, b - first) for a, b in ranges]


class _LoaderGenerators:
    """Torch's generator and that of a loader, now.

    Args:
        loader: the loader.
    """

    def __init__(self, loader: Any):
        self._generators = [torch.default_generator]
        if loader.generator is not None:
            self._generators.append(loader.generator)
        self._states = self._now()

    def _now(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def as_before(self) -> _AsBefore:
        return _AsBefore(self)


class _AsBefore:
    """Context in which generators are as at an earlier time."""

    def __init__(self, generators: _LoaderGenerators):
        self._of = generators

    def __enter__(self) -> None:
        self._now = self._of._now()
        self._set(self._of._states)

    def __exit__(self, *exception: Any) -> None:
        self._set(self._now)

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._of._generators, states, strict=True):
            generator.set_state(state)


def can_read_rows(loader: Any) -> bool:
    """Whether own rows of a loader's batches can be read.

    Not of streams, with a function of the user that makes batches, which may pad or mix
    their rows, or with one that starts processes, which may change the dataset, nor
    where batches come in the order in which processes have read them.
    """
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and loader.collate_fn is default_collate
        and loader.worker_init_fn is None
        and getattr(loader, "in_order", True)
    )


def reads_alike(dataset: Any) -> bool:
    """Whether reads of a dataset change nothing, whichever rows they read."""
    if type(dataset) is Subset:
        return reads_alike(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(reads_alike, dataset.datasets))
    return type(dataset) is TensorDataset


def _changed_later(change: str) -> InputError:
    return InputError(
        "Each worker reads its own rows of a DataLoader with persistent_workers=True, "
        f"but {change}, which the first batch did not. Its processes have read other "
        "rows by now, so that the random numbers of one device are lost. Use "
        "persistent_workers=False, or draw in each row."
    )


def _problem(batch: Any) -> str:
    """Why a batch of own rows cannot be used, like a change; "" if it can."""
    leaves = [leaf for leaf in leaves_of(batch) if leaf is not None]
    if all(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in leaves):
        return ""
    return "its batches have values that are not tensors"


def _loader_like(loader: Any, dataset: Any, sampler: Any, collate: Any) -> Any:
    """A loader with the options of another one."""
    options = {}
    if loader.num_workers > 0:
        options = {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
            "timeout": loader.timeout,
        }
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=collate,
        pin_memory=loader.pin_memory,
        generator=loader.generator,
        **options,
    )

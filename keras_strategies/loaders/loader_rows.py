"""Rows of the global batches of a map-style `DataLoader`, and their random numbers.

The order of rows is that of the loader's batch sampler, which every worker reads in
full; of the dataset, a worker reads its own rows only. Random numbers of a row belong
to the row (`row_order.SeededRows`), under every strategy, so that those rows are the
rows of one device.
"""

from __future__ import annotations

import copy
import logging
import weakref
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
from keras_strategies.communication.worker_steps import chiefs_seed, compare_orders
from keras_strategies.errors import InputError
from keras_strategies.keras_compat.structures import leaves_of
from keras_strategies.loaders.row_generators import RowGenerators
from keras_strategies.loaders.row_order import (
    Collated,
    RowOrder,
    RowsToRead,
    SeededRows,
    SizedRows,
)
from keras_strategies.rows.declarations import is_declared_function
from keras_strategies.runtime.row_splits import replica_ranges
from keras_strategies.runtime.worker_batch import WorkerBatch, WorkerRows

_logger = logging.getLogger("keras_strategies.own_rows")
_named: weakref.WeakSet[Any] = weakref.WeakSet()
# The attribute of a loader for the one that reads its rows with seeds, which keeps
# processes that stay.
_SEEDED = "__keras_strategies_seeded__"


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
        self._workers = workers
        self._rows = rows
        self._is_of_arrays = is_of_arrays
        # Workers that join read by themselves: the steps of the others compare.
        self._agrees = not is_of_arrays and workers.actions.is_fixed
        loader = _users(loader)
        draws = not is_of_arrays and not reads_alike(loader.dataset)
        self._samples = SizedRows(loader.dataset, draws, True)
        self._order = RowOrder(
            loader.batch_sampler, True, loader.generator, rows.range_of
        )
        self._loader = _like(loader, self._samples, self._order, Collated)

    def begin(self, stream: str = "") -> Iterator[WorkerBatch]:
        """A pass over the global batches.

        Iterators of loaders draw from Torch's random numbers when they are made, so
        this one is made now.

        Args:
            stream: str, that in which workers compare their orders; see
                `WorkerGroup.gather_values`.
        """
        if self._agrees:
            # Not before the pass: a state that the sampler changes is read then.
            self._order.agree = lambda own: chiefs_seed(
                self._workers.group, own, stream
            )
        return self._batches(iter(self._loader), stream)

    def _batches(self, reads: Any, stream: str) -> Iterator[WorkerBatch]:
        for read in reads:
            if stream:
                self._compare(len(read[0].keys), read[0].checksum, stream)
            yield self._batch(*read)
        if stream:
            self._compare(0, 0, stream)

    def _compare(self, rows: int, order: int, stream: str) -> None:
        compare_orders(self._workers.group, rows, order, stream)()

    def _batch(self, rows: RowsToRead, batch: Any) -> WorkerBatch:
        counts = self._workers.replica_counts
        _check_leaves(batch, rows)

        def again() -> WorkerBatch:
            samples = self._samples.__getitems__(self._order.own(rows))
            return self._batch(*self._loader.collate_fn(samples))

        every = self._rows.sizes(len(rows.keys)) if rows.is_part else []
        order = None if self._is_of_arrays else (len(rows.keys), rows.checksum)
        return WorkerBatch(batch, every, counts, again, order)


def batches_of_worker(
    loader: Any, counts: ReplicaCounts
) -> Iterator[tuple[Any, list[tuple[int, int]]]]:
    """Own rows of each batch, and those of them that each local replica takes.

    Args:
        loader: a loader that `can_read_rows`.
        counts: the replicas of all workers.
    """

    def own_range(rows: int) -> tuple[int, int]:
        ranges = replica_ranges(rows, counts)
        first = min(ranges[0][0], rows - 1)
        # A row of a batch of which it has none, for the structure.
        return first, max(ranges[-1][1], first + 1)

    loader = _users(loader)
    samples = SizedRows(loader.dataset, not reads_alike(loader.dataset), True)
    order = RowOrder(loader.batch_sampler, True, loader.generator, own_range)
    for read, batch in _like(loader, samples, order, Collated):
        ranges = replica_ranges(len(read.keys), counts)
        yield batch, [(a - read.start, b - read.start) for a, b in ranges]


def seeded_loader(loader: Any) -> Any:
    """A loader that reads all rows, with the random numbers of each row.

    Args:
        loader: `torch.utils.data.DataLoader`.

    Returns:
        `torch.utils.data.DataLoader`; `loader` itself if it is one already, or its rows
        draw nothing, or cannot be told apart.
    """
    dataset = loader.dataset
    if isinstance(dataset, SeededRows) or not _has_rows(loader) or reads_alike(dataset):
        return loader
    found = getattr(loader, _SEEDED, None)
    if found is None or found.of is not loader:
        found = _SeededLoader(loader)
        object.__setattr__(loader, _SEEDED, found)
    return found.loader


class _SeededLoader:
    """What `seeded_loader` returns for a loader, which copies of it have not."""

    def __init__(self, loader: Any):
        self.of = loader
        dataset = loader.dataset
        kind = SizedRows if hasattr(dataset, "__len__") else SeededRows
        is_of_batches = loader.batch_sampler is not None
        order = RowOrder(
            loader.batch_sampler if is_of_batches else loader.sampler,
            is_of_batches,
            loader.generator,
        )
        self.loader = _like(loader, kind(dataset), order)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(None), ()


def _users(loader: Any) -> Any:
    """The loader that `seeded_loader` has got."""
    if not isinstance(loader.dataset, SeededRows):
        return loader
    found = copy.copy(loader)
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    order = getattr(loader, name)
    vars(found).update({"dataset": loader.dataset.dataset, name: order.sampler})
    return found


def _has_rows(loader: Any) -> bool:
    """Whether it reads elements of a dataset by their keys, in Torch's own way."""
    return type(loader).__iter__ is DataLoader.__iter__ and not isinstance(
        loader.dataset, IterableDataset
    )


def can_read_rows(loader: Any) -> bool:
    """Whether own rows of a loader's batches can be read; see `reason_for_all_rows`."""
    return not reason_for_all_rows(loader)


def reason_for_all_rows(loader: Any) -> str:
    """Why each worker reads all rows of a loader; "" if it reads its own.

    Args:
        loader: `torch.utils.data.DataLoader`.
    """
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset is a stream"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} iterates in its own way"
    if loader.batch_sampler is None:
        return "its dataset makes batches (`batch_size=None`)"
    if not getattr(loader, "in_order", True):
        return "its batches come in the order of its processes (`in_order=False`)"
    collate = loader.collate_fn
    if collate is not default_collate and not is_declared_function(collate):
        return (
            "its `collate_fn` may pad or mix rows. If it makes row i of a batch from "
            "sample i only, declare it: `collate_fn=ks.row_wise(collate)`"
        )
    return ""


def warn_of_all_rows(loader: Any, workers: Communicator) -> None:
    """Says once of a loader that each worker reads all rows, and why."""
    count = workers.group.count
    if count > 1 and loader not in _named:
        _named.add(loader)
        _logger.warning(
            "Each of %d workers reads all rows of a DataLoader, %d times the reads of "
            "one device: %s.",
            count,
            count,
            reason_for_all_rows(loader),
        )


def reads_alike(dataset: Any) -> bool:
    """Whether reads of a dataset draw nothing."""
    if type(dataset) is Subset:
        return reads_alike(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(reads_alike, dataset.datasets))
    return type(dataset) is TensorDataset


def first_batch(loader: Any) -> Any:
    """The first batch of the next pass, which is as if it had not been read.

    Args:
        loader: `torch.utils.data.DataLoader`.

    Returns:
        The batch; None of a loader that can be read once or is empty.
    """
    if not _has_rows(loader):
        return None
    loader = _users(loader)
    is_of_batches = loader.batch_sampler is not None
    sampler = loader.batch_sampler if is_of_batches else loader.sampler
    order = RowOrder(sampler, is_of_batches, loader.generator)
    found = _like(loader, SeededRows(loader.dataset), order)
    vars(found).update(num_workers=0, timeout=0)
    own = loader.generator
    state = None if own is None else own.get_state()
    with RowGenerators(loader.dataset).reads():
        batch = next(iter(found), None)
    if own is not None:
        own.set_state(state)
    return batch


def _check_leaves(batch: Any, rows: RowsToRead) -> None:
    count = rows.stop - rows.start
    for leaf in leaves_of(batch):
        if leaf is None:
            continue
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
            raise InputError(
                "Each worker reads its own rows of a DataLoader, whose batches have "
                f"to be tensors with rows. Received: {leaf!r:.80} of type "
                f"{type(leaf).__name__}. Return tensors, arrays or numbers for each "
                "sample."
            )
        if len(leaf) != count:
            raise InputError(
                "Each worker reads its own rows of a DataLoader. Its `collate_fn` "
                f"made {len(leaf)} rows of {count} samples. Declare only functions "
                "that make row i of a batch from sample i."
            )


def _like(loader: Any, dataset: Any, order: RowOrder, collate: Any = None) -> Any:
    """A loader with the options of another one, and with processes of its own."""
    found = copy.copy(loader)
    sampler = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    vars(found).update({"dataset": dataset, sampler: order, "_iterator": None})
    vars(found).pop(_SEEDED, None)
    if collate is not None:
        vars(found)["collate_fn"] = collate(loader.collate_fn)
    return found

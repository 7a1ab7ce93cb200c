"""What a `DataLoader` and its processes read: a worker's rows of a global batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras_strategies.engines.torch.own_rows.dataset_state import DatasetState


class BatchIndices(list[int]):
    """The indices of a global batch, as a loader's processes get them.

    Attributes:
        start: int, where this worker's begin.
        stop: int, where they end.
    """

    start: int
    stop: int


class PassOrder:
    """The order of a pass, in which the batches of a loader can be read again.

    Args:
        sampler: the loader's batch sampler.
    """

    def __init__(self, sampler: Iterable[Any]):
        self._sampler = sampler
        self._rest: Iterator[Any] = iter(())
        self._read: list[Any] = []
        self._again = False

    def pass_over(self) -> Iterator[list[int]]:
        if self._again:
            self._again = False
            yield from self._read
        else:
            self._rest = iter(self._sampler)
        self._read = []
        for indices in self._rest:
            self._read.append(list(indices))
            yield self._read[-1]

    def forget(self) -> None:
        """Drops the batches so far: they will not be read again."""
        self._read.clear()

    def again(self) -> None:
        """The next pass begins with the batches since `forget`, and goes on."""
        self._again = True


class GlobalSampler:
    """The batch sampler of a loader that reads all rows."""

    def __init__(self, order: PassOrder):
        self._order = order

    def __iter__(self) -> Iterator[list[int]]:
        return self._order.pass_over()


class WorkerSampler:
    """The batch sampler of a loader that reads the rows of this worker.

    Args:
        order: the order of the global batches.
        own_range: callable of the rows of a global batch, which returns the first row
            of this worker, and the one after its last.
    """

    def __init__(self, order: PassOrder, own_range: Callable[[int], tuple[int, int]]):
        self._order = order
        self._own_range = own_range
        #: Whether the next batches are read with all rows.
        self.reads_all = False

    def __iter__(self) -> Iterator[list[int]]:
        yield from map(self.own, self._order.pass_over())

    def own(self, indices: list[int]) -> BatchIndices:
        """The rows of this worker in the current group."""
        found, rows = BatchIndices(indices), len(indices)
        found.start, found.stop = (0, rows) if self.reads_all else self._own_range(rows)
        return found


class SamplesRead:
    """What a loader's process has read of a global batch.

    Args:
        indices: those of the global batch.
        checksum: int, of the indices.
        change: str, the state that the read has changed; "" for none.
        samples: what the dataset returned.

    Attributes:
        is_own: bool, whether `samples` are of this worker.
    """

    def __init__(self, indices: BatchIndices, checksum: int, change: str, samples: Any):
        self.indices = list(indices)
        self.is_own = indices.stop - indices.start < len(indices)
        self.checksum = checksum
        self.change = change
        self.samples = samples


class OwnSamples:
    """A dataset that reads the samples of this worker.

    Args:
        dataset: the dataset.
        is_checked: bool, whether the state that reads change is compared.
        is_compared: bool, whether workers compare the order of their batches.
    """

    def __init__(self, dataset: Any, is_checked: bool, is_compared: bool):
        self._dataset = dataset
        self._is_checked = is_checked
        self._is_compared = is_compared
        #: The state before the last read, in the process that has read.
        self.before: DatasetState | None = None
        # What a read has changed; in a process that stays, also for a batch that was
        # not used.
        self._change = ""

    def __getitems__(self, indices: BatchIndices) -> SamplesRead:
        own = list(indices[indices.start : indices.stop])
        if self._is_checked:
            self.before = DatasetState(self._dataset)
        samples = _samples(self._dataset, own)
        if self.before is not None and not self._change:
            change = self.before.changed()
            self._change = change and f"reading a row changes {change}"
        checksum = 0
        if self._is_compared:
            checksum = zlib.crc32(repr(list(indices)).encode())
        return SamplesRead(indices, checksum, self._change, samples)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "before": None}


def _samples(dataset: Any, indices: list[int]) -> Any:
    """The samples of a dataset, as a loader reads them."""
    several = getattr(dataset, "__getitems__", None)
    if several is not None:
        return several(indices)
    return [dataset[index] for index in indices]


class Collated:
    """The function that makes a batch of samples.

    Args:
        collate: the loader's own.
    """

    def __init__(self, collate: Any):
        self._collate = collate

    def __call__(self, read: SamplesRead) -> tuple[list[int], bool, int, str, Any]:
        batch = self._collate(read.samples)
        return read.indices, read.is_own, read.checksum, read.change, batch

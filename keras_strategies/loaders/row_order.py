"""What the batch sampler of a `DataLoader` tells its dataset: which rows to read."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from keras_strategies.loaders.row_generators import (
    RowGenerators,
    mixed,
)


@dataclass(frozen=True)
class RowsToRead:
    """Rows of a global batch.

    Args:
        keys: list, what the sampler says of each row of the global batch.
        seed: int, of the pass.
        first: int, how many rows the pass had before this batch.
        start: int, where the rows to read begin.
        stop: int, where they end.
    """

    keys: list[Any]
    seed: int
    first: int
    start: int
    stop: int

    @property
    def is_part(self) -> bool:
        """Whether other workers read the other rows."""
        return self.stop - self.start < len(self.keys)

    @property
    def checksum(self) -> int:
        """Equal on workers that read the same global batch with the same seed."""
        return zlib.crc32(repr((self.seed, self.first, self.keys)).encode())


class RowOrder:
    """A sampler that yields `RowsToRead` in the order of another one.

    The seed of a pass is made of the state of the generator that shuffles, which is not
    changed: on workers with equal orders it is equal, and a training that continues
    has it again.

    Args:
        sampler: a sampler of batches, or of elements that are read one by one.
        is_of_batches: bool, which of them.
        generator: `torch.Generator` of the loader; None for that of the process.
        own_range: callable of the rows of a global batch, which returns the first row
            of this worker, and the one after its last; None to read all.

    Attributes:
        agree: callable of the seed of this process, which returns that of the next
            pass; None to take it.
    """

    def __init__(
        self,
        sampler: Any,
        is_of_batches: bool,
        generator: Any,
        own_range: Callable[[int], tuple[int, int]] | None = None,
    ):
        self.sampler = sampler
        self._is_of_batches = is_of_batches
        self._generator = generator
        self._own_range = own_range
        self._last = b""
        # Passes since the generator's state has changed.
        self._repeats = 0
        self.agree: Callable[[int], int] | None = None

    def __iter__(self) -> Iterator[RowsToRead]:
        seed, first = self._pass_seed(), 0
        if self.agree is not None:
            seed = self.agree(seed)
        for batch in self.sampler:
            keys = list(batch) if self._is_of_batches else [batch]
            yield self.own(RowsToRead(keys, seed, first, 0, len(keys)))
            first += len(keys)

    def __len__(self) -> int:
        return len(self.sampler)

    def own(self, rows: RowsToRead) -> RowsToRead:
        """The rows of this worker in the current group."""
        count = len(rows.keys)
        start, stop = (0, count)
        if self._own_range is not None:
            start, stop = self._own_range(count)
        return RowsToRead(rows.keys, rows.seed, rows.first, start, stop)

    def _pass_seed(self) -> int:
        generator = self._generator or torch.default_generator
        state = generator.get_state().numpy().tobytes()
        # Processes that stay, and no shuffling: passes draw nothing.
        self._repeats = self._repeats + 1 if state == self._last else 0
        self._last = state
        digest = hashlib.blake2b(state, digest_size=8).digest()
        return mixed(int.from_bytes(digest, "little"), self._repeats)


class SeededRows:
    """A dataset of which the random numbers of a row belong to the row.

    Before a row is read, generators are seeded from the pass and the row's position in
    it, so that its augmentation is the same in any process and on any worker.

    Args:
        dataset: the user's dataset, with a row for each key.
        draws: bool, whether reads may draw random numbers.
        is_named: bool, whether it returns `RowsToRead` beside the samples of a batch.
    """

    def __init__(self, dataset: Any, draws: bool = True, is_named: bool = False):
        self.dataset = dataset
        self._draws = draws
        self._is_named = is_named
        self._generators: RowGenerators | None = None

    def __getitem__(self, rows: RowsToRead) -> Any:
        # Without automatic batches: an element is one read.
        return self.rows(rows)[0]

    def __getitems__(self, rows: RowsToRead) -> Any:
        return (rows, self.rows(rows)) if self._is_named else self.rows(rows)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # For a `worker_init_fn`, which finds the dataset in `get_worker_info()`.
        return getattr(self.__dict__["dataset"], name)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_generators": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def rows(self, rows: RowsToRead) -> Any:
        """The rows, as the dataset returns them."""
        if not self._draws:
            return _read(self.dataset, rows.keys[rows.start : rows.stop])
        if self._generators is None:
            self._generators = RowGenerators(self.dataset)
        found = self._seeded(rows, self._generators)
        if self._generators.find():
            # Generators that the dataset has made in these reads were not seeded.
            found = self._seeded(rows, self._generators)
        return found

    def _seeded(self, rows: RowsToRead, generators: RowGenerators) -> list[Any]:
        found: list[Any] = []
        with generators.reads() as seed:
            for i in range(rows.start, rows.stop):
                seed(mixed(rows.seed, rows.first + i))
                found.extend(_read(self.dataset, rows.keys[i : i + 1]))
        return found


class SizedRows(SeededRows):
    """`SeededRows` of a dataset with a length."""

    def __len__(self) -> int:
        return len(self.dataset)


class Collated:
    """The function that makes a batch of what named `SeededRows` return.

    Args:
        collate: the loader's own.
    """

    def __init__(self, collate: Any):
        self._collate = collate

    def __call__(self, read: tuple[RowsToRead, Any]) -> tuple[RowsToRead, Any]:
        rows, samples = read
        return rows, self._collate(samples)


def _read(dataset: Any, keys: list[Any]) -> Any:
    """The samples of a dataset, as a loader reads them."""
    several = getattr(dataset, "__getitems__", None)
    if several is not None:
        return several(keys)
    return [dataset[key] for key in keys]

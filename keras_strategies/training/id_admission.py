"""Callback that gives rows to ids while `fit` reads them."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from keras_strategies.errors import ContextError, InvalidArgumentError
from keras_strategies.training.growing_embedding import GrowingEmbedding
from keras_strategies.training.id_table import IdTable, keys_of

#: Batches of a generator that Keras reads before training begins.
_FIRST_BATCHES = 2
#: Fraction of a table's rows in use above which it grows.
_MOST_USED = 0.75


class AdmitIds(keras.callbacks.Callback):
    """Gives rows of `ks.layers.GrowingEmbedding` to ids while `fit` reads them.

    The ids of each batch are counted before they are looked up: an id has its row in
    the batch in which it is seen for the `admit`-th time. Which row it is follows from
    the order of the batches, not from how far the input is read ahead.

    The layer, and with it a file, has the counts at the end of an epoch and for its
    evaluation, of the batches that were trained: give `steps_per_epoch` for a long
    stream. A file that is saved within an epoch has the ids of its begin, which suffice
    to go on with that epoch, as `Resume(..., stream="skip")` does: what it reads again
    is not counted twice.

    With the arguments below, rows expire and tables grow at the end of an epoch, after
    its evaluation. A table that has grown gives the model another optimizer, and its
    step is compiled again. `Resume` needs a layer with the capacity that it had then.

    On several workers each one reads all batches, and counts the same ids.

    Args:
        tables: the layer; for inputs that are dicts, a dict of layers by the names of
            the inputs that are ids. Several inputs may have one layer.
        max_capacity: int, rows up to which a table is doubled at the end of an epoch if
            more than 3/4 of its rows are in use. None for no growth.
        unseen: int, see `GrowingEmbedding.expire`, at the end of each epoch.
        fewer_than: int, likewise.

    Example:

    >>> table = ks.layers.GrowingEmbedding(100_000, 16, admit=2)
    >>> admission = ks.callbacks.AdmitIds(table)
    >>> model.fit(
    ...     admission.read(batches),
    ...     steps_per_epoch=1000,
    ...     epochs=10,
    ...     shuffle=False,
    ...     callbacks=[admission],
    ... )
    """

    def __init__(
        self,
        tables: Any,
        max_capacity: int | None = None,
        unseen: int | None = None,
        fewer_than: int | None = None,
    ):
        super().__init__()
        self._ends = _EpochEnd(max_capacity, unseen, fewer_than)
        self._named = tables if isinstance(tables, dict) else {None: tables}
        self._layers = list(dict.fromkeys(self._named.values()))
        self._tables: list[_TableAhead] = []
        # The ids of batches, for each layer, that have been read and not counted, and
        # the number of the first one.
        self._read: deque[list[Any]] = deque()
        self._first = 0
        # Trained batches before this epoch, and in it.
        self._before, self._steps = 0, 0
        self._trains = False
        # Batches of an epoch at whose end tables change; None for no such end.
        self._per_epoch: int | None = None

    def read(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The input of one call of `fit`, with rows in place of ids.

        Args:
            batches: iterable of `(x, ...)`, with ids, integers or strings of any shape,
                as `x` or under names in it.

        Returns:
            generator of the batches, with int32 arrays of the shapes of ids.

        Raises:
            RuntimeError: under a strategy with elastic workers. In `fit`, without this
                callback.
        """
        self._tables = [_TableAhead(layer) for layer in self._layers]
        self._read.clear()
        self._first, self._trains = 0, False
        return self._rows(batches)

    def _rows(self, batches: Iterable[Any]) -> Iterator[Any]:
        for number, (x, *rest) in enumerate(batches):
            if number >= _FIRST_BATCHES and not self._trains:
                raise ContextError(
                    "`AdmitIds` counts ids as one of the callbacks of `fit`. Call "
                    "`model.fit(admission.read(batches), callbacks=[admission])`."
                )
            given = {n: keys_of(x if n is None else x[n]) for n in self._named}
            rounds = [
                _joined([given[n] for n, layer in self._named.items() if layer is own])
                for own in self._layers
            ]
            self._read.append(rounds)
            self._see(number, rounds)
            rows = {}
            for name, (keys, places) in given.items():
                table = self._tables[self._layers.index(self._named[name])]
                rows[name] = table.ids.rows_of(keys)[places]
            yield (rows[None] if None in self._named else {**x, **rows}, *rest)

    def _see(self, number: int, rounds: list[Any]) -> None:
        per_epoch = self._per_epoch
        for table, (keys, counts) in zip(self._tables, rounds, strict=True):
            if per_epoch and number % per_epoch == 0 and number > table.loaded:
                table.ids = self._ends.applied(table.ids)
            # A batch that is read again has been counted.
            if number >= table.counted:
                table.ids.see(keys, counts, table.layer.admit)

    def on_train_begin(self, logs: Any = None) -> None:
        self._trains = True
        self._per_epoch = self.params.get("steps") if self._ends.changes else None
        if self._per_epoch is None:
            return
        if self._per_epoch < _FIRST_BATCHES:
            raise InvalidArgumentError(
                "`AdmitIds` changes tables at the end of an epoch, which has "
                f"steps_per_epoch={self._per_epoch}. Give at least {_FIRST_BATCHES}."
            )
        # Keras runs as many steps in the last execution of an epoch as in others.
        steps = self.model.steps_per_execution
        self._per_epoch = math.ceil(self._per_epoch / steps) * steps

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # Another callback may have restored the variables.
        restored = [table.load() for table in self._tables]
        if any(restored):
            for number, rounds in enumerate(self._read, self._first):
                self._see(number, rounds)
        self._before = max((table.counted for table in self._tables), default=0)
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps = batch + 1

    def on_test_begin(self, logs: Any = None) -> None:
        self._count()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._count()
        grown = [table.end_epoch(self._ends, self.model) for table in self._tables]
        if any(grown):
            self.model.make_train_function(force=True)

    def _count(self) -> None:
        """Counts the ids of trained batches in the layers."""
        trained = self._before + self._steps
        if trained > self._first + len(self._read):
            raise ContextError(
                f"`AdmitIds` has read {self._first + len(self._read)} batches, and "
                f"{trained} have been trained. Call `model.fit(admission.read(batches),"
                " callbacks=[admission])`, with batches from the begin of training; "
                "with a generator and `Resume`, give it `stream='skip'`."
            )
        own: list[list[Any]] = [[] for _ in self._tables]
        while self._first < trained:
            for i, each in enumerate(self._read.popleft()):
                if self._first >= self._tables[i].counted:
                    own[i].append(each)
            self._first += 1
        for table, rounds in zip(self._tables, own, strict=True):
            table.count(rounds)


@dataclasses.dataclass(frozen=True)
class _EpochEnd:
    """What happens to a table at the end of an epoch; see `AdmitIds`."""

    max_capacity: int | None
    unseen: int | None
    fewer_than: int | None

    @property
    def expires(self) -> bool:
        """Whether rows are freed."""
        return self.unseen is not None or self.fewer_than is not None

    @property
    def changes(self) -> bool:
        """Whether anything happens."""
        return self.expires or self.max_capacity is not None

    def capacity(self, table: IdTable) -> int:
        """The rows of a table afterwards."""
        is_full = len(table.used[0]) > _MOST_USED * table.rows
        grown = min(2 * table.rows, self.max_capacity or 0)
        return max(grown, table.rows) if is_full else table.rows

    def applied(self, table: IdTable) -> IdTable:
        """A table of ids afterwards."""
        if self.expires:
            table.expire(self.unseen, self.fewer_than)
        rows = self.capacity(table)
        return table.grown(rows) if rows > table.rows else table


class _TableAhead:
    """The ids of a layer after the last batch that has been read.

    Args:
        layer: the layer, which has those of the last batch that has been counted.
    """

    def __init__(self, layer: GrowingEmbedding):
        self.layer = layer
        self._state = np.empty(0, np.int32)
        self._others = 0
        self.load()
        # Batches of other calls of `fit`.
        self._others, self.loaded = self.counted, 0

    @property
    def counted(self) -> int:
        """int, batches of this input that the layer has counted."""
        return int(self._state[2]) - self._others

    def load(self) -> bool:
        """Begins from the layer, if its variables have changed; whether they have."""
        table = self.layer.id_table("AdmitIds")
        is_new = not np.array_equal(table.state, self._state)
        if is_new:
            self.ids = table.copy()
            self._state = table.state.copy()
            #: int, batches that were counted then.
            self.loaded = self.counted
        return is_new

    def count(self, rounds: list[Any]) -> None:
        """Counts the ids of further batches in the layer."""
        if rounds:
            self.layer.count_batches(rounds)
            self._state = self.layer.id_table("AdmitIds").state.copy()

    def end_epoch(self, ends: _EpochEnd, model: Any) -> bool:
        """Changes the layer at the end of an epoch; whether it has grown."""
        layer = self.layer
        if ends.expires:
            layer.expire(model.optimizer, ends.unseen, ends.fewer_than)
        table = layer.id_table("AdmitIds")
        self._state = table.state.copy()
        rows = ends.capacity(table)
        if grows := rows > table.rows:
            layer.grow(rows, model)
        return grows


def _joined(given: list[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Different ids of several inputs, and how often each was seen."""
    counts = [np.bincount(p.reshape(-1), minlength=len(k)) for k, p in given]
    if len(given) == 1:
        return given[0][0], counts[0]
    keys, places = np.unique(np.concatenate([k for k, _ in given]), return_inverse=True)
    weights = np.concatenate(counts)
    return keys, np.bincount(places, weights, len(keys)).astype(np.int64)

"""An embedding without a vocabulary: rows are given to ids as they come."""

from __future__ import annotations

import weakref
from typing import Any

import keras
import numpy as np

from keras_strategies.errors import ContextError, InvalidArgumentError
from keras_strategies.keras_compat.optimizers.optimizer_parts import trained_variables
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.hosted_variables import host_of, is_hosted
from keras_strategies.training.id_table import (
    IdTable,
    initial_rows,
    keys_of,
    with_seed,
)
from keras_strategies.user_warnings import warn_user

#: Rows that are read and written at a time, of variables on servers.
_BLOCK_ROWS = 4096
#: What the variables of a layer had when they were read or written last. It is no
#: attribute: those are sent to workers.
_tables: weakref.WeakKeyDictionary[Any, IdTable] = weakref.WeakKeyDictionary()


@keras.saving.register_keras_serializable("keras_strategies")
class GrowingEmbedding(keras.layers.Embedding):
    """An `Embedding` of ids that are not known in advance, integers or strings.

    Train on a stream part by part: `adapt` counts the ids of a part and gives rows to
    those that have been seen often enough; `rows` turns ids into the numbers of their
    rows, which are the input of the layer; `expire` frees rows. The row 0 is that of
    all ids without one, and is trained as the others are.

    A row begins with values that follow from its id and the initializer's seed. They
    are the same under every strategy, on every backend. What is known of ids are
    variables of the layer, 16 bytes for each row: files, checkpoints and the snapshots
    of parameter servers have them. On servers memory is taken by the rows in use,
    and by slots that do not begin with zeros.

    Args:
        capacity: int, most rows, the row 0 included.
        dim: int, columns.
        admit: int, how often an id must be seen to get a row. With more than 1, as many
            ids again as `capacity` are counted without one.
        initializer: `RandomUniform`, `RandomNormal` or `Zeros`, or a name of Keras.
        **kwargs: of `keras.layers.Embedding`.

    Raises:
        ValueError: for another initializer, or arguments out of range.

    Example:

    >>> table = ks.layers.GrowingEmbedding(100_000, 16, admit=2)
    >>> model = keras.Sequential([keras.Input((1,), dtype="int32"), table, ...])
    >>> for ids, y in days:
    ...     table.adapt(ids)
    ...     table.expire(model.optimizer, unseen=30)
    ...     model.fit(table.rows(ids), y)
    """

    def __init__(
        self,
        capacity: int,
        dim: int,
        admit: int = 1,
        initializer: Any = "uniform",
        **kwargs: Any,
    ):
        super().__init__(capacity, dim, embeddings_initializer="zeros", **kwargs)
        if capacity < 2 or not isinstance(admit, int) or admit < 1:
            raise InvalidArgumentError(
                "`capacity` must be at least 2 and `admit` at least 1. Received: "
                f"capacity={capacity}, admit={admit}"
            )
        self.capacity, self.dim, self.admit = capacity, dim, admit
        self.initializer = with_seed(keras.initializers.get(initializer))

    def build(self, input_shape: Any = None) -> None:
        if self.built:
            return
        super().build(input_shape)
        # "none": steps do not use them, and servers do not send them.
        options = {"dtype": "int32", "trainable": False, "synchronization": "none"}
        count = self.capacity * (1 if self.admit == 1 else 2)
        shapes = {"entries": (count, 4), "state": (2,)}
        self.entries, self.state = (
            keras.Variable(keras.initializers.Zeros(), shape, name=name, **options)
            for name, shape in shapes.items()
        )

    @property
    def variable_serialization_spec(self) -> dict[Any, list[str]]:
        return {None: ["embeddings", "entries", "state"]}

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        for name in ("input_dim", "output_dim", "embeddings_initializer"):
            del config[name]
        initializer = keras.initializers.serialize(self.initializer)
        own = {"capacity": self.capacity, "dim": self.dim, "admit": self.admit}
        return {**config, **own, "initializer": initializer}

    def adapt(self, ids: Any) -> int:
        """Counts ids, and gives rows to those that have been seen often enough.

        Call it between two calls of `fit`, on the coordinator of parameter servers.
        Where rows are scarce the most frequent ids get them, with a warning.

        Args:
            ids: array or tensor of integers or strings, of any shape.

        Returns:
            int, the number of new rows.

        Raises:
            RuntimeError: under a strategy with several workers, whose ids differ.
        """
        table = self._loaded("adapt")
        keys, places = keys_of(ids)
        counts = np.bincount(places.reshape(-1), minlength=len(keys))
        before = table.entries.copy()
        rows, new, refused = table.see(keys, counts, self.admit)
        values = initial_rows(self.initializer, new, self.dim)
        self._write(before, table, [(self.embeddings, rows, values)])
        if refused:
            warn_user(
                f"{refused:,} ids get no row in {self.name!r}: all {self.capacity:,} "
                "are in use. Call `expire`, or give more `capacity`."
            )
        return len(rows)

    def expire(
        self,
        optimizer: Any,
        unseen: int | None = None,
        fewer_than: int | None = None,
    ) -> int:
        """Frees the rows of ids; if they come again, they begin again.

        Args:
            optimizer: the optimizer that trains the layer; None without one. Its slots
                of these rows begin again.
            unseen: int, frees rows of ids that were not in the last so many calls of
                `adapt`.
            fewer_than: int, frees rows of ids that have been seen fewer times.

        Returns:
            int, the number of rows.
        """
        table = self._loaded("expire")
        before = table.entries.copy()
        rows = table.expire(unseen, fewer_than)
        writes = [(self.embeddings, rows, np.zeros((1, self.dim), np.float32))]
        for slot, initial in _slots(optimizer, self.embeddings):
            writes.append((slot, rows, initial))
        self._write(before, table, writes)
        return len(rows)

    def rows(self, ids: Any) -> np.ndarray:
        """The rows of ids, the input of this layer; 0 for ids without one.

        Args:
            ids: array or tensor of integers or strings, of any shape.

        Returns:
            int32 array of the same shape.
        """
        table = self._loaded("rows")
        keys, places = keys_of(ids)
        return table.rows_of(keys)[places]

    def export(self, ids: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """A fixed table, such as for `keras.layers.StringLookup` and `Embedding`.

        Args:
            ids: of the table, such as strings; None for all ids with a row, as int64:
                of strings these are hashes.

        Returns:
            pair of the ids `(n,)` and of their vectors `(n, dim)`.
        """
        found = np.asarray(self._loaded("export").used[1] if ids is None else ids)
        every = keras.ops.convert_to_numpy(self.embeddings)
        return found, np.asarray(every)[self.rows(found)]

    def _loaded(self, name: str) -> IdTable:
        """The table of what the variables have."""
        if not self.built:
            self.build()
        strategy = strategy_of(self.entries)
        if strategy is not None and strategy.workers is not None:
            raise ContextError(
                f"`{name}` of {self.name!r} was called under "
                f"{type(strategy).__name__}, whose workers have different ids. Use "
                "parameter servers, or one worker."
            )
        state = np.array(keras.ops.convert_to_numpy(self.state))
        table = _tables.get(self)
        if table is None or not np.array_equal(state, table.state):
            entries = np.array(keras.ops.convert_to_numpy(self.entries))
            table = _tables[self] = IdTable(entries, state, self.capacity)
        return table

    def _write(self, before: np.ndarray, table: IdTable, rows: list[Any]) -> None:
        changed = np.flatnonzero((before != table.entries).any(axis=1))
        writes = [
            *rows,
            (self.entries, changed, table.entries[changed]),
            (self.state, np.arange(2), table.state),
        ]

        def write() -> None:
            for variable, places, values in writes:
                _set_rows(variable, places, values)

        # What is not written completely is read again.
        _tables.pop(self, None)
        if is_hosted(self.entries):
            host_of(self.entries).write_durably(write)
        else:
            write()
        _tables[self] = table


def _set_rows(variable: Any, rows: np.ndarray, values: np.ndarray) -> None:
    """Assigns some rows of a variable.

    Args:
        variable: of any strategy.
        rows: `(n,)`.
        values: their values, or one for all.
    """
    values = np.broadcast_to(values, (len(rows), *variable.shape[1:]))
    if not len(rows):
        return
    if not is_hosted(variable):
        array = np.array(keras.ops.convert_to_numpy(variable))
        array[rows] = values
        variable.assign(array)
        return
    host = host_of(variable)
    for block in np.unique(rows // _BLOCK_ROWS):
        start = block * _BLOCK_ROWS
        part = np.array(host.read_slice(variable, slice(start, start + _BLOCK_ROWS)))
        inside = rows // _BLOCK_ROWS == block
        part[rows[inside] - start] = values[inside]
        host.write_pieces(variable, [(int(start), part)])


def _slots(optimizer: Any, variable: Any) -> list[tuple[Any, np.ndarray]]:
    """The slots of a variable, and the values with which one of their rows begins."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if optimizer is None or not optimizer.built:
        return []
    # An optimizer with the same variables, of which only this one has a single row.
    twin = type(optimizer).from_config(optimizer.get_config())
    shapes = [
        (1, *v.shape[1:]) if v is variable else (2,) * len(v.shape)
        for v in trained_variables(optimizer)
    ]
    twin.build([keras.Variable(np.zeros(shape, "float32")) for shape in shapes])
    found = []
    for own, other in zip(optimizer.variables, twin.variables, strict=True):
        if tuple(other.shape)[:1] == (1,):
            if tuple(own.shape) != tuple(variable.shape):
                raise InvalidArgumentError(
                    f"{type(optimizer).__name__} has a slot of shape {own.shape} for a "
                    f"table of shape {variable.shape}, which has no rows to begin "
                    "again. Use an optimizer whose slots have the table's shape."
                )
            found.append((own, np.asarray(keras.ops.convert_to_numpy(other))))
    return found

"""An embedding without a vocabulary: rows are given to ids as they come."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import keras
import numpy as np

from keras_strategies.errors import ContextError, InvalidArgumentError
from keras_strategies.keras_compat.models.growth import grow_layer
from keras_strategies.keras_compat.optimizers.optimizer_parts import trained_variables
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.hosted_variables import host_of, is_hosted
from keras_strategies.training.id_table import IdTable, keys_of
from keras_strategies.training.row_initializer import (
    RowInitializer,
    initial_rows,
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

    Ids that have been seen often enough get rows: between two calls of `fit` by
    `adapt`, which counts the ids of a part of a stream, or within `fit` by
    `ks.callbacks.AdmitIds`, which counts those of each batch. `rows` turns ids into the
    numbers of their rows, which are the input of the layer; `expire` frees rows, and
    `grow` makes the table larger. The row 0 is that of all ids without one, and is
    trained as the others are.

    Free rows are given from the first to the last, and a row's initial values follow
    from its number and the initializer's seed. So the same stream gives the same
    numbers under every strategy, on every backend. What is known of ids are
    variables of the layer, 16 bytes for each row: files, checkpoints and the snapshots
    of parameter servers have them.

    Args:
        capacity: int, rows, the row 0 included.
        dim: int, columns.
        admit: int, how often an id must be seen to get a row. With more than 1, as many
            ids again as `capacity` are counted without one; where they are more, those
            that were not seen for longest are forgotten.
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
    ...     if table.used > 0.9 * table.capacity:
    ...         table.grow(2 * table.capacity, model)
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
        own = with_seed(keras.initializers.get(initializer))
        by_row = RowInitializer(own)
        super().__init__(capacity, dim, embeddings_initializer=by_row, **kwargs)
        if capacity < 2 or not isinstance(admit, int) or admit < 1:
            raise InvalidArgumentError(
                "`capacity` must be at least 2 and `admit` at least 1. Received: "
                f"capacity={capacity}, admit={admit}"
            )
        self.dim, self.admit, self.initializer = dim, admit, own

    def build(self, input_shape: Any = None) -> None:
        if self.built:
            return
        super().build(input_shape)
        # "none": steps do not use them, and servers do not send them.
        options = {"dtype": "int32", "trainable": False, "synchronization": "none"}
        count = self.capacity * (1 if self.admit == 1 else 2)
        shapes = {"entries": (count, 4), "state": (3,)}
        self.entries, self.state = (
            keras.Variable(keras.initializers.Zeros(), shape, name=name, **options)
            for name, shape in shapes.items()
        )

    @property
    def capacity(self) -> int:
        """int, rows, the row 0 included."""
        return self.input_dim

    @property
    def used(self) -> int:
        """int, rows that ids have, without the row 0."""
        return len(self.id_table("used").used[0])

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
            ValueError: if workers give different ids, or their seeds differ.
            RuntimeError: under a strategy with elastic workers.
        """
        keys, places = keys_of(ids)
        return self._count([(keys, np.bincount(places.reshape(-1)))], "adapt", 0)

    def count_batches(self, rounds: list[tuple[np.ndarray, np.ndarray]]) -> int:
        """As `adapt`, with the ids of each of several batches of `fit`.

        Args:
            rounds: list of pairs: different ids, int64, and how often each was seen.
        """
        return self._count(rounds, "AdmitIds", len(rounds))

    def _count(self, rounds: list[Any], name: str, batches: int) -> int:
        table = self.id_table(name)
        before = table.entries.copy()
        found = [table.see(keys, counts, self.admit) for keys, counts in rounds]
        table.state[2] += batches
        self._write(before, table, [])
        refused = max((each for _, each in found), default=0)
        if refused:
            warn_user(
                f"{refused:,} ids get no row in {self.name!r}: all {self.capacity:,} "
                "are in use. Call `expire` or `grow`, or give `AdmitIds` "
                "`max_capacity` or `unseen`."
            )
        return sum(new for new, _ in found)

    def expire(
        self,
        optimizer: Any,
        unseen: int | None = None,
        fewer_than: int | None = None,
    ) -> int:
        """Frees the rows of ids; if they come again, they begin again.

        Call it between two calls of `fit`.

        Args:
            optimizer: the optimizer that trains the layer; None without one. Its slots
                of these rows begin again.
            unseen: int, frees rows of ids that were not in the last so many calls of
                `adapt` and batches of `ks.callbacks.AdmitIds`.
            fewer_than: int, frees rows of ids that have been seen fewer times.

        Returns:
            int, the number of rows.
        """
        table = self.id_table("expire")
        before = table.entries.copy()
        rows = table.expire(unseen, fewer_than)
        initial = initial_rows(self.initializer, rows, self.dim)
        writes = [(self.embeddings, rows, initial)]
        for slot, initial in _slots(optimizer, self.embeddings):
            writes.append((slot, rows, initial))
        self._write(before, table, writes)
        return len(rows)

    def grow(self, capacity: int, model: Any = None) -> None:
        """Gives the table more rows; those in use keep their values and slots.

        The numbers are then those of a table that had this capacity from the begin, if
        it has not been full. Call it between two calls of `fit`: the layer gets other
        variables, and the model an optimizer with slots for them, so the next steps
        are compiled again. Both tables take memory until this returns.

        Args:
            capacity: int, rows, the row 0 included.
            model: the model that trains the layer; None without one.

        Raises:
            ValueError: if `capacity` is not larger than the present one, or the model
                does not have the layer.
        """
        if capacity <= self.capacity:
            raise InvalidArgumentError(
                f"`grow` makes a table larger. Received: capacity={capacity}, and "
                f"{self.name!r} has {self.capacity:,} rows. `expire` frees rows."
            )
        table = self.id_table("grow").grown(capacity)
        strategy = strategy_of(self.entries)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            pairs = grow_layer(self, {"input_dim": capacity}, model)

            def write() -> None:
                for old, new in pairs:
                    _copy_rows(old, new)
                _set_rows(self.entries, np.arange(len(table.entries)), table.entries)
                _set_rows(self.state, np.arange(len(table.state)), table.state)

            self._durably(write)
        _tables[self] = table

    def rows(self, ids: Any) -> np.ndarray:
        """The rows of ids, the input of this layer; 0 for ids without one.

        Args:
            ids: array or tensor of integers or strings, of any shape.

        Returns:
            int32 array of the same shape.
        """
        table = self.id_table("rows")
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
        found = np.asarray(self.id_table("export").used[1] if ids is None else ids)
        every = keras.ops.convert_to_numpy(self.embeddings)
        return found, np.asarray(every)[self.rows(found)]

    def id_table(self, name: str) -> IdTable:
        """What the variables have of ids.

        Args:
            name: str, of what uses it, for errors.
        """
        if not self.built:
            self.build()
        strategy = strategy_of(self.entries)
        workers = None if strategy is None else strategy.workers
        if workers is not None and not workers.actions.is_fixed:
            raise ContextError(
                f"`{name}` of {self.name!r} was called under "
                f"{type(strategy).__name__} with `elastic`: a worker that joins has "
                "not seen the ids. Leave out `elastic`, or use parameter servers."
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
            (self.state, np.arange(len(table.state)), table.state),
        ]

        def write() -> None:
            for variable, places, values in writes:
                _set_rows(variable, places, values)

        # What is not written completely is read again.
        _tables.pop(self, None)
        self._agree(table)
        self._durably(write)
        _tables[self] = table

    def _agree(self, table: IdTable) -> None:
        """Checks that all workers know the same ids and give rows the same values."""
        strategy = strategy_of(self.entries)
        if strategy is not None and strategy.workers is not None:
            found = {
                "rounds and checksum": table.state.tolist(),
                "seed": getattr(self.initializer, "seed", None),
            }
            what = f"the ids of {self.name!r} and its initializer"
            strategy.workers.group.agree(what, found)

    def _durably(self, write: Any) -> None:
        if is_hosted(self.entries):
            host_of(self.entries).write_durably(write)
        else:
            write()


def _copy_rows(old: Any, new: Any) -> None:
    """Assigns the value of a variable to another one, which may have more rows."""
    if is_hosted(old) and len(old.shape):
        host = host_of(old)
        host_of(new).write_pieces(new, host.pieces(old))
        return
    value = keras.ops.convert_to_numpy(old)
    if tuple(old.shape) == tuple(new.shape):
        new.assign(value)
    else:
        _set_rows(new, np.arange(len(value)), value)


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

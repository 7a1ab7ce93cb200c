"""Variables on one parameter server, and the updates applied to them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from keras_strategies.errors import PeerError
from keras_strategies.parameter_server.server.changed_rows import ChangedRows
from keras_strategies.parameter_server.wire.arrays.row_arrays import (
    Empty,
    put_rows,
    take_rows,
)
from keras_strategies.parameter_server.wire.step_messages import Key, UpdateId


@dataclass
class AppliedUpdates:
    """Names of the applied updates, so that each is applied once.

    A task that runs again after its worker died sends the same names. Names of finished
    tasks are discarded.
    """

    steps: dict[int, int] = field(default_factory=dict)
    #: Tasks below this number are finished.
    done: int = 0
    #: The number of the last request of each sender outside of tasks.
    requests: dict[str, int] = field(default_factory=dict)

    def is_new(self, update: UpdateId) -> bool:
        task, number = update
        return task >= self.done and self.steps.get(task, -1) < number

    def add(self, update: UpdateId) -> None:
        task, number = update
        self.steps[task] = number

    def is_new_request(self, sender: str, number: int) -> bool:
        """Records a request; returns whether it is new."""
        if self.requests.get(sender, -1) >= number:
            return False
        self.requests[sender] = number
        return True

    def discard_below(self, task: int) -> None:
        if task > self.done:
            self.done = task
            self.steps = {t: s for t, s in self.steps.items() if t >= task}


class VariableStore:
    """Shards of variables, updated in place where possible.

    Args:
        changes: notes changes for snapshots; None without them.
    """

    def __init__(self, changes: ChangedRows | None = None) -> None:
        #: Changed only by the methods, which note it.
        self.arrays: dict[Key, np.ndarray] = {}
        self.changes = changes
        self.applied = AppliedUpdates()
        #: Number of applied updates.
        self.version = 0

    def create(self, key: Key, value: np.ndarray) -> None:
        """Creates a shard, unless it exists: requests may be repeated."""
        if key not in self.arrays:
            array = np.asarray(value, order="C")
            # An array of a message is a view of it.
            is_own = array.flags.owndata and array.flags.writeable
            self.arrays[key] = array if is_own else np.array(array)

    def get(self, key: Key) -> np.ndarray:
        """The array of a shard.

        Raises:
            RuntimeError: `PeerError` if there is no such shard.
        """
        try:
            return self.arrays[key]
        except KeyError:
            raise PeerError(
                f"This parameter server has no shard {key}; it has "
                f"{len(self.arrays)} shards."
            ) from None

    def delete(self, key: Key) -> None:
        """Deletes a shard, if there is one."""
        if self.arrays.pop(key, None) is not None and self.changes is not None:
            self.changes.forget(key)

    def before_change(self, key: Key, rows: slice | np.ndarray | None = None) -> None:
        """Notes that rows of a shard, or all, will be changed in place."""
        if self.changes is not None:
            self.changes.before_change(key, rows)

    def replace(self, key: Key, array: np.ndarray) -> None:
        """Uses another array as the value of a shard."""
        if self.changes is not None:
            self.changes.replaced(key)
        self.arrays[key] = array

    def _own(self, key: Key, rows: slice | np.ndarray | None = None) -> np.ndarray:
        """The array of a shard, writable, before a change of rows, or of all.

        After an update it may be read-only memory of the framework; it is copied then.
        """
        self.before_change(key, rows)
        array = self.get(key)
        if not array.flags.writeable:
            array = self.arrays[key] = np.array(array)
        return array

    def write(self, key: Key, value: np.ndarray, start: int = 0) -> None:
        """Writes consecutive rows of a shard, or a scalar."""
        if self.get(key).ndim == 0:
            self._own(key)[...] = value
        else:
            rows = slice(start, start + len(value))
            self._own(key, rows)[rows] = value

    def write_rows(self, key: Key, ids: np.ndarray, rows: np.ndarray) -> None:
        """Writes some rows of a shard."""
        put_rows(self._own(key, ids), ids, rows)

    def add(self, key: Key, delta: np.ndarray) -> None:
        """Adds to a shard."""
        array = self._own(key)
        if array.dtype == bool:
            array[...] = delta
        else:
            array += delta

    def rows(
        self, key: Key, ids: np.ndarray, count: int, empty: Empty | None = None
    ) -> np.ndarray:
        """Copies of some rows of a shard (see `take_rows`)."""
        return take_rows(self.get(key), ids, count, empty)

    @property
    def nbytes(self) -> int:
        """int, bytes of all shards."""
        return sum(array.nbytes for array in self.arrays.values())

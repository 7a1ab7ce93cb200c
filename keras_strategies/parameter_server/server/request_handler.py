"""Requests to a parameter server, handled one after the other."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import pickle
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_strategies.errors import PeerError, SnapshotError
from keras_strategies.parameter_server.engines import parameter_server_engine
from keras_strategies.parameter_server.server.changed_rows import ChangedRows
from keras_strategies.parameter_server.server.optimizer_updater import OptimizerUpdater
from keras_strategies.parameter_server.server.snapshots import SnapshotFiles
from keras_strategies.parameter_server.server.variable_store import VariableStore
from keras_strategies.parameter_server.variables.initial_values import (
    ShardInitializer,
)
from keras_strategies.parameter_server.wire.arrays.array_messages import COPY_BYTES
from keras_strategies.parameter_server.wire.arrays.row_arrays import (
    Empty,
    empty_aligned,
)
from keras_strategies.parameter_server.wire.step_messages import (
    Key,
    StepReply,
    StepRequest,
)

#: Most seconds between calls of `idle`.
_IDLE_SECONDS = 0.2
#: Fraction of the snapshot interval after which the next snapshot starts.
_EARLY = 0.7


class ParameterServer:
    """Handler of requests to a variable store.

    Args:
        index: int, the number of this server.
        snapshots: folder for snapshots, None for none.
        interval: float, seconds between snapshots.
    """

    def __init__(
        self, index: int, snapshots: str | None = None, interval: float | None = None
    ):
        self._index = index
        self._process = secrets.token_hex(8)
        self._engine = parameter_server_engine()
        self._updaters: dict[int, OptimizerUpdater] = {}
        self._optimizers: dict[int, bytes] = {}
        # Name of the coordinator that owns the variables.
        self._owner: str | None = None
        # Of shards without the values of all rows.
        self._initializers: dict[Key, ShardInitializer] = {}
        self._snapshots = SnapshotFiles(snapshots, index) if snapshots else None
        self._store = self._new_store()
        self._interval = interval
        self._saved_at = time.monotonic()
        self._saved_version = -1
        # The version that a snapshot has which is being written.
        self._begun_version = -1
        # Whether shards or optimizers are in neither snapshot nor journal; and whether
        # some are since the snapshot that is being written has begun.
        self._is_incomplete = False
        self._has_lost_notes = False
        self._has_failed = False
        #: Messages for the coordinator: `("snapshots", (index, problem, restorable))`.
        self.notices: collections.deque[tuple[str, Any]] = collections.deque()
        #: str, damaged files found at the start; "" for none.
        self.damage = ""
        self.is_restored = self._restore()
        self.is_stopped = False

    def _new_store(self) -> VariableStore:
        return VariableStore(None if self._snapshots is None else ChangedRows())

    def _restore(self) -> bool:
        """Restores the files of an earlier process; returns whether there were any."""
        if self._snapshots is None:
            return False
        try:
            found = self._snapshots.load()
        except SnapshotError as error:
            self.damage = error.text
            return False
        if found is None:
            return False
        self._store, self.damage = found.store, found.damage
        self._store.changes = ChangedRows()
        if found.extra is not None:
            self._owner, self._optimizers = found.extra
            for number in self._optimizers:
                self._make_updater(number)
        for kind, value in found.events:
            if kind == "owner":
                self._owner = value
            elif kind == "shards":
                self._create(value)
            elif kind == "deleted":
                self._delete(value)
            elif kind == "released":
                self._release(value)
            else:
                self._optimizers[value[0]] = value[1]
                self._make_updater(value[0])
        return self._owner is not None

    def handle(self, message: tuple[Any, ...], empty: Empty = empty_aligned) -> Any:
        """Handles a request.

        Args:
            message: name of a method, its argument, optionally the coordinator's name.
            empty: allocator of arrays for the reply to a step.
        """
        name, argument, *owner = message
        if owner and self._owner is not None and owner[0] != self._owner:
            raise PeerError(
                f"Parameter server {self._index} is used by another coordinator now: "
                f"it is owned by {self._owner!r}, and the request is of {owner[0]!r}. "
                "Run one coordinator per cluster."
            )
        if name == "step":
            return self.on_step(argument, empty)
        method: Callable[[Any], Any] = getattr(self, f"on_{name}")
        return method(argument)

    def on_step(self, step: StepRequest, empty: Empty = empty_aligned) -> StepReply:
        """Applies the update, unless it has been applied, and replies with values."""
        store = self._store
        store.applied.discard_below(step.done)
        if step.update is not None and store.applied.is_new(step.update):
            self._push(step)
        return self._pulled(step, empty)

    def _push(self, step: StepRequest) -> None:
        store = self._store
        for number, dense, rows in step.optimizers:
            self._updater(number).apply(dense, rows)
        for key, delta in step.adds:
            store.add(key, delta)
        for key, value in step.writes:
            store.write(key, value)
        assert step.update is not None
        store.applied.add(step.update)
        store.version += 1

    def _pulled(self, step: StepRequest, empty: Empty) -> StepReply:
        store = self._store
        dense = [store.get(key) for key in step.pull]
        if self._engine.updates_in_place:
            # The reply may still be in transit when the next update starts.
            dense = [_copy(a, empty) if a.nbytes >= COPY_BYTES else a for a in dense]
        rows = [store.rows(*wanted, empty) for wanted in step.pull_rows]
        return StepReply(dense, rows, store.version)

    def on_begin(self, owner: str) -> None:
        """Assigns this server to a coordinator; clears the state of another one."""
        if self._owner == owner:
            return
        if self._snapshots is not None:
            self._attempt(self._snapshots.clear)
        self._store = self._new_store()
        self._updaters, self._optimizers, self._initializers = {}, {}, {}
        self._owner = owner
        self._note("owner", owner)

    def _note(self, kind: str, value: Any) -> None:
        snapshots = self._snapshots
        if snapshots is not None:
            self._attempt(lambda: snapshots.note(kind, value))

    @property
    def _extra(self) -> tuple[Any, ...]:
        return self._owner, self._optimizers

    def _attempt(self, write: Callable[[], Any]) -> None:
        """Writes to the journal; after a failure a snapshot is due."""
        try:
            write()
        except SnapshotError as error:
            self._is_incomplete = self._has_lost_notes = True
            self._report(error.text)

    def _report(self, problem: str | None) -> None:
        """Reports a snapshot problem to the coordinator; None after recovery."""
        if problem is None and not self._has_failed:
            return
        self._has_failed = problem is not None
        value = (self._index, problem, not self._is_incomplete)
        self.notices.append(("snapshots", value))

    def on_create(self, shards: list[tuple[Key, Any]]) -> None:
        """Creates shards: pairs of a key and an array or a pickled initializer."""
        new = [(key, value) for key, value in shards if key not in self._store.arrays]
        for key, value in new:
            if isinstance(value, bytes):
                initializer = pickle.loads(value)
                value = initializer.empty()
                first, *following = initializer.requests()
                initializer.fill(value, *first)
                if following:
                    self._initializers[key] = initializer
            self._store.create(key, value)
        self._note("shards", new)

    def on_initialize(self, argument: tuple[Key, int, int]) -> None:
        """Computes initial values of consecutive rows, until those of the last ones.

        After a restart all rows have them, from the journal.
        """
        key, first, last = argument
        initializer = self._initializers.get(key)
        if initializer is None:
            return
        initializer.fill(self._store.get(key), first, last)
        if last == initializer.rows:
            del self._initializers[key]

    def _initialize_all(self) -> None:
        """Computes what is missing of shards, which a snapshot would not have."""
        for key, initializer in self._initializers.items():
            initializer.fill(self._store.get(key), 0, initializer.rows)
        self._initializers.clear()

    def _create(self, shards: list[tuple[Key, Any]]) -> None:
        for key, value in shards:
            if isinstance(value, bytes):
                value = pickle.loads(value)()
            self._store.create(key, value)

    def on_optimizer(self, argument: tuple[int, bytes]) -> None:
        """Creates the updater of a pickled `OptimizerSpec`."""
        number, blob = argument
        self._optimizers[number] = blob
        self._make_updater(number)
        self._note("optimizer", argument)

    def _make_updater(self, number: int) -> None:
        spec = pickle.loads(self._optimizers[number])()
        self._updaters[number] = OptimizerUpdater(spec, self._store, self._engine)

    def _updater(self, number: int) -> OptimizerUpdater:
        if number not in self._updaters:
            raise PeerError(
                f"Parameter server {self._index} has no optimizer {number}."
            )
        return self._updaters[number]

    # Shards of other servers

    def on_read(self, argument: tuple[Key, int, int]) -> np.ndarray:
        """Consecutive rows of a shard; the value of a scalar."""
        key, start, stop = argument
        array = self._store.get(key)
        return array if array.ndim == 0 else array[start:stop]

    def on_write(self, argument: tuple[Key, int, np.ndarray]) -> None:
        """Writes consecutive rows of a shard."""
        key, start, value = argument
        self._store.write(key, value, start)
        self._store.version += 1

    def on_add(self, argument: tuple[Key, np.ndarray, str, int]) -> None:
        """Adds to a shard, once for each sender and request number."""
        key, delta, sender, number = argument
        if self._store.applied.is_new_request(sender, number):
            self._store.add(key, delta)
            self._store.version += 1

    def on_delete(self, keys: list[Key]) -> None:
        """Deletes shards of variables that no longer exist."""
        self._delete(keys)
        self._note("deleted", keys)

    def _delete(self, keys: list[Key]) -> None:
        for key in keys:
            self._store.delete(key)
            self._initializers.pop(key, None)

    def on_release(self, number: int) -> None:
        """Deletes an optimizer that no longer exists."""
        self._release(number)
        self._note("released", number)

    def _release(self, number: int) -> None:
        self._optimizers.pop(number, None)
        self._updaters.pop(number, None)

    def on_snapshot(self, argument: None = None) -> str:
        """Writes a snapshot and returns its path."""
        if self._snapshots is None:
            raise PeerError(
                f"Parameter server {self._index} has no snapshot folder. Create the "
                "strategy with `snapshot_seconds`, or `ks.Server` with "
                "`snapshot_folder`."
            )
        # If that one cannot be written, this one says so.
        with contextlib.suppress(SnapshotError):
            self._finish_snapshot(waits=True)
        self._begin_snapshot()
        self._finish_snapshot(waits=True)
        return str(self._snapshots.path)

    def on_flush(self, is_written: bool) -> str:
        """Writes a snapshot, if wanted and possible; returns a name of this process."""
        if is_written and self._snapshots is not None:
            self.on_snapshot()
        return self._process

    def _begin_snapshot(self) -> None:
        """Begins a snapshot, unless the last one has the present state."""
        assert self._snapshots is not None
        self._saved_at = time.monotonic()
        if self._store.version == self._saved_version and not self._is_incomplete:
            self._report(None)
            return
        self._has_lost_notes = False
        self._initialize_all()
        self._snapshots.begin(self._store, self._extra)
        self._begun_version = self._store.version

    def _finish_snapshot(self, waits: bool) -> None:
        """Publishes a snapshot if it has been written."""
        assert self._snapshots is not None
        if self._snapshots.is_writing and self._snapshots.finish(waits):
            self._saved_version = self._begun_version
            self._is_incomplete = self._has_lost_notes
            if not self._is_incomplete:
                self._report(None)

    def on_status(self, argument: None = None) -> dict[str, Any]:
        """Statistics for `coordinator.status()`."""
        return {
            "nbytes": self._store.nbytes,
            "shards": len(self._store.arrays),
            "optimizers": len(self._optimizers),
            "version": self._store.version,
            "restored": self.is_restored,
            "pid": os.getpid(),
        }

    def on_stop(self, argument: None = None) -> None:
        """Ends the process after the reply."""
        if self._snapshots is not None:
            self._snapshots.abort()
        self.is_stopped = True

    def idle(self) -> None:
        """Begins a snapshot if one is due, or publishes it; called periodically."""
        if self._snapshots is None or self._interval is None or self._owner is None:
            return
        try:
            self._finish_snapshot(waits=False)
            # Early, so that the snapshot is complete within the interval.
            is_due = time.monotonic() - self._saved_at >= _EARLY * self._interval
            if is_due and not (self._snapshots.is_writing or self._initializers):
                self._begin_snapshot()
        except SnapshotError as error:
            self._report(error.text)

    @property
    def idle_seconds(self) -> float:
        """float, seconds between calls of `idle`."""
        interval = math.inf if self._interval is None else self._interval
        return min(_IDLE_SECONDS, interval / 10)


def _copy(array: np.ndarray, empty: Empty) -> np.ndarray:
    copy = empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy

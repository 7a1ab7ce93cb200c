"""Connections to all parameter servers: requests by shard."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_strategies.errors import ReplicaError, WorkerError
from keras_strategies.parameter_server.wire.cluster_keys import Keys
from keras_strategies.parameter_server.wire.request_connection import Connection
from keras_strategies.parameter_server.wire.row_indexing import (
    indexed,
    indexed_by_rows,
)
from keras_strategies.parameter_server.wire.server_addresses import ServerAddresses
from keras_strategies.parameter_server.wire.step_messages import StepReply, StepRequest
from keras_strategies.parameter_server.wire.variable_description import (
    ShardRange,
    VariableDescription,
)

_CHUNK_BYTES = 32 << 20
#: Pieces of a variable that servers send while one is used.
_PIECES_AHEAD = 2


class ServerConnections:
    """Connections to all parameter servers.

    Args:
        addresses: `ServerAddresses`; the connections follow its changes.
        keys: `Keys` for TCP.
        timeout: float, timeout in seconds for a server's reply, including a restart.
        owner: str, the coordinator's name; servers refuse steps of another one.
        check: called periodically while waiting; raises to end the wait.
    """

    def __init__(
        self,
        addresses: ServerAddresses,
        keys: Keys | None,
        timeout: float,
        owner: str | None = None,
        check: Callable[[], None] | None = None,
    ):
        self.owner = owner
        self._connections = [
            Connection(
                functools.partial(addresses.__getitem__, server),
                keys,
                f"parameter server {server}",
                check,
            )
            for server in range(len(addresses))
        ]
        self._timeout = timeout
        self._is_closed = False
        # Callbacks may run in other threads than `fit`.
        self._lock = threading.RLock()
        # Name of this sender: servers apply each of its numbered additions once.
        self._name = secrets.token_hex(8)
        self._additions = itertools.count()

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        sent = sum(connection.sent_bytes for connection in self._connections)
        received = sum(connection.received_bytes for connection in self._connections)
        return sent, received

    def request(self, server: int, name: str, argument: Any = None) -> Any:
        """Sends a request to one server and waits for the reply."""
        with self._lock:
            self._check_open()
            return self._connections[server].request((name, argument), self._timeout)

    def request_all(self, name: str, arguments: dict[int, Any]) -> dict[int, Any]:
        """Sends a request to each of several servers and waits for the replies."""
        with self._lock:
            self._check_open()
            numbers = {
                server: self._connections[server].begin((name, argument))
                for server, argument in arguments.items()
            }
            return {
                server: self._connections[server].finish(number, self._timeout)
                for server, number in numbers.items()
            }

    def send_steps(
        self, steps: dict[int, StepRequest], shares_memory: bool = True
    ) -> dict[int, int]:
        """Sends each server its part of a step; returns the request numbers.

        Args:
            steps: by server.
            shares_memory: bool, as for `Connection.begin`.
        """
        with self._lock:
            return {
                server: self._connections[server].begin(
                    ("step", step, self.owner), shares_memory
                )
                for server, step in steps.items()
            }

    def is_shared(self, array: np.ndarray) -> bool:
        """Whether an array is in shared memory that a server will reuse."""
        return any(connection.is_shared(array) for connection in self._connections)

    def receive_steps(self, numbers: dict[int, int]) -> dict[int, StepReply]:
        """The replies of the servers."""
        with self._lock:
            return {
                server: self._connections[server].finish(number, self._timeout)
                for server, number in numbers.items()
            }

    def _check_open(self) -> None:
        if self._is_closed:
            raise WorkerError(
                "The cluster of this strategy has been closed, which deleted its "
                "variables. Save the model before `close()` or the end of the `with` "
                "block."
            )

    # Unsharded values

    def pieces(
        self, description: VariableDescription
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Pieces of a variable: the first row of each, and its rows.

        Servers take turns, and send the next ones while a piece is used.
        """
        shards = description.shards[: 1 if description.kind == "scalar" else None]
        ranges = [
            [(shard, start, stop) for start, stop in _ranges(description, shard)]
            for shard in shards
        ]
        turns = itertools.chain(*itertools.zip_longest(*ranges))
        wanted = (piece for piece in turns if piece is not None)
        begun: collections.deque[tuple[ShardRange, int, int]] = collections.deque()
        try:
            for shard, start, stop in wanted:
                key = (description.number, shard.start)
                request = self._begin(shard.server, "read", (key, start, stop))
                begun.append((shard, start, request))
                if len(begun) > _PIECES_AHEAD:
                    yield self._piece(*begun.popleft())
            while begun:
                yield self._piece(*begun.popleft())
        finally:
            for piece in begun:
                # Of a reader that has ended early, or an error.
                with contextlib.suppress(ReplicaError):
                    self._piece(*piece)

    def _begin(self, server: int, name: str, argument: Any) -> int:
        with self._lock:
            self._check_open()
            return self._connections[server].begin((name, argument))

    def _piece(
        self, shard: ShardRange, start: int, request: int
    ) -> tuple[int, np.ndarray]:
        with self._lock:
            connection = self._connections[shard.server]
            return shard.start + start, connection.finish(request, self._timeout)

    def read(self, description: VariableDescription) -> np.ndarray:
        """Reads a variable in full."""
        found: np.ndarray | None = None
        for start, rows in self.pieces(description):
            if found is None:
                # A view of a message would hold its memory, which is read-only.
                found = np.empty(description.shape, rows.dtype)
            if found.ndim:
                found[start : start + len(rows)] = rows
            else:
                found[...] = rows
        assert found is not None
        return found

    def write(self, description: VariableDescription, value: np.ndarray) -> None:
        """Writes a variable in full."""
        if value.ndim == 0:
            for shard in description.shards:
                key = (description.number, shard.start)
                self.request(shard.server, "write", (key, 0, value))
            return
        step = max(1, _CHUNK_BYTES // max(1, _row_bytes(description)))
        for start in range(0, description.shape[0], step):
            self.write_rows(description, start, value[start : start + step])

    def write_rows(
        self, description: VariableDescription, start: int, rows: np.ndarray
    ) -> None:
        """Writes consecutive rows to their shards."""
        stop = start + len(rows)
        for shard in description.shards:
            first, last = max(start, shard.start), min(stop, shard.stop)
            if first < last:
                key = (description.number, shard.start)
                own = np.ascontiguousarray(
                    rows[first - start : last - start], array_dtype(description)
                )
                self.request(shard.server, "write", (key, first - shard.start, own))

    def add(self, description: VariableDescription, delta: np.ndarray) -> None:
        """Adds to a variable, shard by shard."""
        for shard in description.shards:
            rows = delta if delta.ndim == 0 else delta[shard.start : shard.stop]
            key = (description.number, shard.start)
            # Numbered, because a request without a reply is sent again.
            request = (
                key,
                np.ascontiguousarray(rows),
                self._name,
                next(self._additions),
            )
            self.request(shard.server, "add", request)

    def read_slice(self, description: VariableDescription, index: Any) -> np.ndarray:
        """The part of a variable that NumPy indexing selects; reads only its rows."""
        found = None
        if description.shape:
            found = indexed_by_rows(
                index, description.shape[0], lambda ids: self.rows(description, ids)
            )
        return indexed(index, self.read(description)) if found is None else found

    def rows(self, description: VariableDescription, ids: np.ndarray) -> np.ndarray:
        """Some rows of a variable, in the order of the ids."""
        found = np.empty((len(ids), *description.shape[1:]), array_dtype(description))
        for shard in description.shards:
            here = (ids >= shard.start) & (ids < shard.stop)
            if here.any():
                key = (description.number, shard.start)
                own = ids[here] - shard.start
                step = StepRequest(pull_rows=((key, own, len(own)),))
                found[here] = self.request(shard.server, "step", step).rows[0]
        return found

    def close(self) -> None:
        """Closes the connections."""
        with self._lock:
            self._is_closed = True
            for connection in self._connections:
                connection.close()


def _ranges(
    description: VariableDescription, shard: ShardRange
) -> Iterator[tuple[int, int]]:
    """First and last rows (exclusive), in a shard, of its pieces."""
    step = max(1, _CHUNK_BYTES // max(1, _row_bytes(description)))
    for start in range(0, max(shard.rows, 1), step):
        yield start, min(start + step, shard.rows)


def _row_bytes(description: VariableDescription) -> int:
    itemsize = array_dtype(description).itemsize
    return int(np.prod(description.shape[1:], dtype=np.int64)) * itemsize


def array_dtype(description: VariableDescription) -> np.dtype[Any]:
    """The dtype of a variable's arrays."""
    if description.dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(description.dtype)

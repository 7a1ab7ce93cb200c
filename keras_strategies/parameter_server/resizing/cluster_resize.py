"""`ClusterCoordinator.resize`: shards move to another number of servers.

The coordinator has the placement of shards. It copies shards to their new servers,
which stage them until all are complete, adopt them and write a snapshot. Then the
coordinator changes its placement, sends it to each worker before the next task, and
deletes the old copies. Until that change, a failure leaves everything as it was.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_strategies.errors import InvalidArgumentError, PeerError
from keras_strategies.parameter_server.coordinator.process_cluster import ProcessCluster
from keras_strategies.parameter_server.coordinator.remote_functions import (
    RemoteFunctions,
)
from keras_strategies.parameter_server.resizing.shard_assignment import (
    assign,
    new_shards,
    shard_groups,
)
from keras_strategies.parameter_server.variables.variable_registry import (
    VariableRegistry,
)
from keras_strategies.parameter_server.wire.server_connections import ServerConnections
from keras_strategies.parameter_server.wire.step_messages import Key
from keras_strategies.parameter_server.wire.variable_description import (
    ShardRange,
    VariableDescription,
)

#: Attempts at the transfer to a server that restarts during each of them.
_ATTEMPTS = 4


@dataclass(frozen=True)
class _Move:
    """A shard that moves.

    Args:
        description: of its variable.
        shard: its rows and its present server.
        target: int, its new server.
    """

    description: VariableDescription
    shard: ShardRange
    target: int

    @property
    def key(self) -> Key:
        return self.description.number, self.shard.start


class ClusterResize:
    """One change of the number of servers.

    Args:
        cluster: the processes.
        registry: the variables.
        functions: the functions of workers.
    """

    def __init__(
        self,
        cluster: ProcessCluster,
        registry: VariableRegistry,
        functions: RemoteFunctions,
    ):
        assert cluster.servers is not None
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        self._registry = registry
        self._functions = functions
        self._servers: ServerConnections = cluster.servers
        # Distinguishes this transfer from others on the servers.
        self._token = secrets.token_hex(8)
        self._moves: list[_Move] = []

    def run(self, count: int) -> None:
        """Changes the number of servers.

        Args:
            count: int, the new number.
        """
        _check(count, self._cluster)
        self._scheduler.tasks.wait_until_done()
        self._functions.release()
        before = len(self._servers)
        if count == before:
            return
        with self._registry.lock, self._scheduler.paused():
            added = range(before, count)
            try:
                if added:
                    self._cluster.add_servers(count)
                shards = self._transfer(count, added)
            except BaseException:
                self._cluster.remove_servers(before)
                # Copies on servers that remain.
                with contextlib.suppress(Exception):
                    self._delete([(m.target, m.key) for m in self._moves])
                raise
            self._change(count, shards)

    def _transfer(self, count: int, added: range) -> dict[int, tuple[ShardRange, ...]]:
        """Copies shards to their new servers; returns those of each variable."""
        described = self._registry.descriptions()
        groups = shard_groups(described, self._registry.homes)
        shards = new_shards(described, groups, assign(groups, count), count)
        self._moves = moves = [
            _Move(description, old, new.server)
            for number, description in described.items()
            if description.kind not in ("local", "scalar")
            for old, new in zip(description.shards, shards[number], strict=True)
            if old.server != new.server
        ]
        # Servers refuse late messages of lost workers from here on, and a server that
        # dies is restored with all updates.
        done = self._scheduler.first_unfinished()
        present = [i for i in range(len(self._servers)) if i not in added]
        self._servers.request_all("settle", dict.fromkeys(present, done))
        targets = {*added, *(move.target for move in moves)}
        for server in sorted(targets):
            own = [move for move in moves if move.target == server]
            self._fill(server, own, described if server in added else {}, done)
        # From here on, the death of these servers loses variables.
        self._scheduler.use_servers()
        for server in sorted(targets):
            if not self._servers.request(server, "has_adopted", self._token):
                own = [move for move in moves if move.target == server]
                self._fill(server, own, described if server in added else {}, done)
        return shards

    def _fill(
        self,
        server: int,
        moves: list[_Move],
        new_scalars: Mapping[int, VariableDescription],
        done: int,
    ) -> None:
        """Copies shards to a server, again if it is restarted meanwhile.

        Args:
            server: int.
            moves: of shards to this server.
            new_scalars: the variables, of which a new server receives the scalars;
                empty for a server that has them.
            done: int, all tasks below this number are finished.
        """
        for attempt in range(_ATTEMPTS):
            try:
                if new_scalars:
                    self._begin(server, new_scalars, done)
                for move in moves:
                    self._copy(move)
                keys = [move.key for move in moves]
                self._servers.request(server, "adopt", (self._token, keys))
                return
            except PeerError:
                if attempt == _ATTEMPTS - 1:
                    raise

    def _begin(
        self, server: int, described: Mapping[int, VariableDescription], done: int
    ) -> None:
        """Sends a new server the scalars and the optimizers."""
        self._servers.request(server, "renew", self._cluster.name)
        self._servers.request(server, "settle", done)
        scalars = [
            ((number, 0), self._servers.read(description))
            for number, description in described.items()
            if description.kind == "scalar"
        ]
        self._servers.request(server, "create", scalars)
        optimizers: dict[int, Any] = self._servers.request(0, "optimizers")
        for optimizer in optimizers.items():
            self._servers.request(server, "optimizer", optimizer)

    def _copy(self, move: _Move) -> None:
        request, is_first = self._servers.request, True
        for start, rows in self._servers.pieces_of(move.description, move.shard):
            if is_first:
                shape = (move.shard.rows, *rows.shape[1:]) if rows.ndim else ()
                request(move.target, "stage", (move.key, shape, rows.dtype))
                is_first = False
            request(move.target, "fill", (move.key, start, rows))

    def _change(self, count: int, shards: dict[int, tuple[ShardRange, ...]]) -> None:
        """Uses the new servers, and deletes the moved shards on the old ones."""
        self._registry.move_shards(shards, count)
        if count < len(self._servers):
            self._cluster.remove_servers(count)
        self._cluster.place(shards)
        self._delete([(move.shard.server, move.key) for move in self._moves])

    def _delete(self, shards: Sequence[tuple[int, Key]]) -> None:
        """Deletes shards from servers, unless the server has been removed."""
        old: dict[int, list[Key]] = {}
        for server, key in shards:
            if server < len(self._servers):
                old.setdefault(server, []).append(key)
        self._servers.request_all("delete", old)


def _check(count: int, cluster: ProcessCluster) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidArgumentError(
            "`ps` must be a number of parameter servers, 1 or more. Received: "
            f"{count!r}"
        )
    if not cluster.starts_processes:
        raise InvalidArgumentError(
            "The processes of this cluster are not started by the strategy, so it "
            "cannot start or end parameter servers. Create the strategy with another "
            "cluster, and load a checkpoint."
        )

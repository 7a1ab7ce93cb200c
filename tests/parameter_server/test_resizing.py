"""Another number of servers: shards move, and no update is lost or counted twice."""

from __future__ import annotations

import contextlib
import gc
import types

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.experimental import partitioners
from keras_strategies.parameter_server.resizing.cluster_resize import ClusterResize
from keras_strategies.parameter_server.resizing.shard_assignment import (
    ShardGroup,
    assign,
    shard_groups,
)
from keras_strategies.parameter_server.server.request_handler import ParameterServer
from keras_strategies.parameter_server.variables.coordinator_variables import (
    CoordinatorVariables,
)
from keras_strategies.parameter_server.variables.variable_registry import (
    VariableRegistry,
)
from keras_strategies.parameter_server.wire import server_connections
from keras_strategies.parameter_server.wire.server_connections import ServerConnections
from keras_strategies.parameter_server.wire.step_messages import StepRequest
from keras_strategies.parameter_server.wire.variable_description import (
    ShardRange,
    VariableDescription,
)
from parameter_server import clusters

pytestmark = pytest.mark.one_backend

#: Rows of variables that are larger than those that other tests have left.
ROWS = 5000

# Assignment


def bytes_of(groups, assigned, servers: int) -> list[int]:
    found = [0] * servers
    for group, server in zip(groups, assigned, strict=True):
        found[server] += group.nbytes
    return found


@pytest.mark.one_backend
@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 3), (3, 2), (4, 1), (2, 2)])
def test_servers_have_nearly_equal_shares_after_few_moves(before, after) -> None:
    groups = [ShardGroup(((i, 0),), i % before, 10 + i % 3) for i in range(24)]
    assigned = assign(groups, after)
    found = bytes_of(groups, assigned, after)
    assert max(found) - min(found) <= 12
    moves = sum(g.server != s for g, s in zip(groups, assigned, strict=True))
    # As many as the new servers take, or the removed ones had; one more for balance.
    assert moves <= 24 * abs(after - before) / max(after, before) + 1


def described(number: int, *shards, kind: str = "weight") -> VariableDescription:
    ranges = tuple(ShardRange(*shard) for shard in shards)
    shape = (shards[-1][2], 2)
    return VariableDescription(number, "v", shape, "float32", True, kind, ranges)


def test_slots_move_with_the_shards_of_their_variable() -> None:
    variables = {
        0: described(0, (0, 0, 3), (1, 3, 5)),
        1: described(1, (0, 0, 3), (1, 3, 5), kind="slot"),
        # Colocated with the first shard of the sharded variable, and its own slot.
        2: described(2, (0, 0, 9)),
        3: described(3, (0, 0, 9), kind="slot"),
        4: described(4, (0, 0, 1), (1, 0, 1), kind="scalar"),
    }
    found = shard_groups(variables, {1: 0, 2: 0, 3: 2, 9: 8})
    assert found == [
        ShardGroup(((0, 0), (1, 0), (2, 0), (3, 0)), 0, 8 * (3 + 3 + 9 + 9)),
        ShardGroup(((0, 3), (1, 3)), 1, 8 * (2 + 2)),
    ]


# Servers in this process, which die at any request


class Servers(ServerConnections):
    """Servers in this process that write snapshots.

    Args:
        folder: for the snapshots.
    """

    def __init__(self, folder) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self.servers: list[ParameterServer] = []
        self._name, self._additions = "me", iter(range(1000))
        self.grow(2)
        for server in self.servers:
            server.handle(("begin", "me"))
        #: Requests so far, and the one at which its server dies.
        self.count, self.fatal, self.is_after = 0, -1, False
        #: Requests at which servers always die.
        self.fatal_name = ""

    def __len__(self) -> int:
        return len(self.servers)

    def grow(self, count: int) -> None:
        for i in range(len(self), count):
            self.servers.append(ParameterServer(i, str(self._folder)))

    def request(self, server: int, name: str, argument=None):
        self.count += 1
        dies = self.count == self.fatal
        if name == self.fatal_name or (dies and not self.is_after):
            self.restart(server)
        reply = self.servers[server].handle((name, argument))
        if dies and self.is_after:
            # It died before its reply, so that the request is repeated.
            self.restart(server)
            reply = self.servers[server].handle((name, argument))
        return reply

    def _begin(self, server: int, name: str, argument):
        return self.request(server, name, argument)

    def _piece(self, shard, start: int, request):
        return shard.start + start, request

    def restart(self, server: int) -> None:
        self.servers[server] = ParameterServer(server, str(self._folder))

    def request_all(self, name: str, arguments):
        return {i: self.request(i, name, a) for i, a in arguments.items()}


class Cluster:
    """Stands in for `ProcessCluster` and its scheduler.

    Args:
        servers: the servers.
    """

    name = "me"
    starts_processes = True

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.scheduler = self
        self.tasks = types.SimpleNamespace(wait_until_done=lambda: None)
        self.shards: dict = {}

    paused = contextlib.nullcontext

    def first_unfinished(self) -> int:
        return 7

    def use_servers(self) -> None:
        pass

    def add_servers(self, count: int) -> None:
        self.servers.grow(count)

    def remove_servers(self, count: int) -> None:
        for i in range(count, len(self.servers)):
            self.servers.request(i, "retire")
        del self.servers.servers[count:]

    def place(self, shards) -> None:
        self.shards = shards


class Coordinator:
    """Variables on servers in this process.

    Args:
        folder: for the snapshots.
    """

    def __init__(self, folder) -> None:
        self.servers = Servers(folder)
        self.cluster = Cluster(self.servers)
        self.registry = VariableRegistry(
            self.servers,
            partitioners.FixedShardsPartitioner(3),
            CoordinatorVariables(),
        )
        random = np.random.default_rng(0)
        self.values = [random.normal(size=(rows, 5)) for rows in (9, 4, 50)]
        self.variables = [keras.Variable(value) for value in self.values]
        for variable, value in zip(self.variables, self.values, strict=True):
            self.registry.create(variable, value.astype("float32"))
        for server in self.servers.servers:
            server.on_optimizer((3, b"an optimizer"))
            server.on_snapshot()

    def update(self, task: int) -> None:
        """Adds one to all variables, as a worker with this task."""
        adds: dict[int, list] = {}
        for variable in self.variables:
            about = self.registry.describe(variable)
            for shard in about.shards:
                ones = np.ones((shard.rows, 5), "float32")
                adds.setdefault(shard.server, []).append(
                    ((about.number, shard.start), ones)
                )
        for server, own in adds.items():
            step = StepRequest(update=(task, 0), adds=tuple(own))
            self.servers.servers[server].handle(("step", step, "me"))

    def resize(self, count: int) -> None:
        functions = types.SimpleNamespace(release=lambda: None)
        ClusterResize(self.cluster, self.registry, functions).run(count)

    def check(self, added: float, servers: int) -> None:
        """All values and optimizers are there, on so many servers, once."""
        assert len(self.servers) == servers
        found = [self.registry.read(variable) for variable in self.variables]
        for value, expected in zip(found, self.values, strict=True):
            np.testing.assert_allclose(value, expected + added, rtol=1e-6, atol=1e-6)
        statuses = [server.on_status() for server in self.servers.servers]
        assert sum(status["shards"] for status in statuses) == 9
        assert [status["optimizers"] for status in statuses] == [1] * servers


@pytest.fixture
def without_updates(monkeypatch) -> None:
    monkeypatch.setattr(ParameterServer, "_make_updater", lambda self, number: None)
    # Several pieces for each shard.
    monkeypatch.setattr(server_connections, "_CHUNK_BYTES", 100)
    # Files of a test need not be on the disk.
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.mark.usefixtures("without_updates")
def test_values_move_and_late_updates_are_refused(tmp_path) -> None:
    coordinator = Coordinator(tmp_path)
    coordinator.update(3)
    done = 1
    for count in (4, 3, 5, 1, 2):
        coordinator.resize(count)
        # Of a task that is finished, from a worker that was lost.
        coordinator.update(3)
        coordinator.check(done, count)
        coordinator.update(10 + done)
        done += 1
        coordinator.check(done, count)
    assert (
        coordinator.cluster.shards[0]
        == coordinator.registry.describe(coordinator.variables[0]).shards
    )
    names = {path.name.split(".")[0] for path in tmp_path.iterdir()}
    assert names == {"ps-0", "ps-1"}


@pytest.mark.slow(seconds=35)
@pytest.mark.parametrize(
    ("count", "is_after"),
    [
        (3, False),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in ((3, True), (1, False), (1, True))
        ),
    ],
)
@pytest.mark.usefixtures("without_updates")
def test_a_server_that_dies_at_any_request_loses_nothing(
    tmp_path, count, is_after
) -> None:
    # A server that dies before `settle`, the first request to each of the two, loses
    # what is in no snapshot, as ever.
    fatal = requests = 0 if is_after else 2
    while fatal <= requests:
        fatal += 1
        coordinator = Coordinator(tmp_path / str(fatal))
        coordinator.update(3)
        servers = coordinator.servers
        servers.count, servers.fatal, servers.is_after = 0, fatal, is_after
        coordinator.resize(count)
        requests = servers.count
        coordinator.update(3)
        coordinator.check(1.0, count)
        # As it would be after a loss of all servers.
        for server in range(count):
            servers.restart(server)
        coordinator.check(1.0, count)
    assert fatal > 20


@pytest.mark.usefixtures("without_updates")
def test_a_transfer_that_fails_changes_nothing(tmp_path, monkeypatch) -> None:
    coordinator = Coordinator(tmp_path)
    before = coordinator.registry.descriptions()
    for count in (3, 1):
        with monkeypatch.context() as patch:
            patch.setattr(coordinator.servers, "fatal_name", "adopt")
            with pytest.raises(ks.errors.PeerError, match="was restarted"):
                coordinator.resize(count)
        assert coordinator.registry.descriptions() == before
        coordinator.check(0.0, 2)


# Clusters


@pytest.mark.multiprocess
def test_training_goes_on_with_other_servers_as_on_one_device(synchronous) -> None:
    coordinator = ks.ClusterCoordinator(synchronous)
    x, y = clusters.clicks()
    alone = clusters.two_inputs(keras.optimizers.Adam(0.01))
    with synchronous.scope():
        model = clusters.two_inputs(keras.optimizers.Adam(0.01))
    assert len(coordinator.status().held_bytes) == 2
    try:
        for count in (2, 4, 1):
            coordinator.resize(ps=count)
            for each in (alone, model):
                each.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        for ours, expected in zip(
            clusters.values(model.variables),
            clusters.values(alone.variables),
            strict=True,
        ):
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
        coordinator.resize(ps=3)
        status = coordinator.status()
        assert len(status.held_bytes) == 3 and min(status.held_bytes) > 0
        assert "3 parameter servers" in str(status)
        clusters.wait_until(
            lambda: min(coordinator.status().resident_bytes) > 1 << 20,
            "all servers have reported their memory",
        )
        assert len(synchronous.extended.parameter_devices) == 3
        with synchronous.scope():
            late = [keras.Variable(np.ones(3), name="late") for _ in range(6)]
        devices = {shard.device for v in late for shard in v.variables}
        assert devices == set(synchronous.extended.parameter_devices)
    finally:
        coordinator.resize(ps=2)
    np.testing.assert_allclose(
        model.predict(x, verbose=0), alone.predict(x, verbose=0), rtol=1e-3, atol=1e-4
    )


@pytest.mark.multiprocess
def test_a_number_that_cannot_be(synchronous) -> None:
    coordinator = ks.ClusterCoordinator(synchronous)
    for count in (0, True, 2.0):
        with pytest.raises(ks.errors.InvalidArgumentError, match="1 or more"):
            coordinator.resize(ps=count)


@pytest.fixture
def resized(recovered):
    """The asynchronous cluster with snapshots; afterwards with one server again."""
    coordinator = ks.ClusterCoordinator(recovered)
    # Variables of other tests would move in their place.
    gc.collect()
    try:
        yield coordinator
    finally:
        clusters.wait_until_whole(recovered)
        coordinator.resize(ps=1)


def during(monkeypatch, name: str, number: int, act) -> list[int]:
    """Calls a function before a request of the transfer to a server."""
    calls: list[int] = []
    request = ServerConnections.request

    def counted(self, server, kind, argument=None):
        if kind == name:
            calls.append(server)
            if len(calls) == number:
                act(server)
        return request(self, server, kind, argument)

    monkeypatch.setattr(ServerConnections, "request", counted)
    return calls


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["read", "fill", "adopt", "has_adopted"])
def test_a_server_is_killed_during_a_resize(
    recovered, resized, monkeypatch, name
) -> None:
    with recovered.scope():
        totals = [keras.Variable(np.zeros(ROWS), trainable=False) for _ in range(4)]

    def step():
        for total in totals:
            total.assign_add(np.ones(ROWS))

    def train() -> None:
        for _ in range(10):
            resized.schedule(step)

    train()
    with monkeypatch.context() as patch:
        calls = during(
            patch, name, 2, lambda server: clusters.kill(recovered, "ps", server)
        )
        resized.resize(ps=3)
    assert len(calls) > 1
    train()
    clusters.kill(recovered, "worker", 0)
    train()
    resized.join(clusters.SECONDS)
    for total in totals:
        np.testing.assert_array_equal(total.numpy(), np.full(ROWS, 30.0))
    for server in range(3):
        recovered.cluster.servers.request(server, "snapshot")
    clusters.kill(recovered, "ps", 2)
    train()
    resized.resize(ps=2)
    train()
    resized.join(clusters.SECONDS)
    for total in totals:
        np.testing.assert_array_equal(total.numpy(), np.full(ROWS, 50.0))


@pytest.mark.multiprocess
def test_a_worker_that_dies_during_a_resize_is_replaced(
    recovered, resized, monkeypatch
) -> None:
    """The new process has functions that were sent before."""
    with recovered.scope():
        totals = [keras.Variable(np.zeros(ROWS), trainable=False) for _ in range(4)]

    def step():
        import time

        for total in totals:
            total.assign_add(np.ones(ROWS))
        time.sleep(0.01)

    for _ in range(10):
        resized.schedule(step)
    with monkeypatch.context() as patch:
        during(patch, "fill", 1, lambda server: clusters.kill(recovered, "worker", 1))
        resized.resize(ps=2)
    for _ in range(20):
        resized.schedule(step)
    clusters.kill(recovered, "worker", 0)
    resized.join(clusters.SECONDS)
    for total in totals:
        np.testing.assert_array_equal(total.numpy(), np.full(ROWS, 30.0))
    assert {v.device for v in totals} == set(recovered.extended.parameter_devices)

"""One parameter server, in this process: updates that count once, and its files."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.parameter_server.coordinator.cluster_processes import EndCause
from keras_strategies.parameter_server.server import request_handler
from keras_strategies.parameter_server.server.request_handler import ParameterServer
from keras_strategies.parameter_server.wire.step_messages import StepRequest
from keras_strategies.processes.local_cluster import LocalTask
from parameter_server import clusters

pytestmark = pytest.mark.one_backend

KEY = (0, 0)


def begun(folder=None, owner: str = "me") -> ParameterServer:
    server = ParameterServer(0, None if folder is None else str(folder))
    server.handle(("begin", owner))
    return server


def read(server: ParameterServer, key=KEY) -> list[float]:
    return server.handle(("read", (key, 0, 100))).tolist()


def adding(closure: int, number: int, done: int = 0) -> tuple[str, StepRequest, str]:
    adds = ((KEY, np.ones(2, "float32")),)
    return "step", StepRequest(update=(closure, number), done=done, adds=adds), "me"


def test_a_step_counts_once_also_after_a_restart(tmp_path) -> None:
    server = begun(tmp_path)
    server.handle(("create", [(KEY, np.zeros(2, "float32"))]))
    for _ in range(2):
        pulled = server.handle(adding(5, 0))
    assert read(server) == [1.0, 1.0] and pulled.version == 1
    server.handle(("snapshot", None))

    server = ParameterServer(0, str(tmp_path))
    assert server.is_restored
    server.handle(("begin", "me"))
    server.handle(adding(5, 0))
    assert read(server) == [1.0, 1.0]
    server.handle(adding(5, 1))
    server.handle(adding(7, 0, done=6))
    # Closures below 6 are done; what still arrives of them has been made.
    server.handle(adding(5, 2))
    assert read(server) == [3.0, 3.0]


def test_an_addition_counts_once(tmp_path) -> None:
    server = begun(tmp_path)
    server.handle(("create", [(KEY, np.zeros(2, "float32"))]))
    one = np.ones(2, "float32")
    for sender, number in (("a", 0), ("a", 0), ("b", 0), ("a", 1)):
        server.handle(("add", (KEY, one, sender, number)))
    assert read(server) == [3.0, 3.0]


def test_what_began_after_a_snapshot_is_there_again(tmp_path) -> None:
    server = begun(tmp_path)
    first = np.array([1.5, 2.5], ml_dtypes.bfloat16)
    server.handle(("create", [(KEY, first)]))
    server.handle(("snapshot", None))
    server.handle(("create", [((1, 4), np.arange(3.0))]))
    server.handle(("create", [((2, 0), np.array(True))]))
    # The process died while it wrote the last of them.
    journal = tmp_path / "ps-0.1.journal"
    journal.write_bytes(journal.read_bytes()[:-3])

    again = ParameterServer(0, str(tmp_path))
    assert again.is_restored
    assert again.handle(("read", (KEY, 0, 2))).dtype == first.dtype
    assert read(again) == [1.5, 2.5]
    assert read(again, (1, 4)) == [0.0, 1.0, 2.0]
    with pytest.raises(ks.errors.PeerError, match="has no shard"):
        read(again, (2, 0))
    # The next snapshot has all of it.
    again.handle(("add", ((1, 4), np.ones(3), "a", 0)))
    again.handle(("snapshot", None))
    assert not (tmp_path / "ps-0.2.journal").exists()
    assert read(ParameterServer(0, str(tmp_path)), (1, 4)) == [1.0, 2.0, 3.0]


def test_another_coordinators_server_begins_anew(tmp_path) -> None:
    server = begun(tmp_path)
    server.handle(("create", [(KEY, np.zeros(2, "float32"))]))
    server.handle(("snapshot", None))
    server = ParameterServer(0, str(tmp_path))
    server.handle(("begin", "you"))
    with pytest.raises(ks.errors.PeerError, match="is used by another coordinator"):
        server.handle(adding(0, 0))
    with pytest.raises(ks.errors.PeerError, match="has 0 shards"):
        read(server)
    server.handle(("create", [(KEY, np.full(2, 7.0))]))
    assert read(server) == [7.0, 7.0]
    assert not list(tmp_path.glob("*.snapshot"))


def test_snapshots_begin_before_the_interval_is_over(tmp_path, monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(request_handler.time, "monotonic", lambda: now[0])
    server = ParameterServer(0, str(tmp_path), interval=10.0)
    server.handle(("begin", "me"))
    server.handle(("create", [(KEY, np.zeros(2, "float32"))]))
    path = tmp_path / "ps-0.1.snapshot"
    now[0] = 106.0
    server.idle()
    assert not server._snapshots.is_writing
    now[0] = 107.5
    server.idle()
    assert server._snapshots.is_writing
    while server._snapshots.is_writing:
        server.idle()
    assert path.exists()
    # So that it has its name soon after it was written.
    assert server.idle_seconds == 0.2


def test_who_is_silent_is_killed_but_not_when_this_process_stood_still(
    monkeypatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(
        "keras_strategies.parameter_server.coordinator.process_supervisor.time.monotonic",
        lambda: now[0],
    )
    supervisor = clusters.RecordedSupervisor(2, 1)
    lost, processes = supervisor.lost, supervisor.processes
    for index in (0, 1):
        supervisor.handle("worker", b"w%d" % index, (index, 0, 50 + index, "cpu:0"))
    messages = [message for _, message in supervisor.sent]
    assert messages == [("registered", "me")] * 2
    assert supervisor.missing() == ["parameter server 0"]
    supervisor.handle("server", b"s", (0, 0, 60, False, "", "ipc://s"))
    now[0] += 30
    supervisor.check_heartbeats()
    assert not lost

    def pass_time(seconds: float) -> None:
        until = now[0] + seconds
        while now[0] < until:
            now[0] += 1
            supervisor.handle("heartbeat", b"b", (0, 0, 0))
            supervisor.handle("heartbeat", b"b", (("ps", 0), 0, None))
            supervisor.check_heartbeats()

    pass_time(7)
    assert not lost
    pass_time(3)
    assert lost == [(1, "no heartbeat for 8 seconds")]
    assert processes.killed == [LocalTask("worker", 1)]
    supervisor.update_processes()
    assert processes.started == [LocalTask("worker", 1, 1)]
    # An old process's sign is not the new one's.
    supervisor.handle("worker", b"old", (1, 0, 51, "cpu:0"))
    assert not supervisor.workers[1].is_alive
    processes.ends.append((LocalTask("ps", 0), EndCause("it was killed", True)))
    supervisor.update_processes()
    (error,) = supervisor.failures
    assert isinstance(error, ks.errors.ServerLostError)
    assert "Parameter server 0 died: it was killed" in str(error)

"""Snapshots that cannot be written or read: what is reported, and what is restored."""

from __future__ import annotations

import errno
import os
import signal
import time
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.parameter_server.coordinator.cluster_processes import EndCause
from keras_strategies.parameter_server.server import snapshots
from keras_strategies.parameter_server.server.request_handler import ParameterServer
from keras_strategies.parameter_server.server.snapshots import check_folder
from keras_strategies.processes.local_cluster import LocalTask
from parameter_server import clusters
from parameter_server.full_disk import full_disk

pytestmark = pytest.mark.one_backend

KEY = (0, 0)


def begun(folder, interval: float | None = None) -> ParameterServer:
    server = ParameterServer(0, str(folder), interval)
    server.handle(("begin", "me"))
    server.handle(("create", [(KEY, np.zeros(200, "float32"))]))
    return server


def add_one(server: ParameterServer) -> None:
    version = server.handle(("status", None))["version"]
    server.handle(("add", (KEY, np.ones(200, "float32"), "a", version)))


def first(server: ParameterServer) -> float:
    return float(server.handle(("read", (KEY, 0, 1)))[0])


def idle(server: ParameterServer) -> None:
    """Begins a snapshot if one is due, and finishes it."""
    server.idle()
    clusters.wait_until(lambda: not is_writing(server), "it is written")


def is_writing(server: ParameterServer) -> bool:
    server.idle()
    return server._snapshots.is_writing


def with_two_snapshots(folder) -> ParameterServer:
    """A server with snapshots of the values 1 and 2, and a part after each."""
    server = begun(folder)
    for number in (1, 2):
        add_one(server)
        server.handle(("snapshot", None))
        server.handle(("create", [((number, 0), np.full(3, number, "float32"))]))
    return server


def flip(path, place: int | bytes) -> None:
    """Changes one bit, at a place or 20 bytes after a mark."""
    content = bytearray(path.read_bytes())
    content[content.rindex(place) + 20 if isinstance(place, bytes) else place] ^= 4
    path.write_bytes(bytes(content))


def test_a_full_disk_is_named_and_the_server_goes_on(tmp_path) -> None:
    server = begun(tmp_path, interval=1e-6)
    idle(server)
    assert (tmp_path / "ps-0.1.snapshot").exists() and not server.notices
    add_one(server)
    with full_disk(tmp_path) as (mounted, number):
        idle(server)
        kind, (_, problem, is_restorable) = server.notices.popleft()
        assert kind == "snapshots" and is_restorable
        assert os.strerror(number) in problem
        assert f"{tmp_path}/ps-0.2.snapshot" in problem
        assert f"The filesystem mounted at {mounted} has " in problem
        # What is created now, no file has: the server cannot be restored.
        server.handle(("create", [((1, 0), np.full(3, 7.0))]))
        _, (_, problem, is_restorable) = server.notices.popleft()
        assert "ps-0.1.journal" in problem and not is_restorable
        assert first(server) == 1.0 and not (tmp_path / "ps-0.2.snapshot").exists()
    idle(server)
    assert server.notices.popleft() == ("snapshots", (0, None, True))
    assert not server.notices
    again = ParameterServer(0, str(tmp_path))
    assert first(again) == 1.0 and again.damage == ""
    assert again.handle(("read", ((1, 0), 0, 3))).tolist() == [7.0] * 3


def test_a_journal_without_space_has_no_half_record(tmp_path) -> None:
    server = begun(tmp_path)
    path = tmp_path / "ps-0.0.journal"
    before = path.read_bytes()
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, hard))
    try:
        server.handle(("create", [((1, 0), np.zeros(1000))]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    _, (_, problem, _) = server.notices.popleft()
    assert os.strerror(errno.EFBIG) in problem


def test_a_folder_that_is_a_file_is_said_at_once(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    for folder in (path, path / "below"):
        with pytest.raises(ks.errors.SnapshotError, match="mounted at") as raised:
            check_folder(str(folder))
        assert f"snapshot_folder={str(folder)!r}" in str(raised.value)
    cluster = {"chief": ["c:1"], "worker": ["a:1"], "ps": ["b:1"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KS_CLUSTER_SECRET", "correct horse battery staple")
        with pytest.raises(ks.errors.SnapshotError, match="cannot be written"):
            ks.Server(cluster, "ps", 0, snapshot_folder=str(path))
    with pytest.raises(ks.errors.SnapshotError, match="cannot be written"):
        ks.ParameterServerStrategy(snapshot_seconds=1.0, snapshot_folder=str(path))
    with pytest.raises(ks.errors.InvalidArgumentError, match="'raise' or 'continue'"):
        ks.ParameterServerStrategy(on_snapshot_error="ignore")
    # Also where it is noticed later, by the server.
    server = begun(path)
    assert os.strerror(errno.ENOTDIR) in server.notices[0][1][1]
    with pytest.raises(ks.errors.SnapshotError, match=os.strerror(errno.ENOTDIR)):
        server.handle(("snapshot", None))


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "head", "values", "end", "without an end"]
)
def test_a_damaged_snapshot_gives_way_to_the_one_before(tmp_path, damage) -> None:
    with_two_snapshots(tmp_path)
    path = tmp_path / "ps-0.2.snapshot"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-50])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "without an end":
        # 20 bytes before each record, 32 in the last one.
        path.write_bytes(path.read_bytes()[:-52])
    else:
        flip(path, {"head": b'"applied"', "values": -100, "end": -5}[damage])
    server = ParameterServer(0, str(tmp_path))
    assert server.is_restored and first(server) == 1.0
    # Parts that were created after either of the snapshots.
    for number in (1, 2):
        found = server.handle(("read", ((number, 0), 0, 3)))
        assert found.tolist() == [number] * 3
    assert "ps-0.2.snapshot is" in server.damage
    assert "ps-0.1.snapshot" in server.damage
    # The one that was used stays until there is another one that is complete.
    server.handle(("snapshot", None))
    assert (tmp_path / "ps-0.1.snapshot").exists()
    flip(tmp_path / "ps-0.3.snapshot", -5)
    assert first(ParameterServer(0, str(tmp_path))) == 1.0


def test_files_of_another_format_are_named(tmp_path) -> None:
    with_two_snapshots(tmp_path)
    for number in (1, 2):
        path = tmp_path / f"ps-0.{number}.snapshot"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("contents.json", '{"version": 1}')
    server = ParameterServer(0, str(tmp_path))
    assert not server.is_restored
    assert "ps-0.2.snapshot has the format b'PK" in server.damage
    (tmp_path / "journal").mkdir()
    begun(tmp_path / "journal")
    path = tmp_path / "journal" / "ps-0.0.journal"
    path.write_bytes(b"KSR1" + path.read_bytes()[4:])
    server = ParameterServer(0, str(path.parent))
    assert not server.is_restored and "has the format b'KSR1'" in server.damage


def test_a_snapshot_has_every_bit_of_every_dtype(tmp_path) -> None:
    server = begun(tmp_path)
    values = {
        (1, 0): np.arange(5, dtype=ml_dtypes.bfloat16) / 3,
        (2, 0): np.arange(6, dtype="int8").reshape(2, 3),
        (3, 0): np.zeros((0, 4), "float64"),
    }
    server.handle(("create", list(values.items())))
    for _ in range(2):
        server = ParameterServer(0, str(tmp_path))
        for key, value in values.items():
            found = server.handle(("read", (key, 0, len(value))))
            assert found.dtype == value.dtype and found.shape == value.shape
            assert found.tobytes() == value.tobytes()
        server.handle(("snapshot", None))


def test_without_a_complete_snapshot_nothing_is_restored(tmp_path) -> None:
    with_two_snapshots(tmp_path)
    for number in (1, 2):
        flip(tmp_path / f"ps-0.{number}.snapshot", -5)
    server = ParameterServer(0, str(tmp_path))
    assert not server.is_restored
    assert "cannot restore any" in server.damage and "0.1.snapshot" in server.damage


def test_a_damaged_journal_is_not_used(tmp_path) -> None:
    with_two_snapshots(tmp_path)
    flip(tmp_path / "ps-0.2.journal", -5)
    server = ParameterServer(0, str(tmp_path))
    assert not server.is_restored and "ps-0.2.journal is damaged" in server.damage


def test_two_generations_stay(tmp_path) -> None:
    server = with_two_snapshots(tmp_path)
    add_one(server)
    server.handle(("snapshot", None))
    assert {path.name for path in tmp_path.iterdir()} == {
        "ps-0.2.snapshot",
        "ps-0.2.journal",
        "ps-0.3.snapshot",
    }


def test_what_a_coordinator_makes_of_a_servers_files() -> None:
    supervisor = clusters.RecordedSupervisor(0, 1, can_restore=True)
    broken = supervisor.failures

    def end(incarnation: int, reason: str, is_from_outside: bool = True) -> None:
        cause = EndCause(reason, is_from_outside)
        supervisor.processes.ends.append((LocalTask("ps", 0, incarnation), cause))
        supervisor.update_processes()

    supervisor.handle("server", b"s", (0, 0, 50, False, "", "ipc://s"))
    end(0, "it was killed")
    supervisor.handle(
        "server", b"s", (0, 1, 51, True, "f.snapshot is damaged.", "ipc://s")
    )
    assert supervisor.damage == ["f.snapshot is damaged."] and not broken
    supervisor.handle("snapshots", b"s", (0, "The disk is full.", False))
    assert supervisor.snapshot_problems == ["The disk is full."]
    end(1, "it was killed")
    assert "Its snapshots are incomplete: The disk is full." in str(broken.pop())
    supervisor.handle("snapshots", b"s", (0, None, True))
    # One that cannot start is abandoned, instead of being waited for.
    for incarnation in (1, 2, 3, 4):
        end(incarnation, "no memory", is_from_outside=False)
    assert "before it was ready: no memory" in str(broken.pop())


def test_preempted_servers_are_restarted_more_often() -> None:
    supervisor = clusters.RecordedSupervisor(0, 1, can_restore=True)
    cause = EndCause("it was ended by SIGTERM", is_from_outside=True)
    for incarnation in range(10):
        assert not supervisor.failures
        task = LocalTask("ps", 0, incarnation)
        supervisor.processes.ends.append((task, cause))
        supervisor.update_processes()
    (error,) = supervisor.failures
    assert "exited 10 times before it was ready: it was ended by SIGTERM" in str(error)


class SlowWrites:
    """Writes of snapshots that end when a file exists."""

    def __init__(self, folder: Path, monkeypatch):
        self.gate = folder / "gate"
        write = snapshots._write

        def wait_and_write(description, keys, pieces, file, check) -> None:
            while not self.gate.exists():
                check()
                time.sleep(0.01)
            write(description, keys, pieces, file, check)

        monkeypatch.setattr(snapshots, "_write", wait_and_write)

    def end(self) -> None:
        self.gate.touch()


@pytest.fixture
def slow_writes(tmp_path_factory, monkeypatch) -> SlowWrites:
    return SlowWrites(tmp_path_factory.mktemp("gate"), monkeypatch)


def changed_while_written(folder) -> ParameterServer:
    """Its snapshot with the value 1 is being written; it has the value 2 and a part."""
    server = begun(folder, interval=1e-6)
    add_one(server)
    server.idle()
    add_one(server)
    server.handle(("create", [((1, 0), np.full(3, 7.0))]))
    server.handle(("create", [((2, 0), np.full(3, 8.0))]))
    server.handle(("delete", [(2, 0)]))
    assert is_writing(server)
    return server


@pytest.mark.parametrize("ends", [True, False])
def test_a_server_goes_on_while_its_snapshot_is_written(
    tmp_path, slow_writes, ends
) -> None:
    server = changed_while_written(tmp_path)
    if ends:
        slow_writes.end()
        clusters.wait_until(
            lambda: (tmp_path / "ps-0.1.snapshot").exists() or not is_writing(server),
            "it is written",
        )
    else:
        server.on_stop()
    # As after a kill: what was created since the snapshot is there, updates are not.
    assert not list(tmp_path.glob("*.snapshot")) or ends
    again = ParameterServer(0, str(tmp_path))
    assert first(again) == (1.0 if ends else 0.0)
    assert again.handle(("read", ((1, 0), 0, 3))).tolist() == [7.0] * 3
    with pytest.raises(ks.errors.PeerError, match="no shard"):
        again.handle(("read", ((2, 0), 0, 3)))
    slow_writes.end()
    server.on_stop()


def test_a_request_waits_for_a_snapshot_of_its_own(tmp_path, slow_writes) -> None:
    server = changed_while_written(tmp_path)
    slow_writes.end()
    path = server.handle(("snapshot", None))
    assert path == str(tmp_path / "ps-0.2.snapshot")
    assert first(ParameterServer(0, str(tmp_path))) == 2.0


def test_a_writer_that_fails_is_reported(tmp_path, monkeypatch) -> None:
    def fail(*_) -> None:
        raise KeyError("of a fault")

    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "_write", fail)
        server = begun(tmp_path, interval=1e-6)
        add_one(server)
        clusters.wait_until(lambda: server.idle() or server.notices, "it is reported")
    _, (_, problem, is_restorable) = server.notices[0]
    assert "its writer failed" in problem and is_restorable
    recovered = ("snapshots", (0, None, True))
    clusters.wait_until(
        lambda: server.idle() or server.notices[-1] == recovered, "it is written"
    )
    assert first(ParameterServer(0, str(tmp_path))) == 1.0


def test_a_killed_server_publishes_nothing(tmp_path, slow_writes) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            server = changed_while_written(tmp_path)
            (tmp_path / "begun").touch()
            clusters.wait_until(lambda: not is_writing(server), "it is killed")
        finally:
            os._exit(0)
    clusters.wait_until((tmp_path / "begun").exists, "it is writing")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert list(tmp_path.glob(".part-*"))
    server = ParameterServer(0, str(tmp_path))
    assert not list(tmp_path.glob(".part-*"))
    assert first(server) == 0.0
    assert server.handle(("read", ((1, 0), 0, 3))).tolist() == [7.0] * 3


def test_what_a_server_has_acknowledged_is_on_disk(tmp_path, monkeypatch) -> None:
    """Files with all of their bytes, and their names in the folder."""
    flushed: list[tuple[str, int]] = []
    fsync, unlink = os.fsync, Path.unlink

    def record(number: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        size = 0 if path.is_dir() else os.fstat(number).st_size
        flushed.append((path.name, size))
        fsync(number)

    def record_removal(path: Path, **options: bool) -> None:
        flushed.append((f"removed {path.name}", 0))
        unlink(path, **options)

    server = ParameterServer(0, str(tmp_path), 3600.0)
    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "unlink", record_removal)

    def size(name: str) -> int:
        return (tmp_path / name).stat().st_size

    server.handle(("begin", "me"))
    begun_size = size("ps-0.0.journal")
    assert flushed == [("ps-0.0.journal", begun_size), (tmp_path.name, 0)]
    # Its name is in the folder by now.
    server.handle(("create", [(KEY, np.zeros(200, "float32"))]))
    assert flushed[2:] == [("ps-0.0.journal", size("ps-0.0.journal"))]
    assert size("ps-0.0.journal") > begun_size
    for number in (1, 2):
        flushed.clear()
        add_one(server)
        server.handle(("snapshot", None))
        written = size(f"ps-0.{number}.snapshot")
        assert flushed[:2] == [
            (f"ps-0.{number}.snapshot", written),
            (tmp_path.name, 0),
        ]
    assert flushed[2:] == [("removed ps-0.0.journal", 0)]

"""Snapshots of shards that are updated while they are written, and their chains."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from keras_strategies.parameter_server.server import changed_rows
from keras_strategies.parameter_server.server.changed_rows import (
    ChangedRows,
)
from keras_strategies.parameter_server.server.request_handler import ParameterServer
from keras_strategies.parameter_server.server.variable_store import VariableStore
from keras_strategies.parameter_server.wire.step_messages import StepRequest
from parameter_server import clusters

pytestmark = pytest.mark.one_backend

TABLE, NARROW, DENSE, SCALAR = (0, 0), (1, 40), (2, 0), (3, 0)
ROWS = 20_000


def values() -> dict:
    random = np.random.default_rng(5)
    return {
        TABLE: random.normal(size=(ROWS, 16)).astype("float32"),
        NARROW: random.normal(size=500).astype(ml_dtypes.bfloat16),
        DENSE: random.normal(size=(30, 8)),
        SCALAR: np.array(7, "int64"),
        (4, 0): np.zeros((0, 4), "float32"),
    }


def store_of(arrays: dict) -> VariableStore:
    store = VariableStore(ChangedRows())
    for key, array in arrays.items():
        store.create(key, array.copy())
    return store


def copies(store: VariableStore) -> dict:
    return {key: array.copy() for key, array in store.arrays.items()}


class Updates:
    """Random updates by all methods of a store."""

    def __init__(self, store: VariableStore):
        self.store = store
        self.random = np.random.default_rng(11)

    def make(self) -> None:
        random, store = self.random, self.store
        ids = np.unique(random.integers(0, ROWS, 200))
        rows = random.normal(size=(len(ids), 16)).astype("float32")
        store.write_rows(TABLE, ids, rows)
        store.write(NARROW, np.full(7, random.integers(9), ml_dtypes.bfloat16), 90)
        store.write(SCALAR, store.get(SCALAR) + 1)
        kind = random.integers(3)
        if kind == 0:
            store.add(DENSE, np.ones((30, 8)))
        elif kind == 1:
            store.replace(DENSE, store.get(DENSE) * 1.25)
        else:
            # A framework that updates memory in place and returns it.
            store.before_change(DENSE)
            array = store.get(DENSE)
            array *= 0.75
            store.replace(DENSE, array)


def applied(pieces, arrays: dict) -> dict:
    """Arrays with the rows of pieces, of which none may be there twice."""
    seen: set[tuple] = set()
    for key, start, ids, rows in pieces:
        ids = start + (np.arange(len(rows)) if ids is None else ids.astype(int))
        named = {(key, int(i)) for i in ids}
        assert len(named) == len(ids) and not seen & named
        seen |= named
        array = arrays[key]
        target = array.reshape(max(1, array.size and len(np.atleast_1d(array))), -1)
        target.view(np.uint8)[ids] = rows
    return arrays


def assert_equal(found: dict, expected: dict) -> None:
    assert list(found) == list(expected)
    for key, array in expected.items():
        assert found[key].dtype == array.dtype and found[key].shape == array.shape
        assert found[key].tobytes() == array.tobytes(), key


def test_a_snapshot_has_the_rows_of_one_moment(monkeypatch) -> None:
    """Updates between all of its pieces are in the next one, and only they."""
    monkeypatch.setattr(changed_rows, "_PIECE_BYTES", 40_000)
    store = store_of(values())
    updates, changes = Updates(store), store.changes
    found = {key: np.zeros_like(array) for key, array in store.arrays.items()}
    changed = []
    for is_full in (True, False, False, True, False):
        changed.append(changes.changed_bytes(store.arrays))
        changes.begin(store.arrays, is_full)
        expected = copies(store)
        pieces = []
        for piece in changes.pieces():
            pieces.append(piece)
            updates.make()
        assert_equal(applied(pieces, found), expected)
        nbytes = sum(piece.rows.nbytes for piece in pieces)
        assert nbytes == (store.nbytes if is_full else changed[-1])
    assert changed[0] == store.nbytes and max(changed[1:]) < store.nbytes


def test_shards_that_go_and_come_while_they_are_written() -> None:
    store = store_of(values())
    store.changes.begin(store.arrays, True)
    expected = copies(store)
    store.delete(TABLE)
    store.delete(NARROW)
    store.create(NARROW, np.full(300, 2, ml_dtypes.bfloat16))
    store.write(NARROW, np.full(300, 3, ml_dtypes.bfloat16))
    store.create((9, 0), np.ones(5))
    store.write((9, 0), np.full(2, 4.0), 1)
    blank = {key: np.zeros_like(array) for key, array in expected.items()}
    assert_equal(applied(store.changes.pieces(), blank), expected)
    # What has no marks is new, with all rows.
    store.changes.begin(store.arrays, False)
    blank = {key: np.zeros_like(array) for key, array in store.arrays.items()}
    found = applied(store.changes.pieces(), blank)
    assert (found[NARROW] == 3).all() and found[9, 0].tolist() == [1, 4, 4, 1, 1]


def test_a_snapshot_that_is_given_up_keeps_no_copies() -> None:
    store = store_of(values())
    store.changes.begin(store.arrays, True)
    store.changes.end()
    updates = Updates(store)
    for _ in range(5):
        updates.make()
    assert list(store.changes.pieces()) == []


# Files


def pushed(number: int) -> tuple[str, StepRequest, str]:
    """A step that adds to a shard and writes another one."""
    return (
        "step",
        StepRequest(
            update=(number, 0),
            adds=((NARROW, np.ones(500, "float32")),),
            writes=((SCALAR, np.array(number)),),
        ),
        "me",
    )


def server_of(folder: Path, interval: float | None = None) -> ParameterServer:
    server = ParameterServer(0, str(folder), interval)
    server.handle(("begin", "me"))
    return server


def change(server: ParameterServer, first: int, value: float) -> None:
    """Changes 100 rows of the table, and the scalar."""
    rows = np.full((100, 16), value, "float32")
    server.handle(("write", (TABLE, first, rows)))
    server.handle(("write", (SCALAR, 0, np.array(first))))


def with_a_chain(folder: Path) -> tuple[ParameterServer, list[dict]]:
    """A server with a full snapshot, and three that follow; their values."""
    server = server_of(folder)
    server.handle(("create", list(values().items())))
    states = []
    for number in range(4):
        change(server, 1000 * number, float(number + 1))
        server.handle(("snapshot", None))
        states.append(copies(server._store))
    return server, states


def size(folder: Path, number: int) -> int:
    return (folder / f"ps-0.{number}.snapshot").stat().st_size


def test_a_snapshot_has_the_rows_that_have_changed(tmp_path) -> None:
    _, states = with_a_chain(tmp_path)
    assert size(tmp_path, 1) > 1_280_000
    # 100 rows of 64 bytes, and the description.
    assert all(6_400 < size(tmp_path, number) < 9_000 for number in (2, 3, 4))
    again = ParameterServer(0, str(tmp_path))
    assert again.is_restored and not again.damage
    assert_equal(again._store.arrays, states[-1])
    # The chain begins again after a restart.
    change(again, 7000, 9.0)
    again.handle(("snapshot", None))
    assert size(tmp_path, 5) > 1_280_000
    assert_equal(ParameterServer(0, str(tmp_path))._store.arrays, again._store.arrays)


def test_shards_of_a_chain_are_deleted_and_created(tmp_path) -> None:
    server, _ = with_a_chain(tmp_path)
    server.handle(("delete", [DENSE]))
    server.handle(("create", [((8, 0), np.arange(6.0))]))
    server.handle(("write", ((8, 0), 2, np.array([7.0]))))
    server.handle(("snapshot", None))
    assert size(tmp_path, 5) < 9_000
    again = ParameterServer(0, str(tmp_path))
    assert_equal(again._store.arrays, server._store.arrays)


@pytest.mark.parametrize("damaged, restored", [(4, 3), (3, 2), (2, 1), (1, 0)])
def test_a_damaged_file_costs_what_follows_it(tmp_path, damaged, restored) -> None:
    _, states = with_a_chain(tmp_path)
    path = tmp_path / f"ps-0.{damaged}.snapshot"
    content = bytearray(path.read_bytes())
    content[-700] ^= 1
    path.write_bytes(content)
    server = ParameterServer(0, str(tmp_path))
    assert f"ps-0.{damaged}.snapshot is damaged" in server.damage
    expected = states[restored - 1] if restored else values()
    assert_equal(server._store.arrays, expected)


def test_a_chain_ends_when_half_of_its_bytes_follow(tmp_path) -> None:
    """The chain before it stays, for files that are damaged."""
    server, _ = with_a_chain(tmp_path)
    for _ in range(2):
        for first in range(0, ROWS // 3, 100):
            change(server, first, 0.5)
        server.handle(("snapshot", None))
    assert size(tmp_path, 5) < 500_000 and size(tmp_path, 6) > 1_280_000
    assert sorted(p.name for p in tmp_path.glob("*.snapshot"))[0] == "ps-0.1.snapshot"
    change(server, 4, 8.0)
    server.handle(("snapshot", None))
    for first in range(0, ROWS, 100):
        change(server, first, 0.25)
    server.handle(("snapshot", None))
    assert sorted(path.name for path in tmp_path.glob("*.snapshot")) == [
        f"ps-0.{number}.snapshot" for number in (6, 7, 8)
    ]
    again = ParameterServer(0, str(tmp_path))
    assert_equal(again._store.arrays, server._store.arrays)


def test_after_a_failure_a_snapshot_is_full(tmp_path) -> None:
    server, _ = with_a_chain(tmp_path)
    change(server, 50, 3.0)
    server._begin_snapshot()
    server._snapshots.abort()
    change(server, 9000, 4.0)
    server.handle(("snapshot", None))
    assert size(tmp_path, 5) > 1_280_000
    again = ParameterServer(0, str(tmp_path))
    assert_equal(again._store.arrays, server._store.arrays)


def test_servers_go_on_while_a_thread_writes(tmp_path) -> None:
    """What is restored are the values of when the snapshot began."""
    server = server_of(tmp_path, interval=1e9)
    server.handle(("create", list(values().items())))
    for number in range(6):
        change(server, 1000 * number, float(number + 1))
        expected = copies(server._store)
        server._begin_snapshot()
        number = 0
        while server._snapshots.is_writing:
            change(server, 300 * (number % 60), -1.0)
            server._finish_snapshot(waits=False)
            number += 1
        assert number
        again = ParameterServer(0, str(tmp_path))
        assert_equal(again._store.arrays, expected)


def test_steps_count_once_with_a_chain(tmp_path) -> None:
    server, _ = with_a_chain(tmp_path)
    for number in (1, 2, 1, 2):
        server.handle(pushed(number))
    server.handle(("snapshot", None))
    server.handle(pushed(3))
    expected = values()[NARROW] + ml_dtypes.bfloat16(1) + ml_dtypes.bfloat16(1)
    again = ParameterServer(0, str(tmp_path))
    for number in (1, 2):
        again.handle(pushed(number))
    found = again.handle(("read", (NARROW, 0, 500)))
    assert found.tobytes() == expected.tobytes()
    again.handle(pushed(3))
    assert again.handle(("read", (NARROW, 0, 500))).tobytes() != expected.tobytes()
    clusters.wait_until(lambda: not again._snapshots.is_writing, "nothing is written")

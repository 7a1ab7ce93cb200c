"""Elastic groups: workers are lost, join and take over, and no step is lost."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cluster import elastic_worker
from harness.elastic_processes import Workers
from harness.processes import TIMEOUT, assert_gone, wait_until

from keras_strategies.cluster.group.membership import Membership, elastic_settings
from keras_strategies.cluster.resolvers.local_processes import free_addresses
from keras_strategies.cluster.spec import split_address
from keras_strategies.errors import ClusterError, WorkerError
from keras_strategies.lead.state import Settings
from keras_strategies.types import Elastic

pytestmark = pytest.mark.one_backend("jax")

# Long enough for a busy machine; only tests of stopped workers wait for it.
SILENCE = 5.0


def settings_of(addresses: list[str], **changed: Any) -> Settings:
    elastic = Elastic(timeout_seconds=TIMEOUT)
    return dataclasses.replace(elastic_settings(elastic, addresses, SILENCE), **changed)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"min_workers": 0}, "`min_workers` must be a number of workers, 1 or more"),
        ({"min_workers": True}, "min_workers=True"),
        ({"min_workers": 3, "max_workers": 2}, "min_workers=3, max_workers=2"),
        ({"rejoin": "yes"}, "`rejoin` must be True or False"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
    ],
)
def test_options_are_checked(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Elastic(**given)


def test_a_minimum_above_the_cluster_is_an_error():
    with pytest.raises(
        ClusterError, match="more workers than the cluster describes: 2"
    ):
        elastic_settings(Elastic(min_workers=3), ["a:1", "b:1"], 1.0)


class Cluster(Workers):
    """Processes of `elastic_worker`."""

    def __init__(self, folder: Path, count: int, seconds: float = 0.01, **changed: Any):
        given = settings_of(free_addresses(count), **changed)
        super().__init__(folder, given, seconds=seconds)
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self, *indices: int) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        for index in indices:
            command = [sys.executable, elastic_worker.__file__, *self.arguments(index)]
            self.processes[index] = subprocess.Popen(command, env=environment)
            self.all.append(self.processes[index])

    def pid(self, index: int) -> int:
        return int(self.processes[index].pid)

    def await_members(self, members: set[int]) -> None:
        wait_until(lambda: self.train_together(members), f"{members} train together")

    def results(self) -> dict[int, dict[str, Any]]:
        self.stop()
        for process in self.processes.values():
            process.wait(TIMEOUT)
        return {index: self.result(index) for index in self.processes}

    def check(self, lost: int, joined: int) -> None:
        """Checks that all workers have taken each step once."""
        found = self.results()
        assert len({result["steps"] for result in found.values()}) == 1
        for result in found.values():
            assert result["state"] == elastic_worker.expected(result["steps"])
        events = max((result["events"] for result in found.values()), key=len)
        assert sum("lost" in event for event in events) == lost, events
        assert sum("added" in event for event in events) == joined, events


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(count: int, addresses: int = 0, **settings: Any) -> Cluster:
        made.append(Cluster(tmp_path, addresses or count, **settings))
        made[-1].start(*range(count))
        made[-1].await_members(set(range(count)))
        return made[-1]

    yield make
    for each in made:
        for process in each.all:
            process.kill()
            process.wait()
        assert_gone([process.pid for process in each.all])


@pytest.mark.nightly(unless=["chief"])
@pytest.mark.slow(seconds=7)
@pytest.mark.parametrize("victim", [0, 1], ids=["chief", "worker"])
def test_a_killed_worker_is_replaced_by_a_new_one(cluster, victim):
    three = cluster(3)
    os.kill(three.pid(victim), signal.SIGKILL)
    three.processes.pop(victim).wait()
    others = {0, 1, 2} - {victim}
    three.await_members(others)
    three.start(victim)
    three.await_members({0, 1, 2})
    # The chief remains the chief.
    assert three.members(2) == [*sorted(others), victim]
    three.check(lost=1, joined=1)


@pytest.mark.nightly(unless=["worker"])
@pytest.mark.slow(seconds=7)
@pytest.mark.parametrize("victim", [0, 1], ids=["chief", "worker"])
def test_a_stopped_worker_is_excluded_and_rejoins(cluster, victim):
    three = cluster(3, timeout=2.0)
    os.kill(three.pid(victim), signal.SIGSTOP)
    three.await_members({0, 1, 2} - {victim})
    os.kill(three.pid(victim), signal.SIGCONT)
    three.await_members({0, 1, 2})
    three.check(lost=1, joined=1)


@pytest.mark.nightly
@pytest.mark.slow(seconds=13)
def test_a_stopped_worker_rejoins_workers_outside_of_its_last_generation(cluster):
    """When it continues, all workers that it trained with are stopped themselves."""
    three = cluster(3, timeout=2.0)
    os.kill(three.pid(1), signal.SIGSTOP)
    three.await_members({0, 2})
    os.kill(three.pid(2), signal.SIGSTOP)
    three.await_members({0})
    os.kill(three.pid(1), signal.SIGCONT)
    three.await_members({0, 1})
    os.kill(three.pid(0), signal.SIGSTOP)
    three.await_members({1})
    os.kill(three.pid(2), signal.SIGCONT)
    three.await_members({1, 2})
    os.kill(three.pid(0), signal.SIGCONT)
    three.await_members({0, 1, 2})
    found = three.results()
    assert {result["state"] for result in found.values()} == {
        elastic_worker.expected(found[1]["steps"])
    }


def test_all_but_one_are_killed_at_once(cluster):
    three = cluster(3)
    for index in (0, 1):
        os.kill(three.pid(index), signal.SIGKILL)
        three.processes.pop(index).wait()
    three.await_members({2})
    three.start(1, 0)
    three.await_members({0, 1, 2})
    found = three.results()
    assert {result["state"] for result in found.values()} == {
        elastic_worker.expected(found[2]["steps"])
    }


def test_workers_below_the_minimum_wait_for_another_one(cluster):
    two = cluster(2, min_workers=2)
    os.kill(two.pid(0), signal.SIGKILL)
    two.processes.pop(0).wait()
    two.start(0)
    wait_until(lambda: two.members(1) == [1, 0], "the new worker trains")
    two.check(lost=1, joined=1)


def test_a_spare_worker_takes_the_place_of_a_lost_one(cluster):
    three = cluster(2, addresses=3, max_workers=2)
    three.start(2)
    os.kill(three.pid(0), signal.SIGKILL)
    three.processes.pop(0).wait()
    three.await_members({1, 2})
    three.check(lost=1, joined=1)


# In threads of one process: refusals, and a network that is cut.


def join_all(addresses: list[str], indices: list[int], **changed: Any) -> list[Any]:
    """Memberships, or errors, of workers that start together."""
    with ThreadPoolExecutor(len(indices)) as pool:
        futures = [pool.submit(join, addresses, index, **changed) for index in indices]
        return [future.exception(TIMEOUT) or future.result() for future in futures]


def join(
    addresses: list[str], index: int, version: str = "1", **changed: Any
) -> Membership:
    given = settings_of(addresses, **changed)
    return Membership(given, index, {"the version": version})


def everywhere(
    members: list[Membership], call: Callable[[Membership], Any]
) -> list[Any]:
    with ThreadPoolExecutor(len(members)) as pool:
        futures = [pool.submit(call, each) for each in members]
        return [future.exception(TIMEOUT) or future.result() for future in futures]


@pytest.fixture
def joined() -> Iterator[list[Membership]]:
    """Memberships that the test adds, and that are left at its end."""
    members: list[Membership] = []
    yield members
    for each in members:
        each.leave()


def test_a_pause_of_the_process_is_no_loss(joined):
    """As an import or a compilation that holds the interpreter's lock."""
    joined += join_all(free_addresses(2), [0, 1], timeout=SILENCE)
    ctypes.PyDLL(None).usleep(2_000_000)
    time.sleep(0.5)
    assert [each.group.loss() for each in joined] == [None, None]


def test_a_start_below_the_minimum_is_an_error():
    addresses = free_addresses(3)
    found = join_all(addresses, [0, 2], patience=4.0, min_workers=3)
    assert [type(error) for error in found] == [WorkerError, WorkerError]
    assert f"without worker 1 ({addresses[1]})" in str(found[1])


@pytest.mark.slow(seconds=6)
def test_without_any_state_the_error_names_the_last_snapshot(joined):
    addresses = free_addresses(2)
    joined += join_all(addresses, [0, 1])
    joined[1].client.report_snapshot(8, "/runs/8")
    joined[0].client.abandon()

    def is_waiting() -> bool:
        rows = joined[1].client.status()["workers"]
        return any(row["waits"] for row in rows)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(join, addresses, 0)
        wait_until(is_waiting, "the new worker waits")
        joined[1].client.abandon()
        error = waiting.exception(TIMEOUT)
    assert "No worker has the state of training any longer" in str(error)
    assert "they continue at the last snapshot, '/runs/8'" in str(error)


def test_too_few_workers_after_a_loss_are_an_error(joined):
    joined += join_all(free_addresses(2), [0, 1], patience=3.0, min_workers=2)
    joined.pop().leave()
    with pytest.raises(WorkerError) as caught:
        joined[0].reform(5)
    error = str(caught.value)
    assert "1 of 2 workers are connected after 3 s, without worker 1" in error
    assert "At least 2 are needed (`ks.Elastic(min_workers=...)`)" in error


def test_a_process_that_has_replaced_the_chief_does_not_lead(joined):
    # It listens before the others notice the loss.
    addresses = free_addresses(2)
    joined += join_all(addresses, [0, 1], min_workers=2)
    joined.pop(0).leave()
    with ThreadPoolExecutor(1) as pool:
        new = pool.submit(join, addresses, 0, min_workers=2)
        wait_until(lambda: _listens(addresses[0]), "the new worker listens")
        found = joined[0].reform(5)
        joined.append(new.result(TIMEOUT))
    assert found.members == (1, 0)
    assert (found.lost, found.joined, found.step) == ((0,), (0,), 5)


def _listens(address: str) -> bool:
    host, port = split_address(address)
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def test_one_worker_ends_the_generation_of_busy_ones(joined):
    joined += join_all(free_addresses(2), [0, 1])
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(joined[1].reform, 3)
        # Its wait for the other one ends.
        with pytest.raises(WorkerError):
            joined[0].group.barrier("a step")
        assert joined[0].reform(3).members == second.result(TIMEOUT).members


def test_a_member_waits_for_the_end_of_the_chiefs_step(joined):
    timeout = 0.5
    joined += join_all(free_addresses(2), [0, 1], timeout=timeout)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(joined[1].reform, 3)
        # A compilation, which does not notice that the generation has ended.
        time.sleep(4 * timeout)
        assert not second.done(), second.exception()
        assert joined[0].reform(3).members == second.result(TIMEOUT).members


def test_no_thread_is_left(joined):
    before = {thread.ident for thread in threading.enumerate()}
    members = join_all(free_addresses(2), [0, 1])
    everywhere(members, lambda each: each.reform(1))
    everywhere(members, Membership.leave)
    wait_until(
        lambda: (
            not [
                thread
                for thread in threading.enumerate()
                if thread.ident not in before and thread.name == "lead"
            ]
        ),
        "all threads have ended",
    )

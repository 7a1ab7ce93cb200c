"""Collectives of the engine go on with the workers that are left, and with new ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
from backends import elastic_collectives
from harness.elastic_processes import Workers
from harness.forker import Forker
from harness.processes import TIMEOUT, wait_until

from keras_strategies.cluster.group.membership import elastic_settings
from keras_strategies.cluster.resolvers.local_processes import free_addresses
from keras_strategies.types import Elastic

pytestmark = [
    pytest.mark.skipif(
        keras.backend.backend() not in ("jax", "tensorflow"), reason="no such engine"
    ),
    pytest.mark.multiprocess,
]

# Long enough for a busy machine; only tests of stopped workers wait for it.
SILENCE = 10.0


class Cluster(Workers):
    """Processes of `elastic_collectives`."""

    def __init__(self, forker: Forker, folder: Path, silence: float = SILENCE):
        elastic = Elastic(timeout_seconds=TIMEOUT)
        super().__init__(folder, elastic_settings(elastic, free_addresses(3), silence))
        self.forker = forker
        for index in range(3):
            self.start(index)
        self.await_members({0, 1, 2})

    def start(self, index: int) -> None:
        script = str(elastic_collectives.__file__)
        log = self.folder / f"log{index}-{len(list(self.folder.glob('log*')))}"
        self.processes[index] = self.forker.start(
            log, script, *self.arguments(index), OMP_NUM_THREADS="1"
        )

    def await_members(self, members: set[int]) -> None:
        def together() -> bool:
            for index, each in self.processes.items():
                assert each.ended() is None, f"worker {index}:\n{self.text()}"
            return self.train_together(members)

        try:
            wait_until(together, f"{members} train together")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from error

    def send(self, index: int, number: int) -> None:
        os.kill(self.processes[index].pid, number)
        if number == signal.SIGKILL:
            self.processes.pop(index).wait(TIMEOUT)

    def results(self) -> dict[int, dict[str, Any]]:
        self.stop()
        for process in self.processes.values():
            code, _ = process.wait(TIMEOUT)
            assert code == 0, process.text()
        return {index: self.result(index) for index in self.processes}

    def text(self) -> str:
        paths = sorted(self.folder.glob("log*-?"))
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in paths)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Forker() as forker:
        yield Cluster(forker, tmp_path)


@pytest.mark.nightly
def test_a_killed_worker_and_a_killed_chief_are_replaced(cluster):
    cluster.send(2, signal.SIGKILL)
    cluster.await_members({0, 1})
    cluster.start(2)
    cluster.await_members({0, 1, 2})
    cluster.send(0, signal.SIGKILL)
    cluster.await_members({1, 2})
    cluster.start(0)
    cluster.await_members({0, 1, 2})
    found = cluster.results()
    assert len({each["steps"] for each in found.values()}) == 1
    assert [len(found[index]["times"]) for index in range(3)] == [1, 4, 3]


@pytest.mark.one_backend("jax", "tensorflow")
def test_a_worker_is_lost_before_the_first_collective(cluster):
    """The connections of a generation are made when no other has taken a step."""
    second = cluster.processes[1]
    (cluster.folder / f"{second.pid}.dies").touch()
    cluster.send(2, signal.SIGKILL)
    second.wait(TIMEOUT)
    del cluster.processes[1]
    cluster.await_members({0})
    assert len(cluster.results()[0]["times"]) == 2


@pytest.mark.nightly
def test_a_busy_worker_is_waited_for(tmp_path):
    """It compiles, for example; its heartbeats continue."""
    with Forker() as forker:
        cluster = Cluster(forker, tmp_path, silence=3.0)
        sleeps = tmp_path / f"{cluster.processes[1].pid}.sleeps"
        sleeps.write_text("9")
        wait_until(lambda: not sleeps.exists(), "it has been busy")
        found = cluster.results()
    assert [each["times"] for each in found.values()] == [[], [], []]


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1], ids=["chief", "worker"])
def test_a_stopped_worker_is_left_out(cluster, victim):
    cluster.send(victim, signal.SIGSTOP)
    stopped = cluster.processes.pop(victim)
    cluster.await_members({0, 1, 2} - {victim})
    stopped.send_kill()
    found = cluster.results()
    assert len({each["steps"] for each in found.values()}) == 1

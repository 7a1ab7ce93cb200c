"""Descriptors that run out, cut cables and stops of the lead make no second chief."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
from elastic.endless_runs import WORKERS, Run
from elastic.test_soak import Soak
from harness.forker import Forker
from harness.hosts import Hosts, connected_hosts
from harness.processes import TIMEOUT, lead_process

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.nightly,
    pytest.mark.timeout(3 * TIMEOUT),
    pytest.mark.skipif(
        keras.backend.backend() != "torch",
        reason="the soak has the engines of the others; the lead has none",
    ),
]

KINDS = ("descriptors of the lead", "descriptors of all", "stop of the lead", "cable")
RUNS = 50
# Seconds for the end of a training.
_LAST = 30.0


@contextlib.contextmanager
def without_descriptors(pids: list[int]) -> Iterator[None]:
    """Processes that can open no file; those that have ended are left out."""
    limits = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            used = max(map(int, os.listdir(f"/proc/{pid}/fd")))
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 1, before[1]))
            limits[pid] = before
    yield
    for pid, before in limits.items():
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


class Disturbed(Soak):
    """Disturbs the connections of a training, which may end by an error.

    Args:
        run: the training.
        seed: int, of the random choices.
        hosts: those of the workers; None where all are on this one.
    """

    def __init__(self, run: Run, seed: int, hosts: Hosts | None):
        super().__init__(run, seed)
        self._hosts = hosts

    def disturb_connections(self, kind: str) -> None:
        workers = [each.pid for each in self._run.workers]
        if kind == "cable":
            assert self._hosts is not None
            victim = self._random.randrange(WORKERS)
            self._hosts.cut(victim)
            time.sleep(self._random.uniform(5, 20))
            self._hosts.plug(victim)
            return
        lead = lead_process(self._run.addresses[0])
        if kind == "stop of the lead":
            os.kill(lead, signal.SIGSTOP)
            self._lose_chief()
            time.sleep(self._random.uniform(0, 6))
            os.kill(lead, signal.SIGCONT)
            return
        pids = [lead] if kind.endswith("lead") else [lead, *workers]
        with without_descriptors(pids):
            self._lose_chief()
            time.sleep(self._random.uniform(0.5, 4))
        self._run.start_again(self._lost)

    def _lose_chief(self) -> None:
        self._lost = self._chief()
        self._run.workers[self._lost].send_kill()

    def finish(self) -> None:
        """Ends the training, which may have ended by an error before."""
        time.sleep(self._random.uniform(2, 6))
        (self._run.states.folder / "stop").touch()
        # If all were lost, a worker that was started again waits for the others.
        until = time.monotonic() + _LAST
        for worker in self._run.workers:
            while worker.ended() is None and time.monotonic() < until:
                time.sleep(0.05)
            worker.kill()


@pytest.mark.parametrize("seed", range(RUNS))
def test_one_group_trains(forker: Forker, tmp_path: Path, seed: int) -> None:
    kind = KINDS[seed % len(KINDS)]
    with contextlib.ExitStack() as stack:
        hosts = None
        if kind == "cable":
            hosts = stack.enter_context(connected_hosts(WORKERS))
        run = Run(forker, tmp_path, hosts)
        stack.callback(run.close)
        soak = Disturbed(run, seed, hosts)
        soak.await_steps()
        soak.disturb_connections(kind)
        if kind == "descriptors of the lead":
            soak.await_steps()
        soak.finish()
        codes = [worker.ended() for worker in run.workers]
        assert all(code is None or code[0] != -signal.SIGABRT for code in codes), (
            run.text()
        )
        print(f"{kind}: generation {soak.check_chiefs()}, {codes}")

"""Many random losses and stops of workers, and stops of their lead, in one training."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from elastic.elastic_until_stopped import PLACES, SILENCE
from elastic.endless_runs import WORKERS, Run
from harness.processes import lead_process, wait_until

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]

#: Seconds for one event and what follows from it.
SECONDS = 120
CHIEFS = ("kill the chief", "stop the chief")
EVENTS = ("kill", "stop", *CHIEFS, "pair", "stop the lead", *PLACES)
#: Trainings, with a seed each, and events of each.
TRAININGS, EVENTS_OF_EACH = 15, 20


class Soak:
    """Disturbs a training.

    Args:
        run: the training.
        seed: int, of the random choices.
    """

    def __init__(self, run: Run, seed: int):
        self._run, self._random = run, random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()

    def disturb(self) -> None:
        """One event, and the end of what follows from it."""
        event = self._random.choice(EVENTS)
        self.counts[event] += 1
        time.sleep(self._random.uniform(0, 2))
        if event in PLACES:
            self._kill_in(event)
        elif event == "stop the lead":
            # Workers end when they do not hear of it for longer.
            lead = lead_process(self._run.addresses[0])
            self._stop(lead, self._random.uniform(0.5, 0.8 * SILENCE))
        elif event == "pair":
            self._lose_two()
        else:
            chief = self._chief() if event.endswith("chief") else None
            index = self._random.randrange(WORKERS) if chief is None else chief
            if event.startswith("kill"):
                self._kill(index)
            else:
                self._stop(self._run.workers[index].pid, self._seconds())
        self.await_steps()

    def disturb_start(self) -> None:
        """Kills a worker that starts."""
        self.counts["start"] += 1
        time.sleep(self._random.uniform(0, 3))
        self._kill(self._random.randrange(WORKERS))
        self.await_steps()

    def disturb_end(self) -> None:
        """Kills or stops a worker in the last second; the others finish."""
        self.counts["last second"] += 1
        (self._run.states.folder / "stop").touch()
        time.sleep(self._random.uniform(0, 1))
        victim = self._random.randrange(WORKERS)
        worker = self._run.workers[victim]
        if self._random.random() < 0.5 and worker.ended() is None:
            # It may end by itself just before.
            with contextlib.suppress(ProcessLookupError):
                self._stop(worker.pid, self._seconds())
        else:
            worker.send_kill()
        self._run.end(may_fail=victim)

    def await_steps(self) -> None:
        """Waits until all workers take steps together."""
        begun = time.monotonic()

        def are_together() -> bool:
            for worker in self._run.workers:
                assert worker.ended() is None, self._run.text()
            last = self._last_steps()
            generations = {generation for _, generation, _, _ in last}
            return (
                len(last) == WORKERS and min(last)[0] > begun and len(generations) == 1
            )

        try:
            wait_until(are_together, "the workers train together")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._run.text()}") from error

    def _last_steps(self) -> list[tuple[float, int, int, int]]:
        """The last line of each worker that has taken a step."""
        files = [self._steps(each.pid) for each in self._run.workers]
        lines = [each.read_text().splitlines() for each in files if each.exists()]
        return [tuple(json.loads(each[-1])) for each in lines if each]

    def _lose_two(self) -> None:
        """Two workers are stopped or killed within two seconds."""
        first, second = self._random.sample(range(WORKERS), 2)
        pid = self._run.workers[first].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._random.uniform(0, 2))
        if self._random.random() < 0.5:
            os.kill(pid, signal.SIGKILL)
            self._kill(second)
            self._run.start_again(first)
        else:
            self._kill(second)
            time.sleep(self._seconds())
            os.kill(pid, signal.SIGCONT)

    def _kill(self, index: int) -> None:
        self._run.workers[index].send_kill()
        time.sleep(self._random.uniform(0, 2))
        self._run.start_again(index)

    def _kill_in(self, place: str) -> None:
        """A worker kills itself in a place of `PLACES`; the chief in saving."""
        index = self._random.randrange(WORKERS)
        if place == "saving":
            index = self._chief()
        (self._run.states.folder / f"{index}.{place}").touch()
        self._run.start_again(index)

    def _stop(self, pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    def _seconds(self) -> float:
        return min(20.0, 1.0 + self._random.expovariate(1 / 4))

    def _chief(self) -> int:
        """The chief of the last step, by the lines of the workers."""
        return next(i for i, each in enumerate(self._last_steps()) if each[2] == 0)

    def _steps(self, pid: int) -> Path:
        return self._run.states.folder / f"{pid}.steps"

    def check_chiefs(self) -> int:
        """Fails if two groups have trained at the same time; returns the last one."""
        rows = sorted(
            (*json.loads(line), int(file.stem))
            for file in self._run.states.folder.glob("*.steps")
            for line in file.read_text().splitlines()
            # A killed process may have written half of one.
            if line.endswith("]")
        )
        chiefs: dict[int, int] = {}
        newest, late = 0, collections.Counter[tuple[int, int]]()
        for _, generation, rank, _, pid in rows:
            if rank == 0:
                assert chiefs.setdefault(generation, pid) == pid, generation
            newest = max(newest, generation)
            if generation < newest:
                # A stopped process writes the line of its last step when it goes on.
                late[generation, pid] += 1
        assert not late or max(late.values()) == 1, late
        return newest


@pytest.mark.timeout(EVENTS_OF_EACH * SECONDS)
@pytest.mark.parametrize("seed", range(TRAININGS))
def test_no_event_changes_the_result(run: Run, seed: int) -> None:
    soak = Soak(run, seed)
    soak.disturb_start()
    for _ in range(EVENTS_OF_EACH - 2):
        soak.disturb()
    soak.disturb_end()
    assert soak.check_chiefs() > 1
    difference = run.states.assert_like_one_device(1e-6)
    print(f"{dict(soak.counts)}, weights within {difference:.1e}")

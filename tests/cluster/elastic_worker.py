"""A worker of an elastic group that computes without a framework, as a process.

Each step sums the rows of a global batch, which are split over the workers, and updates
one number. `python elastic_worker.py SETTINGS INDEX` trains, and writes `PID.json`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from harness.elastic_processes import join, run, write, write_members

from keras_strategies.cluster.group.membership import Membership
from keras_strategies.errors import WorkerError
from keras_strategies.lead.client_state import JoinedGeneration

ROWS = 7
_MODULUS = 2**31 - 1


def rows_of(step: int) -> list[int]:
    """The global batch of a step; it does not divide by most numbers of workers."""
    return [(step * ROWS + row) * 7919 % 10007 for row in range(ROWS)]


def updated(state: int, total: int) -> int:
    """The state after a step; a step that is lost or done twice changes it."""
    return (state * 31 + total) % _MODULUS


def expected(steps: int) -> int:
    """The state of one worker without faults."""
    state = 0
    for step in range(steps):
        state = updated(state, sum(rows_of(step)))
    return state


class Training:
    """The loop of one worker, until a file `stop` exists.

    Args:
        membership: the group.
        folder: for files; `PID.members` has the members of the current generation.
        seconds: float, the least duration of a step.
    """

    def __init__(self, membership: Membership, folder: Path, seconds: float):
        self.membership = membership
        self.folder = folder
        self.seconds = seconds
        self.step: int | None = None
        self.state = 0
        self.events: list[str] = []
        self._is_over = False

    def run(self) -> None:
        self._synchronize()
        while not self._is_over:
            try:
                if self.membership.group.begin_step():
                    self._train()
                else:
                    self._reform()
            except WorkerError:
                self._reform()

    def _train(self) -> None:
        assert self.step is not None
        group = self.membership.group
        time.sleep(self.seconds)
        own = sum(rows_of(self.step)[group.index :: group.count])
        stop = (self.folder / "stop").exists()
        group.progress = f"step {self.step}"
        found = group.gather_values("a step", [self.step, own, stop])
        assert {step for step, _, _ in found} == {self.step}
        self.state = updated(self.state, sum(part for _, part, _ in found))
        self.step += 1
        self.membership.client.step = self.step
        self._is_over = any(stop for _, _, stop in found)

    def _reform(self) -> None:
        self._note(self.membership.reform(self.step))
        self._synchronize()

    def _note(self, generation: JoinedGeneration) -> None:
        changes = {"lost": generation.lost, "added": generation.joined}
        self.events.append(" and ".join(name for name in changes if changes[name]))

    def _synchronize(self) -> None:
        """Takes the state of the worker that has finished the last step."""
        while True:
            own = [self.step or 0, self.state]
            try:
                found = self.membership.group.gather_values("the state", own)
                if self.step is not None or self.membership.generation.step is not None:
                    self.membership.confirm()
            except WorkerError:
                self._note(self.membership.reform(self.step))
                continue
            self.step, self.state = found[0]
            self.membership.client.step = self.step
            write_members(self.folder, self.membership)
            return


def train(settings: dict[str, Any], index: int) -> Membership:
    folder = Path(settings["folder"])
    training = Training(join(settings, index), folder, settings["seconds"])
    training.run()
    found = {"steps": training.step, "state": training.state}
    write(folder, "json", {**found, "events": training.events})
    return training.membership


if __name__ == "__main__":
    run(train)

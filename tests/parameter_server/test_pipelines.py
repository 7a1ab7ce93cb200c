"""Places of batches that workers read: each batch once, whichever workers are lost."""

from __future__ import annotations

import random
from collections import deque

import pytest

from keras_strategies.parameter_server.coordinator.pipelines import Pipelines

pytestmark = pytest.mark.one_backend

#: Workers that are lost at random have as many tasks as this.
IN_FLIGHT = 3


class Cluster:
    """Workers that read pipelines of numbers, lost and replaced at random.

    Args:
        seed: int.
        workers: int, their number, that of pipelines too.
        batches: int, the number of batches.
        is_exact: bool, see `Pipelines`.
    """

    def __init__(self, seed: int, workers: int, batches: int, is_exact: bool):
        self.random = random.Random(seed)
        self.rows = [list(range(batches))[i::workers] for i in range(workers)]
        self.pipelines = Pipelines(0, 0, workers, 1, is_exact)
        self.alive = [True] * workers
        self.in_flight: list[deque] = [deque() for _ in range(workers)]
        self.waiting: deque = deque()
        self.read: list[int] = []

    def lose(self) -> None:
        worker = self.random.randrange(len(self.alive))
        self.alive[worker] = False
        self.waiting.extendleft(reversed(self.in_flight[worker]))
        self.in_flight[worker].clear()

    def assign(self) -> bool:
        """Assigns a step, new or repeated; False at the end."""
        place = self.waiting[0] if self.waiting else None
        if self.pipelines.have_ended(place):
            return any(self.in_flight)
        readers = {
            worker: self.pipelines.of_worker(worker, self.alive.__getitem__, place)
            for worker, is_alive in enumerate(self.alive)
            if is_alive and len(self.in_flight[worker]) < IN_FLIGHT
        }
        able = [worker for worker, pipeline in readers.items() if pipeline >= 0]
        if able:
            worker = self.random.choice(able)
            if self.waiting:
                self.waiting.popleft()
            self.in_flight[worker].append(place or self.pipelines.take(readers[worker]))
        return True

    def finish(self) -> None:
        """Finishes a step of a worker, which reads the batch at its place."""
        busy = [tasks for tasks in self.in_flight if tasks]
        if not busy:
            return
        pipeline, position = self.random.choice(busy).popleft()
        rows = self.rows[pipeline]
        if position < len(rows):
            self.read.append(rows[position])
        else:
            self.pipelines.end(pipeline)

    def run(self, loses: bool) -> None:
        for _ in range(10_000):
            event = self.random.random()
            if event < 0.1 and loses:
                self.lose()
            elif event < 0.2:
                self.alive = [True] * len(self.alive)
            elif event < 0.6:
                if not self.assign():
                    return
            else:
                self.finish()
        raise AssertionError("the pass does not end")


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_batch_is_read_once_while_workers_are_lost(workers) -> None:
    for seed in range(200):
        cluster = Cluster(seed, workers, 20, is_exact=True)
        cluster.run(loses=True)
        assert sorted(cluster.read) == list(range(20)), seed


def test_each_batch_is_read_once_of_a_number_of_steps() -> None:
    for seed in range(50):
        cluster = Cluster(seed, 2, 21, is_exact=False)
        cluster.run(loses=False)
        assert sorted(cluster.read) == list(range(21)), seed

"""Stalls: the awaited workers, since when, and the line where they are."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.cluster.resolvers.local_processes import free_addresses
from keras_strategies.errors import WorkerError
from keras_strategies.lead.stalls import StallWatch
from keras_strategies.lead.state import KnownWorker

pytestmark = pytest.mark.one_backend("jax")


def worker_of(rank):
    """In a group whose first workers were lost, numbers are not ranks."""
    at = "step 4 of fit"
    return KnownWorker("", rank + 2, "10.0.0.7", 42, 0.0, 0.0, progress=at)


class Watched:
    """A `StallWatch` of workers whose answers arrive at once, or never."""

    def __init__(self, after=30.0, answers=True):
        self.asked = []
        self._answers = answers
        self.watch = StallWatch(after, self._ask, worker_of)

    def _ask(self, index):
        self.asked.append(index)
        if self._answers:
            self.watch.answered(index, f"train.py, line {index}")

    def reports(self, beats, collectives=None, until=400):
        """The reports by the second, with a heartbeat of each worker in each."""
        found = {}
        for now in range(until):
            for index, (count, waits) in enumerate(beats(now)):
                self.watch.beat(index, count, waits, now)
            text = self.watch.tick(collectives(now) if collectives else {}, now)
            if text is not None:
                found[now] = text
        return found


def test_a_collective_names_those_that_have_not_arrived_and_their_lines():
    watched = Watched()
    found = watched.reports(
        lambda now: [((7, 0), 0.0)] * 3,
        lambda now: {("", 5): ("the end of batch 3", {0, 2})} if now >= 10 else {},
    )
    # At 30 s, and after twice the time each.
    assert list(found) == [40, 70, 130, 250]
    assert found[40] == (
        "Worker 3 (10.0.0.7, process 42) has been awaited in 'the end of batch 3' for "
        "30 s. It is at step 4 of fit, in train.py, line 1."
    )
    assert watched.asked == [1, 1, 1, 1]


def test_one_that_is_awaited_for_too_long_is_given_up():
    """In an engine, although it misses in the comparison of the next batch, too."""
    watched = Watched(after=10.0)
    batch = {("", 5): ("a batch", {0})}
    for counts, pending, limit in (((8, 7), {}, 20), ((8, 8), batch, 22)):
        given_up = {}
        for now in range(100, 140):
            for index, count in enumerate(counts):
                watched.watch.beat(index, (count, 0), 0.0, now)
            watched.watch.tick(pending, now)
            given_up[now - 100] = watched.watch.overdue(20.0, now)
        first = next(now for now, found in given_up.items() if found)
        assert given_up[first][0] == 1 and "Worker 3" in given_up[first][1]
        assert limit <= first <= limit + 1
        watched = Watched(after=10.0)


@pytest.mark.parametrize(
    "beats",
    [
        # Long steps, compilation, a pause between methods.
        lambda now: [((5, 1), 0.0), ((5, 1), 0.0)],
        # Slow, and not stalled.
        lambda now: [((5, now // 20 + 1), 0.0), ((5, now // 20), 0.0)],
        lambda now: [((5, now // 20), now % 20), ((5, now // 20), 0.0)],
    ],
)
def test_without_a_wait_for_others_nothing_is_said(beats):
    watched = Watched()
    assert watched.reports(beats) == {}
    assert watched.asked == []


HANGS = """\
import sys, threading
from keras_strategies.cluster.group import WorkerGroup

group = WorkerGroup.join(sys.argv[1:], 1, {}, timeout=6.0)
group.progress = "step 4 of fit"
group.barrier("the first")
def load_batch():
    threading.Event().wait(60)  # never set
load_batch()
"""


@pytest.mark.slow(seconds=8)
def test_a_real_worker_that_hangs_is_named_with_its_line(tmp_path, caplog):
    script = tmp_path / "train.py"
    script.write_text(HANGS)
    addresses = free_addresses(2)
    process = subprocess.Popen([sys.executable, str(script), *addresses])
    try:
        group = WorkerGroup.join(addresses, 0, {}, timeout=6.0)
        group.barrier("the first")
        with (
            caplog.at_level(logging.WARNING, "keras_strategies"),
            pytest.raises(WorkerError) as caught,
        ):
            group.barrier("the end of batch 3")
        where = (
            f"Worker 1 (127.0.0.1, process {process.pid}) has been awaited in 'the end "
            f"of batch 3' for 3 s. It is at step 4 of fit, in {script}, line 8, in "
            "load_batch: `threading.Event().wait(60)  # never set`."
        )
        # Half of the timeout is before 30 s.
        assert caplog.records[0].getMessage() == where
        text = str(caught.value)
        assert "Not all workers reached 'the end of batch 3' within 6 s." in text
        assert "line 8, in load_batch" in text
    finally:
        process.kill()
        process.wait()
        group.leave()

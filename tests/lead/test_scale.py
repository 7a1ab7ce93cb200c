"""What the lead of a thousand workers costs, by counts; times are in the benchmarks."""

from __future__ import annotations

import resource
import time

import pytest
from lead.leads import RunningLead
from lead.simulated_workers import SimulatedWorkers, ask_for_status, beat, compare

from keras_strategies.lead.events import TICK


@pytest.fixture(params=[64, 1000])
def group(request):
    """A lead, and simulated workers that train."""
    count = request.param
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2500)), hard))
    with RunningLead(count, timeout=60.0, patience=60.0) as lead:
        workers = SimulatedWorkers(lead, count)
        workers.until("go", count)
        yield lead, workers, count
        workers.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.one_backend
def test_threads_memory_messages_and_bytes(group):
    lead, workers, count = group
    assert lead.threads == 1
    assert lead.descriptors <= count + 16
    assert lead.megabytes < 64
    assert set(workers.seen) <= {"facts", "welcome", "arrival", "begin", "go"}
    # To worker 0 alone.
    assert workers.seen["arrival"] == count
    assert workers.seen["begin"] == workers.seen["go"] == count
    assert workers.bytes_of(lambda: compare(workers, count)) / count < 100
    assert workers.bytes_of(lambda: beat(workers, count)) / count < 60
    assert workers.bytes_of(lambda: ask_for_status(workers)) < 200 * count + 200
    lose_one(workers, count)


def lose_one(workers, count):
    """A generation takes three messages to each worker."""
    time.sleep(TICK)
    before = sum(workers.seen.values())
    workers.leave(count // 2)
    sent = workers.bytes_of(lambda: workers.until("go", count - 1))
    # `end`, `begin` and `go`; the numbers of all members are in `begin`.
    assert sum(workers.seen.values()) - before == 3 * (count - 1)
    assert sent / count < 600 + 8 * count
    assert workers.generation == 2

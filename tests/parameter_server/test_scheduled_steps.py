"""Steps that are scheduled ahead of Keras's loop, without processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keras_strategies.parameter_server.coordinator.remote_values import RemoteValue
from keras_strategies.parameter_server.coordinator.scheduled_steps import (
    ScheduledSteps,
)
from keras_strategies.parameter_server.coordinator.step_sources import ReadAhead

pytestmark = pytest.mark.one_backend


class Cluster:
    """Records the batches that are scheduled; their steps return them at once."""

    def __init__(self, workers: int = 1, max_staleness: int | None = None):
        self.workers = dict.fromkeys(range(workers))
        self.max_staleness = max_staleness
        self.tasks = self
        self.scheduled: list[list[int]] = []

    def emit_warnings(self) -> None:
        """None here."""

    def wait_for_room(self, is_done: Any) -> bool:
        return bool(is_done())

    def model_definition(self, model: Any, kind: str) -> str:
        return kind

    def schedule_steps(self, definition: str, batches: list[Any]) -> RemoteValue:
        self.scheduled.append([int(batch[0][0]) for batch in batches])
        value = RemoteValue()
        value.set([np.asarray(batch[0]) for batch in batches], None)
        return value


class Model:
    steps_per_execution = 1


def steps(model: Model, cluster: Any) -> ScheduledSteps:
    return ScheduledSteps(model, "predict", cluster, cluster)


def batches(count: int) -> Any:
    return ((np.full(2, i, "float32"),) for i in range(count))


def test_three_steps_of_each_worker_are_in_flight_until_the_input_ends() -> None:
    cluster = Cluster(workers=2)
    model = Model()
    step = steps(model, cluster)
    read = ReadAhead(batches(8), 1, None)
    counts = []
    for _ in range(8):
        step(read)
        counts.append(len(cluster.scheduled))
    assert counts == [6, 7, 8, 8, 8, 8, 8, 8]
    assert cluster.scheduled == [[i] for i in range(8)]
    with pytest.raises(StopIteration):
        step(read)


def test_no_step_of_the_next_epoch_begins() -> None:
    cluster = Cluster()
    model = Model()
    step = steps(model, cluster)
    read = ReadAhead(batches(8), 1, 4)
    counts = []
    for _ in range(8):
        step(read)
        counts.append(len(cluster.scheduled))
    assert counts == [3, 4, 4, 4, 7, 8, 8, 8]


def test_without_staleness_a_step_ends_before_the_next_one() -> None:
    cluster = Cluster(workers=2, max_staleness=0)
    model = Model()
    step = steps(model, cluster)
    read = ReadAhead(batches(3), 1, None)
    for done in range(3):
        step(read)
        assert len(cluster.scheduled) == done + 1


def test_several_batches_are_one_step_also_as_a_state_and_an_iterator() -> None:
    cluster = Cluster()
    model = Model()
    model.steps_per_execution = 2
    step = steps(model, cluster)
    read = ReadAhead(batches(5), 2, None)
    outputs, state = step("state", read)
    assert state == "state" and np.shape(outputs) == (4,)
    assert cluster.scheduled == [[0, 1], [2, 3], [4]]


def test_another_method_schedules_what_an_ended_one_had_read() -> None:
    """`evaluate` that stopped early; the next one goes on with the same iterator."""
    cluster = Cluster()
    model = Model()
    first = steps(model, cluster)
    read = ReadAhead(batches(6), 1, 3)
    first(read)
    assert cluster.scheduled == [[0], [1], [2]]
    steps(model, cluster)(read)
    assert [1] in cluster.scheduled[3:]

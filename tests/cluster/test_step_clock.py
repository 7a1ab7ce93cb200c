"""Times of steps without waits for other workers, and which worker is slow."""

from __future__ import annotations

import pytest

from keras_strategies.cluster.group import step_clock
from keras_strategies.cluster.group.step_clock import (
    WINDOW,
    StepClock,
    StepTimes,
    slow_workers,
)

pytestmark = pytest.mark.one_backend("jax")


class FakeTime:
    """Wall and processor time that pass on request."""

    def __init__(self) -> None:
        self.wall = self.processor = 0.0
        self.readings = 0

    def perf_counter(self) -> float:
        return self.wall

    def process_time(self) -> float:
        self.readings += 1
        return self.processor


@pytest.fixture
def now(monkeypatch) -> FakeTime:
    now = FakeTime()
    monkeypatch.setattr(step_clock.time, "perf_counter", now.perf_counter)
    monkeypatch.setattr(step_clock.time, "process_time", now.process_time)
    return now


def test_waits_are_no_time_of_the_worker(now):
    clock = StepClock(sees_waits=True)
    clock.begin(2)
    now.wall += 3
    with clock.waiting():
        now.wall += 1
        # Of another thread at the same time.
        with clock.waiting():
            now.wall += 2
    clock.end()
    assert clock.times == StepTimes(2, 1.5, 1.5)
    now.wall += 100  # Between methods.
    clock.begin()
    now.wall += 100
    clock.cancel()
    assert clock.times.steps == 2


def test_where_waits_are_not_seen_processor_time_and_input_count(now):
    clock = StepClock()
    for _ in range(2 + WINDOW):
        clock.begin()
        now.wall += 10
        now.processor += 2
        with clock.reading():
            now.wall += 5
            now.processor += 1
            with clock.waiting():
                now.wall += 1
    clock.end()
    # The first read is measured as processor time only.
    assert clock.times == StepTimes(2 + WINDOW, 2 + 5, 16 - 7)


def test_short_steps_are_measured_together(now):
    clock = StepClock()
    for _ in range(3 * WINDOW):
        clock.begin()
        now.wall += 0.001
        now.processor += 0.0004
        with clock.reading():
            now.wall += 0.001
    clock.begin()
    now.wall += 100
    clock.cancel()
    assert clock.times.steps == 3 * WINDOW
    assert clock.times.own == pytest.approx(0.0004)
    assert clock.times.waits == pytest.approx(0.0016)
    # 60 steps of 2 ms.
    assert now.readings <= 6


def test_single_long_steps_do_not_count(now):
    clock = StepClock(sees_waits=True)
    for step in range(2 * WINDOW):
        clock.begin()
        now.wall += 50 if step % 15 == 0 else 1
    clock.end()
    assert clock.times == StepTimes(2 * WINDOW, 1, 0)


@pytest.mark.parametrize(
    ("own", "slow"),
    [
        ([0.1, 0.1, 0.25], [2]),
        ([0.25, 0.1], [0]),
        ([0.1, 0.1, 0.19], []),
        ([0.1, 0.3, 0.1, 0.5, 0.1], [1, 3]),
        # The noise of a scheduler.
        ([0.001, 0.001, 0.015], []),
        ([1.0], []),
        ([], []),
    ],
)
def test_slow_workers_take_twice_the_median_of_the_others(own, slow):
    assert slow_workers([StepTimes(WINDOW, each) for each in own]) == slow
    assert slow_workers([StepTimes(WINDOW - 1, each) for each in own]) == []

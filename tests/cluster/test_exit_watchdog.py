"""A process with an engine that waits for a lost worker is ended, and no other."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from keras_strategies.cluster.group.exit_watchdog import ExitWatchdog
from keras_strategies.lead.state import Loss

pytestmark = pytest.mark.one_backend("jax")

GRACE = 0.3
LOSS = Loss(1, 1, "10.0.0.2", 77, "step 3 of fit", "it was stopped")


class Group:
    """What `ExitWatchdog` asks of a group."""

    def on_loss(self, callback):
        self.lose = callback

    def describe(self, loss):
        return f"{loss} This is worker 0."


@pytest.fixture
def watched():
    group, ended = Group(), threading.Event()
    return group, ExitWatchdog(group, GRACE, lambda _: ended.set()), ended


def test_who_still_waits_is_ended_after_the_error_is_printed(watched, capfd):
    group, exit_watchdog, ended = watched
    with exit_watchdog.waiting():
        begin = time.monotonic()
        group.lose(LOSS)
        assert ended.wait(10)
    assert time.monotonic() - begin >= GRACE
    printed = capfd.readouterr().err
    assert "WorkerError: Worker 1 (10.0.0.2, process 77) was lost at step 3" in printed
    assert "and exits" in printed


def test_who_comes_back_in_time_goes_on(watched, capfd):
    group, exit_watchdog, ended = watched
    with exit_watchdog.waiting():
        with exit_watchdog.waiting():
            group.lose(LOSS)
        assert not ended.is_set()
    assert not ended.wait(3 * GRACE)
    assert capfd.readouterr().err == ""


def test_who_does_not_wait_goes_on(watched):
    group, exit_watchdog, ended = watched
    with exit_watchdog.waiting():
        pass
    group.lose(LOSS)
    assert not ended.wait(3 * GRACE)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_process_that_has_lost_a_worker_does_not_hang_at_its_end(is_lost):
    script = f"""
import threading
from test_exit_watchdog import GRACE, LOSS, Group
from keras_strategies.cluster.group.exit_watchdog import ExitWatchdog
group = Group()
exit_watchdog = ExitWatchdog(group, GRACE)
if {is_lost}:
    group.lose(LOSS)
exit_watchdog.limit_exit()
# What the engine's threads do: nobody comes.
threading.Event().wait(None if {is_lost} else 4 * GRACE)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join([*filter(None, sys.path), "tests/cluster"])},
        timeout=60,
        check=False,
    )
    assert ended.returncode == int(is_lost)

"""Threads that do not take the core from the thread that wakes them."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from keras_strategies.runtime.thread_scheduling import scheduled_as_batch

pytestmark = pytest.mark.one_backend("jax")


def policy_of_new_thread() -> int:
    """How a thread is scheduled that is started here."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="policies of Linux")
def test_threads_started_inside_are_batch_and_others_as_they_were() -> None:
    with pytest.raises(ZeroDivisionError), scheduled_as_batch():
        assert policy_of_new_thread() == os.SCHED_BATCH
        1 / 0  # noqa: B018
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert policy_of_new_thread() == os.SCHED_OTHER


def test_a_sandbox_that_forbids_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden, raising=False)
    with scheduled_as_batch():
        pass

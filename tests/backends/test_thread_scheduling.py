"""Threads that do not take the core from the thread that wakes them."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from keras_strategies.runtime.thread_scheduling import scheduled_as_batch

pytestmark = pytest.mark.one_backend("jax")

linux_only = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="scheduling policies are Linux's"
)


def policy_of_new_thread() -> int:
    """How a thread is scheduled that is started here."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


@linux_only
def test_threads_started_inside_are_batch() -> None:
    with scheduled_as_batch():
        assert policy_of_new_thread() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert policy_of_new_thread() == os.SCHED_OTHER


@linux_only
def test_an_error_inside_leaves_the_caller_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), scheduled_as_batch():
        1 / 0  # noqa: B018
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@linux_only
def test_what_a_user_has_chosen_stays() -> None:
    def choose() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with scheduled_as_batch():
            found.append(policy_of_new_thread())
        found.append(os.sched_getscheduler(0))

    found: list[int] = []
    thread = threading.Thread(target=choose)
    thread.start()
    thread.join()
    assert found == [os.SCHED_IDLE, os.SCHED_IDLE]


def test_a_sandbox_that_forbids_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden, raising=False)
    with scheduled_as_batch():
        pass

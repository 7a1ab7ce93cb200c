"""Threads that do not preempt the thread that wakes them.

A thread with the policy `SCHED_BATCH` does not preempt the running thread when it is
woken (sched(7)).

# Threads of Gloo

Gloo, which Torch and XLA use between CPUs, has one thread for all of its connections.
Incoming data wake it, often while another thread of the process is sending and holds
the connection's lock. Then it does not block, but polls the lock in a busy loop
(`Pair::handleEvents` in Gloo's `transport/tcp/pair.cc`, which gives up "until the next
tick"). On separate cores that is short. If both threads share a core, as in a container
with one, the sender cannot continue until the scheduler preempts the polling thread:
4 ms where Linux ticks 250 times a second, for a message that takes 0.2 ms. With this
policy the sender finishes first. Threads that wait for messages have it as well:
otherwise a woken thread would preempt the one that woke it, and then wait for a lock
that it holds.

# Workers of parameter servers

On one machine, a server that answers a worker wakes it. If the worker preempted it, the
other workers would wait for the server.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def scheduled_as_batch() -> Iterator[None]:
    """Context manager in which the calling thread has the policy `SCHED_BATCH`.

    Threads that it starts inherit the policy. A policy other than the default one is
    not changed; outside of Linux nothing changes.

    Example:

    ```python
    with scheduled_as_batch():
        device = torch.distributed.ProcessGroupGloo.create_device(hostname=host)
    ```
    """
    if not _schedule(from_policy="SCHED_OTHER", to_policy="SCHED_BATCH"):
        yield
        return
    try:
        yield
    finally:
        _schedule(from_policy="SCHED_BATCH", to_policy="SCHED_OTHER")


def _schedule(*, from_policy: str, to_policy: str) -> bool:
    """Changes the calling thread's policy if it is `from_policy`; returns whether."""
    if not hasattr(os, to_policy):
        return False
    try:
        # 0 is the calling thread, not its process.
        if os.sched_getscheduler(0) != getattr(os, from_policy):
            return False
        os.sched_setscheduler(0, getattr(os, to_policy), os.sched_param(0))
    except OSError:
        # A sandbox may forbid it; then communication is only slower.
        return False
    return True

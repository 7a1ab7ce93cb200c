"""Scheduling of Gloo's communication threads.

Gloo, which Torch and XLA use between CPUs, has one thread for all of its connections.
It is woken by what arrives, often while another thread of the same process is sending
and has the connection's lock. Then it does not wait for the lock, but looks again at
once, and again (`Pair::handleEvents` in Gloo's `transport/tcp/pair.cc`, which gives up
"until the next tick"). On a core of their own this is a moment; where the two threads
share a core, as in a container with one, the sender cannot go on until the scheduler
takes the core away from the one that looks: 4 ms where Linux ticks 250 times a second,
for a message that takes 0.2.

Linux does not let a thread of `SCHED_BATCH` take the core from the one that runs when
it is woken (sched(7)), so the sender comes to its end first. The threads that wait for
messages are of it as well: otherwise one that is woken takes the core from the thread
that wakes it, and then waits for a lock of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def gloo_threads() -> Iterator[None]:
    """Context manager around the start of Gloo's threads, which inherit its scheduling.

    Only a thread that is scheduled as usual makes others that are not; on systems
    other than Linux nothing happens.

    Example:

    ```python
    with gloo_threads():
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
    """Whether the calling thread was scheduled by one policy, and now is by another."""
    if not hasattr(os, to_policy):
        return False
    try:
        # 0 is the calling thread, not its process.
        if os.sched_getscheduler(0) != getattr(os, from_policy):
            return False
        os.sched_setscheduler(0, getattr(os, to_policy), os.sched_param(0))
    except OSError:
        # A sandbox forbids it; messages arrive all the same.
        return False
    return True

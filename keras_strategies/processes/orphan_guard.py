"""Guard process: kills process groups that outlive the launcher.

It runs by its path, without the package, so that it starts in milliseconds:

    python -I -S orphan_guard.py watch
        Reads lines "+42" and "-42", process groups that began and ended. When the
        input ends, because the launcher did, the groups that are left are killed.

    python -I -S orphan_guard.py run 17 COMMAND...
        Becomes COMMAND, which the kernel kills with its parent, process 17. This
        covers the moment before `watch` has read of it, on Linux.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

# <linux/prctl.h>. It persists through `exec`, and the parent is the thread that forked.
PR_SET_PDEATHSIG = 1


def watch(lines: Iterable[str]) -> None:
    groups: set[int] = set()
    for line in lines:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def end_with_parent(parent: int) -> None:
    """Makes the kernel signal this process when its parent ends, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # The parent ended before the call of `prctl`.
        sys.exit(1)


def run(parent: int, command: list[str]) -> None:
    end_with_parent(parent)
    os.execvp(command[0], command)


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        # The launcher handles Ctrl-C and ends the groups.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        watch(sys.stdin)
    else:
        run(int(sys.argv[2]), sys.argv[3:])

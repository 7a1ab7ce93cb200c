"""Open files of this process, of which an engine needs some for each worker.

Threads of an engine that cannot open a socket end the process, without an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from keras_strategies.errors import WorkerError

# Files of an engine for each worker, and others: as far as the limit may be raised, and
# without which it is an error.
_WANTED, _LEAST = (4, 64), (1, 16)
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)


def reserve_files(workers: int) -> None:
    """Raises the soft limit of open files to what connections with workers need.

    Raises:
        WorkerError: if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted, least = (each * workers + more for each, more in (_WANTED, _LEAST))
    used = _open_files(soft)
    if soft == resource.RLIM_INFINITY or used + wanted <= soft:
        return
    limit = (
        used + wanted if hard == resource.RLIM_INFINITY else min(used + wanted, hard)
    )
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if used + least > limit:
        raise WorkerError(
            f"This process has {used} files open and may open {limit}, but connections "
            f"with {workers} workers need {least} more. Raise the limit of open files "
            f"(`ulimit -n {used + wanted}`), or close files that the script opens."
        )


def _open_files(limit: int) -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError as error:
        # Listing them opens one. Some systems have no list.
        return limit if error.errno in _EXHAUSTED else 0

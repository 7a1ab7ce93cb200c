"""The worker of this process."""

from __future__ import annotations


class CurrentWorker:
    """The number of the worker of this process, for all of its threads.

    Functions of datasets run on threads of the framework.
    """

    index: int | None = None

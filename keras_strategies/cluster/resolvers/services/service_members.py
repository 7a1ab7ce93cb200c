"""Helpers of resolvers that query a service for machines."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from typing import Any


def natural_order(name: str) -> tuple[object, ...]:
    """Sorts `worker-2` before `worker-10`."""
    parts = re.split(r"(\d+)", name)
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def own_place(groups: Iterable[tuple[str, list[set[str]]]]) -> tuple[str, int] | None:
    """The task of this machine, by its host name.

    Args:
        groups: pairs of a job and, for each of its tasks, the names that its machine
            may have.

    Returns:
        tuple of the job and the task's number; None if no member has the name.
    """
    name = socket.gethostname()
    short = name.split(".", 1)[0]
    for job, members in groups:
        for index, names in enumerate(members):
            if name in names or short in names:
                return job, index
    return None


def google_service(name: str, version: str, resolver: str, **options: Any) -> Any:
    """A client of a service of Google.

    Args:
        name: str, the service.
        version: str, its version.
        resolver: str, what needs it, for the error.
        options: of `googleapiclient.discovery.build`.

    Raises:
        ImportError: without the package `google-api-python-client`.
    """
    try:
        from googleapiclient import discovery
    except ImportError:
        raise ImportError(
            f"{resolver} needs the package `google-api-python-client`: "
            "`pip install google-api-python-client`. Or pass a client as `service`."
        ) from None
    return discovery.build(name, version, **options)

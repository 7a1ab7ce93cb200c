"""The lead of a cluster that a launcher starts."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

from keras_strategies.cluster.environment import LEAD, SECRET
from keras_strategies.cluster.resolvers.environment import tf_config
from keras_strategies.lead.process import BACKLOG, start_lead
from keras_strategies.lead.state import Settings
from keras_strategies.processes.local_cluster import LocalTask

_LOCAL = "127.0.0.1"
# Seconds between two starts.
_PAUSE = 0.2


class LaunchedLead:
    """The lead of workers, as long as they run; a context manager.

    It is started again when it has ended before training has, so that workers that are
    started again have one.

    Args:
        addresses: list of str, those of the workers.
        secret: str, the same in the workers.
        host: str, an address of this machine that the workers reach.
    """

    def __init__(self, addresses: Sequence[str], secret: str, host: str = _LOCAL):
        self._settings = Settings(len(addresses), addresses=tuple(addresses))
        self._secret = secret.encode()
        self._host, self._port = host, 0
        self._process = self._start()
        self._ending = threading.Event()
        self._watch = threading.Thread(target=self._restart, name="lead", daemon=True)
        self._watch.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.set()
        self._process.terminate()
        self._watch.join()

    def variables(self, first: str) -> dict[str, str]:
        """The variables by which a worker finds it.

        Args:
            first: str, the address of worker 0 in the worker's description.
        """
        host = f"[{self._host}]" if ":" in self._host else self._host
        return {LEAD: f"{first} {host}:{self._port}", SECRET: self._secret.decode()}

    def _start(self) -> subprocess.Popen[bytes]:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        address = (self._host, self._port)
        listener = socket.create_server(address, family=family, backlog=BACKLOG)
        self._port = listener.getsockname()[1]
        return start_lead(
            listener, self._settings, self._secret, ends_with_starter=True
        )

    def _restart(self) -> None:
        while self._process.wait() and not self._ending.wait(_PAUSE):
            self._process = self._start()
            if self._ending.is_set():
                self._process.terminate()


@contextmanager
def launched_lead(
    environments: Mapping[LocalTask, Mapping[str, str]],
) -> Iterator[dict[LocalTask, dict[str, str]]]:
    """Runs the lead of a cluster on this machine; gives the variables of its tasks.

    Without several workers, and for workers of parameter servers, there is none.

    Args:
        environments: as of `LocalCluster.environments`.
    """
    given = next(iter(environments.values()))
    tasks = json.loads(given[tf_config.VARIABLE])["cluster"]
    addresses = [*tasks.get("chief", []), *tasks.get("worker", [])]
    if len(addresses) == 1 or "ps" in tasks:
        yield {task: dict(each) for task, each in environments.items()}
        return
    with LaunchedLead(addresses, given[SECRET]) as lead:
        variables = lead.variables(addresses[0])
        yield {task: {**each, **variables} for task, each in environments.items()}

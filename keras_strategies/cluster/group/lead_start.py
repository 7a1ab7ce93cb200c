"""The lead of a cluster: started by its first worker, reached by all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import subprocess
import time

from keras_strategies.cluster.environment import LEAD
from keras_strategies.cluster.own_address import own_address
from keras_strategies.cluster.spec import split_address
from keras_strategies.errors import ClusterError, WorkerError
from keras_strategies.lead.client import LeadClient
from keras_strategies.lead.client_state import GroupListener, TrainingEnded
from keras_strategies.lead.process import BACKLOG, SECRET, start_lead, tls_context
from keras_strategies.lead.state import Settings

# Seconds, at least, for the start of a lead.
_START_SECONDS = 30.0
# Seconds for which the end of an earlier lead at the same address is awaited.
_EARLIER_SECONDS = 5.0
# Number of ports after the first address's at which the lead may listen.
_MORE_PORTS = 16
_TICK = 0.1
# Leads that this process has started, until they have ended.
_started: list[subprocess.Popen[bytes]] = []


def connected(
    settings: Settings,
    index: int,
    same: dict[str, object],
    job: str | None,
    listener: GroupListener,
    *,
    shares_port: bool = False,
) -> LeadClient:
    """A client of the cluster's lead, which the launcher or worker 0 has started.

    Args:
        settings: `Settings` of the lead, with the address of the first worker.
        index: int, the number of this worker.
        same: dict of values that must agree on all workers, by name.
        job: str, identifies this cluster among others at the same address; None to use
            the addresses.
        listener: `GroupListener`.
        shares_port: bool, whether another program listens at the chief's port, as
            under torchrun; the lead then uses one of the next ports.

    Raises:
        ClusterError: if worker 0 cannot listen at its address, two workers have one
            index, or workers disagree.
        WorkerError: if there is no lead.
    """
    host, port = split_address(settings.addresses[0])
    ports = [port + each for each in (range(1, _MORE_PORTS) if shares_port else (0,))]
    job = (
        job or hashlib.sha256(json.dumps(settings.addresses).encode()).hexdigest()[:16]
    )
    secret = os.environ.get(SECRET, "").encode()
    until = time.monotonic() + _EARLIER_SECONDS
    launched = _launched((host, ports[0]))
    while True:
        addresses = launched or [(host, port) for port in ports]
        is_started = bool(launched)
        if index == 0 and not launched:
            server = listen(host, ports, is_shared=not settings.is_fixed)
            if server is not None:
                addresses = [server.getsockname()[:2]]
                reap()
                lead = start_lead(server, settings, secret, job, ends_with_starter=True)
                _started.append(lead)
                is_started = True
        limit = settings.patience if index else _EARLIER_SECONDS
        if is_started:
            limit = max(settings.patience, _START_SECONDS)
        try:
            return LeadClient(
                addresses,
                secret,
                index,
                same,
                # That of a launcher has one cluster, and its address.
                job="" if launched else job,
                timeout=limit,
                listener=listener,
                settings=settings,
                tls=tls_context(is_server=False),
            )
        except TrainingEnded:
            # The lead of an earlier run.
            if time.monotonic() > until:
                raise
            time.sleep(_TICK)
        except WorkerError as error:
            if index or is_started:
                raise
            raise _in_use(f"{host}:{ports[0]}") from error


def _launched(first: tuple[str, int]) -> list[tuple[str, int]]:
    """The address of the lead that a launcher has started; empty without one."""
    given = [split_address(each) for each in os.environ.get(LEAD, "").split()]
    # A process of another cluster may have inherited the variable.
    return given[1:] if given[:1] == [first] else []


def reap(seconds: float = 0.0) -> None:
    """Forgets the leads of this process that have ended, or end within some seconds."""
    until = time.monotonic() + seconds
    while _started:
        _started[:] = [each for each in _started if each.poll() is None]
        if time.monotonic() >= until:
            return
        time.sleep(_TICK / 5)


def listen(
    host: str, ports: list[int], *, is_shared: bool = False
) -> socket.socket | None:
    """A socket at the first free port.

    Args:
        host: str.
        ports: list of int.
        is_shared: bool, whether a lead may listen there already: that of an elastic
            group survives the first worker. None is returned then.
    """
    own = own_address(host)
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    problem: OSError | None = None
    for port in ports:
        try:
            return socket.create_server((own, port), family=family, backlog=BACKLOG)
        except OSError as error:
            problem = error
            if error.errno != errno.EADDRINUSE:
                break
    assert problem is not None
    if problem.errno == errno.EADDRINUSE and is_shared:
        return None
    where = f"{host}:{ports[0]}"
    if problem.errno == errno.EADDRINUSE:
        raise _in_use(where) from problem
    raise ClusterError(
        f"The chief cannot listen at {where}: {problem.strerror or problem}. This "
        "process is the chief, so the first address of the cluster must be an address "
        "of this machine."
    ) from problem


def _in_use(where: str) -> ClusterError:
    return ClusterError(
        f"The chief cannot listen at {where}: another program listens there, possibly "
        "an earlier run. End it, or use another port in the cluster's description."
    )

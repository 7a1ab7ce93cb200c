"""Start of the lead as a process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import resource
import socket
import ssl
import subprocess
import sys
from typing import Any

from keras_strategies.errors import ClusterError
from keras_strategies.lead.peers import PENDING
from keras_strategies.lead.server import LeadServer
from keras_strategies.lead.state import LeadState, Settings

#: Environment variables: the secret that workers and the lead share; a file in PEM
#: format with the lead's certificate and, on its machine, its key.
SECRET = "KS_CLUSTER_SECRET"
CERTIFICATE = "KS_CLUSTER_CERT"
BACKLOG = 1024
#: Exit code of a lead whose workers have not come to the end of training.
UNFINISHED = 3
# Not `-m`: the path to this package may be in `sys.path` only.
_CODE = """\
import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = given.pop("path")
from keras_strategies.lead.process import main
sys.exit(main(given))
"""
# Descriptors beside those of workers and of peers without a proof.
_MORE = 32


def needed_descriptors(workers: int) -> int:
    """Open files that a lead needs.

    Raises:
        ClusterError: if the hard limit is lower.
    """
    need = workers + PENDING + _MORE
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < need:
        raise ClusterError(
            f"{workers} workers need {need} open files in the lead, but the limit of "
            f"this machine is {hard}. Raise it (`ulimit -Hn {need}`)."
        )
    return need


def _raise_descriptor_limit(workers: int) -> None:
    """Raises the soft limit of open files where it is too low."""
    need = needed_descriptors(workers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def start_lead(
    listener: socket.socket,
    settings: Settings,
    secret: bytes = b"",
    job: str = "",
    *,
    ends_with_starter: bool = False,
    stderr: Any = None,
) -> subprocess.Popen[bytes]:
    """Starts the lead in a process of its own, which outlives this one.

    Args:
        listener: the listening socket, which is closed here.
        settings: `Settings`, some of which the first worker may change.
        secret: bytes that the workers know.
        job: str, identifies the cluster among others at the same address.
        ends_with_starter: bool, whether the lead ends when this process has ended
            before a generation has begun.
        stderr: as for `subprocess.Popen`; that of this process by default.

    Raises:
        ClusterError: if the limit of open files is too low.
    """
    needed_descriptors(settings.workers)
    with listener:
        given = {
            "listener": listener.fileno(),
            "settings": dataclasses.asdict(settings),
            "job": job,
            "starter": os.getpid() if ends_with_starter else 0,
            "path": [os.path.abspath(folder) for folder in sys.path],
        }
        environment = {**os.environ, SECRET: secret.decode()}
        return subprocess.Popen(
            [sys.executable, "-c", _CODE, json.dumps(given)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )


def tls_context(*, is_server: bool) -> ssl.SSLContext | None:
    """The context of the lead's certificate, or of a worker that trusts it.

    Returns:
        `ssl.SSLContext`; None without a certificate.
    """
    path = os.environ.get(CERTIFICATE)
    if not path:
        return None
    if is_server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # This certificate is trusted, at whatever address the lead is.
    context.check_hostname = False
    context.load_verify_locations(path)
    return context


def main(given: dict[str, Any]) -> int:
    """Runs a lead, as started by `start_lead`; returns its exit code."""
    settings = given["settings"]
    settings["addresses"] = tuple(settings["addresses"])
    settings = Settings(**settings)
    _raise_descriptor_limit(settings.workers)
    secret = os.environ.get(SECRET, "").encode()
    listener = socket.socket(fileno=given["listener"])

    async def serve() -> LeadState:
        tls = tls_context(is_server=True)
        lead = LeadServer(
            listener, settings, secret, given["job"], given["starter"], tls
        )
        await lead.serve()
        return lead.state

    state = asyncio.run(serve())
    return 0 if state.is_over and not state.verdict else UNFINISHED

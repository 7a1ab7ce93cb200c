"""`keras-strategies doctor`: what this machine has, and what is set on it."""

from __future__ import annotations

import importlib.metadata
import platform
import socket
from collections.abc import Iterator

from keras_strategies.cluster import ClusterResolver, find_cluster
from keras_strategies.errors import ClusterError

PACKAGES = (
    "keras-strategies",
    "keras",
    "keras-nightly",
    "jax",
    "torch",
    "tensorflow",
    "tensorflow-cpu",
    "numpy",
    "ray",
)
# How long to wait for the port of another task.
CONNECT_SECONDS = 3.0


def main() -> int:
    """Prints the report; 1 if something that is set cannot be right, else 0."""
    good = True
    for heading, lines in (("versions", _versions()), ("devices", _devices())):
        print(f"{heading}:")
        for line in lines:
            print(f"  {line}")
    print("cluster:")
    try:
        resolver = find_cluster()
    except ClusterError as error:
        print(f"  {error}")
        return 1
    if resolver is None:
        print("  no variables of a cluster are set: this process works alone")
        return 0
    print(f"  {resolver!r}")
    for line, answers in _peers(resolver):
        print(f"  {line}")
        good = good and answers
    return 0 if good else 1


def _versions() -> Iterator[str]:
    yield f"python {platform.python_version()} on {platform.platform()}"
    for package in PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _devices() -> Iterator[str]:
    from keras_strategies.backends import get_backend

    backend = get_backend()
    yield f"backend {backend.name} (KERAS_BACKEND)"
    for device in backend.local_devices():
        yield str(device)


def _peers(resolver: ClusterResolver) -> Iterator[tuple[str, bool]]:
    """For each other task: what to print, and whether its port answers."""
    spec = resolver.cluster_spec()
    for job in spec.jobs:
        for index in spec.task_indices(job):
            if (job, index) == (resolver.task_type, resolver.task_id):
                continue
            address = spec.task_address(job, index)
            problem = _problem_with(address)
            yield f"{job} {index} at {address}: {problem or 'answers'}", not problem


def _problem_with(address: str) -> str:
    """Why nobody answers at an address; `""` if somebody does."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return "is no address to connect to"
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        return f"does not answer ({error})"
    return ""

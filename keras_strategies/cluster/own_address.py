"""Address of this machine to listen at."""

from __future__ import annotations

import os
import socket

# Set in every pod.
_IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"


def own_address(host: str) -> str:
    """The address to listen at, of a host that the cluster names.

    This is the host itself, except in a pod of Kubernetes. DNS resolves the name of a
    pod, such as `trainer-0.trainer`, seconds after the pod's start, and to the previous
    pod's address until then; the own address is in `/etc/hosts` under `trainer-0`.

    Args:
        host: str, a name or an address of this machine.

    Returns:
        str.
    """
    name = socket.gethostname()
    if _IN_KUBERNETES not in os.environ or host.partition(".")[0] != name:
        return host
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return host
    return str(found[0][4][0])

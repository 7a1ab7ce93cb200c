"""TPU slices, from environment variables or metadata of the machine.

On Kubernetes in variables: TPU_WORKER_HOSTNAMES=t-0.svc,t-1.svc TPU_WORKER_ID=1
On Compute Engine in the machine's metadata, which answers over HTTP:
    worker-network-endpoints    "10.0.0.2,10.0.0.3" or "name:id:10.0.0.2,..."
    agent-worker-number         "1"
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from keras_strategies.cluster.resolver import FixedClusterResolver
from keras_strategies.cluster.resolvers.services.service_members import google_service
from keras_strategies.cluster.spec import ClusterSpec, split_address
from keras_strategies.errors import ClusterError

WORKER_HOSTNAMES = "TPU_WORKER_HOSTNAMES"
WORKER_ID = "TPU_WORKER_ID"
# The variable for `tpu=None`, as in TensorFlow.
NAME = "TPU_NAME"
# A metadata server other than metadata.google.internal, as in Google's clients.
METADATA_HOST = "GCE_METADATA_HOST"
DEVICES = ("/dev/accel0", "/dev/vfio/0")
# Product name in the firmware of Compute Engine's machines.
_PRODUCT = Path("/sys/class/dmi/id/product_name")
_METADATA_SECONDS = 5.0


class TPUClusterResolver(FixedClusterResolver):
    """The machines of a TPU slice.

    Args:
        tpu: str. `"local"` for the TPU of this machine alone; an address such as
            `"grpc://10.0.0.2:8470"` for a TPU there; a name in the Cloud
            TPU service; None or `""` for the variable `TPU_NAME`, and without it for
            the slice of this machine.
        zone: str, the TPU's zone, with a name.
        project: str, its project, with a name.
        job_name: str, the job that the machines are tasks of.
        service: a client as `googleapiclient.discovery.build("tpu", "v2")` makes it;
            None to make one for a name.
        port: int, the port of every machine.
        rpc_layer: str, the protocol for `master()`.

    Raises:
        ValueError: if no TPU is found; the message lists the places searched.
        ImportError: for a name without the package `google-api-python-client`.

    Example:

    >>> resolver = ks.cluster_resolver.TPUClusterResolver()
    >>> strategy = ks.TPUStrategy(resolver)
    """

    _environment = "google"

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        service: Any = None,
        port: int = 8470,
        rpc_layer: str | None = "grpc",
    ):
        number = 0
        name = tpu or os.environ.get(NAME, "")
        if name == "local":
            _expect_device(name)
            addresses = [f"localhost:{port}"]
        elif "://" in name or ":" in name:
            addresses = ["{}:{}".format(*split_address(name))]
        elif name and (zone or project or service is not None):
            addresses = self._look_up(name, zone, project, service, port)
        else:
            hosts, number = _own_slice()
            if not hosts:
                _expect_device(name)
                hosts = ["localhost"]
            addresses = [f"{host}:{port}" for host in hosts]
        self._spec = ClusterSpec({job_name: addresses})
        super().__init__(job_name, number, rpc_layer)

    def _look_up(
        self, name: str, zone: str | None, project: str | None, service: Any, port: int
    ) -> list[str]:
        """Addresses of a named TPU, from the Cloud TPU service."""
        if not zone or not project:
            raise ClusterError(
                f"To look up the TPU {name!r}, both `zone` and `project` are needed. "
                f"Received: zone={zone!r}, project={project!r}"
            )
        path = f"projects/{project}/locations/{zone}/nodes/{name}"
        service = service or google_service("tpu", "v2", type(self).__name__)
        nodes = service.projects().locations().nodes()
        node = nodes.get(name=path).execute()
        if node.get("state") != "READY":
            raise ClusterError(
                f"The TPU {path} is {node.get('state')!r}, not 'READY'. Wait until "
                "it is, or start it."
            )
        return [
            f"{endpoint['ipAddress']}:{endpoint.get('port', port)}"
            for endpoint in node["networkEndpoints"]
        ]


def _own_slice() -> tuple[list[str], int]:
    """The hosts of the slice of this machine, if there is one, and its number."""
    hosts = os.environ.get(WORKER_HOSTNAMES, "")
    number = os.environ.get(WORKER_ID, "0")
    source = WORKER_HOSTNAMES
    if not hosts and _has_metadata():
        source = "worker-network-endpoints"
        hosts = _metadata(source)
        number = _metadata("agent-worker-number") or "0"
    names = [host.strip().split(":")[-1] for host in hosts.split(",") if host]
    if not names:
        return [], 0
    if not number.isdecimal() or int(number) >= len(names):
        raise ClusterError(
            f"This machine is number {number!r} of its TPU slice ({WORKER_ID} is "
            f"{os.environ.get(WORKER_ID)!r}), and {source} names the machines "
            f"{names}, numbered from 0. Set {WORKER_ID} to one of these numbers."
        )
    return names, int(number)


def _has_metadata() -> bool:
    """Whether the machine has a metadata server."""
    if os.environ.get(METADATA_HOST):
        return True
    try:
        return "Google" in _PRODUCT.read_text()
    except OSError:
        return False


def _metadata(key: str) -> str:
    host = os.environ.get(METADATA_HOST) or "metadata.google.internal"
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/attributes/{key}",
        headers={"Metadata-Flavor": "Google"},
    )
    # The server is on the machine's own network, never behind a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_METADATA_SECONDS) as response:
            text: bytes = response.read()
    except urllib.error.HTTPError as error:
        if error.code == 404:  # A machine of Compute Engine without a TPU.
            return ""
        raise ClusterError(
            f"The metadata server {host!r} answered the request for {key!r} with "
            f"{error}. Set {WORKER_HOSTNAMES} and {WORKER_ID} instead."
        ) from error
    except OSError as error:
        raise ClusterError(
            f"The metadata server {host!r} of this machine does not answer: {error}. "
            f"Set {WORKER_HOSTNAMES} and {WORKER_ID} instead."
        ) from error
    return text.decode().strip()


def _expect_device(name: str) -> None:
    if any(Path(device).exists() for device in DEVICES):
        return
    metadata = (
        ", and its metadata server names no TPU workers" if _has_metadata() else ""
    )
    raise ClusterError(
        f"No TPU was found for {name or 'this machine'}. Looked for the variable "
        f"{WORKER_HOSTNAMES}, which machines of a TPU slice have, and for the devices "
        f"{', '.join(DEVICES)}; this machine has neither{metadata}. Run this on a "
        "machine with a TPU, pass `zone` and `project` to look up a TPU by its name, "
        "or use ks.MirroredStrategy."
    )

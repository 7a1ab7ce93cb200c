"""TPUs, as the machines that have them describe them."""

from __future__ import annotations

import os
from pathlib import Path

from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.errors import ClusterError

# Set on the machines of a TPU slice.
WORKER_HOSTNAMES = "TPU_WORKER_HOSTNAMES"
WORKER_ID = "TPU_WORKER_ID"
ACCELERATOR_TYPE = "TPU_ACCELERATOR_TYPE"
# What `tpu=None` is looked up in, as TensorFlow does.
NAME = "TPU_NAME"
DEVICES = ("/dev/accel0", "/dev/vfio/0")


class TPUClusterResolver(ClusterResolver):
    """The machines of a TPU slice, from what is set on each of them.

    Args:
        tpu: str, `"local"` or `""` for the TPU of this machine; None for what the
            machine's variables say.
        port: int, the port of every machine.
        rpc_layer: str, the protocol for `master()`.

    Raises:
        ValueError: where there is no TPU, with what was looked for.

    Example:

    >>> resolver = ks.cluster_resolver.TPUClusterResolver()
    >>> strategy = ks.TPUStrategy(resolver)
    """

    def __init__(
        self,
        tpu: str | None = None,
        port: int = 8470,
        rpc_layer: str | None = "grpc",
    ):
        hosts = [h for h in os.environ.get(WORKER_HOSTNAMES, "").split(",") if h]
        found = bool(hosts) or any(Path(device).exists() for device in DEVICES)
        if not found:
            raise ClusterError(
                f"No TPU was found for {tpu or os.environ.get(NAME) or 'this machine'}"
                f". Looked for the variable {WORKER_HOSTNAMES}, which machines of a "
                f"TPU slice have, and for the devices {', '.join(DEVICES)}. Run this "
                "on a machine with a TPU, or use ks.MirroredStrategy."
            )
        if tpu in ("local", "") or len(hosts) < 2:
            hosts = ["localhost"]
        number = os.environ.get(WORKER_ID, "0") if len(hosts) > 1 else "0"
        if not number.isdigit() or int(number) >= len(hosts):
            raise ClusterError(
                f"{WORKER_ID} is {number!r}, and {WORKER_HOSTNAMES} names the machines "
                f"{hosts}, numbered from 0."
            )
        self._spec = ClusterSpec({"worker": [f"{host}:{port}" for host in hosts]})
        super().__init__("worker", int(number), rpc_layer)

    def cluster_spec(self) -> ClusterSpec:
        return self._spec

    @property
    def environment(self) -> str:
        return "google"

    @property
    def accelerator_type(self) -> str:
        """str, the kind of the slice, such as `"v5litepod-16"`; `""` if not said."""
        return os.environ.get(ACCELERATOR_TYPE, "")

"""Environment variables of `torchrun`.

RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2
MASTER_ADDR=10.0.0.1 MASTER_PORT=29500
"""

from __future__ import annotations

import os

from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.resolvers.environment.process_numbers import (
    check_rank,
    number,
    workers_of,
)
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.errors import ClusterError

RANK = "RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
NEEDED = (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)
ALL = (*NEEDED, LOCAL_RANK, LOCAL_WORLD_SIZE)


class TorchrunClusterResolver(ClusterResolver):
    """Reads the variables of `torchrun`: each process is a worker.

    `torchrun` provides the address of the first process only. The others appear under
    their rank, as `"rank-3"`, which is not an address; engines need only the first one.

    Args:
        rpc_layer: str, the protocol for `master()`.

    Raises:
        ValueError: if a variable is missing or invalid.

    Example:

    >>> resolver = ks.cluster_resolver.TorchrunClusterResolver()
    """

    _environment = "torchrun"

    def __init__(self, rpc_layer: str | None = None):
        missing = [name for name in NEEDED if not os.environ.get(name)]
        if missing:
            raise ClusterError(
                f"The environment variables {missing} are not set; torchrun sets "
                "them for each process. Start the script with `torchrun "
                "--nproc-per-node=N script.py`, or describe the cluster in "
                "TF_CONFIG."
            )
        check_rank(LOCAL_RANK, LOCAL_WORLD_SIZE)
        rank, self._size = number(RANK), number(WORLD_SIZE)
        check_rank(RANK, WORLD_SIZE)
        self._first = f"{os.environ[MASTER_ADDR]}:{number(MASTER_PORT)}"
        super().__init__("worker", rank, rpc_layer)

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec({"worker": workers_of(self._first, self._size)})

"""The variables that `torchrun` sets for each process that it starts.

RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2
MASTER_ADDR=10.0.0.1 MASTER_PORT=29500
"""

from __future__ import annotations

import os

from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.errors import ClusterError

RANK = "RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_RANK = "LOCAL_RANK"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
NEEDED = (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)


class TorchrunClusterResolver(ClusterResolver):
    """Reads what `torchrun` says: each process is a worker.

    `torchrun` tells a process the address of the first one only. The others appear
    under their rank, as `"rank-3"`, which is no address to connect to; the engines
    need the first one's.

    Raises:
        ValueError: if a variable is missing or cannot be right.

    Example:

    >>> resolver = ks.cluster_resolver.TorchrunClusterResolver()
    """

    def __init__(self, rpc_layer: str | None = None):
        missing = [name for name in NEEDED if not os.environ.get(name)]
        if missing:
            raise ClusterError(
                f"The variables {missing} are not set, which torchrun gives to each "
                "process. Start the script with `torchrun --nproc-per-node=N "
                "script.py`, or describe the cluster in TF_CONFIG."
            )
        rank, self._size = _number(RANK), _number(WORLD_SIZE)
        if rank >= self._size:
            raise ClusterError(
                f"{RANK} is {rank} and {WORLD_SIZE} is {self._size}; ranks are "
                "numbered from 0 and smaller than the number of processes."
            )
        self._first = f"{os.environ[MASTER_ADDR]}:{_number(MASTER_PORT)}"
        super().__init__("worker", rank, rpc_layer)

    @property
    def local_rank(self) -> int:
        """int, the number of this process on its machine; 0 where it is not set."""
        return _number(LOCAL_RANK) if os.environ.get(LOCAL_RANK) else 0

    def cluster_spec(self) -> ClusterSpec:
        others = [f"rank-{rank}" for rank in range(1, self._size)]
        return ClusterSpec({"worker": [self._first, *others]})

    @property
    def environment(self) -> str:
        return "torchrun"


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.strip().isdigit():
        raise ClusterError(f"The variable {name} is {text!r}, which is no number.")
    return int(text)

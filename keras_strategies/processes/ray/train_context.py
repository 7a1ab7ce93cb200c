"""Workers of Ray Train, by their context."""

from __future__ import annotations

import functools
import importlib
import socket
import sys
from typing import Any

from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.processes.ray.connection import node_address


class TrainWorker(ClusterResolver):
    """The workers of a trainer of Ray Train, such as `TorchTrainer`.

    The first worker's address is one of its node with a free port, which the others
    receive from it: all workers make the resolver. They appear under their rank, as
    under `torchrun`, since engines need only the first address.
    """

    def __init__(self) -> None:
        rank, self._first, self._size = _cluster()
        super().__init__("worker", rank)

    def cluster_spec(self) -> ClusterSpec:
        others = [f"rank-{rank}" for rank in range(1, self._size)]
        return ClusterSpec({"worker": [self._first, *others]})


def is_train_worker() -> bool:
    """Whether this process is a worker of Ray Train, which has imported it then."""
    if "ray.train" not in sys.modules:
        return False
    return _context() is not None


def _context() -> Any:
    try:
        context = importlib.import_module("ray.train").get_context()
        context.get_world_size()
    except (RuntimeError, AttributeError):
        return None
    return context


@functools.cache
def _cluster() -> tuple[int, str, int]:
    """The rank, the first worker's address and the number of workers; called by all."""
    context = _context()
    rank = int(context.get_world_rank())
    with socket.socket() as server:
        server.bind(("", 0))
        own = node_address(server.getsockname()[1])
    collective = importlib.import_module("ray.train.collective")
    first = collective.broadcast_from_rank_zero(own)
    return rank, str(first), int(context.get_world_size())

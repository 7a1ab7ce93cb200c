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

    They appear under their rank, as under `torchrun`, since engines need only the
    address of the first one.
    """

    def __init__(self) -> None:
        context = _context()
        self._size = int(context.get_world_size())
        super().__init__("worker", int(context.get_world_rank()))

    def cluster_spec(self) -> ClusterSpec:
        others = [f"rank-{rank}" for rank in range(1, self._size)]
        return ClusterSpec({"worker": [_first_address(), *others]})


def is_train_worker() -> bool:
    """Whether this process is a worker of Ray Train, which imports `ray.train`."""
    return "ray.train" in sys.modules and _context() is not None


def _context() -> Any:
    try:
        context = importlib.import_module("ray.train").get_context()
        context.get_world_size()
    except (RuntimeError, AttributeError, DeprecationWarning):
        # The last is what Ray raises in a trial of Ray Tune.
        return None
    return context


@functools.cache
def _first_address() -> str:
    """The first worker's node with a free port, which the others receive from it.

    Trainers have addresses of their own, in `MASTER_ADDR` or `TF_CONFIG`: Torch's store
    listens at the former.
    """
    with socket.socket() as server:
        server.bind(("", 0))
        own = node_address(server.getsockname()[1])
    collective = importlib.import_module("ray.train.collective")
    return str(collective.broadcast_from_rank_zero(own))

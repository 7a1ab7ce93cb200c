"""Environment variables of `keras.distribution.initialize`.

KERAS_DISTRIBUTION_JOB_ADDRESSES=10.0.0.1:1234,10.0.0.2:1234
KERAS_DISTRIBUTION_NUM_PROCESSES=2 KERAS_DISTRIBUTION_PROCESS_ID=1
"""

from __future__ import annotations

import os

from keras_strategies.cluster.resolver import FixedClusterResolver
from keras_strategies.cluster.resolvers.environment.process_numbers import (
    RankAndSize,
    workers_of,
)
from keras_strategies.cluster.spec import ClusterSpec, split_address
from keras_strategies.errors import ClusterError

ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
SIZE = "KERAS_DISTRIBUTION_NUM_PROCESSES"
RANK = "KERAS_DISTRIBUTION_PROCESS_ID"
ALL = (ADDRESSES, SIZE, RANK)


class KerasDistributionClusterResolver(FixedClusterResolver):
    """Reads the variables of `keras.distribution.initialize`: each process is a worker.

    The addresses are those of all processes, or of the first one only; the others
    appear under their rank then, as `"rank-3"`, which is not an address.

    Args:
        rpc_layer: str, the protocol for `master()`.

    Raises:
        ValueError: if a variable is missing or invalid.

    Example:

    >>> resolver = ks.cluster_resolver.KerasDistributionClusterResolver()
    """

    _environment = "keras"

    def __init__(self, rpc_layer: str | None = None):
        found = {name: os.environ.get(name, "") for name in ALL}
        missing = [name for name in ALL if not found[name]]
        if missing:
            given = ", ".join(f"{k} is {text!r}" for k, text in found.items() if text)
            raise ClusterError(
                f"The environment variables {missing} are not set"
                f"{given and f', but {given}'}. Set all three for each process, as for "
                "keras.distribution.initialize: addresses with ports, separated by "
                "commas, the number of processes, and the number of this process."
            )
        process = RankAndSize.read(RANK, SIZE)
        assert process is not None
        addresses = [each.strip() for each in found[ADDRESSES].split(",")]
        for address in addresses:
            split_address(address)
        if len(addresses) not in (1, process.size):
            raise ClusterError(
                f"{ADDRESSES} has {len(addresses)} addresses, {addresses}, but {SIZE} "
                f"is {process.size}. Give the address of each process, or of the "
                "first one only."
            )
        if len(addresses) == 1:
            addresses = workers_of(addresses[0], process.size)
        self._spec = ClusterSpec({"worker": addresses})
        super().__init__("worker", process.rank, rpc_layer)

"""Environment variables of MPI's launchers.

Open MPI's `mpirun`:
OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4
OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
MPICH's and Intel MPI's `mpiexec`:
PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2
Cray's `aprun` and PALS:
PMI_RANK=3 PMI_SIZE=4 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2
MVAPICH2's `mpirun_rsh`:
MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4
MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2

None of them has an address. By convention it is given as for torchrun:
mpirun -n 4 -x MASTER_ADDR=10.0.0.1 -x MASTER_PORT=29500 python script.py
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from keras_strategies.cluster.resolver import FixedClusterResolver
from keras_strategies.cluster.resolvers.environment.process_numbers import (
    RankAndSize,
    number,
    workers_of,
)
from keras_strategies.cluster.resolvers.environment.slurm import (
    NODE_LIST,
    expand_node_list,
)
from keras_strategies.cluster.resolvers.environment.torchrun import (
    MASTER_ADDR,
    MASTER_PORT,
)
from keras_strategies.cluster.resolvers.local_processes import LOOPBACK
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.errors import ClusterError


@dataclass(frozen=True)
class _Launcher:
    """The variables of one launcher.

    Args:
        prefix: str, that of their names.
        own: pairs of the variables with the number of a process, and of processes, of
            one machine, beside those with the prefix.
    """

    prefix: str
    own: tuple[tuple[str, str], ...] = ()

    @property
    def rank(self) -> str:
        return f"{self.prefix}_RANK"

    @property
    def size(self) -> str:
        return f"{self.prefix}_SIZE"

    @property
    def local(self) -> tuple[tuple[str, str], ...]:
        return *self.own, (f"{self.prefix}_LOCAL_RANK", f"{self.prefix}_LOCAL_SIZE")

    @property
    def is_complete(self) -> bool:
        return bool(os.environ.get(self.rank) and os.environ.get(self.size))


LAUNCHERS = (
    _Launcher("OMPI_COMM_WORLD"),
    _Launcher("MV2_COMM_WORLD"),
    # The last: those of Open MPI and MVAPICH2 may set them as well.
    _Launcher("PMI", (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),)),
)
NUMBERS = tuple(name for each in LAUNCHERS for name in (each.rank, each.size))
LOCAL_NUMBERS = tuple(n for each in LAUNCHERS for pair in each.local for n in pair)
ALL = (*NUMBERS, *LOCAL_NUMBERS)


def is_complete() -> bool:
    """Whether a launcher has set both its variables."""
    return any(each.is_complete for each in LAUNCHERS)


def process_number() -> RankAndSize | None:
    """The number that MPI has given to this process; None outside of MPI.

    Raises:
        ValueError: if a variable is missing or invalid.
    """
    # The launchers with both variables first.
    launchers = sorted(LAUNCHERS, key=lambda each: not each.is_complete)
    found = (RankAndSize.read(each.rank, each.size) for each in launchers)
    return next((each for each in found if each is not None), None)


class MPIClusterResolver(FixedClusterResolver):
    """Reads the variables of MPI's launchers: each process is a worker.

    The address of the first process is `MASTER_ADDR` and `MASTER_PORT`. Without
    `MASTER_ADDR` it is the loopback, if all processes are on one machine, or the first
    node of a SLURM job. The other workers appear under their rank, as `"rank-3"`, which
    is not an address.

    Args:
        port: int, the port of the first process without `MASTER_PORT`.
        rpc_layer: str, the protocol for `master()`.

    Raises:
        ValueError: if a variable is missing or invalid, or the address of the first
            process is not known.

    Example:

    >>> resolver = ks.cluster_resolver.MPIClusterResolver()
    """

    _environment = "mpi"

    def __init__(self, port: int = 29500, rpc_layer: str | None = None):
        process = process_number()
        if process is None:
            pairs = [f"{each.rank} and {each.size}" for each in LAUNCHERS]
            raise ClusterError(
                f"None of the environment variables {', '.join(pairs)} is set; MPI's "
                "launchers set them for each process. Start the script with "
                "`mpirun -n N python script.py`."
            )
        port = number(MASTER_PORT) if os.environ.get(MASTER_PORT) else port
        workers = workers_of(f"{_first_host(process)}:{port}", process.size)
        self._spec = ClusterSpec({"worker": workers})
        super().__init__("worker", process.rank, rpc_layer)


def _first_host(process: RankAndSize) -> str:
    if os.environ.get(MASTER_ADDR):
        return os.environ[MASTER_ADDR]
    local = (size for each in LAUNCHERS for _, size in each.local)
    if any(os.environ.get(name) and number(name) == process.size for name in local):
        return LOOPBACK
    nodes = next((os.environ[name] for name in NODE_LIST if os.environ.get(name)), "")
    if nodes:
        # Processes are numbered from the first node on.
        return expand_node_list(nodes)[0]
    raise ClusterError(
        f"MPI has started this process, {process.variables}, and has no variable with "
        f"the address of the first process; {MASTER_ADDR} is not set either. Start the "
        f"script with `mpirun -x {MASTER_ADDR}=HOST -x {MASTER_PORT}=29500 python "
        "script.py`, with the host of process 0."
    )

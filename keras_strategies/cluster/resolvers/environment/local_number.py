"""Number of a process among those that a launcher has started on one machine.

torchrun: LOCAL_RANK=1 LOCAL_WORLD_SIZE=2
Open MPI: OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
MVAPICH2: MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2
Intel MPI and MPICH: MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2
Cray: PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2
SLURM: SLURM_LOCALID=1
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from keras_strategies.cluster.resolvers.environment import mpi, slurm, torchrun
from keras_strategies.cluster.resolvers.environment.process_numbers import (
    check_rank,
    number,
)


@dataclass(frozen=True)
class LocalNumber:
    """The number of this process among those of its machine.

    Args:
        rank: int, from 0.
        size: int, the processes of the machine; None if it is not known.
        variables: str, the environment variables, for errors.
    """

    rank: int
    size: int | None
    variables: str

    @classmethod
    def read(cls, rank: str, size: str | None) -> LocalNumber | None:
        """The number in environment variables; None if that of `rank` is not set.

        Args:
            rank: str, the name of the variable with the number of this process.
            size: str, that with the number of processes, which may be missing.

        Raises:
            ValueError: if one of them is not a number, or the rank is not below the
                size.
        """
        if not os.environ.get(rank):
            return None
        found = f"{rank}={os.environ[rank]}"
        if size is None or not os.environ.get(size):
            return cls(number(rank), None, found)
        check_rank(rank, size)
        found += f" and {size}={os.environ[size]}"
        return cls(number(rank), number(size), found)


def of_torchrun() -> LocalNumber | None:
    """The number that torchrun has given to this process; None for the only one."""
    if number(torchrun.WORLD_SIZE) == 1:
        return None
    return LocalNumber.read(torchrun.LOCAL_RANK, torchrun.LOCAL_WORLD_SIZE)


def of_mpi() -> LocalNumber | None:
    """The number that a launcher of MPI has given to this process."""
    for launcher in mpi.LAUNCHERS:
        for rank, size in launcher.local if launcher.is_complete else ():
            found = LocalNumber.read(rank, size)
            if found is not None:
                return found
    return None


def of_slurm() -> LocalNumber | None:
    """The number that `srun` has given to this process.

    None if `CUDA_VISIBLE_DEVICES` is set, by `srun` or by `SlurmClusterResolver`.
    """
    if os.environ.get(slurm.GPUS):
        return None
    found = LocalNumber.read(slurm.PLACE, None)
    counts = next(
        (os.environ[n] for n in slurm.TASKS_PER_NODE if os.environ.get(n)), ""
    )
    node = os.environ.get(slurm.NODE, "")
    if found is None or not counts or not node.isdecimal():
        return found
    every = slurm.expand_tasks_per_node(counts)
    size = every[int(node)] if int(node) < len(every) else None
    return dataclasses.replace(found, size=size)

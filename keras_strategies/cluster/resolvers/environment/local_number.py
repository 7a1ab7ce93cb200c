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

from keras_strategies.cluster.resolvers.environment import mpi, slurm, torchrun
from keras_strategies.cluster.resolvers.environment.process_numbers import (
    RankAndSize,
    number,
)


def of_torchrun() -> RankAndSize | None:
    """The number that torchrun has given to this process; None for the only one."""
    if number(torchrun.WORLD_SIZE) == 1:
        return None
    return RankAndSize.read(
        torchrun.LOCAL_RANK, torchrun.LOCAL_WORLD_SIZE, needs_size=False
    )


def of_mpi() -> RankAndSize | None:
    """The number that a launcher of MPI has given to this process."""
    for launcher in mpi.LAUNCHERS:
        for rank, size in launcher.local if launcher.is_complete else ():
            found = RankAndSize.read(rank, size, needs_size=False)
            if found is not None:
                return found
    return None


def of_slurm() -> RankAndSize | None:
    """The number that `srun` has given to this process.

    None if `CUDA_VISIBLE_DEVICES` is set, by `srun` or by `SlurmClusterResolver`.
    """
    if os.environ.get(slurm.GPUS):
        return None
    found = RankAndSize.read(slurm.PLACE, "", needs_size=False)
    counts = next(
        (os.environ[n] for n in slurm.TASKS_PER_NODE if os.environ.get(n)), ""
    )
    node = os.environ.get(slurm.NODE, "")
    if found is None or not counts or not node.isdecimal():
        return found
    every = slurm.expand_tasks_per_node(counts)
    size = every[int(node)] if int(node) < len(every) else 0
    return dataclasses.replace(found, size=size)

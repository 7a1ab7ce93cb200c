"""Workers that exchange the shards of variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor

from keras_strategies.engines.torch.model_parallel.shards import layout_of
from keras_strategies.engines.torch.worker_collectives import TorchCommunicator


@dataclass(frozen=True)
class ExchangeGroup:
    """Workers that exchange the shards of a variable.

    Args:
        holders: those with all of its shards, each with one.
        equals: those with the same shard as this worker; None if it has it alone.
    """

    holders: TorchCommunicator
    equals: TorchCommunicator | None


class ShardGroups:
    """The workers that exchange the shards of each variable.

    Args:
        workers: the processes of the mesh, in its order.
    """

    def __init__(self, workers: TorchCommunicator):
        self._workers = workers
        # By the axes of the mesh that have shards.
        self._groups: dict[tuple[int, ...], ExchangeGroup] = {}

    def of(self, like: DTensor) -> ExchangeGroup:
        """Those of a variable."""
        axes = layout_of(like).axes
        if axes not in self._groups:
            mesh = like.device_mesh
            place = mesh.get_coordinate()
            assert place is not None
            others = tuple(i for i in range(mesh.ndim) if i not in axes)
            holders = self._along(mesh, place, axes)
            equals = self._along(mesh, place, others)
            assert holders is not None
            self._groups[axes] = ExchangeGroup(holders, equals)
        return self._groups[axes]

    def _along(
        self, mesh: Any, place: Sequence[int], axes: tuple[int, ...]
    ) -> TorchCommunicator | None:
        """The workers with this one's place on other axes; None if it is alone."""
        index = tuple(slice(None) if i in axes else p for i, p in enumerate(place))
        members = mesh.mesh[index].flatten().tolist()
        if len(members) == self._workers.group.count:
            return self._workers
        if len(members) == 1:
            return None
        names = " and ".join(mesh.mesh_dim_names[i] for i in axes)
        return self._workers.among(names, members)

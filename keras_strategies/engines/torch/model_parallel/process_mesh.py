"""Mesh of processes for DTensors, as a distribution of Keras."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch
import torch.distributed as dist
from keras.distribution import DeviceMesh, TensorLayout
from torch.distributed.device_mesh import DeviceMesh as ProcessMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from keras_strategies.communication.checksums import checksum
from keras_strategies.communication.file_parts import file_part_number
from keras_strategies.engines.torch.model_parallel.shards import (
    ShardLayout,
    layout_of,
)
from keras_strategies.engines.torch.model_parallel.transposed_values import (
    copy_values,
    in_order_of_memory,
)
from keras_strategies.engines.torch.worker_collectives import TorchCommunicator
from keras_strategies.errors import BackendError
from keras_strategies.keras_compat.backends.keras_on_torch import distribution_class
from keras_strategies.layouts import VariableMesh
from keras_strategies.runtime.colocation import layout_or_colocated
from keras_strategies.runtime.placement import itemsize


def start_default_group(workers: TorchCommunicator | None) -> TorchCommunicator:
    """Creates torch's default process group, which DTensors communicate by.

    Args:
        workers: the processes of the mesh; None without a cluster.

    Returns:
        The workers.

    Raises:
        BackendError: without a cluster.
        ClusterError: if a default group of other processes exists.
    """
    if workers is None:
        raise BackendError(
            "ks.ModelParallelStrategy was made with KERAS_BACKEND='torch' in a "
            "process without a cluster, but each device of the mesh needs its own "
            "process. Name several devices, and the script starts a process for each; "
            "or start it with `keras-strategies launch --workers N "
            "--devices-per-worker 1 script.py` or torchrun. For one device use "
            "ks.OneDeviceStrategy."
        )
    workers.start_default_group()
    return workers


_Distribution: Any = distribution_class()


class ShardedDistribution(_Distribution):  # type: ignore[misc]
    """Keras distribution with the layouts of a `VariableMesh`.

    Keras asks it for the layouts of layers' outputs; variables are made by the engine.
    The class does not derive from `keras.distribution.ModelParallel`, for which Keras
    treats the batch of a process as its share of the global one.

    Args:
        mesh: the mesh of devices, one for each process.
        kind: str, torch's name of their kind.
    """

    def __init__(self, mesh: VariableMesh, kind: str):
        # "cpu:1" is the device of process 1.
        names = [f"{kind}:{rank}" for rank in range(len(mesh.devices))]
        super().__init__(
            DeviceMesh(mesh.shape, list(mesh.axes), names),
            mesh.batch_axis,
            auto_shard_dataset=False,
        )
        self._mesh = mesh
        #: Torch's mesh.
        self.processes = ProcessMesh(
            kind, np.arange(len(names)), mesh_dim_names=tuple(mesh.axes)
        )

    def get_data_layout(self, data_shape: Sequence[int]) -> TensorLayout:
        """Replicated: batches are global, and layer calls split them."""
        return TensorLayout([None] * len(data_shape), self.device_mesh)

    def get_variable_layout(self, variable: Any) -> None:
        """None: Keras 3.16 would make a DTensor of the variable by itself."""

    def variable_layout(self, variable: Any) -> TensorLayout:
        """The layout of a variable that is made now."""
        replicated = TensorLayout([None] * len(variable.shape), self.device_mesh)
        return layout_or_colocated(variable, self.own_layout, replicated)

    def layout_of(self, tensor: DTensor) -> TensorLayout:
        """The layout of a DTensor on this mesh."""
        axes: list[str | None] = [None] * tensor.ndim
        [placement] = tensor.placements
        if isinstance(placement, Shard):
            axes[placement.dim] = self._mesh.batch_axis
        return TensorLayout(axes, self.device_mesh)

    def own_layout(self, variable: Any) -> TensorLayout:
        """The layout of a variable under this strategy."""
        is_float = keras.backend.is_float_dtype(variable.dtype)
        axes = self._mesh.layout(
            variable.path, variable.shape, itemsize(variable.dtype), is_float
        )
        full = [*axes, *[None] * (len(variable.shape) - len(axes))]
        return TensorLayout(full, self.device_mesh)

    def get_tensor_layout(self, path: str) -> None:
        """None: outputs of layers are rows."""


class _Thread(threading.local):
    #: Whether ordinary tensors that are assigned are equal in all processes.
    is_in_step = False


_thread = _Thread()


@contextlib.contextmanager
def in_step() -> Iterator[None]:
    """A context in which tensors that are assigned are equal in all processes."""
    before, _thread.is_in_step = _thread.is_in_step, True
    try:
        yield
    finally:
        _thread.is_in_step = before


@torch.no_grad()
def assign_shards(
    shards: DTensor, value: torch.Tensor, array: np.ndarray | None = None
) -> None:
    """Assigns a value to the shards of all processes.

    Args:
        shards: the shards.
        value: of their full shape; a DTensor, or a tensor of which the chief's values
            count. In a step each process keeps its part, without communication.
        array: the array that the tensor shares its memory with, if it does.
    """
    mesh, placements = shards.device_mesh, shards.placements
    if isinstance(value, DTensor):
        shards.copy_(value.redistribute(mesh, placements))
        return
    own = shards.to_local()
    if _thread.is_in_step or is_equal_everywhere(value, array, own.device):
        # No other memory of its size: a model is loaded variable by variable.
        copy_values(own, layout_of(shards).shard_of(value, mesh.get_local_rank()))
        # As an operation on the DTensor does.
        torch.autograd.graph.increment_version(shards)
        return
    local = value.detach().to(own.device)
    shards.copy_(distribute_tensor(local, mesh, placements))


def make_shards(
    value: torch.Tensor, mesh: Any, dim: int, like: torch.Tensor, array: Any = None
) -> DTensor:
    """The shards of a value, of which the chief's values count.

    Args:
        value: the full value in this process.
        mesh: torch's `DeviceMesh`.
        dim: the dimension along which they are.
        like: tensor with the dtype and the device of the shards.
        array: NumPy array that the value shares its memory with, or None.
    """
    if not is_equal_everywhere(value, array, like.device):
        return distribute_tensor(value.to(like), mesh, [Shard(dim)])
    layout = ShardLayout(dim, mesh.size(), tuple(value.shape))
    part = layout.shard_of(value, mesh.get_local_rank())
    own = like.new_empty(part.shape)
    copy_values(own, part)
    return DTensor.from_local(
        own,
        mesh,
        [Shard(dim)],
        run_check=False,
        shape=value.shape,
        stride=torch.empty(value.shape, device="meta").stride(),
    )


def is_equal_everywhere(
    value: torch.Tensor, array: np.ndarray | None, device: torch.device
) -> bool:
    """Whether all processes have a value: one part of a file, or by checksums."""
    value = value.detach()
    part = None if array is None else file_part_number(array)
    # Ranks are different: those without a part compare checksums.
    if _is_same(dist.get_rank() if part is None else part, device):
        return True
    order, in_memory = in_order_of_memory(value)
    own = zlib.crc32(repr(order).encode(), checksum(in_memory, _bytes_of))
    return _is_same(own, device)


def _is_same(number: int, device: torch.device) -> bool:
    """Whether all processes have the same number."""
    own = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    most, least = own.tolist()
    return bool(most == -least)


def _bytes_of(rows: torch.Tensor) -> np.ndarray:
    return rows.cpu().contiguous().view(-1).view(torch.uint8).numpy()


def gather_shards(value: Any) -> Any:
    """The full tensor of a DTensor, in every process; other values unchanged."""
    return value.full_tensor() if isinstance(value, DTensor) else value

"""Functions of Torch that combine the tensors of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_strategies.communication.communicator import Communicator
from keras_strategies.devices import Device
from keras_strategies.engines.torch.data_parallel.row_parts import (
    TorchRowParts,
    row_parts,
)
from keras_strategies.engines.torch.devices import torch_device
from keras_strategies.engines.torch.memory_formats import in_format_of
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.data_parallel.row_parts import RowPartsCaller
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.replicas.tensor_primitives import TensorPrimitives
from keras_strategies.types import ReduceOp

_REDUCTIONS: dict[ReduceOp, Callable[[torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: lambda stacked: stacked.sum(0, dtype=_dtype_of_sum(stacked)),
    ReduceOp.MEAN: lambda stacked: stacked.mean(0),
    ReduceOp.MIN: lambda stacked: stacked.amin(0),
    ReduceOp.MAX: lambda stacked: stacked.amax(0),
}


def _dtype_of_sum(tensor: torch.Tensor) -> torch.dtype | None:
    """That of the tensor, where Torch's own has 64 bits; a count for bools."""
    return None if tensor.dtype == torch.bool else tensor.dtype


class TorchPrimitives(TensorPrimitives):
    """Functions of tensors on one device."""

    @staticmethod
    def row_parts(  # type: ignore[override]
        parts: Sequence[torch.Tensor],
        row_split: RowSplit,
        caller: RowPartsCaller,
        device: Device,
    ) -> TorchRowParts:
        return row_parts(parts, row_split, caller, torch_device(device))

    def may_have_gradient(self, tensor: torch.Tensor) -> bool:
        return tensor.requires_grad

    def concatenate(
        self, tensors: Sequence[torch.Tensor], axis: int = 0
    ) -> torch.Tensor:
        return torch.cat(list(tensors), dim=axis)

    def split(
        self, tensor: torch.Tensor, sizes: Sequence[int], axis: int = 0
    ) -> list[torch.Tensor]:
        return list(tensor.split(list(sizes), dim=axis))

    def reshape(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return tensor.reshape(list(shape))

    def move_axis(
        self, tensor: torch.Tensor, source: int, destination: int
    ) -> torch.Tensor:
        return tensor.movedim(source, destination)

    def reduce(self, op: ReduceOp, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return in_format_of(_REDUCTIONS[op](torch.stack(list(tensors))), tensors[0])

    def add(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total + tensor
        return total

    def widened(self, tensor: torch.Tensor) -> torch.Tensor:
        is_half = tensor.dtype in (torch.float16, torch.bfloat16)
        return tensor.float() if is_half else tensor

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor if tensor.dtype is dtype else tensor.to(dtype)

    def to_device(self, tensor: torch.Tensor, device: Device) -> torch.Tensor:
        return tensor.to(torch_device(device))

    def read(self, variable: Any) -> torch.Tensor:
        value: torch.Tensor = raw_value(variable).detach().clone()
        return value

    def read_with_gradient(self, variable: Any, like: torch.Tensor) -> torch.Tensor:
        raw: torch.Tensor = raw_value(variable)
        return raw

    def assign(self, variable: Any, value: torch.Tensor) -> None:
        raw_value(variable).detach().copy_(value)

    def to_device_of(self, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return tensor.to(other.device)

    def all_lengths(
        self, lengths: Sequence[int], workers: Communicator, counts: Sequence[int]
    ) -> list[int]:
        own = torch.tensor(list(lengths), dtype=torch.int64)
        found: list[int] = workers.gather_rows(own, counts).tolist()
        return found


PRIMITIVES = TorchPrimitives()

"""Row parts on Torch: tensors without memory, whose rows are on their replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keras_strategies.engines.torch.compat import (
    tensor_without_memory,
)
from keras_strategies.engines.torch.data_parallel.tensor_on_demand import (
    TensorOnDemand,
    on_values,
)
from keras_strategies.engines.torch.devices import moved
from keras_strategies.runtime.data_parallel.row_parts import (
    RowParts,
    RowPartsCaller,
    note_join,
)
from keras_strategies.runtime.replicas.replica_set import RowSplit


@dataclass
class _Rows:
    """The rows of a tensor, and of its aliases: parts until they are joined.

    Joined rows can be changed in place, also through views, so parts end with it.
    """

    parts: list[torch.Tensor] | None
    joined: torch.Tensor | None = None


class TorchRowParts(TensorOnDemand, RowParts):
    """A tensor of the global batch whose rows are on the devices of replicas.

    Autograd sees one tensor. Below it, the first operation on it joins the rows.

    Args:
        rows: the parts of the local replicas, shared by aliases of the tensor.
        row_split: the entries of axis 0 on each replica.
        caller: the data-parallel calls of the strategy.
        device: the device of the global batch.
    """

    _rows: _Rows

    @staticmethod
    def __new__(
        cls,
        rows: _Rows,
        row_split: RowSplit,
        caller: RowPartsCaller,
        device: torch.device,
    ) -> TorchRowParts:
        assert rows.parts is not None
        first = rows.parts[0]
        shape = (sum(row_split.every), *first.shape[1:])
        return tensor_without_memory(cls, shape, first.dtype, device)

    def __init__(
        self,
        rows: _Rows,
        row_split: RowSplit,
        caller: RowPartsCaller,
        device: torch.device,
    ):
        self._rows = rows
        self.row_split = row_split
        self.caller = caller

    @property
    def parts(self) -> list[torch.Tensor] | None:
        return self._rows.parts

    def joined(self) -> torch.Tensor:
        rows = self._rows
        if rows.joined is None:
            assert rows.parts is not None
            note_join(self, tuple(self.shape))
            with torch.no_grad():
                own = [moved(part, self.device) for part in rows.parts]
                local = torch.cat(own)
                rows.joined = self.row_split.joined(local)
            rows.parts = None
        return rows.joined

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default and args[0].parts is not None:
            tensor = args[0]
            alias = cls(tensor._rows, tensor.row_split, tensor.caller, tensor.device)
            alias.layer = tensor.layer
            return alias
        return on_values(cls, func, args, kwargs)

    def demanded(self) -> torch.Tensor:
        return self.joined()


def row_parts(
    parts: Sequence[torch.Tensor],
    row_split: RowSplit,
    caller: RowPartsCaller,
    device: torch.device,
) -> TorchRowParts:
    """A tensor of the global batch, without gradient, from parts of replicas.

    Args:
        parts: the part of each local replica.
        row_split: the entries of axis 0 on each replica.
        caller: the data-parallel calls of the strategy.
        device: the device of the global batch.
    """
    rows = _Rows([part.detach() for part in parts])
    return TorchRowParts(rows, row_split, caller, device)


def on_host(value: Any) -> Any:
    """Row parts joined in the memory of the host; other values unchanged."""
    if not isinstance(value, TorchRowParts):
        return value
    parts = value.parts
    if parts is None or value.row_split.workers is not None:
        return value.joined().cpu()
    return torch.cat([part.cpu() for part in parts])

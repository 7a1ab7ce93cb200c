"""Row parts on Torch: tensors without memory, whose rows are on their replicas."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keras_strategies.engines.torch.compat import (
    disabled_torch_function,
    tensor_without_memory,
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


class TorchRowParts(torch.Tensor, RowParts):
    """A tensor of the global batch whose rows are on the devices of replicas.

    Autograd sees one tensor. Below it, the first operation on it joins the rows.

    Args:
        rows: the parts of the local replicas, shared by aliases of the tensor.
        row_split: the entries of axis 0 on each replica.
        caller: the data-parallel calls of the strategy.
        device: the device of the global batch.
    """

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]
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
        named = kwargs or {}
        joined = dict(zip(named, _joined(named.values()), strict=True))
        return func(*_joined(args), **joined)

    # Methods that read memory or its layout without an operation, which Torch refuses
    # without memory.

    def _with_memory(self) -> torch.Tensor:
        return self.joined().detach().requires_grad_(self.requires_grad)

    def numpy(self, *, force: bool = False) -> Any:
        return self._with_memory().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_memory().__array__(*args, **kwargs)

    def tolist(self) -> Any:
        return self.joined().tolist()

    def data_ptr(self) -> int:
        return self.joined().data_ptr()

    def untyped_storage(self) -> Any:
        return self.joined().untyped_storage()

    def stride(self, *args: Any, **kwargs: Any) -> Any:
        return self.joined().stride(*args, **kwargs)

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        return self.joined().is_contiguous(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_memory().__dlpack__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._with_memory().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if not self.is_leaf:
            # Raises Torch's error.
            return torch.Tensor.__deepcopy__(self, memo)
        return copy.deepcopy(self._with_memory(), memo)

    def __format__(self, text: str) -> str:
        return format(self.joined(), text) if text else repr(self)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        # An operation on it: text of a tensor with a gradient has its function.
        return repr(self.view_as(self))


def _joined(args: Iterable[Any]) -> list[Any]:
    """Arguments of an operation, with plain tensors in the place of row parts."""
    return [
        each.joined()
        if isinstance(each, TorchRowParts)
        else _joined(each)
        if isinstance(each, (list, tuple))
        else each
        for each in args
    ]


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

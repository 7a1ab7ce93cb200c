"""Collectives of Gloo on tensors of accelerators that it does not support."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch

from keras_strategies.engines.torch.compat import all_gather_into, reduce_scatter_into

#: The types of devices with tensors that Gloo takes.
_SUPPORTED = ("cpu", "cuda")


def gloo_for(group: Any, device: torch.device) -> Any:
    """A Gloo process group with collectives on tensors of a device."""
    return group if device.type in _SUPPORTED else _HostStagedGroup(group)


class _HostStagedGroup:
    """Collectives on copies in the host's memory, which are copied back."""

    def __init__(self, group: Any):
        self._group = group

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any) -> _Work:
        copies = [tensor.cpu() for tensor in tensors]
        return _Work(self._group.allreduce(copies, options), tensors, copies)

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> _Work:
        copies = [tensor.cpu() for tensor in tensors]
        return _Work(self._group.broadcast(copies, options), tensors, copies)

    def _allgather_base(self, joined: torch.Tensor, own: torch.Tensor) -> _Work:
        copy = torch.empty_like(joined, device="cpu")
        work = all_gather_into(self._group, copy, own.cpu())
        return _Work(work, [joined], [copy])

    def _reduce_scatter_base(self, own: torch.Tensor, parts: torch.Tensor) -> _Work:
        copy = torch.empty_like(own, device="cpu")
        work = reduce_scatter_into(self._group, copy, parts.cpu())
        return _Work(work, [own], [copy])


class _Work:
    """A collective; `wait` copies its results back."""

    def __init__(
        self, work: Any, tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]
    ):
        self._work = work
        self._tensors = tensors
        self._copies = copies

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, *timeout: datetime.timedelta) -> None:
        self._work.wait(*timeout)
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy)

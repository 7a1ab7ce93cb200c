"""Transfer of batches to a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from keras_strategies.engines.torch.devices import moved
from keras_strategies.keras_compat.structures import leaves_of, with_leaves
from keras_strategies.runtime.batch_prefetch import prefetch_one

# Starts the transfer of a batch; returns a callable that waits for it and returns the
# batch on the device.
Mover = Callable[[Any], Callable[[], Any]]


class CudaMover:
    """Moves structures of tensors to a CUDA device on a separate stream.

    The host does not wait: tensors are copied from pinned memory, and the compute
    stream waits for the copies when they are used.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: Any) -> Callable[[], Any]:
        leaves = leaves_of(batch)
        with torch.cuda.stream(self._stream):
            moved = [self._begin(leaf) for leaf in leaves]
            arrived = self._stream.record_event()

        def arrive() -> Any:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(arrived)
            for leaf in moved:
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                    # Allocated on the transfer stream, which could reuse its memory.
                    leaf.record_stream(computing)
            return with_leaves(batch, moved)

        return arrive

    def _begin(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == self._device:
            return leaf
        # Torch keeps pinned memory alive until the copy from it has finished.
        return pinned(leaf).to(self._device, non_blocking=True)


class BatchPrefetcher(Protocol):
    """Prefetches the batches of `fit`, `evaluate` and `predict`."""

    def batches(self, batches: Iterable[Any], adapter: Any = None) -> Iterator[Any]:
        """A pass over the batches, which begins now; see `LoaderPlacer`."""


def pinned(leaf: Any) -> Any:
    """A dense tensor of the host in pinned memory; other values unchanged.

    Transfers from other memory make the host wait, and do not overlap.
    """
    is_host = isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
    return leaf.pin_memory() if is_host and leaf.layout is torch.strided else leaf


def batch_prefetcher(home: torch.device, is_single: bool) -> BatchPrefetcher:
    """The prefetch of batches under a strategy.

    Args:
        home: the device of the variables.
        is_single: bool, whether all rows are computed there.
    """
    if is_single and home.type == "cuda":
        return CudaPrefetcher(CudaMover(home))
    return HostReader()


def device_rows(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A replica's rows on its device; the host does not wait for their transfer."""
    return moved(pinned(part) if device.type == "cuda" else part, device)


class HostReader:
    """Leaves batches on the host, from where layer calls move rows to their devices."""

    def batches(self, batches: Iterable[Any], adapter: Any = None) -> Iterator[Any]:
        return iter(batches)


class CudaPrefetcher:
    """Prefetches the batches of `fit`, `evaluate` and `predict` to a device.

    Args:
        move: begins to move a batch.
    """

    def __init__(self, move: Mover):
        self._move = move

    def batches(self, batches: Iterable[Any], adapter: Any = None) -> Iterator[Any]:
        return prefetch_one(iter(batches), self._move)

"""Transfer of batches to a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

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


def pinned(leaf: Any) -> Any:
    """A dense tensor of the host in pinned memory; other values unchanged.

    Transfers from other memory make the host wait, and do not overlap.
    """
    is_host = isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
    return leaf.pin_memory() if is_host and leaf.layout is torch.strided else leaf


def device_rows(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A replica's rows on its device; the host does not wait for their transfer."""
    return moved(pinned(part) if device.type == "cuda" else part, device)


class BatchPrefetcher:
    """Prefetches the batches of `fit`, `evaluate` and `predict`.

    Args:
        move: begins to move a batch to its device; None to leave batches on the host,
            from where layer calls move rows.
    """

    def __init__(self, move: Mover | None):
        self._move = move

    def batches(self, batches: Iterable[Any], adapter: Any = None) -> Iterator[Any]:
        """A pass over the batches, which begins now."""
        begun = iter(batches)
        return begun if self._move is None else prefetch_one(begun, self._move)

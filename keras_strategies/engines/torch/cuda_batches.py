"""Transfer of batches to a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import torch

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
        leaves = keras.tree.flatten(batch)
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
            return keras.tree.pack_sequence_as(batch, moved)

        return arrive

    def _begin(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == self._device:
            return leaf
        if leaf.device.type == "cpu" and leaf.layout is torch.strided:
            # Torch keeps pinned memory alive until the copy from it has finished.
            leaf = leaf.pin_memory()
        return leaf.to(self._device, non_blocking=True)


class CudaPrefetcher:
    """Prefetches the batches of `fit`, `evaluate` and `predict` to a device.

    Args:
        move: begins to move a batch.
    """

    def __init__(self, move: Mover):
        self._move = move

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        return prefetch_one(batches, self._move)

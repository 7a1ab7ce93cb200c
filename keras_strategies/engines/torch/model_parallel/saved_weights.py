"""What autograd saves of gathered weights: how to gather them again.

It would keep a gathered weight for the backward pass of each operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keras_strategies.engines.torch.compat import (
    StorageWeakRef,
    storage_key,
    version_of,
)


def check_version(shards: DTensor, version: int) -> None:
    """Raises an error if a weight has changed since its forward pass."""
    if version_of(shards) != version:
        raise RuntimeError(
            "A weight was assigned between the forward and the backward pass, "
            "which needs the value of before. Assign it after the backward pass."
        )


class SavedWeights:
    """Keeps how to gather weights, where autograd would keep gathered weights."""

    def __init__(self) -> None:
        # By the memory of a gathered weight: this memory, and what gathers it again.
        self._sources: dict[int, tuple[Any, Callable[[], torch.Tensor]]] = {}

    def note(self, full: torch.Tensor, again: Callable[[], torch.Tensor]) -> None:
        """Takes a gathered weight.

        Args:
            full: the weight.
            again: gathers the same tensor.
        """
        memory = StorageWeakRef(full.untyped_storage())
        self._sources[memory.cdata] = memory, again

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A context in which autograd keeps no gathered weight."""
        with torch.autograd.graph.saved_tensors_hooks(self._packed, _unpacked):
            yield

    def _packed(self, tensor: torch.Tensor) -> Any:
        is_plain = not tensor.is_sparse and not isinstance(tensor, DTensor)
        found = self._sources.get(storage_key(tensor)) if is_plain else None
        # Another tensor may be where a weight was.
        if found is None or found[0].expired():
            return tensor, version_of(tensor)
        again = found[1]
        place = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return lambda: again().as_strided(*place)


def _unpacked(packed: Any) -> torch.Tensor:
    if callable(packed):
        return packed()  # type: ignore[no-any-return]
    tensor, version = packed
    if version_of(tensor) != version:
        raise RuntimeError(
            "A tensor that the backward pass needs was modified in place after the "
            f"operation that saved it: shape {tuple(tensor.shape)}, {tensor.dtype}."
        )
    return tensor  # type: ignore[no-any-return]

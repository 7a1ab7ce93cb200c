"""Reads of weights in shards in a step that is computed without values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_strategies.engines.torch.model_parallel.saved_weights import SavedWeights


class CountedReads:
    """What operations read of weights in shards, forward and backward.

    Args:
        own_shape: returns the shape of what a device has of a variable.
    """

    def __init__(self, own_shape: Callable[[Any], Sequence[int]]):
        self._own_shape = own_shape
        self._saved = SavedWeights()
        #: The variables, and the dtypes in which they are read.
        self.found: list[tuple[Any, torch.dtype]] = []

    def used(
        self, variable: Any, value: torch.Tensor, name: str | None
    ) -> torch.Tensor:
        """What an operation reads; see `ReplicaState`."""
        if tuple(self._own_shape(variable)) == tuple(variable.shape):
            return value
        dtype = value.dtype if name is None else getattr(torch, name)
        found = value.to(dtype)
        self.found.append((variable, dtype))

        def again() -> torch.Tensor:
            self.found.append((variable, dtype))
            return value.detach().to(dtype)

        self._saved.note(found, again)
        return found

    def saved(self) -> contextlib.AbstractContextManager[None]:
        """A context in which what the backward pass reads is counted."""
        return self._saved.entered()

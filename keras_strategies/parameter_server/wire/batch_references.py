"""Batches of a step: arrays, or references to batches that a worker reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_strategies.input.batches import as_numpy
from keras_strategies.parameter_server.engines.composite_tensors import is_composite


@dataclass(frozen=True)
class BatchReference:
    """A batch that a worker reads.

    Args:
        reader: int, number of the `WorkerResource` that reads it.
        pass_number: int, the earlier passes over the pipelines.
        pipeline: int, the pipeline.
        position: int, the number of the batch in this pass over the pipeline.
    """

    reader: int
    pass_number: int
    pipeline: int
    position: int


def host_batch(batch: Any) -> Any:
    """A batch of NumPy arrays and composite tensors, without trailing None."""
    parts = list(batch) if isinstance(batch, (tuple, list)) else [batch]
    while parts and parts[-1] is None:
        parts.pop()
    return tuple(
        keras.tree.map_structure(
            lambda leaf: (
                leaf
                if leaf is None or is_composite(leaf)
                else _contiguous(as_numpy(leaf))
            ),
            part,
        )
        for part in parts
    )


def _contiguous(array: Any) -> Any:
    if array.dtype == np.float64:
        # As Keras converts it.
        array = array.astype(keras.config.floatx())
    return np.ascontiguousarray(array) if array.ndim else array

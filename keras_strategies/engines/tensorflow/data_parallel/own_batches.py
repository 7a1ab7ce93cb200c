"""Batches of which each worker has its own rows, in a program."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_strategies.engines.tensorflow.data_parallel.row_parts import row_parts
from keras_strategies.engines.tensorflow.devices import tf_device
from keras_strategies.engines.tensorflow.tensor_primitives import PRIMITIVES
from keras_strategies.keras_compat.models.input_adapters import RowsOfWorker
from keras_strategies.runtime.data_parallel.row_parts import RowPartsCaller
from keras_strategies.runtime.placement import Placement
from keras_strategies.runtime.replicas.replica_set import RowSplit


def in_parts(data: RowsOfWorker, placement: Placement, caller: RowPartsCaller) -> Any:
    """The batch as row parts, if each replica has a row.

    Args:
        data: this worker's rows.
        placement: the devices.
        caller: the data-parallel calls of the strategy.
    """
    assert placement.workers is not None
    total = placement.replica_counts.total
    sizes = tf.unstack(tf.ensure_shape(data.every, [total]))
    row_split = RowSplit.over(PRIMITIVES, sizes, placement.workers)
    assert row_split is not None

    def parts_of(leaf: Any) -> Any:
        if leaf is None:
            return None
        count = len(row_split.sizes)
        parts = tf.split(leaf, row_split.sizes) if count > 1 else [leaf]
        placed = []
        for part, device in zip(parts, placement.replicas, strict=True):
            with tf.device(tf_device(device)):
                placed.append(tf.identity(part))
        tensor = row_parts(placed, row_split, caller, placement.variables)
        tensor.layer = _no_layer
        return tensor

    return keras.tree.map_structure(parts_of, data.batch)


def _no_layer() -> None:
    return None


def joined(data: RowsOfWorker, placement: Placement) -> Any:
    """The global batch."""
    workers, counts = placement.workers, placement.replica_counts
    assert workers is not None
    sizes = tf.unstack(tf.ensure_shape(data.every, [counts.total]))
    rows = [sum(each) for each in counts.split(sizes)]

    def of_all(leaf: Any) -> Any:
        return None if leaf is None else workers.gather_rows(leaf, rows)

    return keras.tree.map_structure(of_all, data.batch)

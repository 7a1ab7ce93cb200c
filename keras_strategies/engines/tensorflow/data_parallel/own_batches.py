"""Batches of which each worker has its own rows, in a program."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.engines.tensorflow.data_parallel.row_parts import (
    TensorFlowRowParts,
    row_parts,
)
from keras_strategies.engines.tensorflow.devices import tf_device
from keras_strategies.engines.tensorflow.functions_by_rank import with_ranks_of
from keras_strategies.engines.tensorflow.tensor_primitives import PRIMITIVES
from keras_strategies.keras_compat.models.input_adapters import RowsOfWorker
from keras_strategies.runtime.data_parallel.row_parts import RowPartsCaller
from keras_strategies.runtime.placement import Placement
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.row_splits import split_sizes
from keras_strategies.runtime.worker_batch import WorkerBatch


def in_parts(data: RowsOfWorker, placement: Placement, caller: RowPartsCaller) -> Any:
    """The batch as row parts, if each replica has a row.

    Args:
        data: this worker's rows.
        placement: the devices.
        caller: the data-parallel calls of the strategy.
    """
    assert placement.workers is not None
    sizes = _every(data, placement.replica_counts.total)
    row_split = RowSplit.over(PRIMITIVES, sizes, placement.workers)
    assert row_split is not None

    def parts_of(leaf: Any) -> Any:
        if leaf is None:
            return None
        placed = []
        for part, device in zip(
            _split(leaf, row_split.sizes), placement.replicas, strict=True
        ):
            with tf.device(tf_device(device)):
                placed.append(tf.identity(part))
        tensor = row_parts(placed, row_split, caller, placement.variables)
        tensor.layer = _no_layer
        return tensor

    return keras.tree.map_structure(parts_of, data.batch)


def as_tensors(data: Any, spec: Any, counts: ReplicaCounts) -> tuple[Any, Any]:
    """A batch that a step has read, for the current group, and its specification.

    Args:
        data: a `WorkerBatch`; others are returned unchanged.
        spec: the specification of the global batches; None if it is unknown.
        counts: the replicas of the current group.
    """
    if not isinstance(data, WorkerBatch):
        return data, spec
    data = data.of(counts)
    total = sum(data.every) or _rows(data.batch)
    with tf.device("/device:CPU:0"):
        every = tf.zeros([total, 0], tf.bool)
        if spec is None:
            batch = keras.tree.map_structure(_tensor, data.batch)
            return RowsOfWorker(batch, every), None
        batch = keras.tree.map_structure(_tensor, data.batch, spec)
    spec = with_ranks_of(batch, spec)
    is_fixed = next(iter(keras.tree.flatten(spec))).shape[0] is not None

    def own(leaf: Any, spec: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec):
            return spec
        length = leaf.shape[0] if is_fixed else None
        return tf.TensorSpec([length, *spec.shape[1:]], spec.dtype)

    own_spec = keras.tree.map_structure(own, batch, spec)
    rows = tf.TensorSpec([total if is_fixed else None, 0], tf.bool)
    return RowsOfWorker(batch, every), RowsOfWorker(own_spec, rows)


def _rows(batch: Any) -> int:
    """The rows of the first leaf."""
    return next(
        int(leaf.shape[0]) for leaf in keras.tree.flatten(batch) if leaf is not None
    )


def _tensor(leaf: Any, spec: Any = None) -> Any:
    if leaf is None or not isinstance(spec, tf.TensorSpec):
        return None if leaf is None else tf.convert_to_tensor(leaf)
    return tf.cast(leaf, spec.dtype)


def _split(leaf: Any, sizes: list[Any]) -> list[Any]:
    if len(sizes) > 1:
        return list(tf.split(leaf, sizes))
    if isinstance(sizes[0], int):
        return [leaf]
    # The program is for any number of rows, also if it is traced for this batch.
    rest = leaf.shape[1:]
    own = tf.slice(leaf, [0] * leaf.shape.rank, [sizes[0], *[-1] * len(rest)])
    own.set_shape([None, *rest])
    return [own]


def _every(data: RowsOfWorker, replicas: int) -> list[Any]:
    """The rows of each replica: ints, or scalar tensors."""
    if data.every.shape.rank == 1:
        return tf.unstack(tf.ensure_shape(data.every, [replicas]))
    total = data.every.shape[0]
    if total is not None:
        return split_sizes(int(total), replicas)
    rows = tf.shape(data.every)[0]
    larger = rows % replicas
    return [rows // replicas + tf.cast(i < larger, tf.int32) for i in range(replicas)]


def has_all_rows(data: RowsOfWorker) -> bool:
    """Whether each worker has read all rows of a global batch."""
    every = data.every
    return len(every.shape) > 1 and int(every.shape[0]) == _rows(data.batch)


def are_joined(batch: Any) -> bool:
    """Whether a program has joined one of the row parts of a batch."""
    return any(
        isinstance(leaf, TensorFlowRowParts) and leaf.is_joined
        for leaf in keras.tree.flatten(batch)
    )


def _no_layer() -> None:
    return None


def joined(data: Any, placement: Placement) -> Any:
    """The global batch, of this worker's rows or as it is."""
    if not isinstance(data, RowsOfWorker):
        return data
    workers, counts = placement.workers, placement.replica_counts
    assert workers is not None
    sizes = _every(data, counts.total)
    rows = [sum(each) for each in counts.split(sizes)]

    def of_all(leaf: Any) -> Any:
        return None if leaf is None else workers.gather_rows(leaf, rows)

    return keras.tree.map_structure(of_all, data.batch)

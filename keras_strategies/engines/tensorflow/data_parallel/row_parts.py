"""Row parts on TensorFlow: tensors of a program whose rows are on their replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_strategies.devices import Device
from keras_strategies.engines.tensorflow.compat.gradients import (
    record_gradient,
    tape_id,
    with_gradient,
    without_recording,
)
from keras_strategies.engines.tensorflow.compat.operations import is_read_for_shape
from keras_strategies.engines.tensorflow.data_parallel.custom_gradient import (
    custom_gradient,
)
from keras_strategies.engines.tensorflow.devices import tf_device
from keras_strategies.errors import ContextError
from keras_strategies.keras_compat.models.layers import get_logits, set_logits
from keras_strategies.runtime.data_parallel.row_parts import (
    RowParts,
    RowPartsCaller,
    note_join,
    parts_of,
)
from keras_strategies.runtime.replicas.replica_set import RowSplit


class TensorFlowRowParts(tf.Tensor, RowParts):  # type: ignore[misc]
    """A tensor of the global batch whose rows are on the devices of replicas.

    Tapes see one tensor. Operations convert their arguments to tensors; the first that
    does joins the rows, in the graph that has the parts.

    Args:
        parts: the parts of the local replicas, for tapes.
        row_split: the entries of axis 0 on each replica.
        caller: the data-parallel calls of the strategy.
        device: str, the device of the global batch, as TensorFlow names it.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        row_split: RowSplit,
        caller: RowPartsCaller,
        device: str,
    ):
        self.row_split = row_split
        self.caller = caller
        self._parts = list(parts)
        self._lead = device
        rows = row_split.every
        is_static = all(isinstance(size, int) for size in rows)
        size = sum(rows) if is_static else None
        self._static_shape = tf.TensorShape([size, *parts[0].shape[1:]])
        self._all_rows: Any = None
        with without_recording():
            # Of no other tensor, for tapes.
            self._of_tapes = tf.identity(parts[0])
        record_gradient([self], self._parts, self._gradients_of_parts)

    def _gradients_of_parts(self, gradient: Any) -> list[Any]:
        parts = parts_of(gradient, self.row_split)
        if parts is not None:
            return parts
        with tf.device(self._lead):
            own = own_rows(self.row_split, tf.convert_to_tensor(gradient))
            if len(self._parts) == 1:
                return [own]
            return list(tf.split(own, self.row_split.sizes))

    @property
    def parts(self) -> list[Any] | None:
        is_here = tf.compat.v1.get_default_graph() is self.graph
        return self._parts if is_here else None

    @property
    def is_joined(self) -> bool:
        """Whether the program has all rows."""
        return self._all_rows is not None

    def joined(self) -> Any:
        if self._all_rows is None:
            note_join(self, tuple(self.shape))
        return self.joined_silently()

    def joined_silently(self) -> Any:
        """The same without a line in the log."""
        with self.graph.as_default(), tf.device(self._lead):
            with without_recording():
                if self._all_rows is None:
                    own = self._parts
                    local = tf.concat(own, 0) if len(own) > 1 else own[0]
                    self._all_rows = self.row_split.joined(local)
                found = tf.identity(self._all_rows)
            found.set_shape(self._static_shape)
            record_gradient([found], [self], lambda gradient: [gradient])
        logits = get_logits(self)
        if logits is not None:
            set_logits(found, logits)
        return found

    # What TensorFlow asks of a tensor.

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        if is_read_for_shape() and self.parts is not None:
            # Keras's steps have the number of rows from the shape of `x`.
            return self._of_this_shape()
        return self.joined().__tf_tensor__(dtype, name)

    def _of_this_shape(self) -> Any:
        """A tensor of this shape, without the rows."""
        with without_recording():
            rows = tf.convert_to_tensor(self.rows, tf.int32)
            shape = tf.concat([[rows], tf.shape(self._parts[0])[1:]], 0)
            found = tf.broadcast_to(tf.zeros([], tf.bool), shape)
        found.set_shape(self._static_shape)
        return found

    @property
    def dtype(self) -> Any:
        return self._of_tapes.dtype

    @property
    def shape(self) -> Any:
        return self._static_shape

    def set_shape(self, shape: Any) -> None:
        self._static_shape = self._static_shape.merge_with(shape)

    @property
    def graph(self) -> Any:
        return self._of_tapes.graph

    @property
    def name(self) -> Any:
        return self._of_tapes.name

    @property
    def device(self) -> Any:
        return self._lead

    @property
    def op(self) -> Any:
        return self.joined().op

    @property
    def value_index(self) -> int:
        return 0

    def consumers(self) -> Any:
        return [] if self._all_rows is None else self._all_rows.consumers()

    def __repr__(self) -> str:
        shape, kind = self._static_shape, self.dtype.name
        return f"<tf.Tensor '{self.name}' shape={shape} dtype={kind}, on replicas>"

    __str__ = __repr__

    @property
    def _id(self) -> Any:
        # Tapes know tensors by it.
        return tape_id(self._of_tapes)


def own_rows(row_split: RowSplit, tensor: Any) -> Any:
    """This worker's rows of a tensor that all workers have.

    Tapes can differentiate it any number of times: its gradient is `all_rows`, of which
    the gradient is this.
    """
    if row_split.workers is None:
        return tensor

    @custom_gradient
    def own(tensor: Any) -> tuple[Any, Callable[[Any], Any]]:
        return row_split.own(tensor), functools.partial(all_rows, row_split)

    return own(tensor)


def all_rows(row_split: RowSplit, tensor: Any) -> Any:
    """The rows of all workers, from those of this one; see `own_rows`."""
    if row_split.workers is None:
        return tensor

    @custom_gradient
    def joined(tensor: Any) -> tuple[Any, Callable[[Any], Any]]:
        return row_split.joined(tensor), functools.partial(own_rows, row_split)

    return joined(tensor)


def row_parts(
    parts: Sequence[Any],
    row_split: RowSplit,
    caller: RowPartsCaller,
    device: Device,
) -> TensorFlowRowParts:
    """A tensor of the global batch from parts of replicas.

    Args:
        parts: the part of each local replica.
        row_split: the entries of axis 0 on each replica.
        caller: the data-parallel calls of the strategy.
        device: the device of the global batch.
    """
    return TensorFlowRowParts(parts, row_split, caller, tf_device(device))


def for_tapes(tensor: Any) -> Any:
    """A tensor whose gradient only tapes can compute, as the boundary of a call.

    A graph has no operation from the boundary's tensors to all of its targets, since
    these are on several devices.
    """
    with tf.device(tensor.device):
        (found,) = with_gradient([tensor], _refused)
    return found


def _refused(*gradients: Any) -> list[Any]:
    raise ContextError(
        "A gradient through a layer call on several replicas was computed by "
        "`tf.gradients`, or by a tape outside of the program. Use a `tf.GradientTape` "
        "in the step."
    )


def joined_silently(value: Any) -> Any:
    """Row parts joined without a line in the log; other values unchanged."""
    is_in_parts = isinstance(value, TensorFlowRowParts)
    return value.joined_silently() if is_in_parts else value

"""Replicas of one computation, over all workers, and their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from keras_strategies.communication.communicator import Communicator
from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.runtime.replicas.tensor_primitives import TensorPrimitives
from keras_strategies.types import ReduceOp


@dataclass(frozen=True)
class ReplicaSet:
    """The participating replicas of a computation: local devices times workers.

    Args:
        primitives: the functions of the framework's tensors.
        counts: the participating replicas of all workers.
        workers: the communicator between workers; None with one worker.
    """

    primitives: TensorPrimitives
    counts: ReplicaCounts
    workers: Communicator | None = None

    @classmethod
    def local(cls, primitives: TensorPrimitives, count: int) -> ReplicaSet:
        """Replicas of this process alone."""
        return cls(primitives, ReplicaCounts((count,)))

    def reduce(self, op: ReduceOp, values: Sequence[Sequence[Any]]) -> list[Any]:
        """Reduces tensors over all replicas, on the first replica's devices.

        Args:
            op: the operation.
            values: for each local replica a list of tensors.

        Returns:
            list with one tensor for each in a replica's list.
        """
        columns = self._on_first_replica(values)
        if self.workers is None:
            return [self.primitives.reduce(op, column) for column in columns]
        is_mean = op is ReduceOp.MEAN
        own = ReduceOp.SUM if is_mean else op
        local = [self.primitives.reduce(own, column) for column in columns]
        found = self.workers.all_reduce(own, local)
        return [tensor / self.counts.total for tensor in found] if is_mean else found

    def gather(
        self, values: Sequence[Sequence[Any]], axis: int, are_equal: bool = False
    ) -> tuple[list[Any], list[list[Any]]]:
        """Concatenates tensors of all replicas along an axis.

        Args:
            values: for each local replica a list of tensors.
            axis: int, the axis along which lengths may differ.
            are_equal: bool, whether they are known to be equal on all replicas, so that
                workers do not exchange them.

        Returns:
            list with one tensor for each in a replica's list, and for each of them the
            lengths of all replicas' parts.
        """
        gathered, lengths = [], []
        for column in self._on_first_replica(values):
            joined, sizes = self._gather(column, axis, are_equal)
            gathered.append(joined)
            lengths.append(sizes)
        return gathered, lengths

    def _on_first_replica(self, values: Sequence[Sequence[Any]]) -> list[list[Any]]:
        return [
            [self.primitives.to_device_of(tensor, column[0]) for tensor in column]
            for column in zip(*values, strict=True)
        ]

    def _gather(
        self, parts: Sequence[Any], axis: int, are_equal: bool
    ) -> tuple[Any, list[Any]]:
        joined = self.primitives.concatenate(parts, axis)
        # Scalar tensors in a program where sizes are unknown.
        sizes = [keras.ops.shape(part)[axis] for part in parts]
        if self.workers is None:
            return joined, sizes
        if are_equal:
            sizes = sizes[:1] * self.counts.total
        else:
            sizes = self.primitives.all_lengths(
                sizes, self.workers, self.counts.by_worker
            )
        rows = [sum(each) for each in self.counts.split(sizes)]
        if axis % len(joined.shape) == 0:
            return self.workers.gather_rows(joined, rows), sizes
        first = self.primitives.move_axis(joined, axis, 0)
        joined = self.workers.gather_rows(first, rows)
        return self.primitives.move_axis(joined, 0, axis), sizes

    def all_values(self, columns: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """The tensors of all replicas, from those of the local ones.

        Args:
            columns: lists with a tensor of each local replica, of equal shapes. All
                tensors of a dtype are sent in one message.
        """
        if self.workers is None:
            return [list(column) for column in columns]
        ops = self.primitives
        found: list[Any] = [None] * len(columns)
        for kind in dict.fromkeys(column[0].dtype for column in columns):
            numbers = [i for i, column in enumerate(columns) if column[0].dtype == kind]
            flat = [
                ops.concatenate([ops.reshape(part, [1, -1]) for part in columns[i]])
                for i in numbers
            ]
            widths = [part.shape[1] for part in flat]
            rows = self.workers.gather_rows(
                ops.concatenate(flat, 1), self.counts.by_worker
            )
            for i, part in zip(numbers, ops.split(rows, widths, 1), strict=True):
                shape = columns[i][0].shape
                values = ops.split(part, [1] * self.counts.total, 0)
                found[i] = [ops.reshape(value, shape) for value in values]
        return found


@dataclass(frozen=True)
class RowSplit:
    """Rows of one call on each participating replica.

    Rows are ints, or scalar tensors in a program for any number of rows.

    Args:
        every: the number of rows of each replica, of all workers.
        sizes: the number of rows of each local replica.
        replica_set: the replicas.
        all_have_rows: bool, whether each replica is known to have a row.
    """

    every: list[Any]
    sizes: list[Any]
    replica_set: ReplicaSet
    all_have_rows: bool = True
    _by_multiple: dict[int, RowSplit] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def local(
        cls,
        primitives: TensorPrimitives,
        sizes: Sequence[Any],
        all_have_rows: bool = True,
    ) -> RowSplit:
        """Over the replicas of this process; those without rows do not participate."""
        present = [size for size in sizes if _may_have_rows(size)]
        replica_set = ReplicaSet.local(primitives, len(present))
        return cls(present, present, replica_set, all_have_rows)

    @classmethod
    def over(
        cls,
        primitives: TensorPrimitives,
        sizes: Sequence[Any],
        workers: Communicator,
        all_have_rows: bool = True,
    ) -> RowSplit | None:
        """Over the replicas of all workers; None if a worker has no rows."""
        own = [
            [size for size in each if _may_have_rows(size)]
            for each in workers.replica_counts.split(sizes)
        ]
        if not all(own):
            return None
        index = workers.group.index
        counts = ReplicaCounts(tuple(map(len, own)), index)
        every = [size for each in own for size in each]
        replica_set = ReplicaSet(primitives, counts, workers)
        return cls(every, own[index], replica_set, all_have_rows)

    @property
    def workers(self) -> Communicator | None:
        return self.replica_set.workers

    @property
    def worker_rows(self) -> list[Any]:
        """The rows of each worker."""
        return [sum(each) for each in self.replica_set.counts.split(self.every)]

    def times(self, multiple: int) -> RowSplit:
        """The split of a tensor with several entries of axis 0 for each row."""
        if multiple == 1:
            return self
        if multiple not in self._by_multiple:
            self._by_multiple[multiple] = RowSplit(
                [rows * multiple for rows in self.every],
                [rows * multiple for rows in self.sizes],
                self.replica_set,
                self.all_have_rows,
            )
        return self._by_multiple[multiple]

    def is_like(self, other: RowSplit) -> bool:
        """Whether each replica is known to have as many rows in another split."""
        if self is other:
            return True
        if self.replica_set != other.replica_set or len(self.every) != len(other.every):
            return False
        return all(
            own is rows or (type(own) is type(rows) is int and own == rows)
            for own, rows in zip(self.every, other.every, strict=True)
        )

    def own(self, tensor: Any, multiple: int = 1) -> Any:
        """This worker's rows of a tensor of the global batch.

        Args:
            tensor: a tensor.
            multiple: int, entries of its axis 0 for each row.
        """
        if self.workers is None:
            return tensor
        rows, index = self.worker_rows, self.workers.group.index
        start = sum(rows[:index]) * multiple
        return tensor[start : start + rows[index] * multiple]

    def joined(self, tensor: Any, multiple: int = 1) -> Any:
        """All rows, from those of this worker; see `own`."""
        if self.workers is None:
            return tensor
        return self.workers.gather_rows(
            tensor, [rows * multiple for rows in self.worker_rows]
        )

    def summed(self, tensors: list[Any]) -> list[Any]:
        """Sums of tensors over workers."""
        if self.workers is None or not tensors:
            return tensors
        return self.workers.all_reduce(ReduceOp.SUM, tensors)


def _may_have_rows(size: Any) -> bool:
    return not isinstance(size, int) or size > 0

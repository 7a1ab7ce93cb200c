"""The replicas that compute together, on this worker and on the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.custom_gradient import custom_gradient
from keras_strategies.engines.tensorflow.gradients import widened
from keras_strategies.engines.tensorflow.workers import TensorFlowWorkers
from keras_strategies.types import ReduceOp


@dataclass(frozen=True)
class Team:
    """The replicas that take part in a computation, on all workers.

    Args:
        workers: the engine between workers; None where there is one worker.
        counts: how many replicas take part on each worker.
        first: int, the number of this worker's first replica.
    """

    workers: TensorFlowWorkers | None
    counts: tuple[int, ...]
    first: int

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def own_count(self) -> int:
        """The replicas of this worker."""
        return self.counts[0 if self.workers is None else self.workers.group.index]

    def reduce(self, op: ReduceOp, values: Sequence[Sequence[Any]]) -> list[Any]:
        """Reduces the local replicas' tensors, and those of other workers.

        Args:
            op: the operation.
            values: for each local replica a list of tensors.
        """
        columns = list(zip(*values, strict=True))
        if self.workers is None:
            return [reduce_tensors(op, column) for column in columns]
        mean = op is ReduceOp.MEAN
        own = ReduceOp.SUM if mean else op
        local = [reduce_tensors(own, column) for column in columns]
        found = self.workers.all_reduce(own, local)
        return [tensor / self.total for tensor in found] if mean else found

    def gather(
        self, values: Sequence[Sequence[Any]], axis: int
    ) -> tuple[list[Any], list[list[Any]]]:
        """Concatenates tensors of all replicas, and says how long each part is."""
        gathered, lengths = [], []
        for column in zip(*values, strict=True):
            whole, sizes = self._gather(column, axis)
            gathered.append(whole)
            lengths.append(sizes)
        return gathered, lengths

    def _gather(self, parts: Sequence[Any], axis: int) -> tuple[Any, list[Any]]:
        joined = tf.concat(list(parts), axis)
        sizes = [part.shape[axis] for part in parts]
        if self.workers is None:
            return joined, [
                tf.shape(part)[axis] if size is None else size
                for part, size in zip(parts, sizes, strict=True)
            ]
        if tf.executing_eagerly() or None in sizes:
            own = tf.stack([tf.shape(part)[axis] for part in parts])
            every = self.workers.gather_rows(own, self.counts)
            sizes = tf.unstack(every, self.total)
        else:
            # Once, while a program is made, and not whenever it runs.
            found = self.workers.group.gather_values("the lengths to gather", sizes)
            sizes = [size for each in found for size in each]
        remaining = iter(sizes)
        rows = [sum(itertools.islice(remaining, count)) for count in self.counts]
        if axis % len(joined.shape) == 0:
            return self.workers.gather_rows(joined, rows), sizes
        order = list(range(len(joined.shape)))
        order.insert(0, order.pop(axis))
        back = [order.index(i) for i in range(len(order))]
        whole = self.workers.gather_rows(tf.transpose(joined, order), rows)
        return tf.transpose(whole, back), sizes

    def everywhere(self, columns: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """The values of all replicas, from those of the local ones.

        Args:
            columns: for each of several things, a tensor of each local replica, of
                equal shapes. They travel in one message for each dtype.
        """
        if self.workers is None:
            return [list(column) for column in columns]
        found: list[Any] = [None] * len(columns)
        for kind in dict.fromkeys(column[0].dtype for column in columns):
            places = [i for i, column in enumerate(columns) if column[0].dtype == kind]
            flat = [
                tf.reshape(tf.stack(list(columns[i])), [len(columns[i]), -1])
                for i in places
            ]
            rows = self.workers.gather_rows(tf.concat(flat, 1), self.counts)
            widths = [part.shape[1] for part in flat]
            for i, part in zip(places, tf.split(rows, widths, axis=1), strict=True):
                shape = columns[i][0].shape
                found[i] = [
                    tf.reshape(row, shape) for row in tf.unstack(part, self.total)
                ]
        return found

    def sum_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """The sums over workers of gradients, which are the same tensors on all.

        Those that come last in a layer are first in its backward pass, and travel
        while the rest of it is computed. Rows of a table stay rows.
        """
        if self.workers is None:
            return list(gradients)
        results = list(gradients)
        dense = [
            i
            for i, gradient in enumerate(gradients)
            if gradient is not None and not isinstance(gradient, tf.IndexedSlices)
        ][::-1]
        totals = self.workers.all_reduce(
            ReduceOp.SUM, [tf.convert_to_tensor(gradients[i]) for i in dense]
        )
        for i, total in zip(dense, totals, strict=True):
            results[i] = total
        for i, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                results[i] = self._all_slices(gradient)
        return results

    def _all_slices(self, gradient: Any) -> Any:
        assert self.workers is not None
        own = tf.shape(gradient.indices)[:1]
        counts = tf.unstack(
            self.workers.gather_rows(own, [1] * self.workers.group.count),
            self.workers.group.count,
        )
        return tf.IndexedSlices(
            self.workers.gather_rows(gradient.values, counts),
            self.workers.gather_rows(gradient.indices, counts),
            gradient.dense_shape,
        )


@dataclass(frozen=True)
class Spread:
    """How the rows of one call are spread over the replicas that take part.

    Rows are ints, or tensors in a program for any number of them.

    Args:
        every: the rows of each replica that takes part, of all workers.
        sizes: those of the local ones.
        team: the replicas that take part.
    """

    every: list[Any]
    sizes: list[Any]
    team: Team

    @classmethod
    def local(cls, sizes: Sequence[Any]) -> Spread:
        """Over the replicas of this process alone."""
        present = [size for size in sizes if _may_have_rows(size)]
        return cls(present, present, Team(None, (len(present),), 0))

    @classmethod
    def over(cls, sizes: Sequence[Any], workers: TensorFlowWorkers) -> Spread | None:
        """Over the replicas of all workers; None if a worker has no rows."""
        remaining = iter(sizes)
        own = [
            [
                size
                for size in itertools.islice(remaining, count)
                if _may_have_rows(size)
            ]
            for count in workers.replicas
        ]
        if not all(own):
            return None
        index = workers.group.index
        counts = tuple(len(each) for each in own)
        return cls(
            [size for each in own for size in each],
            own[index],
            Team(workers, counts, sum(counts[:index])),
        )

    @property
    def workers(self) -> TensorFlowWorkers | None:
        return self.team.workers

    @property
    def worker_rows(self) -> list[Any]:
        """The rows of each worker."""
        remaining = iter(self.every)
        return [sum(itertools.islice(remaining, count)) for count in self.team.counts]

    def own(self, tensor: Any) -> Any:
        """This worker's rows of a tensor of the global batch."""
        if self.workers is None:
            return tensor
        index = self.workers.group.index
        start = sum(self.worker_rows[:index])
        return tensor[start : start + self.worker_rows[index]]

    def own_source(self, tensor: Any) -> Any:
        """The same, through which a gradient goes to the global batch."""
        workers = self.workers
        if workers is None:
            return tensor

        # Only if somebody asks for that gradient do workers exchange it.
        @custom_gradient
        def own(tensor: Any) -> tuple[Any, Callable[[Any], Any]]:
            return self.own(tensor), self.joined

        return own(tensor)

    def joined(self, tensor: Any) -> Any:
        """All rows, from those of this worker."""
        if self.workers is None:
            return tensor
        return self.workers.gather_rows(tensor, self.worker_rows)

    def summed(self, tensors: list[Any]) -> list[Any]:
        """The sums over workers."""
        if self.workers is None or not tensors:
            return tensors
        return self.workers.all_reduce(ReduceOp.SUM, tensors)


def _may_have_rows(size: Any) -> bool:
    return not isinstance(size, int) or size > 0


def reduce_tensors(op: ReduceOp, tensors: Sequence[Any]) -> Any:
    """Reduces tensors on the current device, in their order."""
    if op is ReduceOp.SUM:
        return tf.cast(tf.add_n([widened(t) for t in tensors]), tensors[0].dtype)
    if op is ReduceOp.MEAN:
        mean = tf.reduce_mean(tf.stack([widened(t) for t in tensors]), 0)
        return tf.cast(mean, tensors[0].dtype)
    stacked = tf.stack(list(tensors))
    return (
        tf.reduce_min(stacked, 0) if op is ReduceOp.MIN else tf.reduce_max(stacked, 0)
    )

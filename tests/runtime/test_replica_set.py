"""Combining replicas of several workers, on NumPy's arrays."""

from __future__ import annotations

import numpy as np
import pytest
from backends.numpy_replicas import NumpyPrimitives, on_workers

from keras_strategies.runtime.replicas.replica_set import ReplicaSet, RowSplit
from keras_strategies.types import ReduceOp

pytestmark = pytest.mark.one_backend("jax")

PRIMITIVES = NumpyPrimitives()
COUNTS = [(3,), (2, 1), (1, 3, 2)]
REDUCED = {
    ReduceOp.SUM: np.sum,
    ReduceOp.MEAN: np.mean,
    ReduceOp.MIN: np.min,
    ReduceOp.MAX: np.max,
}


def on_replicas(counts, fn):
    """Calls `fn(replica_set, numbers of the local replicas)` on all workers."""
    if len(counts) == 1:
        return [fn(ReplicaSet.local(PRIMITIVES, counts[0]), range(counts[0]))]

    def call(worker):
        own = worker.replica_counts
        replica_set = ReplicaSet(PRIMITIVES, own, worker)
        return fn(replica_set, range(own.first, own.first + own.count))

    return on_workers(counts, call)


def values(count, shape=(2, 3)):
    return np.random.default_rng(count).normal(size=(count, *shape))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("op", list(REDUCED))
def test_reduce_is_over_the_replicas_of_all_workers(counts, op):
    every = values(sum(counts))
    found = on_replicas(
        counts,
        lambda replicas, own: replicas.reduce(
            op, [[every[i], 2 * every[i]] for i in own]
        ),
    )
    for once, twice in found:
        np.testing.assert_allclose(once, REDUCED[op](every, axis=0))
        np.testing.assert_allclose(twice, REDUCED[op](2 * every, axis=0))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_concatenates_parts_of_different_lengths(counts, axis):
    lengths = [1 + i % 3 for i in range(sum(counts))]
    shapes = [(n, 4) if axis == 0 else (4, n) for n in lengths]
    every = [np.full(shape, i) for i, shape in enumerate(shapes)]
    found = on_replicas(
        counts, lambda replicas, own: replicas.gather([[every[i]] for i in own], axis)
    )
    for [whole], [sizes] in found:
        np.testing.assert_array_equal(whole, np.concatenate(every, axis))
        assert sizes == lengths


@pytest.mark.parametrize("counts", COUNTS)
def test_all_values_are_one_message_for_each_dtype(counts):
    floats, integers = values(sum(counts)), np.arange(sum(counts))
    scalars = values(sum(counts), ())

    def call(replicas, own):
        columns = [[each[i] for i in own] for each in (floats, integers, scalars)]
        found = replicas.all_values(columns)
        return found, getattr(replicas.workers, "messages", 2)

    for (a, b, c), messages in on_replicas(counts, call):
        np.testing.assert_array_equal(np.stack(a), floats)
        np.testing.assert_array_equal(np.stack(b), integers)
        np.testing.assert_array_equal(np.stack(c), scalars)
        assert messages == 2


def test_rows_of_a_batch_are_split_and_joined_again():
    batch = np.arange(14).reshape(7, 2)

    def call(worker):
        split = RowSplit.over(PRIMITIVES, [3, 0, 2, 2], worker)
        own = split.own(batch)
        assert split.replica_set.counts.by_worker == (1, 2)
        assert len(own) == sum(split.sizes)
        [total] = split.summed([own.sum(0)])
        return split.worker_rows, split.joined(own), total

    for rows, joined, total in on_workers([2, 2], call):
        assert rows == [3, 4]
        np.testing.assert_array_equal(joined, batch)
        np.testing.assert_array_equal(total, batch.sum(0))


def test_a_worker_without_rows_has_no_split():
    assert on_workers(
        [1, 2], lambda worker: RowSplit.over(PRIMITIVES, [1, 0, 0], worker)
    ) == [None, None]


def test_replicas_without_rows_take_no_part():
    split = RowSplit.local(PRIMITIVES, [2, 1, 0])
    assert split.sizes == [2, 1]
    assert split.replica_set.counts.total == 2

"""Updates of Keras's optimizers on servers of this process, against one device.

Both get the same gradients. Steps of a cluster that compute them: `test_optimizers`.
"""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
import pytest
from keras import optimizers

from parameter_server import clusters, servers_in_process
from parameter_server.optimizer_cases import (
    BATCH,
    COMPLETE_WITH_LAZY_ROWS,
    OPTIMIZERS,
    REFERENCES,
    ROWS,
    assert_equal,
    build,
)

STEPS = 6


@pytest.fixture(scope="module")
def in_process():
    """Two servers in this process."""
    with servers_in_process.start(servers=2) as strategy:
        yield strategy


@pytest.fixture(scope="module")
def lazy():
    with servers_in_process.start(servers=2, lazy_rows=True) as strategy:
        yield strategy


def steps() -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """The rows of the table in each step, not all of them, and gradients."""
    random = np.random.default_rng(3)
    for _ in range(STEPS):
        ids = np.sort(random.permutation(ROWS)[: 3 * BATCH])
        shapes = [(len(ids), 4), (12, 6), (6,), (6, 1), (1,)]
        yield ids, [random.normal(size=shape).astype("float32") for shape in shapes]


def train(strategy, ours, theirs) -> None:
    worker = servers_in_process.GradientPusher(strategy, ours)
    # Before the first update: ScheduleFreeAdamW's momentum begins with the weights.
    theirs.optimizer.build(theirs.trainable_variables)
    for ids, gradients in steps():
        worker.push(ids, gradients)
        table = np.zeros((ROWS, 4), "float32")
        table[ids] = gradients[0]
        tensors = map(keras.ops.convert_to_tensor, (table, *gradients[1:]))
        theirs.optimizer.apply(list(tensors), theirs.trainable_variables)


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["lion", "nadam", "rmsprop"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_one_device(in_process, name) -> None:
    with in_process.scope(), clusters.parts(in_process, 1):
        ours = build(OPTIMIZERS[name]())
    theirs = build(REFERENCES.get(name, OPTIMIZERS[name])())
    before = clusters.values(theirs.weights)
    train(in_process, ours, theirs)
    assert_equal(ours, theirs)
    for old, new in zip(before, clusters.values(ours.weights), strict=True):
        assert not np.array_equal(old, new)


@pytest.mark.one_backend
@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("name", COMPLETE_WITH_LAZY_ROWS)
def test_lazy_rows_do_not_change_what_needs_the_table(lazy, name) -> None:
    make = COMPLETE_WITH_LAZY_ROWS[name]
    with lazy.scope(), clusters.parts(lazy, 1):
        ours = build(make())
    theirs = build(make())
    train(lazy, ours, theirs)
    assert_equal(ours, theirs)


@pytest.mark.one_backend("jax")
@pytest.mark.parametrize("clipping", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_gradients_of_shards_are_clipped_together(in_process, clipping) -> None:
    def optimizer():
        return optimizers.SGD(0.1, momentum=0.5, **{clipping: 0.5})

    with in_process.scope(), clusters.parts(in_process, 2):
        ours = build(optimizer())
    assert len(in_process.registry.describe(ours.weights[0]).shards) == 2
    theirs = build(optimizer())
    train(in_process, ours, theirs)
    assert_equal(ours, theirs)

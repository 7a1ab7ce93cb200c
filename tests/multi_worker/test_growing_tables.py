"""Growing tables on several workers, which all read every batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from multi_worker.clusters import own_cluster
from parameter_server.growing_tables import CAPACITY
from parameter_server.test_id_admission import changing, fit_changing, weights_of

import keras_strategies as ks

pytestmark = pytest.mark.one_backend


def grows(strategy):
    with strategy.scope():
        model, admission = changing()
    fit_changing(model, admission)
    return weights_of(model)


@pytest.mark.slow(seconds=12)
def test_tables_of_two_workers_grow_as_on_one_device(cluster) -> None:
    model, admission = changing()
    fit_changing(model, admission)
    for found in cluster(grows):
        for ours, theirs in zip(found, weights_of(model), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def counts(strategy, ids, seeds):
    number = strategy.workers.group.index
    uniform = keras.initializers.RandomUniform(seed=seeds[number])
    with strategy.scope():
        table = ks.layers.GrowingEmbedding(CAPACITY, 3, initializer=uniform)
        table.build()
    table.adapt(ids[number])


@pytest.mark.parametrize(
    "ids, seeds", [([[1], [2]], [3, 3]), ([[1], [1]], [3, 4])], ids=["ids", "seeds"]
)
def test_workers_with_other_ids_are_refused(forker, ids, seeds) -> None:
    with own_cluster(forker) as cluster:
        for error, _ in cluster.outcomes(counts, ids, seeds):
            assert "Workers disagree on the ids of" in error

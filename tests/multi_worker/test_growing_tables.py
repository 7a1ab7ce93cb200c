"""Growing tables on several workers, which all read every batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from harness.training import assert_arrays
from multi_worker.clusters import one_device, own_cluster
from parameter_server.growing_tables import CAPACITY
from parameter_server.test_id_admission import changing, fit_changing, weights_of

import keras_strategies as ks

pytestmark = pytest.mark.one_backend


def stream():
    """Batches of 4 and 3 rows, without equal ids in one of them.

    Keras on TensorFlow squares the gradients of equal ids one by one.
    """
    random = np.random.default_rng(3)
    for i in range(16):
        ids = 2 * i + random.permutation(10)[: 8 - 2 * (i % 2)].reshape(-1, 2)
        yield ids * (2**40 + 3), (ids % 7).sum(axis=1, keepdims=True).astype("float32")


def grows(strategy, steps_per_execution):
    """Rows expire at the end of each epoch, and the table grows after the second."""
    keras.utils.set_random_seed(2)
    with strategy.scope():
        table = ks.layers.GrowingEmbedding(20, 3)
        layers = [table, keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
        adam = keras.optimizers.Adam(0.1)
        model.compile(adam, "mse", steps_per_execution=steps_per_execution)
    admission = ks.callbacks.AdmitIds(table, max_capacity=60, unseen=6, fewer_than=2)
    used, capacities = [], []

    def note(epoch, logs):
        used.append(table.used)
        capacities.append(table.capacity)

    after = keras.callbacks.LambdaCallback(on_epoch_end=note)
    options = {"steps_per_epoch": 4, "epochs": 4, "shuffle": False, "verbose": 0}
    data = admission.read(stream())
    history = model.fit(data, callbacks=[admission, after], **options)
    return used, capacities, history.history["loss"], weights_of(model)


@pytest.mark.slow(seconds=12)
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_tables_of_two_workers_change_within_fit_as_on_one_device(
    cluster, steps_per_execution
) -> None:
    used, capacities, losses, weights = grows(one_device(), steps_per_execution)
    assert capacities == [20, 40, 40, 40]
    for found in cluster(grows, steps_per_execution):
        assert found[:2] == (used, capacities)
        np.testing.assert_allclose(found[2], losses, rtol=2e-5)
        assert_arrays(found[3], weights, 2e-5, 2e-6)


def grows_with_row_0(strategy):
    with strategy.scope():
        model, admission = changing()
    fit_changing(model, admission)
    return weights_of(model)


@pytest.mark.slow(seconds=12)
def test_tables_of_two_workers_grow_as_on_one_device(cluster) -> None:
    model, admission = changing()
    fit_changing(model, admission)
    for found in cluster(grows_with_row_0):
        assert_arrays(found, weights_of(model), 2e-5, 2e-6)


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

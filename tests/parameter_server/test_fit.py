"""`fit`, `evaluate` and `predict` on parameter servers, against one device."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest

import keras_strategies as ks
from parameter_server import clusters

pytestmark = [pytest.mark.one_backend, pytest.mark.multiprocess]


# Updates of others, of rows too, are those of `test_optimizers.py`.
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=1.0),
    "nadam_schedule": lambda: keras.optimizers.Nadam(
        keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.5), global_clipnorm=0.5
    ),
}


@pytest.mark.nightly(unless=["momentum"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_staleness_it_equals_one_device(synchronous, name) -> None:
    x, y = clusters.clicks()
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    expected = clusters.two_inputs(OPTIMIZERS[name]())
    history = expected.fit(x, y, epochs=2, **options).history
    with synchronous.scope():
        model = clusters.two_inputs(OPTIMIZERS[name]())
    found = model.fit(x, y, epochs=2, **options).history

    for log, numbers in history.items():
        np.testing.assert_allclose(found[log], numbers, rtol=1e-5, err_msg=log)
    pairs = zip(
        clusters.values(model.weights), clusters.values(expected.weights), strict=True
    )
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 24
    np.testing.assert_allclose(
        model.evaluate(x, y, batch_size=7, verbose=0),
        expected.evaluate(x, y, batch_size=7, verbose=0),
        rtol=1e-4,
    )
    np.testing.assert_allclose(
        model.predict(x, batch_size=7, verbose=0),
        expected.predict(x, batch_size=7, verbose=0),
        rtol=1e-4,
        atol=1e-5,
    )


def test_constraints_hold_for_whole_variables_only(asynchronous, synchronous) -> None:
    def build():
        model = keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                keras.layers.Embedding(10, 4, embeddings_constraint="non_neg"),
                keras.layers.Flatten(),
                keras.layers.Dense(1, kernel_constraint="non_neg"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.5), "mse")
        return model

    x, y = np.arange(20).reshape(10, 2) % 10, np.full((10, 1), -1.0)
    with asynchronous.scope():
        model = build()
    model.fit(x, y, batch_size=5, verbose=0)
    assert all(weights.min() >= 0 for weights in clusters.values(model.weights[:2]))
    with synchronous.scope():
        model = build()
    with pytest.raises(ks.errors.InvalidArgumentError, match="sharded into 2 shards"):
        model.fit(x, y, batch_size=5, verbose=0)


def test_asynchronous_training_learns_and_counts_each_step_once(asynchronous) -> None:
    with asynchronous.scope():
        model = clusters.two_inputs(keras.optimizers.Adam(0.02))
    x, y = clusters.clicks(192)
    seen = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append((batch, logs["loss"]))
    )
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=3,
        verbose=0,
        callbacks=[callback],
        validation_data=(x, y),
    ).history
    assert [batch for batch, _ in seen] == list(range(24)) * 3
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 72
    clusters.wait_until_whole(asynchronous)
    status = ks.ClusterCoordinator(asynchronous).status()
    workers = len(asynchronous.cluster.scheduler.workers)
    assert status.workers_alive == workers and "worker 1" in str(status)


def test_only_touched_rows_travel(asynchronous) -> None:
    def bytes_per_step(rows: int) -> float:
        with asynchronous.scope():
            model = clusters.two_inputs(keras.optimizers.Adagrad(0.1), ids=rows)
        x, y = clusters.clicks(96)
        coordinator = ks.ClusterCoordinator(asynchronous)
        before = coordinator.status()
        model.fit(x, y, batch_size=8, verbose=0)
        after = coordinator.status()
        total = (
            after.bytes_per_step * after.steps - before.bytes_per_step * before.steps
        )
        return total / (after.steps - before.steps)

    small, large = bytes_per_step(40), bytes_per_step(40_000)
    assert large < 1.5 * small
    assert large < 40_000 * 4 * 4 / 10


@pytest.mark.one_backend("tensorflow")
def test_a_step_that_raises_reaches_the_caller_and_fit_works_again(
    asynchronous,
) -> None:
    with asynchronous.scope():
        model = clusters.two_inputs("sgd")
    x, y = clusters.clicks(16)
    wrong = [x[0], x[1] + 1000]
    with pytest.raises(ks.errors.InvalidArgumentError, match="was looked up, which"):
        model.fit(wrong, y, batch_size=8, verbose=0)
    model.fit(x, y, batch_size=8, verbose=0)


def test_a_large_table_that_each_step_sends_in_full_is_named() -> None:
    """Its regularizer needs all rows; a kernel of that size is not named."""
    with clusters.start(workers=1, ps=2) as strategy:
        with strategy.scope():
            table = keras.layers.Embedding(
                600_000, 8, embeddings_regularizer=keras.regularizers.L2(1e-3)
            )
            layers = [keras.Input((2,)), table, keras.layers.Flatten()]
            model = keras.Sequential([*layers, keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        ids, y = np.zeros((8, 2), "int32"), np.zeros((8, 1), "float32")
        with pytest.warns(UserWarning, match=r"All rows of .*, 18.3 MiB, are sent"):
            model.fit(ids, y, batch_size=4, verbose=0)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "All rows of")
            model.fit(ids, y, batch_size=4, verbose=0)

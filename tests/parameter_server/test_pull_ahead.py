"""Values that are asked for ahead: which updates they miss, and that none is lost."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_strategies as ks
from parameter_server import clusters

pytestmark = pytest.mark.one_backend

IDS, ROWS, BATCH, STEPS, EPOCHS = 8, 500, 64, 12, 3


def build(**options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((IDS,), dtype="int32"),
            # The rows of a batch are more than what a socket carries.
            keras.layers.Embedding(ROWS, 64),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.3), "mse", **options)
    return model


def data():
    random = np.random.default_rng(0)
    x = random.integers(0, ROWS, (BATCH * STEPS, IDS), dtype="int32")
    return x, random.normal(size=(len(x), 1)).astype("float32")


def trained(model, x, y, missed):
    """Weights after each step was computed with what lacked so many updates."""
    weights = model.get_weights()
    history = [weights]
    for i in range(STEPS):
        # The first step of a call has nothing to miss.
        stale = history[-1 - missed] if i else history[-1]
        model.set_weights(stale)
        rows = slice(i * BATCH, (i + 1) * BATCH)
        model.train_on_batch(x[rows], y[rows])
        after = model.get_weights()
        weights = [w + a - s for w, a, s in zip(weights, after, stale, strict=True)]
        history.append(weights)
    return weights


@pytest.mark.nightly(unless=["True-1"])
@pytest.mark.multiprocess
@pytest.mark.parametrize(("pull_ahead", "missed"), [(True, 1), (False, 0)])
def test_a_step_misses_the_update_before_it_and_no_other(pull_ahead, missed):
    x, y = data()
    reference = build()
    with clusters.start(workers=1, ps=1, pull_ahead=pull_ahead) as strategy:
        with strategy.scope():
            model = build(steps_per_execution=STEPS)
        model.set_weights(reference.get_weights())
        for _ in range(EPOCHS):
            # All steps of a call are known from the beginning, so that nothing
            # depends on who is faster; it is done when the servers have all updates.
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            reference.set_weights(trained(reference, x, y, missed))
            for ours, expected in zip(
                clusters.values(model.weights), reference.get_weights(), strict=True
            ):
                np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)
        [worker] = strategy.cluster.scheduler.workers.values()
        assert worker.most_staleness == missed
        assert worker.staleness == EPOCHS * missed * (STEPS - 1)


@pytest.mark.multiprocess
@pytest.mark.parametrize("steps_per_execution", [1, 5])
def test_steps_read_their_own_values_from_shared_memory(steps_per_execution):
    x, _ = data()
    reference = build()
    with clusters.start(workers=1, ps=2) as strategy:
        with strategy.scope():
            model = build(steps_per_execution=steps_per_execution)
        model.set_weights(reference.get_weights())
        # Without updates the outputs do not depend on when the values were read.
        for _ in range(EPOCHS):
            np.testing.assert_allclose(
                model.predict(x, batch_size=BATCH, verbose=0),
                reference.predict(x, batch_size=BATCH, verbose=0),
                rtol=1e-5,
                atol=1e-6,
            )


@pytest.mark.multiprocess
def test_what_is_wrong_with_a_later_step_costs_no_update_before_it():
    x, y = data()
    x[2 * BATCH] = ROWS  # In the third batch.
    with clusters.start(workers=1, ps=1) as strategy:
        with strategy.scope():
            model = build(steps_per_execution=STEPS)
        with pytest.raises(ks.errors.InvalidArgumentError, match=f"Row {ROWS} of"):
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 2

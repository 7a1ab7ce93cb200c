"""Input that can be read once, on parameter servers: training sees all batches.

`tf.distribute` takes a `DatasetCreator` only, and reads nothing before training.
"""

from __future__ import annotations

import numpy as np
import pytest
from harness import streams

import keras_strategies as ks

pytestmark = [pytest.mark.one_backend, pytest.mark.multiprocess]


def made(strategy, kind: str):
    if kind in streams.STREAMS:
        return streams.STREAMS[kind]()
    dataset = strategy.experimental_distribute_dataset(streams.STREAMS["loader"]())
    assert dataset.element_spec is not None
    return dataset


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["generator"])
@pytest.mark.parametrize("kind", [*streams.STREAMS, "distributed_loader"])
def test_every_batch_is_seen_once(synchronous, kind) -> None:
    with synchronous.scope():
        trained = streams.model(4, is_built=False)
    history = trained.fit(made(synchronous, kind), shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"], [streams.LOSS], rtol=1e-5)
    assert streams.steps(trained) == len(streams.BATCHES)
    x, y = streams.BATCHES[0]
    for evaluated in (trained, unbuilt(synchronous)):
        loss = evaluated.evaluate(made(synchronous, kind), verbose=0)
        np.testing.assert_allclose(loss, streams.LOSS, rtol=1e-5)
    validation = made(synchronous, kind)
    history = trained.fit(x, y, validation_data=validation, verbose=0).history
    np.testing.assert_allclose(history["val_loss"], [streams.LOSS], rtol=1e-5)
    rows = trained.predict((batch[:1] for batch in streams.BATCHES), verbose=0)
    np.testing.assert_array_equal(rows.ravel(), np.repeat(range(6), 2))


def unbuilt(strategy):
    with strategy.scope():
        return streams.model(3, is_built=False)


def test_evaluations_of_fit_read_a_generator_as_in_keras(synchronous) -> None:
    """Each begins with the two batches that Keras puts back, and goes on after them."""
    x, y = streams.BATCHES[0]

    with synchronous.scope():
        model = streams.model()
    history = model.fit(
        x,
        y,
        validation_data=streams.STREAMS["generator"](),
        validation_steps=3,
        epochs=3,
        verbose=0,
    ).history
    expected = [(0 + 1 + i * i) / 3 for i in (2, 3, 4)]
    np.testing.assert_allclose(history["val_loss"], expected, rtol=1e-5)


def test_empty_input_is_refused(synchronous) -> None:
    tf = pytest.importorskip("tensorflow")
    with synchronous.scope():
        model = streams.model(is_built=False)
    nothing = tf.data.Dataset.from_tensor_slices(streams.BATCHES[0]).batch(2).take(0)
    with pytest.raises(ks.errors.InputError, match="input is empty"):
        model.fit(nothing, verbose=0)

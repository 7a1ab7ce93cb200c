"""Input that can be read once: training sees all batches, whatever is built or asked.

Keras reads batches to build a model: on JAX and Torch `tf.data` and loaders that are
read once have lost theirs when training begins, and on Torch a generator with
`steps_per_execution` of 3 or more. `tf.distribute.MirroredStrategy` builds the model
in the first step and sees them all.
"""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
from harness import streams
from harness.strategies import STRATEGIES

pytestmark = pytest.mark.one_backend

KINDS = [*streams.STREAMS, "distributed", "distributed_loader", "distributed_function"]


@pytest.fixture(scope="module")
def mirrored():
    return STRATEGIES["mirrored_2"].make()


@pytest.fixture(scope="module")
def one_device():
    return STRATEGIES["one_device"].make()


def made(strategy, kind: str):
    """Input of a kind; distributed datasets are asked for their specification."""
    if kind in streams.STREAMS:
        return streams.STREAMS[kind]()
    if kind == "distributed_function":
        return strategy.distribute_datasets_from_function(
            lambda context: streams.STREAMS["loader"]()
        )
    source = "loader" if kind == "distributed_loader" else "generator"
    dataset = strategy.experimental_distribute_dataset(streams.STREAMS[source]())
    assert dataset.element_spec is not None
    return dataset


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_is_seen_once(mirrored, kind) -> None:
    with mirrored.scope():
        trained = streams.model(4, is_built=False)
    history = trained.fit(made(mirrored, kind), shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"], [streams.LOSS], rtol=1e-5)
    # A dataset function yields a batch for each replica.
    batches = 3 if kind == "distributed_function" else 6
    assert streams.steps(trained) == batches


@pytest.mark.parametrize("kind", ["generator", "tf_data", "loader"])
def test_every_batch_is_seen_once_on_one_device(one_device, kind) -> None:
    with one_device.scope():
        trained = streams.model(3)
    history = trained.fit(made(one_device, kind), shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"], [streams.LOSS], rtol=1e-5)


@pytest.mark.nightly(unless=["generator", "loader"])
@pytest.mark.parametrize("kind", ["generator", "tf_data", "loader"])
def test_evaluation_and_validation_see_every_batch(mirrored, kind) -> None:
    x, y = streams.BATCHES[1]
    with mirrored.scope():
        evaluated, trained = streams.model(3), streams.model(3)
    loss = evaluated.evaluate(made(mirrored, kind), verbose=0)
    np.testing.assert_allclose(loss, streams.LOSS, rtol=1e-5)
    validation = made(mirrored, kind)
    history = trained.fit(x, y, validation_data=validation, verbose=0).history
    np.testing.assert_allclose(history["val_loss"], [streams.LOSS], rtol=1e-5)


def test_specification_of_a_loader_does_not_consume_a_batch(mirrored) -> None:
    dataset = mirrored.experimental_distribute_dataset(streams.STREAMS["loader"]())
    assert dataset.element_spec is not None
    assert dataset.element_spec is not None
    assert len(list(dataset)) == len(streams.BATCHES)


def test_shuffled_datasets_have_the_order_of_keras(mirrored) -> None:
    tf = pytest.importorskip("tensorflow")
    rows = np.arange(12.0, dtype="float32")[:, None] / 12

    def trained(scope) -> list[np.ndarray]:
        with scope:
            model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
            model.compile(keras.optimizers.SGD(0.3), "mse")
        tf.random.set_seed(3)
        dataset = tf.data.Dataset.from_tensor_slices((rows, np.sin(9 * rows)))
        model.fit(dataset.shuffle(12, seed=5).batch(2), verbose=0)
        return model.get_weights()

    plain = trained(contextlib.nullcontext())
    for found, expected in zip(trained(mirrored.scope()), plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)

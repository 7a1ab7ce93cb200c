"""Distributed datasets inside of compiled functions."""

from __future__ import annotations

import gc
import threading
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks

ROWS = np.arange(10, dtype="float32")
BACKEND = keras.backend.backend()

if BACKEND == "jax":
    pytest.skip(
        "batches would become constants: it is refused", allow_module_level=True
    )

pytestmark = pytest.mark.one_backend


def tf_data(rows: np.ndarray = ROWS) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(rows).batch(4)


def restarting() -> Any:
    return [ROWS[i : i + 4] for i in (0, 4, 8)]


@pytest.fixture(params=[tf_data, restarting])
def dataset(request, mirrored) -> Any:
    return mirrored.experimental_distribute_dataset(request.param())


def total(strategy: Any, batch: Any) -> Any:
    sums = strategy.run(lambda x: ops.sum(x), args=(batch,))
    return strategy.reduce("SUM", sums, axis=None)


def test_a_for_loop_sees_every_row(mirrored, dataset) -> None:
    @ks.function
    def epoch(dataset: Any) -> Any:
        found, steps = ops.zeros(()), 0
        for batch in dataset:
            found += total(mirrored, batch)
            steps += 1
        return found, steps

    for _ in range(2):  # Iterating again starts over.
        found, steps = epoch(dataset)
        assert (float(found), int(steps)) == (45, 3)


@pytest.mark.one_backend("torch", "tensorflow")
def test_a_loop_may_be_left(mirrored, dataset) -> None:
    @ks.function
    def until(dataset: Any) -> Any:
        found = ops.zeros(())
        for batch in dataset:
            found += total(mirrored, batch)
            if found > 5:
                break
        return found

    for _ in range(2):
        assert float(until(dataset)) == 6
    names = [thread.name for thread in threading.enumerate()]
    if BACKEND == "torch":
        gc.collect()  # There the loop is Python's.
    else:
        assert "ks-input" not in names


def test_next_goes_on_from_call_to_call(mirrored, dataset) -> None:
    @ks.function
    def step(iterator: Any) -> Any:
        return total(mirrored, next(iterator))

    iterator = iter(dataset)
    assert [float(step(iterator)) for _ in range(3)] == [6, 22, 17]
    with pytest.raises((StopIteration, IndexError, _out_of_range())):
        step(iterator)


def _out_of_range() -> type[Exception]:
    if BACKEND != "tensorflow":
        return StopIteration
    import tensorflow as tf

    return tf.errors.OutOfRangeError


def test_optional_batches_end_a_loop(mirrored, dataset) -> None:
    @ks.function
    def steps(iterator: Any) -> Any:
        found = ops.zeros(())
        for _ in range(5):
            optional = iterator.get_next_as_optional()
            if optional.has_value():
                found += total(mirrored, optional.get_value())
        return found

    assert float(steps(iter(dataset))) == 45


@pytest.mark.one_backend("torch", "tensorflow")
def test_a_model_learns_in_a_loop_as_on_one_device(mirrored) -> None:
    def train(strategy: Any) -> Any:
        with strategy.scope():
            keras.utils.set_random_seed(2)
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
            optimizer.build(model.trainable_variables)

        def replica_step(x: Any) -> Any:
            x = ops.convert_to_tensor(x)  # Without a strategy it is the dataset's.

            def loss_fn() -> Any:
                errors = ops.sum((model(x) - 2 * x) ** 2, axis=-1)
                return ks.compute_average_loss(errors)

            variables = model.trainable_variables
            loss, gradients = ks.value_and_grad(loss_fn, variables)()
            optimizer.apply(gradients, variables)
            return loss

        @ks.function
        def epoch(dataset: Any) -> Any:
            found = ops.zeros(())
            for batch in dataset:
                losses = strategy.run(replica_step, args=(batch,))
                found += strategy.reduce("SUM", losses, axis=None)
            return found

        given = tf_data(ROWS[:9, None])
        dataset = strategy.experimental_distribute_dataset(given)
        losses = [float(epoch(dataset)) for _ in range(3)]
        return [np.array(losses), *model.get_weights()]

    for found, expected in zip(train(mirrored), train(ks.get_strategy()), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4)

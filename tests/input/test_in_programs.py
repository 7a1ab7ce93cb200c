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

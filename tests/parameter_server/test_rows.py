"""Rows of lookups, and rows that are put into arrays, as by NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from keras_strategies.parameter_server.server.variable_store import VariableStore
from keras_strategies.parameter_server.wire.arrays.row_arrays import put_rows
from keras_strategies.parameter_server.worker.row_positions import RowPositions

pytestmark = pytest.mark.one_backend


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(10,), (10, 3), (10, 2, 3), (10, 0)])
def test_rows_are_put_as_numpy_does(dtype, shape) -> None:
    random = np.random.default_rng(0)
    array = random.normal(size=shape).astype(dtype)
    ids = np.array([1, 4, 9])
    rows = random.normal(size=(3, *shape[1:])).astype(dtype)
    expected = array.copy()
    expected[ids] = rows
    put_rows(array, ids, rows)
    np.testing.assert_array_equal(array, expected)
    put_rows(array, ids[:0], rows[:0])
    np.testing.assert_array_equal(array, expected)


def test_read_only_memory_of_a_framework_is_left_alone() -> None:
    store = VariableStore()
    store.create((0, 0), np.zeros(3))
    of_a_framework = np.arange(3.0)
    of_a_framework.flags.writeable = False
    store.arrays[0, 0] = of_a_framework
    store.add((0, 0), np.ones(3))
    store.write((0, 0), np.full(1, 9.0), 2)
    assert store.get((0, 0)).tolist() == [1.0, 2.0, 9.0]
    assert of_a_framework.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("rows", [50, 100_000], ids=["positions of all rows", "unique"])
def test_places_lead_back_to_ids(rows):
    random = np.random.default_rng(0)
    places = RowPositions()
    for sizes in ([13], [40, 1, 7], [0], [5, 0]):
        wanted = [random.integers(0, rows, size) for size in sizes]
        found, where = places.find(wanted, rows)
        joined = np.concatenate(wanted)
        np.testing.assert_array_equal(found, np.unique(joined))
        assert found.dtype == np.int64
        for ids, place in zip(wanted, where, strict=True):
            assert place.dtype == np.int32
            np.testing.assert_array_equal(found[place], ids)

"""Which rows lookups touch, by both ways of finding them."""

import numpy as np
import pytest

from keras_strategies.parameter_server.worker.row_positions import RowPositions

pytestmark = pytest.mark.one_backend


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


def test_ids_of_several_lookups_are_joined():
    wanted = [np.array([5, 3, 5]), np.array([], int), np.array([9, 3])]
    found, places = RowPositions().find(wanted, 10)
    assert found.tolist() == [3, 5, 9]
    assert [each.tolist() for each in places] == [[1, 0, 1], [], [2, 0]]


def test_tables_share_places_without_mixing_them():
    places = RowPositions()
    places.find([np.array([3, 1, 3])], 4)
    found, [where] = places.find([np.array([5, 3])], 6)
    assert found.tolist() == [3, 5]
    assert where.tolist() == [1, 0]


def test_no_lookups_touch_nothing():
    found, where = RowPositions().find([], 10)
    assert len(found) == 0
    assert where == []

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

"""Checksums of a few rows: equal for equal rows, at a cost that no size changes."""

from __future__ import annotations

import numpy as np
import pytest

from keras_strategies.input.sampled_checksums import sampled_checksums

pytestmark = pytest.mark.one_backend


def test_arrays_are_named_and_rows_that_differ_are_found():
    x = {"left": np.arange(60.0).reshape(20, 3), "right": [np.ones(20, "int8")]}
    found = sampled_checksums(x, "x")
    assert list(found) == ["x['left']", "x['right'][0]"]
    assert sampled_checksums({"left": x["left"].copy(), **x}, "x") == found
    for row in (0, 19):
        other = x["left"].copy()
        other[row, 2] += 1
        assert sampled_checksums(other, "x")["x"] != found["x['left']"]


def test_bounded_rows_and_bytes_are_read():
    class Rows:
        """An array on a disk, as of h5py."""

        shape, dtype = (10**9, 1000, 1000), np.dtype("float32")

        def __init__(self):
            self.read = []

        def __getitem__(self, rows):
            self.read.append((rows.start, rows.stop))
            return np.full((1, 1000, 1000), rows.start, "float32")

    rows = Rows()
    assert sampled_checksums(rows, "x").keys() == {"x"}
    assert len(rows.read) == 16
    assert (rows.read[0], rows.read[-1]) == ((0, 1), (10**9 - 1, 10**9))


@pytest.mark.parametrize(
    "array",
    [np.array(["a", "b", "c"], object), np.array(["a", "b", "c"]), np.zeros((0, 3))],
    ids=["objects", "texts", "empty"],
)
def test_texts_and_empty_arrays(array):
    found = sampled_checksums(array, "x")
    assert sampled_checksums(array.copy(), "x") == found
    if len(array):
        other = array.copy()
        other[-1] = "d"
        assert sampled_checksums(other, "x") != found
    else:
        assert found == {}
    for other in (None, (i for i in range(3)), 3.0):
        assert sampled_checksums(other, "x") == {}

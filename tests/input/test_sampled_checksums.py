"""Checksums of a few rows: equal for equal rows, at a cost that no size changes."""

from __future__ import annotations

import numpy as np
import pytest

from keras_strategies.input.sampled_checksums import sampled_checksums

pytestmark = pytest.mark.one_backend


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

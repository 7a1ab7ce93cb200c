"""float8 training with several workers: variables are those of one device."""

from __future__ import annotations

import pytest
from multi_worker.clusters import on_clusters
from test_float8 import assert_equal, fitted, looped

import keras_strategies as ks


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["two_by_two-looped"])
@pytest.mark.parametrize("train", [fitted, looped])
@on_clusters("two", "two_by_two")
def test_variables_are_overwritten_as_on_one_device(cluster, train) -> None:
    expected = train(ks.OneDeviceStrategy("cpu:0"))
    for found in cluster(train):
        assert_equal(found, expected)

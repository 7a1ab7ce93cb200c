"""Strategies and variables with copies, for tests of mirrored variables."""

from __future__ import annotations

import keras
import pytest

import keras_strategies as ks


# With three replicas a variable has two copies, so that what reaches only one shows.
@pytest.fixture
def strategy():
    return ks.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


@pytest.fixture
def variable(strategy):
    from backends.tensorflow.tensorflow_mirrors import START

    with strategy.scope():
        return keras.Variable(START, name="kernel")

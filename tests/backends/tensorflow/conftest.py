"""Strategies and variables with copies, for tests of mirrored variables."""

from __future__ import annotations

import keras
import pytest

import keras_strategies as ks


# With three replicas a variable has two copies, so that what reaches only one shows.
# Two replicas run no code that three do not.
@pytest.fixture(params=[3, pytest.param(2, marks=pytest.mark.nightly)])
def strategy(request):
    return ks.MirroredStrategy([f"cpu:{i}" for i in range(request.param)])


@pytest.fixture
def variable(strategy):
    from backends.tensorflow.tensorflow_mirrors import START

    with strategy.scope():
        return keras.Variable(START, name="kernel")

"""The one look of `describe`, `plan`, `status` and `doctor`."""

from __future__ import annotations

import re

import keras
import pytest

import keras_strategies as ks

pytestmark = pytest.mark.one_backend


def test_describe_and_plan_begin_alike() -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)], name="m")
        model.compile("sgd", "mse")
        return model

    strategy = ks.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        model = build()
    described = str(strategy.describe(model)).splitlines()
    planned = str(strategy.plan(build, ((8, 4), (8, 2)))).splitlines()
    assert described[0] == "OneDeviceStrategy: 1 replica, model 'm'"
    assert planned[0] == f"{described[0]}, 10 parameters"
    for lines in (described, planned):
        assert lines[1] == lines[3] == "-" * max(map(len, lines[:-1]))
        assert re.fullmatch("variable +shape +dtype +.* +bytes per device", lines[2])

"""The leaves of a layer call's arguments are those of `keras.tree`."""

from __future__ import annotations

import dataclasses
import operator

import keras
import numpy as np
import pytest

from keras_strategies.rows.layer_calls import (
    LayerCall,
    argument_leaves,
)

pytestmark = pytest.mark.one_backend


@dataclasses.dataclass
class Pair:
    first: object
    second: object


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((1,), {"training": True, "mask": None}),
        (([1, 2],), {"b": {"y": 3, "x": 4}, "a": (5,)}),
        (([1],), {}),
        (((),), {"a": 1}),
        (("text", 2.5), {"z": [], "a": "more"}),
        ((Pair(1, 2),), {}),
        ((np.arange(3.0),), {"mask": np.arange(2)}),
    ],
)
def test_arguments_have_the_leaves_and_the_structure_of_keras(args, kwargs):
    tensor = keras.ops.ones((2, 3))
    for given in (args, (tensor, *args)):
        leaves = argument_leaves(given, kwargs)
        expected = keras.tree.flatten((given, kwargs))
        assert len(leaves) == len(expected)
        assert all(map(operator.is_, leaves, expected))
        call = LayerCall(None, None, (given, kwargs), leaves, 2)
        others = [f"leaf {i}" for i in range(len(leaves))]
        packed = call.arguments(others)
        assert packed == keras.tree.pack_sequence_as((given, kwargs), others)

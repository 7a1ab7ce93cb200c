"""Leaves of structures are those of `keras.tree`, in its order."""

import collections
import gc
import weakref

import keras
import numpy as np
import pytest

from keras_strategies.keras_compat.structures import leaves_of, with_leaves

pytestmark = pytest.mark.one_backend

Point = collections.namedtuple("Point", "x y")
ZERO, ONE, TWO = (np.full(2, value) for value in range(3))
STRUCTURES = {
    "leaf": ZERO,
    "none": None,
    "pair": (ZERO, ONE),
    "list": [ZERO, None, "name"],
    "nested": ([ZERO, (ONE, 2.0)], TWO),
    "dict": {"b": ONE, "a": ZERO},
    "arguments": ((ZERO, None), {"training": True, "mask": ONE}),
    "dict of lists": {"b": [ONE, TWO], "a": ZERO},
    "dicts in a dict": {"b": {"d": ONE, "c": ZERO}, "a": TWO},
    "number keys": {2: ONE, 1: ZERO},
    "named tuple": (Point(ZERO, ONE), TWO),
    "ordered dict": collections.OrderedDict(b=ONE, a=ZERO),
    "empty": ((), [], {}),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_leaves(name):
    structure = STRUCTURES[name]
    found, expected = leaves_of(structure), keras.tree.flatten(structure)
    assert [*map(id, found)] == [*map(id, expected)]
    leaves = [str(i) for i, _ in enumerate(expected)]
    packed = with_leaves(structure, leaves)
    assert packed == keras.tree.pack_sequence_as(structure, leaves)
    assert type(packed) is type(keras.tree.pack_sequence_as(structure, leaves))


def test_leaves_are_freed_without_a_garbage_collection():
    array = np.zeros(2)
    gone = weakref.ref(array)
    gc.disable()
    try:
        with_leaves((array, None), leaves_of((array, None)))
        leaves_of([array, (array, 1)])
        leaves_of((array, {"x": array}))
        del array
        assert gone() is None
    finally:
        gc.enable()

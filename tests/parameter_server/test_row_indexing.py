"""Indexing of hosted variables: NumPy's rules, and the selected rows only.

`tf.distribute` follows TensorFlow: `ShardedVariable` takes slices and numbers, and its
variables refuse arrays.
"""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.parameter_server.wire.row_indexing import indexed_by_rows
from parameter_server import clusters

pytestmark = pytest.mark.one_backend

ARRAY = np.arange(7 * 3 * 2, dtype="float32").reshape(7, 3, 2)

FIRST = [
    0,
    -1,
    np.int64(6),
    np.array(2),
    slice(None),
    slice(1, 6, 2),
    slice(None, None, -1),
    slice(5, 2),
    [0, 6],
    [6, 0],
    [6, 6, -7],
    [],
    np.array([], "int64"),
    np.array([[0, 1], [6, 1]], "uint8"),
    range(2),
    (1, 4),
    [True, False, True, False, False, False, True],
    True,
    None,
    Ellipsis,
    7,
    [0, 7],
    1.5,
]
OTHERS = [
    (),
    (1,),
    (slice(None, None, -1),),
    ([1, 2],),
    ([[1], [2]],),
    (None,),
    (Ellipsis, 0),
    ([0, 1], [0, 1]),
    (slice(None), [0, 1]),
    (slice(None), [0, 1, 1]),
    (None, [0, 1]),
    ([True, False, True],),
    (1, 1, 1),
    (0, Ellipsis, [1]),
]
INDICES = [(first, *others) for first, others in itertools.product(FIRST, OTHERS)]
RANDOM = np.random.default_rng(0)
INDICES += [
    tuple(RANDOM.integers(-size, size, shape) for size in ARRAY.shape[:axes])
    for axes in (1, 2, 3)
    for shape in ((), (4,), (2, 3))
]
INDICES += [ARRAY > 9, ARRAY[:, 0] > 9, (), [0, 6], None, [[0, 1], [2, 3]]]


def result(call):
    try:
        return np.asarray(call())
    except (IndexError, ValueError) as error:
        return type(error)


def test_every_index_selects_what_numpy_selects() -> None:
    by_rows = 0
    for index in INDICES:
        read: list[int] = []

        def rows(ids, read=read):
            assert len(set(ids)) == len(ids)
            read.extend(ids)
            return ARRAY[ids]

        expected = result(lambda index=index: ARRAY[index])
        try:
            found = indexed_by_rows(index, len(ARRAY), rows)
        except (IndexError, ValueError) as error:
            assert expected is type(error), index
            continue
        if found is None:
            continue
        by_rows += 1
        assert not isinstance(expected, type), index
        assert found.shape == expected.shape, index
        np.testing.assert_array_equal(found, expected, err_msg=repr(index))
    assert by_rows > 100


@pytest.mark.multiprocess
def test_variables_on_servers_are_indexed_as_numpy_arrays(synchronous) -> None:
    with synchronous.scope():
        table = keras.Variable(ARRAY)
        scalar = keras.Variable(2.0)
    chosen = [
        ([0, 6], [1, 2]),
        (0, slice(None), [0, 1, 1]),
        (slice(0, 2), [0, 1], [0, 1]),
        (keras.ops.convert_to_tensor([0, 6]), 1),
        ARRAY > 9,
    ]

    def as_arrays(index):
        if isinstance(index, tuple):
            return tuple(map(as_arrays, index))
        is_tensor = keras.ops.is_tensor(index)
        return keras.ops.convert_to_numpy(index) if is_tensor else index

    for index in chosen:
        expected = ARRAY[as_arrays(index)]
        found = keras.ops.convert_to_numpy(table[index])
        np.testing.assert_array_equal(found, expected)
    assert float(keras.ops.convert_to_numpy(scalar[()])) == 2.0
    with pytest.raises(IndexError, match="out of bounds"):
        table[7]
    coordinator = ks.ClusterCoordinator(synchronous)
    found = coordinator.schedule(lambda: table[[0, 6], [1, 2]]).fetch(clusters.SECONDS)
    np.testing.assert_array_equal(found, ARRAY[[0, 6], [1, 2]])

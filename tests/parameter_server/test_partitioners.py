"""Partitioners and placement: tables of cases."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.parameter_server.variables.shard_placement import (
    RoundRobinPlacement,
)
from keras_strategies.parameter_server.variables.variable_partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    number_of_parts,
    split_rows,
)
from keras_strategies.parameter_server.wire.variable_description import ShardRange

pytestmark = pytest.mark.one_backend


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"),
    [
        (13, 5, [3, 3, 3, 2, 2]),
        (10, 1, [10]),
        (3, 3, [1, 1, 1]),
        (12, 4, [3, 3, 3, 3]),
        (0, 1, [0]),
    ],
)
def test_rows_are_split_div(rows, parts, sizes) -> None:
    ranges = split_rows(rows, parts)
    assert [stop - start for start, stop in ranges] == sizes
    assert [start for start, _ in ranges[1:]] == [stop for _, stop in ranges[:-1]]
    assert ranges[0][0] == 0 and ranges[-1][1] == rows


@pytest.mark.parametrize(
    ("partitioner", "shape", "dtype", "expected"),
    [
        (FixedShardsPartitioner(2), (10, 3), "float32", (2, 1)),
        (FixedShardsPartitioner(4), (3, 2), "float32", (3, 1)),
        (FixedShardsPartitioner(4), (), "float32", ()),
        # Rows of 16 bytes.
        (MinSizePartitioner(64, max_shards=10), (24, 4), "float32", (6, 1)),
        (MinSizePartitioner(64, max_shards=3), (24, 4), "float32", (3, 1)),
        (MinSizePartitioner(65, max_shards=10), (24, 4), "float32", (6, 1)),
        (MinSizePartitioner(10, max_shards=10), (6, 1), "float32", (3, 1)),
        (MinSizePartitioner(10**6, max_shards=10), (24, 4), "float32", (1, 1)),
        (MinSizePartitioner(), (10**6, 8), "float32", (1, 1)),
        (MinSizePartitioner(32, 10, bytes_per_string=8), (16,), "string", (4,)),
        (MaxSizePartitioner(64), (24, 4), "float32", (6, 1)),
        (MaxSizePartitioner(79), (24, 4), "float32", (6, 1)),
        (MaxSizePartitioner(80), (24, 4), "float32", (5, 1)),
        (MaxSizePartitioner(8), (24, 4), "float32", (24, 1)),
        (MaxSizePartitioner(64, max_shards=2), (24, 4), "float32", (2, 1)),
        (MaxSizePartitioner(64), (24, 4), "bfloat16", (3, 1)),
        (MaxSizePartitioner(10**6), (24, 4), "float32", (1, 1)),
    ],
)
def test_partitioners(partitioner, shape, dtype, expected) -> None:
    assert partitioner(shape, dtype) == expected
    if shape:
        assert number_of_parts(partitioner, shape, dtype) == expected[0]


def _dtypes() -> dict[str, object]:
    """float32 as NumPy and the framework of this process say it."""
    found: dict[str, object] = {
        "np.float32": np.float32,
        "np.dtype": np.dtype("float32"),
    }
    backend = keras.backend.backend()
    if backend == "jax":
        import jax.numpy as jnp

        found["jnp.float32"] = jnp.float32
    elif backend == "torch":
        import torch

        found["torch.float32"] = torch.float32
    else:
        import tensorflow as tf

        found["tf.float32"] = tf.float32
    return found


@pytest.mark.parametrize("name", _dtypes())
def test_dtypes_of_every_framework(name) -> None:
    dtype = _dtypes()[name]
    assert FixedShardsPartitioner(2)((10, 4), dtype) == (2, 1)
    assert MaxSizePartitioner(80)((24, 4), dtype) == (5, 1)
    assert MinSizePartitioner(64, max_shards=10)((24, 4), dtype) == (6, 1)


def test_subclasses_define_parts_or_the_call() -> None:
    class Halves(Partitioner):
        def __call__(self, shape, dtype, axis=0):
            return (2, *(1 for _ in shape[1:]))

    class Thirds(Partitioner):
        def parts(self, shape, dtype):
            return 3

    assert number_of_parts(Halves(), (4, 8), "float32") == 2
    assert number_of_parts(Thirds(), (4, 8), "float32") == 3
    with pytest.raises(InvalidArgumentError, match="defines neither"):
        number_of_parts(Partitioner(), (4, 8), "float32")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedShardsPartitioner(0), "`num_shards` must be an int of 1 or more"),
        (lambda: MinSizePartitioner(0), "`min_shard_bytes` must be an int"),
        (lambda: MinSizePartitioner(8, max_shards=-1), "`max_shards` must be an int"),
        (lambda: MaxSizePartitioner(8.5), "Received: max_shard_bytes=8.5"),
        (lambda: MaxSizePartitioner(8, max_shards=0), "`max_shards` must be an int"),
        (lambda: FixedShardsPartitioner(2)((4, 4), "float32", axis=1), "first axis"),
    ],
)
def test_numbers_that_cannot_be(make, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ((2,), "the number of shards of each axis, 1 or more"),
        ((1, 2), "along their first axis only"),
        ((0, 1), "the number of shards"),
        (3, "the number of shards"),
        ((9, 1), "has only 4 rows"),
    ],
)
def test_callables_are_checked(returned, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        number_of_parts(lambda shape, dtype: returned, (4, 8), "float32")


def test_parts_go_round_the_servers() -> None:
    places = RoundRobinPlacement(2, FixedShardsPartitioner(3))
    assert places.place((4, 8), "float32") == (
        ShardRange(0, 0, 2),
        ShardRange(1, 2, 3),
        ShardRange(0, 3, 4),
    )
    assert places.place((), "float32") == (ShardRange(1, 0, 1),)
    assert [
        RoundRobinPlacement(3).place((9,), "float32")[0].server for _ in range(2)
    ] == [0, 0]
    whole = RoundRobinPlacement(3)
    assert [whole.place((9,), "float32")[0].server for _ in range(4)] == [0, 1, 2, 0]

"""Partitioners return the numbers of shards of `tf.distribute`'s."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import tensorflow as tf

import keras_strategies as ks

SHAPES = [(1,), (7,), (6, 1), (13, 5, 3), (1, 1000), (999, 7), (2**20, 64)]
DTYPES = ["float32", "float64", "bfloat16", "float8_e5m2", "int8", "bool", "string"]
BYTES = [1, 3, 4, 10, 16, 63, 64, 65, 1000, 256 << 10]
SHARDS = [1, 2, 3, 10, 10**6]
THERE = tf.distribute.experimental.partitioners


def pairs() -> Iterator[tuple[str, dict[str, int]]]:
    """Names of partitioners with their arguments."""
    for shards in SHARDS:
        yield "FixedShardsPartitioner", {"num_shards": shards}
    for size, shards in itertools.product(BYTES, SHARDS):
        given = {"min_shard_bytes": size, "max_shards": shards}
        yield "MinSizePartitioner", given
        yield "MinSizePartitioner", {**given, "bytes_per_string": 1}
    for size, shards in itertools.product(BYTES, [None, *SHARDS]):
        yield "MaxSizePartitioner", {"max_shard_bytes": size, "max_shards": shards}
    yield "MinSizePartitioner", {}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_partitioners_cut_as_those_of_tf_distribute(shape) -> None:
    different = []
    for (name, arguments), dtype in itertools.product(pairs(), DTYPES):
        there = getattr(THERE, name)(**arguments)(
            tf.TensorShape(shape), tf.as_dtype(dtype)
        )
        here = getattr(ks.experimental.partitioners, name)(**arguments)(shape, dtype)
        if list(here) != there:
            different.append((name, arguments, dtype, here, there))
    assert not different

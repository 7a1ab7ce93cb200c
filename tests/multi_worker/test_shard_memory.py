"""What a worker holds of a sharded variable: its shards."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from multi_worker.memory_peaks import tensorflow_counts_memory

import keras_strategies as ks

ROWS, COLUMNS = 4096, 1024
SIZE = 4 * ROWS * COLUMNS


def in_use() -> int:
    import gc

    import tensorflow as tf

    gc.collect()
    return int(tf.config.experimental.get_memory_info("CPU:0")["current"])


def assigned(way: str) -> tuple[int, int, int]:
    """Bytes in use by a variable in shards: when it is made, and when assigned."""
    import tensorflow as tf

    value = np.arange(ROWS * COLUMNS, dtype="float32").reshape(ROWS, COLUMNS)
    strategy = ks.ModelParallelStrategy("fsdp", ["cpu:0"], min_shard_bytes=0)
    before = in_use()
    with strategy.scope():
        layer = layers.Embedding(ROWS, COLUMNS)
        layer.build()
    [variable] = layer.variables
    made = in_use() - before
    if way == "array":
        variable.assign(value)
    elif way == "eager":
        variable.assign(tf.constant(value))
    else:
        tf.function(variable.assign)(tf.constant(value))
    stays = in_use() - before
    raw: Any = variable.value
    [shard] = raw.shards.values()
    first = int(shard.numpy()[0, 0]) // COLUMNS
    return made, stays, first


@pytest.mark.nightly(unless=["two-eager", "two-program"])
@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="parts of tensors of TensorFlow"
)
@pytest.mark.parametrize("way", ["array", "eager", "program"])
def test_a_shard_does_not_keep_the_tensor_that_it_is_a_part_of(cluster, way) -> None:
    """TensorFlow's parts of rows share the memory of all rows."""
    if not tensorflow_counts_memory():
        pytest.skip("TensorFlow counts memory with TF_ENABLE_ONEDNN_OPTS=1 only here")
    found = cluster(lambda strategy: assigned(way))
    assert sorted(first for *_, first in found) == [0, ROWS // 2]
    for made, stays, _ in found:
        assert made < 0.75 * SIZE
        assert stays < 0.75 * SIZE

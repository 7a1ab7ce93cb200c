"""The memory of a step falls with the number of workers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from multi_worker.clusters import on_clusters, one_device
from multi_worker.memory_peaks import tensorflow_counts_memory

BACKEND = keras.backend.backend()
ROWS, WIDTH, CLASSES = 48, 32, 19


def peak_of_tensors(epoch: Callable[[], None]) -> int:
    """The bytes of tensors that an epoch makes and are alive at once."""
    if BACKEND == "torch":
        from keras_strategies.engines.torch.compat import memory_tracker, tracked_bytes

        with memory_tracker() as tracker:
            epoch()
        return tracked_bytes(tracker, "peak")
    import tensorflow as tf

    gc.collect()
    # Of tests before, too.
    kept = tf.config.experimental.get_memory_info("CPU:0")["current"]

    def peak_of_an_epoch() -> int:
        tf.config.experimental.reset_memory_stats("CPU:0")
        epoch()
        return int(tf.config.experimental.get_memory_info("CPU:0")["peak"]) - kept

    # Its threads take operations in orders that keep up to a third more alive.
    return min(peak_of_an_epoch() for _ in range(8))


def peak_of_fit(strategy: Any) -> int:
    """That of an epoch of a model with large outputs."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        conv = {"kernel_size": 3, "activation": "relu", "padding": "same"}
        hidden = [keras.layers.Conv2D(32, **conv) for _ in range(2)]
        last = keras.layers.Conv2D(CLASSES, 1)
        model = keras.Sequential([keras.Input((WIDTH, WIDTH, 3)), *hidden, last])
        model.compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["sparse_categorical_accuracy"],
        )
    x = np.random.default_rng(0).random((ROWS, WIDTH, WIDTH, 3), dtype="float32")
    y = np.zeros((ROWS, WIDTH, WIDTH), "int32")

    def epoch() -> None:
        model.fit(x, y, batch_size=ROWS, epochs=2, verbose=0)

    epoch()
    return peak_of_tensors(epoch)


def peaks(strategy: Any) -> tuple[int, int]:
    """Those of this worker, and of the same global batch on one device."""
    return peak_of_fit(strategy), peak_of_fit(one_device())


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has one program of all workers")
@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.nightly(unless=["two"])
@pytest.mark.slow(seconds=6)
@on_clusters("two", "three")
def test_the_memory_of_a_step_is_divided(cluster: Any) -> None:
    if BACKEND == "tensorflow" and not tensorflow_counts_memory():
        pytest.skip("TensorFlow counts memory with TF_ENABLE_ONEDNN_OPTS=1 only here")
    share = 1 / cluster.replicas
    for own, alone in cluster(peaks):
        assert own < (share + 0.15) * alone, (own, alone)

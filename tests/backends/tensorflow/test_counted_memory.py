"""Peaks of plans on TensorFlow, beside what TensorFlow allocates in real steps."""

from __future__ import annotations

import gc
import statistics

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of the TensorFlow backend", allow_module_level=True)

import tensorflow as tf
from keras import layers, optimizers

import keras_strategies as ks

ks.set_virtual_cpu_devices(4)
DEVICES = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


def dense(optimizer="adam"):
    hidden = [layers.Dense(1024, "relu") for _ in range(6)]
    model = keras.Sequential([keras.Input((512,)), *hidden, layers.Dense(8)])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def convolutional():
    model = keras.Sequential([keras.Input((32, 32, 3))])
    for _ in range(2):
        model.add(layers.Conv2D(32, 3, padding="same", activation="relu"))
        model.add(layers.BatchNormalization())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(4))
    model.compile("adam", "mse")
    return model


def language():
    tokens = keras.Input((64,), dtype="int32")
    x = layers.Embedding(1000, 128)(tokens)
    x = x + layers.MultiHeadAttention(4, 32)(x, x)
    x = x + layers.Dense(128)(layers.Dense(512, "gelu")(x))
    model = keras.Model(tokens, layers.Dense(1000)(layers.LayerNormalization()(x)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def recurrent():
    tokens = keras.Input((32,), dtype="int32")
    x = layers.LSTM(512, return_sequences=True)(layers.Embedding(1000, 64)(tokens))
    model = keras.Model(tokens, layers.Dense(4)(layers.LSTM(512)(x)))
    model.compile("adam", "mse")
    return model


class _PeaksOfSteps(keras.callbacks.Callback):
    """The most bytes of each step that is traced already, above those before it."""

    def __init__(self):
        super().__init__()
        self.nbytes = []

    def on_train_batch_begin(self, batch, logs=None):
        gc.collect()
        self.before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        tf.config.experimental.reset_memory_stats("CPU:0")

    def on_train_batch_end(self, batch, logs=None):
        if batch > 0:
            peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
            self.nbytes.append(peak - self.before)


def allocated(build, shapes, strategy=None) -> float:
    """The most bytes that TensorFlow has in a step, with variables and the batch.

    The executor starts operations in the order in which they become ready, so
    the peaks of equal steps differ by up to 14 %, and those of two traces of one
    model by up to 11 % in the median: the median of eleven steps is taken.
    """
    strategy = strategy or ks.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        model = build()
    rng = np.random.default_rng(0)
    kinds = ["int32" if build in (language, recurrent) else "float32", "float32"]
    batch = tuple(
        rng.integers(0, 4, shape).astype(kind)
        for shape, kind in zip(shapes, kinds, strict=True)
    )
    steps = _PeaksOfSteps()
    dataset = tf.data.Dataset.from_tensors(batch).repeat(12)
    model.fit(dataset, verbose=0, shuffle=False, callbacks=[steps])
    variables = sum(strategy.describe(model).totals.values())
    return (
        statistics.median(steps.nbytes) + variables + sum(part.nbytes for part in batch)
    )


@pytest.mark.parametrize(
    ("build", "shapes", "within"),
    [
        (dense, ((256, 512), (256, 8)), 0.15),
        (convolutional, ((64, 32, 32, 3), (64, 4)), 0.15),
        (language, ((64, 64), (64, 64)), 0.2),
        pytest.param(
            # Its loops keep slices of what they have made.
            *(recurrent, ((256, 32), (256, 4)), 0.25),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["dense", "convolutional", "language", "recurrent"],
)
def test_a_plan_counts_what_a_step_allocates(build, shapes, within) -> None:
    plan = ks.OneDeviceStrategy("cpu:0").plan(build, shapes)
    assert plan.peak is not None, plan.cost.source
    assert plan.peak == pytest.approx(allocated(build, shapes), rel=within)


def test_each_device_has_a_part_of_the_shards_and_of_the_rows() -> None:
    """Virtual devices have one memory, so a real step has that of both of them."""
    shapes = (64, 512), (64, 8)
    fsdp = ks.ModelParallelStrategy("fsdp", DEVICES[:2])
    plan = fsdp.plan(dense, shapes)
    assert 2 * plan.peak == pytest.approx(allocated(dense, shapes, fsdp), rel=0.15)


def test_shards_take_less_than_copies() -> None:
    shapes = (64, 512), (64, 8)
    copies = ks.MirroredStrategy(DEVICES).plan(dense, shapes)
    shards = ks.ModelParallelStrategy("fsdp", DEVICES).plan(dense, shapes)
    model = sum(copies.bytes_per_device(kind)["cpu:0"] for kind in ("weight", "slot"))
    assert copies.peak > 4 / 3 * model  # And gradients.
    assert shards.peak < 0.6 * model


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1, momentum=0.9)),
        lambda: optimizers.Adam(gradient_accumulation_steps=2, global_clipnorm=1.0),
    ],
    ids=["loss scale", "accumulation"],
)
def test_optimizers_of_a_plan(optimizer) -> None:
    shapes = (64, 512), (64, 8)
    plan = ks.OneDeviceStrategy("cpu:0").plan(lambda: dense(optimizer()), shapes)
    assert plan.peak is not None, plan.cost.source


def test_what_cannot_be_counted_is_named() -> None:
    class Reading(keras.Model):
        def train_step(self, data):
            return {"loss": float(tf.reduce_sum(data[0]))}

    def build():
        inputs = keras.Input((4,))
        model = Reading(inputs, layers.Dense(4)(inputs))
        model.compile("sgd", "mse")
        return model

    plan = ks.OneDeviceStrategy("cpu:0").plan(build, ((8, 4), (8, 4)))
    assert plan.peak is None
    assert "the peak cannot be counted: " in str(plan)

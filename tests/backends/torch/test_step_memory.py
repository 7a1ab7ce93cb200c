"""Peak memory of a step in `plan`, tracked on tensors without values."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks
from keras_strategies.engines.torch.compat import memory_tracker, tracked_bytes
from keras_strategies.keras_compat.variables.values import raw_value


def compiled(model, optimizer):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def images():
    x = inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(16, 3, padding="same")(x)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Dropout(0.3)(layers.MaxPooling2D()(x))
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    return compiled(model, keras.optimizers.SGD(0.1, 0.9, global_clipnorm=1.0))


def words():
    tokens = keras.Input((12,), dtype="int32")
    x = layers.Embedding(500, 32)(tokens)
    x = x + layers.MultiHeadAttention(2, 16, dropout=0.1)(x, x)
    model = keras.Model(tokens, layers.Dense(10)(layers.GlobalMaxPooling1D()(x)))
    return compiled(model, "adamw")


def rematerialized():
    with keras.RematScope(mode="full"):
        model = keras.Sequential([keras.Input((64,))])
        for _ in range(6):
            model.add(layers.Dense(64, "gelu"))
        model.add(layers.Dense(10))
    return compiled(model, "sgd")


def batch_of(make):
    rng = np.random.default_rng(0)
    if make is words:
        x = rng.integers(0, 500, (32, 12)).astype("int32")
    else:
        shape = (32, 16, 16, 3) if make is images else (32, 64)
        x = rng.normal(size=shape).astype("float32")
    return x, rng.integers(0, 10, 32).astype("int32")


@pytest.mark.parametrize("make", [images, words, rematerialized])
def test_a_step_needs_what_the_plan_says(make):
    strategy = ks.OneDeviceStrategy("cpu:0")
    x, y = batch_of(make)
    plan = strategy.plan(make, (x, y))
    with strategy.scope():
        model = make()
    model.fit(x, y, batch_size=32, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    variables += model.metrics_variables
    tracker = memory_tracker()
    tracker.track_external(*(raw_value(each).detach() for each in variables))
    with tracker:
        model.fit(x, y, batch_size=32, verbose=0)
    # The input pipeline has a copy of the batch besides.
    assert plan.peak == pytest.approx(tracked_bytes(tracker, "peak"), rel=0.05)
    assert "peak of a step per device" in str(plan)


def test_more_replicas_have_fewer_rows_each():
    alone = ks.OneDeviceStrategy("cpu:0").plan(images, batch_of(images))
    both = ks.MirroredStrategy(["cpu:0", "cpu:1"]).plan(images, batch_of(images))
    assert both.peak < 0.6 * alone.peak


def test_an_operation_without_a_result_is_named():
    class Selected(layers.Layer):
        def call(self, x):
            kept = x[keras.ops.max(x, axis=1) > 0]
            return x * keras.ops.sum(kept)

    def make():
        model = keras.Sequential([keras.Input((4,)), Selected(), layers.Dense(10)])
        return compiled(model, "sgd")

    # Keras's default, which adds the layer and its arguments to the message.
    keras.config.enable_traceback_filtering()
    try:
        plan = ks.OneDeviceStrategy("cpu:0").plan(make, ((8, 4), (8,)))
    finally:
        keras.config.disable_traceback_filtering()
    assert plan.peak is None
    reason = "DynamicOutputShapeException: aten.nonzero"
    assert f"the peak cannot be counted: {reason}" in plan.cost.source

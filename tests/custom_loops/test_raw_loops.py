"""A loop of the user's without `run` trains on one device, and says so once."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
from custom_loops.helpers import descend
from keras import layers, losses

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

X = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
Y = X[:, :1]


def model() -> keras.Model:
    inputs = keras.Input((3,))
    return keras.Model(inputs, layers.Dense(1)(layers.Dropout(0.1)(inputs)))


def differentiated_call(made: keras.Model) -> None:
    """A call without `training`, of which a gradient is computed."""
    if keras.backend.backend() == "jax":
        import jax

        groups = (made.trainable_variables, made.non_trainable_variables)
        trained, others = ([v.value for v in group] for group in groups)
        jax.grad(lambda values: made.stateless_call(values, others, X)[0].sum())(
            trained
        )
    elif keras.backend.backend() == "torch":
        made(X).sum().backward()
    else:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(made(X))
        tape.gradient(loss, [v.value for v in made.trainable_variables])


def test_several_replicas_say_so_once():
    with ks.OneDeviceStrategy("cpu:0").scope():
        alone = model()
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        made = model()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*outside of `fit` and")
        differentiated_call(alone)
        made(X)
        made(X, training=False)
    match = "outside of `fit` and `strategy.run`"
    with pytest.warns(UserWarning, match=match) as found:
        differentiated_call(made)
        made(X, training=True)
    assert len([w for w in found if "strategy.run" in str(w.message)]) == 1
    assert found[0].filename == __file__


@pytest.mark.one_backend("jax")
def test_what_is_no_raw_loop_says_nothing(tmp_path):
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*outside of `fit` and")
        with strategy.scope():
            made, sequential = model(), keras.Sequential([layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.1)
            for each in (made, sequential):
                each.compile("sgd", "mse")
        made.summary(print_fn=lambda *_, **__: None)
        for each in (made, sequential):
            each.fit(X, Y, validation_data=(X, Y), verbose=0)
        made.predict(X, verbose=0)
        made.train_on_batch(X, Y)
        made(X, training=False)
        made(X)
        if keras.backend.backend() == "torch":
            import torch

            # As exporters do.
            torch.jit.trace(made, torch.from_numpy(X), check_trace=False)
            torch.export.export(made, (torch.from_numpy(X),), strict=False)
        made.save(tmp_path / "model.keras")
        with strategy.scope():
            keras.models.load_model(tmp_path / "model.keras")
            keras.models.clone_model(made)
        strategy.describe(made)

        def step(x: Any, y: Any) -> Any:
            def loss_fn() -> Any:
                loss_of = losses.MeanSquaredError(reduction=None)
                return ks.compute_average_loss(loss_of(y, made(x, training=True)))

            return descend(loss_fn, made.trainable_variables, optimizer)

        for batch in strategy.experimental_distribute_dataset((X, Y), batch_size=4):
            strategy.run(step, args=batch)
            ks.function(lambda *args: strategy.run(step, args=args))(*batch)

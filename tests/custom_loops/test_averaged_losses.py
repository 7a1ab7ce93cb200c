"""A loss that is a mean over the rows of a replica is named, and others are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = np.arange(8) % 4
Losses = Callable[[Any, Any], Any]


def model_and_optimizer(strategy: Any) -> tuple[keras.Model, Any]:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    return model, optimizer


def take_step(strategy: Any, make: Callable[[], Losses], compiled: bool) -> int:
    """Takes two steps; returns the line of `ks.value_and_grad`."""
    model, optimizer = model_and_optimizer(strategy)
    with strategy.scope():
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(True))
    loss_of = make()

    def step(x: Any, y: Any) -> None:
        def loss_fn() -> Any:
            return loss_of(y, model(x, training=True))

        found = ks.value_and_grad(loss_fn, model.trainable_variables)
        _, gradients = found()
        optimizer.apply(gradients, model.trainable_variables)

    def run(*batch: Any) -> None:
        strategy.run(step, args=batch)

    each = ks.function(run) if compiled else run
    for batch in strategy.experimental_distribute_dataset((X, Y), batch_size=4):
        each(*batch)
    return step.__code__.co_firstlineno + 5


def keras_loss(**options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mean_over_the_rows_of_a_replica_is_named(mirrored, compiled):
    with pytest.warns(UserWarning, match="mean over the rows of one replica") as found:
        line = take_step(mirrored, keras_loss, compiled)
    [text] = [str(w.message) for w in found if "of one replica" in str(w.message)]
    # TensorFlow converts the code of a compiled step.
    is_converted = compiled and keras.backend.backend() == "tensorflow"
    assert ("of `loss_fn`" if is_converted else f"{__file__}:{line}, of") in text
    assert "2 times as large" in text


def averaged() -> Losses:
    loss_of = keras_loss(reduction=None)
    return lambda y, p: ks.compute_average_loss(loss_of(y, p))


def divided() -> Losses:
    loss_of = keras_loss()
    return lambda y, p: loss_of(y, p) / ks.get_replica_context().num_replicas_in_sync


def weighted() -> Losses:
    loss_of = keras_loss()
    return lambda y, p: loss_of(y, p, sample_weight=ops.ones((2,)) / 2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "make", [averaged, lambda: keras_loss(reduction="sum"), divided, weighted]
)
def test_other_losses_are_not_named(mirrored, make, compiled):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*mean over the rows")
        take_step(mirrored, make, compiled)
        take_step(ks.OneDeviceStrategy("cpu:0"), keras_loss, compiled)


def test_averaged_gradients_and_losses_without_gradients_are_not_named(mirrored):
    model, optimizer = model_and_optimizer(mirrored)
    loss_of = keras_loss()

    variables = model.trainable_variables

    def step(x: Any, y: Any) -> Any:
        _, found = ks.value_and_grad(lambda: loss_of(y, model(x)), variables)()
        found = ks.get_replica_context().all_reduce("MEAN", found)
        with ks.gradients_are_aggregated():
            optimizer.apply(found, variables)
        return loss_of(y, model(x))

    def halved(x: Any, y: Any) -> None:
        _, found = ks.value_and_grad(lambda: loss_of(y, model(x)), variables)()
        optimizer.apply([g / 2 for g in found], variables)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*mean over the rows")
        for batch in mirrored.experimental_distribute_dataset((X, Y), batch_size=8):
            losses = mirrored.run(step, args=batch)
            mirrored.reduce("MEAN", losses)
            mirrored.run(halved, args=batch)


@pytest.mark.one_backend("torch")
@pytest.mark.skipif(keras.backend.backend() != "torch", reason="functions of Torch")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_of_torch(mirrored, reduction):
    import torch

    model, _ = model_and_optimizer(mirrored)
    loss_of = torch.nn.CrossEntropyLoss(reduction=reduction)

    def step(x: Any, y: Any) -> None:
        loss_of(model(x), y).backward()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for batch in mirrored.experimental_distribute_dataset((X, Y), batch_size=4):
            mirrored.run(step, args=batch)
    texts = [str(w.message) for w in found if "of one replica" in str(w.message)]
    assert len(texts) == (reduction == "mean")
    if texts:
        assert f"{__file__}:{step.__code__.co_firstlineno + 1}" in texts[0]

"""Sums over rows that a layer uses further, in `run`: replicas exchange them.

A loop is that of one device, with batches that do not divide, a replica without rows,
and weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import assert_same
from keras import layers, ops

import keras_strategies as ks
from row_proofs.test_exchanged_sums import (
    DEVICES,
    FUNCTIONS_OF_ROWS,
    WEIGHTS,
    Statistics,
    X,
    Y,
    model_of,
)

BACKEND = keras.backend.backend()
NAMED = "depends on which rows a replica has"


def moving_average(layer: Statistics, x: Any) -> Any:
    """A mean that replicas assign, each of its own rows without an exchange."""
    h = x @ layer.kernel
    layer.average.assign(0.9 * layer.average + 0.1 * ops.mean(h, axis=0))
    return h


LAYERS = {**FUNCTIONS_OF_ROWS, "moving_average": moving_average}


def trained(
    strategy: Any,
    function: Callable[..., Any],
    compiled: bool,
    rows: int = 18,
    batch: int = 8,
    built: bool = True,
) -> dict[str, Any]:
    """The state and the losses of a custom loop."""
    keras.utils.set_random_seed(7)
    with strategy.scope():
        if built:
            model = model_of(function)
        else:
            parts = [layers.Dense(6), Statistics(function), layers.Dense(1)]
            model = keras.Sequential(parts)
        optimizer = keras.optimizers.SGD(0.05)

    def replica_step(x: Any, y: Any, weights: Any) -> Any:
        def loss_of() -> Any:
            each = ops.sum(ops.square(model(x, training=True) - y), axis=-1)
            loss = ks.compute_average_loss(each, sample_weight=weights)
            return loss + ks.scale_regularization_loss(sum(model.losses))

        if not model.built:
            model(x)
        gradient = ks.value_and_grad(loss_of, model.trainable_variables)
        loss, gradients = gradient()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def step(x: Any, y: Any, weights: Any) -> Any:
        losses = strategy.run(replica_step, args=(x, y, weights))
        return strategy.reduce("SUM", losses, axis=None)

    step = ks.function(step) if compiled else step
    found = []
    for _ in range(2):
        arrays = X[:rows], Y[:rows], WEIGHTS[:rows]
        batches = strategy.experimental_distribute_dataset(arrays, batch_size=batch)
        found += [ops.convert_to_numpy(step(*each)) for each in batches]
    state = {v.path: ops.convert_to_numpy(v) for v in model.variables}
    return {**dict(enumerate(state.values())), "losses": np.array(found)}


def check(function: Callable[..., Any], compiled: bool, **options: Any) -> None:
    """Fails if a loop on three replicas is not that of one device, or warns."""
    expected = trained(ks.OneDeviceStrategy("cpu:0"), function, compiled, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{NAMED}")
        found = trained(ks.MirroredStrategy(DEVICES), function, compiled, **options)
    assert_same(expected, found, 2e-5, "three replicas")


COMPILED = [False] if BACKEND == "torch" else [False, True]
#: On JAX replicas with other numbers of rows are other branches, without collectives.
ROWS = {"rows": 18, "batch": 6} if BACKEND == "jax" else {"rows": 18, "batch": 8}


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("name", LAYERS)
def test_loop_is_that_of_one_device(name: str, compiled: bool) -> None:
    check(LAYERS[name], compiled, **ROWS)

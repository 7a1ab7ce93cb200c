"""Sums over rows that a layer uses further, in `run`: replicas exchange them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import assert_same
from keras import ops
from row_proofs.proofs import mirrored
from row_proofs.test_exchanged_sums import (
    FUNCTIONS_OF_ROWS,
    WEIGHTS,
    X,
    Y,
    model_of,
    statistics,
)

import keras_strategies as ks

BACKEND = keras.backend.backend()
NAMED = "depends on which rows a replica has"
#: Of others than JAX, the last batch has two rows, and a replica none.
BATCH = 9 if BACKEND == "jax" else 8
ROWS = 6 if BACKEND == "jax" else 5


def moving_average(layer: Any, x: Any) -> Any:
    """A mean that replicas assign, each of its own rows without an exchange."""
    h = x @ layer.kernel
    layer.average.assign(0.9 * layer.average + 0.1 * ops.mean(h, axis=0))
    return h


LAYERS = {**FUNCTIONS_OF_ROWS, "moving_average": moving_average}


def trained(
    strategy: Any, function: Callable[..., Any], compiled: bool
) -> dict[str, Any]:
    """The state and the losses of a custom loop."""
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = model_of(function)
        optimizer = keras.optimizers.SGD(0.05)

    def replica_step(x: Any, y: Any, weights: Any) -> Any:
        def loss_of() -> Any:
            each = ops.sum(ops.square(model(x, training=True) - y), axis=-1)
            loss = ks.compute_average_loss(each, sample_weight=weights)
            return sum(map(ks.scale_regularization_loss, model.losses), loss)

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
        arrays = X, Y, WEIGHTS
        batches = strategy.experimental_distribute_dataset(arrays, batch_size=BATCH)
        found += [ops.convert_to_numpy(step(*each)) for each in batches]
    state = {v.path: ops.convert_to_numpy(v) for v in model.variables}
    return {**dict(enumerate(state.values())), "losses": np.array(found)}


def check(function: Callable[..., Any], compiled: bool) -> None:
    """Fails if a loop on three replicas is not that of one device, or warns."""
    expected = trained(ks.OneDeviceStrategy("cpu:0"), function, compiled)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{NAMED}")
        found = trained(mirrored(3), function, compiled)
    assert_same(expected, found, 2e-5, "three replicas")


COMPILED = [False] if BACKEND == "torch" else [False, True]


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["*-False", "vicreg-True", "codebook-True"])
@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("name", LAYERS)
def test_loop_is_that_of_one_device(name: str, compiled: bool) -> None:
    check(LAYERS[name], compiled)


#: Whether `changing` uses no sum.
CHANGED: list[bool] = []


def changing(layer: Any, x: Any) -> Any:
    h = x @ layer.kernel
    return h if CHANGED else h - ops.mean(h, axis=0)


def outputs(function: Callable[..., Any], **options: Any) -> Callable[[], Any]:
    """A function that calls a layer on three replicas."""
    strategy = mirrored(3, **options)
    with strategy.scope():
        layer = statistics(function)
    batches = strategy.experimental_distribute_dataset(X[:ROWS], batch_size=ROWS)
    (x,) = batches
    return lambda: strategy.run(lambda x: layer(x), args=(x,))


@pytest.mark.skipif(BACKEND == "jax", reason="JAX runs a trace again")
def test_call_that_changes_is_an_error() -> None:
    CHANGED.clear()
    call = outputs(changing)
    call()
    CHANGED.append(True)
    try:
        with pytest.raises(ks.errors.ContextError, match="computed other ones than"):
            call()
    finally:
        CHANGED.clear()


@pytest.mark.skipif(BACKEND == "jax", reason="JAX refuses the option")
def test_statistics_of_replicas_by_choice() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{NAMED}")
        found = outputs(LAYERS["stopped"], sync_batch_norm=False)()
    for part in found.values:
        mean = np.mean(ops.convert_to_numpy(part), axis=0)
        np.testing.assert_allclose(mean, 0, atol=1e-5)


def in_order(layer: Any, x: Any) -> Any:
    return x - ops.sort(x, axis=0)


def test_layer_that_needs_rows_of_others_is_named() -> None:
    with pytest.warns(UserWarning, match=rf"Layer 'own\w*' \(Own\).*{NAMED}"):
        outputs(in_order)()

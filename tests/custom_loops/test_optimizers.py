"""Optimizers in custom loops: what is summed, when, and by whom it is asked for."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from custom_loops.helpers import assert_alike, descend, per_replica
from harness.strategies import STRATEGIES
from keras import layers, ops

import keras_strategies as ks


@pytest.fixture(params=["mirrored_2", "central"])
def two(request) -> Any:
    """Strategies of two replicas."""
    return STRATEGIES[request.param].make()


def made(strategy: Any, optimizer: Any, value: float = 0.0) -> Any:
    with strategy.scope():
        variable = keras.Variable(np.float32(value))
        optimizer.build([variable])
    return variable


def stepping(strategy: Any, optimizer: Any, variable: Any, compiled: bool) -> Any:
    """A step in which each replica applies its gradient."""

    def on_replica(gradient: Any) -> None:
        optimizer.apply([gradient], [variable])

    def step(gradient: Any) -> None:
        strategy.run(on_replica, args=(gradient,))

    return ks.function(step) if compiled else step


@pytest.mark.one_backend
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_summed_before_they_are_clipped(two, compiled):
    optimizer = keras.optimizers.SGD(1.0, clipvalue=2.0)
    variable = made(two, optimizer)
    step = stepping(two, optimizer, variable, compiled)
    step(per_replica(3.0, -2.5))  # 0.5 in all; clipped first it would be 0.
    assert float(variable.numpy()) == -0.5
    step(per_replica(1.5, 1.5))  # 3 in all.
    assert float(variable.numpy()) == -2.5


@pytest.mark.one_backend
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_that_are_summed_by_hand_are_not_summed_again(two, compiled):
    optimizer = keras.optimizers.SGD(1.0)
    variable = made(two, optimizer)

    def on_replica(gradient: Any) -> None:
        total = ks.get_replica_context().all_reduce("SUM", gradient)
        with ks.gradients_are_aggregated():
            optimizer.apply([total], [variable])

    def step(gradient: Any) -> None:
        two.run(on_replica, args=(gradient,))

    (ks.function(step) if compiled else step)(per_replica(3.0, -2.5))
    assert float(variable.numpy()) == -0.5
    assert int(optimizer.iterations.numpy()) == 1


def train(strategy: Any, optimizer: Any, steps: int = 5) -> list[np.ndarray]:
    """A loop over rows that two replicas share unevenly."""
    random = np.random.default_rng(5)
    x = random.normal(size=(5, 3)).astype("float32")
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]
        )
        optimizer.build(model.trainable_variables)

    def replica_step(x: Any) -> Any:
        def loss_fn() -> Any:
            loss = ks.compute_average_loss(ops.square(model(x)[:, 0] - 1))
            return optimizer.scale_loss(loss)

        return descend(loss_fn, model.trainable_variables, optimizer)

    step = ks.function(lambda x: strategy.run(replica_step, args=(x,)))
    dataset = strategy.experimental_distribute_dataset(x, batch_size=5)
    for _ in range(steps):
        for batch in dataset:
            step(batch)
    return model.get_weights()


OPTIMIZERS = {
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "average": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=8.0
    ),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_equals_one_device_with(mirrored, name):
    found = train(mirrored, OPTIMIZERS[name]())
    # Optimizers that are made outside of a scope are on the default device.
    expected = train(STRATEGIES["one_device"].make(), OPTIMIZERS[name]())
    assert_alike(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.one_backend
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_scale_steps_over_what_is_not_finite(two, compiled):
    inner = keras.optimizers.SGD(1.0)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    variable = made(two, optimizer)
    step = stepping(two, optimizer, variable, compiled)
    for gradients, value, scale in (
        ((8.0, 16.0), -3, 8),
        ((1.0, np.inf), -3, 4),
        ((4.0, 0.0), -4, 4),
    ):
        step(per_replica(*gradients))
        assert float(variable.numpy()) == value
        assert float(ops.convert_to_numpy(optimizer.dynamic_scale)) == scale


EVERY_OPTIMIZER = (
    *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax"),
    *("Adafactor", "Ftrl", "Lion", "Lamb", "Nadam", "Muon", "ScheduleFreeAdamW"),
)


def built_in_first_apply(strategy: Any) -> dict[str, np.ndarray]:
    """A variable for each optimizer, and one of `LossScaleOptimizer`, after 3 steps."""
    random = np.random.default_rng(5)
    x = random.normal(size=(6, 3)).astype("float32")
    with strategy.scope():
        every = {n: getattr(keras.optimizers, n)(0.05) for n in EVERY_OPTIMIZER}
        inner = keras.optimizers.Nadam(0.05)
        every["LossScale"] = keras.optimizers.LossScaleOptimizer(inner)
        every["schedule"] = keras.optimizers.Nadam(
            keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        )
        start = random.normal(size=(3, 2)).astype("float32")
        variables = {name: keras.Variable(start, name=name) for name in every}

    def replica_step(x: Any) -> None:
        for name, optimizer in every.items():

            def loss_fn(name: str = name, optimizer: Any = optimizer) -> Any:
                outputs = ops.matmul(x, variables[name])
                loss = ks.compute_average_loss(ops.sum(ops.square(outputs - 1), -1))
                return optimizer.scale_loss(loss)

            descend(loss_fn, [variables[name]], optimizer)

    step = ks.function(lambda x: strategy.run(replica_step, args=(x,)))
    for _ in range(3):
        for batch in strategy.experimental_distribute_dataset(x, batch_size=6):
            step(batch)
    return {name: variables[name].numpy() for name in every}


@pytest.mark.one_backend("torch")
def test_optimizers_are_built_in_their_first_apply(two):
    assert set(EVERY_OPTIMIZER) == {
        name
        for name, kind in vars(keras.optimizers).items()
        if isinstance(kind, type)
        and issubclass(kind, keras.optimizers.Optimizer)
        and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    }
    found = built_in_first_apply(two)
    alone = built_in_first_apply(STRATEGIES["one_device"].make())
    for name, value in alone.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, err_msg=name)

"""Replica functions compute with the values of the moment of each `run`."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import random
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from custom_loops.helpers import descend, numbers, per_replica
from keras import layers, ops

pytestmark = pytest.mark.one_backend

LARGE = np.full(70_000, 2.0, "float32")
GLOBAL = 2.0

Change = Callable[[], None]


def first(strategy: Any, fn: Callable[[Any], Any]) -> float:
    found = numbers(strategy.run(fn, args=(per_replica(1, 10),)))
    assert found[1] == 10 * found[0]
    return found[0]


@dataclasses.dataclass
class Options:
    rate: float = 2.0

    def step(self, x: Any) -> Any:
        return x * self.rate


def set_global(value: float) -> None:
    globals()["GLOBAL"] = value


@pytest.fixture(autouse=True)
def constants():
    yield
    set_global(2.0)
    LARGE[:] = 2.0


def one_number_of_a_large_array() -> tuple[Any, Change]:
    return lambda x: x * LARGE[33_333], lambda: operator.setitem(LARGE, 33_333, 3.0)


def name_of_the_module() -> tuple[Any, Change]:
    return lambda x: x * GLOBAL, lambda: set_global(3.0)


def attribute_of_the_object_of_a_method() -> tuple[Any, Change]:
    options = Options()
    return options.step, lambda: setattr(options, "rate", 3.0)


CASES = [
    one_number_of_a_large_array,
    name_of_the_module,
    attribute_of_the_object_of_a_method,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_change_between_two_runs_counts(mirrored, case) -> None:
    with mirrored.scope():
        fn, change = case()
    assert [first(mirrored, fn) for _ in range(2)] == [2.0] * 2
    change()
    assert [first(mirrored, fn) for _ in range(2)] == [3.0] * 2


def test_a_layer_that_is_frozen(mirrored) -> None:
    with mirrored.scope():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1), layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    x = per_replica(*np.ones((2, 2, 1)))

    def step(x: Any) -> None:
        descend(lambda: ops.sum(model(x)), model.trainable_variables, optimizer)

    for is_trained in (True, False, True):
        model.layers[1].trainable = is_trained
        before = [layer.bias.numpy().copy() for layer in model.layers]
        mirrored.run(step, args=(x,))
        after = [layer.bias.numpy() for layer in model.layers]
        changes = [bool(a != b) for a, b in zip(before, after, strict=True)]
        assert changes == [True, is_trained]


COUNT = itertools.count()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: float(np.random.random()),
        random.random,
        np.random.default_rng(0).random,
        lambda: float(next(COUNT)),
    ],
    ids=("numpy", "python", "Generator", "count"),
)
def test_numbers_that_python_draws_differ_in_each_run(mirrored, draw) -> None:
    zeros = per_replica(0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = [
            float(mirrored.run(lambda x: x + draw(), args=(zeros,)).values[0])
            for _ in range(4)
        ]
    assert len(set(found)) == 4


ON_JAX = pytest.mark.skipif(keras.backend.backend() != "jax", reason="compiled on JAX")


@pytest.mark.one_backend("jax")
@ON_JAX
def test_a_training_step_is_compiled_once(mirrored, monkeypatch) -> None:
    """It is traced in each call, and has an equal trace."""
    import jax

    with mirrored.scope():
        layer = layers.Dropout(0.5)
        variable = keras.Variable(np.ones(3, "float32"))
        metric = keras.metrics.Mean()
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
        optimizer = keras.optimizers.Adam(schedule)
        optimizer.build([variable])
    programs, compile = [], jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered,
        "compile",
        lambda self: programs.append(self) or compile(self),
    )

    def step(x: Any) -> None:
        def loss_fn() -> Any:
            return ops.mean(layer(x * variable, training=True) ** 2)

        metric.update_state(descend(loss_fn, [variable], optimizer))

    x = per_replica(*np.ones((2, 2, 3)))
    for _ in range(4):
        mirrored.run(step, args=(x,))
    assert len(programs) == 1


@pytest.mark.one_backend("jax")
@ON_JAX
def test_a_run_that_compiles_again_and_again_is_named_once(mirrored, caplog) -> None:
    options = Options()
    with pytest.warns(UserWarning, match="compiled 'Options.step' 32 times") as found:
        for options.rate in range(40):
            mirrored.run(options.step, args=(per_replica(1, 10),))
    about = [each for each in found if "has compiled" in str(each.message)]
    assert [each.filename for each in about] == [__file__]
    named = [each for each in caplog.messages if "outside of `ks.function`" in each]
    assert len(named) == 1 and "Options.step" in named[0]

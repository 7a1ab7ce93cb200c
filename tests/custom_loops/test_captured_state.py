"""Replica functions compute with the values of the moment of each `run`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

LARGE = np.full(70_000, 2.0, "float32")
GLOBAL = 2.0

Change = Callable[[], None]


def pair(value: float = 1.0) -> ks.PerReplica:
    return ks.PerReplica([ops.ones(()) * value, ops.ones(()) * 10 * value])


def first(strategy: Any, fn: Callable[[Any], Any]) -> float:
    found = [float(part) for part in strategy.run(fn, args=(pair(),)).values]
    assert found[1] == 10 * found[0]
    return found[0]


@dataclasses.dataclass
class Options:
    rate: float = 2.0

    def step(self, x: Any) -> Any:
        return x * self.rate


@keras.saving.register_keras_serializable("captured")
class Scale(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self._rates = {"rate": 2.0}

    def call(self, x: Any) -> Any:
        return x * self._rates["rate"] * GLOBAL / 2


def set_global(value: float) -> None:
    globals()["GLOBAL"] = value


@pytest.fixture(autouse=True)
def constants():
    yield
    set_global(2.0)
    LARGE[:] = 2.0
    os.environ.pop("KS_TEST_RATE", None)


def one_number_of_a_large_array() -> tuple[Any, Change]:
    return lambda x: x * LARGE[33_333], lambda: operator.setitem(LARGE, 33_333, 3.0)


def array_in_a_dictionary() -> tuple[Any, Change]:
    tables = {"one": [np.array([2.0], "float32")]}
    return lambda x: x * tables["one"][0][0], lambda: tables["one"][0].fill(3.0)


def argument_of_a_partial_function() -> tuple[Any, Change]:
    rates = [2.0]
    fn = functools.partial(lambda rates, x: x * rates[0], rates)
    return fn, lambda: operator.setitem(rates, 0, 3.0)


def name_of_the_module() -> tuple[Any, Change]:
    return lambda x: x * GLOBAL, lambda: set_global(3.0)


def attribute_of_the_object_of_a_method() -> tuple[Any, Change]:
    options = Options()
    return options.step, lambda: setattr(options, "rate", 3.0)


def private_attribute_of_a_layer_in_a_model() -> tuple[Any, Change]:
    layer = Scale()
    model = keras.Sequential([layer])
    return model, lambda: operator.setitem(layer._rates, "rate", 3.0)


def variable_of_the_environment() -> tuple[Any, Change]:
    os.environ["KS_TEST_RATE"] = "2"

    def step(x: Any) -> Any:
        return x * float(os.environ["KS_TEST_RATE"])

    return step, lambda: operator.setitem(os.environ, "KS_TEST_RATE", "3")


CASES = [
    one_number_of_a_large_array,
    array_in_a_dictionary,
    argument_of_a_partial_function,
    name_of_the_module,
    attribute_of_the_object_of_a_method,
    private_attribute_of_a_layer_in_a_model,
    variable_of_the_environment,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_change_between_two_runs_counts(mirrored, case) -> None:
    with mirrored.scope():
        fn, change = case()
    assert [first(mirrored, fn) for _ in range(2)] == [2.0] * 2
    change()
    assert [first(mirrored, fn) for _ in range(2)] == [3.0] * 2


def test_the_sign_of_a_zero_counts(mirrored) -> None:
    options = Options(0.0)

    def step(x: Any) -> Any:
        return x / np.float32(options.rate)

    assert first(mirrored, step) == np.inf
    options.rate = -0.0
    assert first(mirrored, step) == -np.inf


def test_settings_of_an_optimizer_count(mirrored) -> None:
    with mirrored.scope():
        variable = keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])

    def step() -> None:
        optimizer.apply([ops.ones(())], [variable])

    mirrored.run(step)
    assert float(variable.numpy()) == -2.0
    optimizer.clipvalue = 0.5  # Of the sum over replicas.
    mirrored.run(step)
    assert float(variable.numpy()) == -2.5


def test_the_rate_of_a_layer_counts(mirrored) -> None:
    with mirrored.scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dropout(0.5, seed=1)])
    x = ks.PerReplica([ops.ones((4, 8)), ops.ones((4, 8))])

    def zeros() -> int:
        found = mirrored.run(lambda x: model(x, training=True), args=(x,))
        return sum(np.sum(ops.convert_to_numpy(part) == 0) for part in found.values)

    assert zeros() > 0
    model.layers[0].rate = 0.0
    assert zeros() == 0


def test_a_layer_that_is_frozen(mirrored) -> None:
    with mirrored.scope():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1), layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    x = ks.PerReplica([ops.ones((2, 1)), ops.ones((2, 1))])

    def step(x: Any) -> None:
        variables = model.trainable_variables
        _, gradients = ks.value_and_grad(lambda: ops.sum(model(x)), variables)()
        optimizer.apply(gradients, variables)

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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = [
            float(mirrored.run(lambda x: x + draw(), args=(pair(0.0),)).values[0])
            for _ in range(4)
        ]
    assert len(set(found)) == 4


def test_models_share_a_function_by_its_code(mirrored) -> None:
    """State of one model is neither read nor changed by a run of another."""
    with mirrored.scope():
        variables = [keras.Variable(float(i)) for i in range(3)]

    def step(variable: Any) -> Callable[[], Any]:
        return lambda: variable.assign_add(10.0)

    for _ in range(2):
        for variable in variables:
            mirrored.run(step(variable))
    assert [float(variable.numpy()) for variable in variables] == [20.0, 21.0, 22.0]


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

        loss, gradients = ks.value_and_grad(loss_fn, [variable])()
        optimizer.apply(gradients, [variable])
        metric.update_state(loss)

    x = ks.PerReplica([ops.ones((2, 3)), ops.ones((2, 3))])
    for _ in range(4):
        mirrored.run(step, args=(x,))
    assert len(programs) == 1


@pytest.mark.one_backend("jax")
@ON_JAX
def test_a_run_that_compiles_again_and_again_is_named_once(mirrored, caplog) -> None:
    options = Options()
    with pytest.warns(UserWarning, match="compiled 'Options.step' 32 times") as found:
        for options.rate in range(40):
            mirrored.run(options.step, args=(pair(),))
    about = [each for each in found if "has compiled" in str(each.message)]
    assert [each.filename for each in about] == [__file__]
    named = [each for each in caplog.messages if "outside of `ks.function`" in each]
    assert len(named) == 1 and "Options.step" in named[0]

"""Closures of a replica function may change between two calls of `run`.

Outside of `ks.function` the function's Python runs in each call.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

RATE = 2.0


def numbers(value: Any) -> list[Any]:
    return [np.asarray(ops.convert_to_numpy(part)).tolist() for part in value.values]


@pytest.fixture
def x() -> Any:
    return ks.PerReplica([ops.ones(()), ops.ones(()) * 10])


class Trainer:
    def __init__(self) -> None:
        self.rate = 2.0
        self.options = {"rates": [2.0, 2.0]}
        self.calls = 0

    def step(self, x: Any) -> Any:
        return x * self.rate

    def through_a_method(self, x: Any) -> Any:
        return self.step(x)

    @property
    def doubled(self) -> float:
        return 2 * self.rate

    def through_a_property(self, x: Any) -> Any:
        return x * self.doubled / 2

    def from_a_dictionary(self, x: Any) -> Any:
        return x * self.options["rates"][1]


@pytest.mark.parametrize("name", ["step", "through_a_method", "through_a_property"])
def test_an_attribute_of_the_object_of_a_method(mirrored, x, name) -> None:
    trainer = Trainer()
    for rate in (2.0, 3.0, 2.0):
        trainer.rate = rate
        found = mirrored.run(getattr(trainer, name), args=(x,))
        assert numbers(found) == [rate, 10 * rate]


def test_what_is_in_a_dictionary(mirrored, x) -> None:
    trainer = Trainer()
    for rate in (2.0, 3.0):
        trainer.options["rates"][1] = rate
        found = mirrored.run(trainer.from_a_dictionary, args=(x,))
        assert numbers(found) == [rate, 10 * rate]


@dataclasses.dataclass(slots=True)
class Options:
    loss: Any


def test_an_attribute_of_an_attribute_in_a_helper(mirrored, x) -> None:
    options = Options(types.SimpleNamespace(weight=2.0))

    def helper(x: Any) -> Any:
        return x * options.loss.weight

    def step(x: Any) -> Any:
        return helper(x)

    for weight in (2.0, 3.0):
        options.loss.weight = weight
        assert numbers(mirrored.run(step, args=(x,))) == [weight, 10 * weight]


def test_a_global_name(mirrored, x, monkeypatch) -> None:
    def step(x: Any) -> Any:
        return x * RATE

    for rate in (2.0, 3.0):
        monkeypatch.setitem(globals(), "RATE", rate)
        assert numbers(mirrored.run(step, args=(x,))) == [rate, 10 * rate]


def test_an_argument_of_a_partial_function(mirrored, x) -> None:
    def step(rates: list[float], x: Any) -> Any:
        return x * rates[0]

    rates = [0.0]
    partial = functools.partial(step, rates)
    for rate in (2.0, 3.0):
        rates[0] = rate
        assert numbers(mirrored.run(partial, args=(x,))) == [rate, 10 * rate]


def test_the_rate_of_a_layer(mirrored) -> None:
    with mirrored.scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dropout(0.5, seed=1)])
    x = ks.PerReplica([ops.ones((4, 8)), ops.ones((4, 8))])

    def zeros() -> int:
        found = mirrored.run(lambda x: model(x, training=True), args=(x,))
        return sum(np.sum(np.asarray(part) == 0) for part in numbers(found))

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

    def bias_changes() -> list[bool]:
        before = [layer.bias.numpy().copy() for layer in model.layers]
        mirrored.run(step, args=(x,))
        after = [layer.bias.numpy() for layer in model.layers]
        return [bool(a != b) for a, b in zip(before, after, strict=True)]

    assert bias_changes() == [True, True]
    model.layers[1].trainable = False
    assert bias_changes() == [True, False]
    model.layers[1].trainable = True
    assert bias_changes() == [True, True]


def test_python_runs_in_every_call(mirrored, x, backend_name, monkeypatch) -> None:
    trainer, calls, negative = Trainer(), itertools.count(), ops.negative
    monkeypatch.setattr(ops, "negative", lambda x: next(calls) and negative(x))

    def step(x: Any) -> Any:
        ops.negative(x)
        return trainer.step(x)

    mirrored.run(step, args=(x,))
    before = next(calls)
    for trainer.calls in range(4):
        mirrored.run(step, args=(x,))
    # On JAX one trace is for both replicas.
    assert next(calls) - before - 1 == (4 if backend_name == "jax" else 8)


def test_python_that_changes_something_runs_in_every_call(mirrored, x) -> None:
    seen: list[float] = []

    def step(x: Any) -> Any:
        seen.append(len(seen))
        return x

    mirrored.run(step, args=(x,))
    before = len(seen)
    mirrored.run(step, args=(x,))
    assert len(seen) > before


def test_a_function_that_is_compiled_again_and_again_is_told_so(
    mirrored, x, backend_name
) -> None:
    trainer = Trainer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for trainer.rate in range(40):
            mirrored.run(trainer.step, args=(x,))
    about = [
        w for w in caught if "has compiled 'Trainer.step' 32 times" in str(w.message)
    ]
    assert len(about) == (1 if backend_name == "jax" else 0)
    assert all(w.filename == __file__ for w in about)

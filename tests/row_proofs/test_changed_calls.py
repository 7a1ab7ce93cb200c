"""Eager calls that compute something else than what was proved are exact.

A flag is read by `call` from where no proof looks for it. A callback changes it between
epochs, so that rows depend on one another. Layers are trained on one device and on two
replicas, with an uneven last batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks
from keras_strategies.runtime.data_parallel import data_parallel_call
from row_proofs.case_layers import AddLoss, Apply
from row_proofs.proofs import assert_exact, needs_split

pytestmark = [pytest.mark.one_backend("torch", "tensorflow"), needs_split]

RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(25, 6)).astype("float32") + np.linspace(-1, 1, 25)[:, None]
Y = np.sin(X[:, :1])
DEVICES = ["cpu:0", "cpu:1"]


class Flag(NamedTuple):
    """A flag anywhere: how it is assigned, and read by a layer."""

    set: Callable[[bool], Any]
    get: Callable[[], Any]


CONFIG = Flag(
    lambda on: keras.config.set_epsilon(1e-5 if on else 1e-7),
    lambda: keras.config.epsilon() > 1e-6,
)
VALUES = np.zeros(400_000, "float32")
ARRAY = Flag(lambda on: VALUES.__setitem__(7, on), lambda: VALUES[7] > 0)


#: The rows of the calls of `tanh`.
ROWS: list[Any] = []


def tanh(x: Any) -> Any:
    ROWS.append(x.shape[0])
    return ops.tanh(x)


class Unseeded(layers.Layer):
    """Draws from the generator of the framework."""

    def call(self, x: Any) -> Any:
        return x + keras.random.normal(ops.shape(x))


def toggled(flag: Flag, change: Callable[[Any], Any]) -> layers.Layer:
    return Apply(lambda x: change(x) if flag.get() else x * 0.5)


def center(x: Any) -> Any:
    return x - ops.max(x, axis=0)


CHANGES = {
    "operation": center,
    "operator": lambda x: x * 0.5 + x[:1],
    "axis": lambda x: ops.flip(x, axis=0) * 0.5,
    "take": lambda x: ops.take(x * 0.5, np.arange(len(x))[::-1].copy(), axis=0),
    "draws": lambda x: x + keras.random.normal(ops.shape(x)[1:], seed=3),
}


def check(flag: Flag, layer: Callable[[], Any], draw: Any = None) -> list[str]:
    """Fails if two replicas give other numbers; returns the warnings."""

    def make() -> keras.Model:
        drawing = [draw()] if draw else []
        parts = [layers.Dense(6), *drawing, layer(), layers.Dense(1)]
        model = keras.Sequential([keras.Input((6,)), *parts])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", run_eagerly=True)
        return model

    def fit(model: keras.Model) -> Any:
        toggle = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: flag.set(epoch == 1),
            on_train_end=lambda logs: flag.set(False),
        )
        options = {"epochs": 3, "shuffle": False, "verbose": 0, "callbacks": [toggle]}
        return model.fit(X, Y, batch_size=8, **options)

    return assert_exact(make, fit, tolerance=1e-5)


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.parametrize("flag", [CONFIG, ARRAY], ids=["config", "array"])
def test_flag_of_other_objects(flag: Flag) -> None:
    (text,) = check(flag, lambda: toggled(flag, center))
    assert "'Max' (in layer" in text


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("draw", [None, lambda: layers.Dropout(0.5), Unseeded])
def test_what_a_flag_changes(kind: str, draw: Any) -> None:
    """Random numbers that replicas drew before are drawn again."""
    texts = check(CONFIG, lambda: toggled(CONFIG, CHANGES[kind]), draw)
    assert bool(texts) == (kind != "draws")


def stepped(
    strategy: Any, function: Callable[[Any], Any], before: Callable[[], Any], steps: int
) -> list[float]:
    """Losses of eager steps, before each of which a function is called."""
    keras.utils.set_random_seed(7)
    with strategy.scope():
        parts = [layers.Dense(6), Apply(function)]
        model = keras.Sequential([keras.Input((6,)), *parts])
        model.compile("sgd", "mse", run_eagerly=True)
    losses = []
    for _ in range(steps):
        before()
        losses.append(float(model.train_on_batch(X, X)))
    return losses


def test_flag_that_changes_after_the_proof(monkeypatch: Any) -> None:
    """As by another thread: what replicas call first is not what was proved."""
    flag = CONFIG
    split_call = data_parallel_call.call_on_replicas

    def later(*arguments: Any) -> Any:
        flag.set(True)
        return split_call(*arguments)

    def function(x: Any) -> Any:
        return center(x) if flag.get() else x * 0.5

    monkeypatch.setattr(data_parallel_call, "call_on_replicas", later)
    flag.set(True)
    expected = stepped(ks.OneDeviceStrategy("cpu:0"), function, lambda: None, 2)
    flag.set(False)
    with pytest.warns(UserWarning, match="'Max'"):
        found = stepped(ks.MirroredStrategy(DEVICES), function, lambda: None, 2)
    flag.set(False)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_conversion_that_rounds() -> None:
    """The conversion alone differs; replicas exchange a mean that is rounded."""

    def loss(x: Any) -> Any:
        found = ops.mean(ops.square(x)) * 37.0
        return ops.cast(ops.cast(found, "int32"), "float32") if CONFIG.get() else found

    assert not check(CONFIG, lambda: AddLoss(loss))


def test_number_of_rows_in_an_array() -> None:
    """The same functions are called, with other values of an array."""

    def scaled(x: Any) -> Any:
        factor = x.shape[0] / 16 if CONFIG.get() else 0.5
        return ops.multiply(x, np.array([factor], "float32"))

    assert check(CONFIG, lambda: Apply(scaled))


def test_changed_call_that_is_row_wise_is_split_again() -> None:
    ROWS.clear()
    assert not check(CONFIG, lambda: toggled(CONFIG, tanh))
    assert {4, 1} <= set(ROWS) and ROWS.count(8) <= 4, ROWS


@pytest.mark.one_backend("torch", "tensorflow")
def test_numbers_that_change_in_each_call_end_the_split() -> None:
    """Each of them would need a proof."""
    found = []
    for strategy in ks.OneDeviceStrategy("cpu:0"), ks.MirroredStrategy(DEVICES):
        factors: list[float] = [0.0]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = stepped(
                strategy,
                lambda x, factors=factors: x * factors[-1],
                lambda factors=factors: factors.append(factors[-1] + 0.01),
                40,
            )
        found.append(losses)
    text = "what else its code reads, change from call"
    assert any(text in str(each.message) for each in caught)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)

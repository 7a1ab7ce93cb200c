"""Eager calls that compute something else than what was proved are exact.

A flag is read by `call` from where no proof looks for it. A callback changes it between
epochs, so that rows depend on one another. Layers are trained on one device and on two
replicas, with an uneven last batch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from harness.training import assert_same
from keras import layers, ops

import keras_strategies as ks
from keras_strategies.runtime.data_parallel import data_parallel_call
from row_proofs.proofs import needs_split, trained

pytestmark = [pytest.mark.one_backend("torch", "tensorflow"), needs_split]

BACKEND = keras.backend.backend()
RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(25, 6)).astype("float32") + np.linspace(-1, 1, 25)[:, None]
Y = np.sin(X[:, :1])
DEVICES = ["cpu:0", "cpu:1"]


class Flag(NamedTuple):
    """A flag anywhere: how it is assigned, and read by a layer."""

    set: Callable[[bool], Any]
    get: Callable[[], Any]


def in_config() -> Flag:
    return Flag(
        lambda on: keras.config.set_epsilon(1e-5 if on else 1e-7),
        lambda: keras.config.epsilon() > 1e-6,
    )


def in_array() -> Flag:
    values = np.zeros(400_000, "float32")
    return Flag(lambda on: values.__setitem__(7, on), lambda: values[7] > 0)


@pytest.fixture
def file_flag(tmp_path: Path) -> Flag:
    path = tmp_path / "on"
    return Flag(
        lambda on: path.touch() if on else path.unlink(missing_ok=True), path.exists
    )


#: The rows of the calls of `tanh`.
ROWS: list[Any] = []


def tanh(x: Any) -> Any:
    ROWS.append(x.shape[0])
    return ops.tanh(x)


class Unseeded(layers.Layer):
    """Draws from the generator of the framework."""

    def call(self, x: Any) -> Any:
        return x + keras.random.normal(ops.shape(x))


class Toggled(layers.Layer):
    def __init__(self, is_on: Callable[[], Any], change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.is_on, self.change = is_on, change

    def call(self, x: Any) -> Any:
        return self.change(x) if self.is_on() else x * 0.5


def center(x: Any) -> Any:
    return x - ops.max(x, axis=0)


def turned(x: Any) -> Any:
    return ops.take(x * 0.5, np.arange(x.shape[0])[::-1].copy(), axis=0)


CHANGES = {
    "operation": center,
    "operator": lambda x: x * 0.5 + x[:1],
    "axis": lambda x: ops.flip(x, axis=0) * 0.5,
    "take": turned,
    "draws": lambda x: x + keras.random.normal(ops.shape(x)[1:], seed=3),
}


def check(
    flag: Flag, change: Any = center, draw: Any = None, layer: Any = None
) -> list[str]:
    """Fails if two replicas give other numbers; returns the warnings."""
    layer = layer or (lambda: Toggled(flag.get, change))

    def make() -> keras.Model:
        inputs = keras.Input((6,))
        x = layers.Dense(6)(inputs)
        x = draw()(x) if draw else x
        model = keras.Model(inputs, layers.Dense(1)(layer()(x)))
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", run_eagerly=True)
        return model

    def fit(model: keras.Model) -> Any:
        toggle = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: flag.set(epoch == 1),
            on_train_end=lambda logs: flag.set(False),
        )
        options = {"epochs": 3, "shuffle": False, "verbose": 0, "callbacks": [toggle]}
        return model.fit(X, Y, batch_size=8, **options)

    expected, _ = trained(make, fit, ks.OneDeviceStrategy("cpu:0"))
    found, said = trained(make, fit, ks.MirroredStrategy(DEVICES))
    assert_same(expected, found, 1e-5, "two replicas")
    return said


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.parametrize("make", [in_config, in_array])
def test_flag_of_other_objects(make: Callable[[], Flag]) -> None:
    (text,) = check(make())
    assert "'Max' (in layer" in text


def test_flag_in_a_file(file_flag: Flag) -> None:
    assert check(file_flag)


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("draw", [None, lambda: layers.Dropout(0.5), Unseeded])
def test_what_a_flag_changes(kind: str, draw: Any) -> None:
    """Random numbers that replicas drew before are drawn again."""
    texts = check(in_config(), CHANGES[kind], draw)
    assert bool(texts) == (kind != "draws")


def test_flag_that_changes_after_the_proof(monkeypatch: Any) -> None:
    """As by another thread: what replicas call first is not what was proved."""
    flag = in_config()
    split_call = data_parallel_call.call_on_replicas

    def later(*arguments: Any) -> Any:
        flag.set(True)
        return split_call(*arguments)

    monkeypatch.setattr(data_parallel_call, "call_on_replicas", later)

    def step(strategy: Any) -> Any:
        keras.utils.set_random_seed(7)
        with strategy.scope():
            layer = Toggled(flag.get, center)
            model = keras.Sequential([keras.Input((6,)), layers.Dense(6), layer])
            model.compile("sgd", "mse", run_eagerly=True)
        return [float(model.train_on_batch(X, X)) for _ in range(2)]

    flag.set(True)
    expected = step(ks.OneDeviceStrategy("cpu:0"))
    flag.set(False)
    with pytest.warns(UserWarning, match="'Max'"):
        found = step(ks.MirroredStrategy(DEVICES))
    flag.set(False)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


class Rounded(layers.Layer):
    """A loss that is rounded if a flag is on: the conversion alone differs."""

    def __init__(self, is_on: Callable[[], Any]) -> None:
        super().__init__()
        self.is_on = is_on

    def call(self, x: Any) -> Any:
        loss = ops.mean(ops.square(x)) * 37.0
        if self.is_on():
            loss = ops.cast(ops.cast(loss, "int32"), "float32")
        self.add_loss(loss)
        return x


def test_conversion_that_rounds() -> None:
    """It is proved again: replicas exchange a mean that is rounded."""
    flag = in_config()
    assert not check(flag, layer=lambda: Rounded(flag.get))


def test_number_of_rows_in_an_array() -> None:
    """The same functions are called, with other values of an array."""
    flag = in_config()

    def scaled(x: Any) -> Any:
        factor = x.shape[0] / 16 if flag.get() else 0.5
        return ops.multiply(x, np.array([factor], "float32"))

    assert check(flag, layer=lambda: Toggled(lambda: True, scaled))


def test_changed_call_that_is_row_wise_is_split_again() -> None:
    ROWS.clear()
    assert not check(in_config(), tanh)
    assert {4, 1} <= set(ROWS) and ROWS.count(8) <= 4, ROWS


@pytest.mark.one_backend("torch", "tensorflow")
def test_numbers_that_change_in_each_call_end_the_split() -> None:
    """Each of them would need a proof."""
    count = [0.0]

    def scaled(x: Any) -> Any:
        return x * count[0]

    def step(strategy: Any) -> Any:
        keras.utils.set_random_seed(7)
        count[0] = 0.0
        with strategy.scope():
            layer = Toggled(lambda: True, scaled)
            model = keras.Sequential([keras.Input((6,)), layers.Dense(6), layer])
            model.compile("sgd", "mse", run_eagerly=True)
            losses = []
            for _ in range(40):
                count[0] += 0.01
                losses.append(float(model.train_on_batch(X, X)))
        return losses

    expected = step(ks.OneDeviceStrategy("cpu:0"))
    with pytest.warns(UserWarning, match="what else its code reads, change from call"):
        found = step(ks.MirroredStrategy(DEVICES))
    np.testing.assert_allclose(found, expected, rtol=1e-5)

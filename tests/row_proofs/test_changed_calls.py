"""Eager calls that compute something else than what was proved are exact.

What a call depends on changes between epochs: flags anywhere, and settings and state in
objects that layers hold, or that their calls get. A proof, which calls layers too,
leaves it as it was.
"""

from __future__ import annotations

import functools
import itertools
import random
import types
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import scipy.stats
from harness.training import as_arrays, assert_same
from keras import layers, ops

from keras_strategies.rows.row_proofs import RowProofs
from keras_strategies.runtime.data_parallel import data_parallel_call
from row_proofs import proofs
from row_proofs.proofs import Apply, Function, Held, Make, add_loss

pytestmark = [pytest.mark.one_backend("torch", "tensorflow"), proofs.needs_split]

X = proofs.shifted(25)


def check(layer: Make, change: Function, draw: Make | None = None) -> list[str]:
    """Warnings of two replicas, which give the numbers of one device.

    The layer is changed before each epoch, and at the end as in epoch 0. Another layer
    may draw before it.
    """

    def model() -> keras.Model:
        drawing = [draw()] if draw else []
        return proofs.sequential(layers.Dense(6), *drawing, layer(), layers.Dense(1))

    def fit(model: keras.Model) -> Any:
        own = model.layers[-2]
        changes = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: change(own, epoch),
            on_train_end=lambda logs: change(own, 0),
        )
        return proofs.fits(X, np.sin(X[:, :1]), 8, epochs=3, callbacks=[changes])(model)

    make = proofs.compiled(model, 0.01, momentum=0.9, run_eagerly=True)
    return proofs.assert_exact(make, fit, tolerance=1e-5)


def center(x: Any) -> Any:
    return x - ops.max(x, axis=0)


@dataclass
class Config:
    mixes: bool = False
    kept: Any = None


class Slots:
    __slots__ = ("mixes",)

    def __init__(self) -> None:
        self.mixes = False


#: What a layer holds, what it computes, and what changes after an epoch.
Kind = namedtuple("Kind", "make function change", defaults=[lambda held: None])


def setting(make: Make, read: Function, change: Function) -> Kind:
    return Kind(make, lambda held, x: center(x) if read(held) else x, change)


def state(make: Make, read: Function) -> Kind:
    return Kind(make, lambda held, x: x * (1 + 0.02 * read(held)))


def on(held: Any) -> None:
    held.mixes = True


def grown(held: bytearray) -> int:
    held.append(1)
    return len(held)


def normal(held: Any) -> float:
    return 5 * float(held.normal())


def remembered(held: Config, x: Any) -> Any:
    found = x if held.kept is None else x + 0.1 * held.kept
    if held.mixes:  # Not while Keras computes shapes.
        held.kept = ops.stop_gradient(ops.mean(found, axis=0))
    return found


#: What layers hold.
KINDS: dict[str, Kind] = {
    "dataclass": setting(Config, lambda h: h.mixes, on),
    "slots": setting(Slots, lambda h: h.mixes, on),
    "list": setting(lambda: [Config()], lambda h: h[0].mixes, lambda h: on(h[0])),
    "array": setting(lambda: np.zeros(2), lambda h: h[1] > 0, lambda h: h.fill(1)),
    "nested lists": setting(
        lambda: [[[[[[[0]]]]]]],
        lambda h: h[0][0][0][0][0][0][0] > 0,
        lambda h: h[0][0][0][0][0][0].__setitem__(0, 1),
    ),
    "argument of a partial function": setting(
        lambda: functools.partial(dict.get, {"a": 0}, "a"),
        lambda h: h(),
        lambda h: h.args[0].update({"a": 1}),
    ),
    "bytes": state(bytearray, grown),
    "method": state(lambda: functools.partial(grown, bytearray()), lambda h: h()),
    "generator of NumPy": state(lambda: np.random.default_rng(1), normal),
    "random state of NumPy": state(lambda: np.random.RandomState(1), normal),
    "generator of Python": state(lambda: random.Random(1), lambda h: 5 * h.random()),
    "library": state(lambda: None, lambda h: 5 * float(scipy.stats.norm.rvs())),
    "iterator": state(itertools.count, next),
    "generator function": state(lambda: (10 * i for i in range(100)), next),
    "tensor": Kind(Config, remembered, on),
}
if proofs.BACKEND == "torch":
    import torch

    KINDS["generator of Torch"] = Kind(
        lambda: torch.Generator().manual_seed(3),
        lambda held, x: x + torch.rand(x.shape, generator=held),
    )


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("name", KINDS)
def test_what_a_layer_holds(name: str) -> None:
    make, function, change = KINDS[name]
    assert check(lambda: Held(make(), function), lambda o, e: e and change(o.held))


class GivenFunction(layers.Layer):
    def call(self, x: Any, given: Any) -> Any:
        return given(x) if callable(given) else given.function(x)


def _given(kind: str, mixes: bool, given: Any) -> Any:
    factor = 1.0 if mixes else 0.0
    if kind == "closure":
        return lambda h: h - ops.mean(h, 0) if factor > 0 else h
    code = (lambda h: h - ops.mean(h, 0)) if mixes else (lambda h: ops.tanh(h))
    given.function = code
    return code if kind == "code" else given


@pytest.mark.parametrize("kind", ["code", "closure", "object"])
def test_an_argument_that_changes_is_proved_again(kind: str) -> None:
    found = []
    for strategy in proofs.one_device(), proofs.mirrored():
        with strategy.scope():
            layer, given = GivenFunction(), types.SimpleNamespace()
        each = [layer(X, given=_given(kind, mix, given)) for mix in (0, 1, 0, 1)]
        found.append(as_arrays(each))
    assert_same(found[0], found[1], 2e-5, kind)


def test_calls_and_training_change_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    proved, prove = [], RowProofs._proved

    def counted(self: Any, call: Any, *args: Any) -> Any:
        if call.layer is model:  # Losses and metrics are proved, too.
            proved.append(call.layer)
        return prove(self, call, *args)

    monkeypatch.setattr(RowProofs, "_proved", counted)
    with proofs.mirrored().scope():
        held = Held(Config(), KINDS["dataclass"].function)
        model = proofs.sequential(layers.Dense(6), held)
        model.compile("sgd", "mse", run_eagerly=True)
    for _ in range(3):
        model.predict_on_batch(X)
    assert len(proved) == 1
    for _ in range(3):
        model.train_on_batch(X, X)
    # `training` is another argument.
    assert len(proved) == 2


#: A flag where no proof looks for it: how it is assigned, and read by a layer.
Flag = namedtuple("Flag", "set get")
CONFIG = Flag(
    lambda on: keras.config.set_epsilon(1e-5 if on else 1e-7),
    lambda: keras.config.epsilon() > 1e-6,
)
VALUES = np.zeros(400_000, "float32")
ARRAY = Flag(lambda on: VALUES.__setitem__(7, on), lambda: VALUES[7] > 0)
ROWS: list[Any] = []  # Of the calls of `tanh`.


def tanh(x: Any) -> Any:
    ROWS.append(x.shape[0])
    return ops.tanh(x)


def unseeded() -> layers.Layer:
    return Apply(lambda x: x + keras.random.normal(ops.shape(x)))


def flagged(layer: Make, flag: Flag = CONFIG, draw: Make | None = None) -> Any:
    """As `check`; the flag is set in the second of three epochs."""
    return check(layer, lambda layer, epoch: flag.set(epoch == 1), draw)


def toggled(flag: Flag, change: Function) -> layers.Layer:
    return Apply(lambda x: change(x) if flag.get() else x * 0.5)


CHANGES = {
    "operation": center,
    "operator": lambda x: x * 0.5 + x[:1],
    "axis": lambda x: ops.flip(x, axis=0) * 0.5,
    "take": lambda x: ops.take(x * 0.5, np.arange(len(x))[::-1].copy(), axis=0),
    "draws": lambda x: x + keras.random.normal(ops.shape(x)[1:], seed=3),
}


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.parametrize("flag", [CONFIG, ARRAY], ids=["config", "array"])
def test_flag_of_other_objects(flag: Flag) -> None:
    (text,) = flagged(lambda: toggled(flag, center), flag)
    assert "'Max' (in layer" in text


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("draw", [None, lambda: layers.Dropout(0.5), unseeded])
def test_what_a_flag_changes(kind: str, draw: Any) -> None:
    """Random numbers that replicas drew before are drawn again."""
    texts = flagged(lambda: toggled(CONFIG, CHANGES[kind]), draw=draw)
    assert bool(texts) == (kind != "draws")


def stepped(strategy: Any, function: Function, before: Make, steps: int) -> list[float]:
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = proofs.sequential(layers.Dense(6), Apply(function))
        model.compile("sgd", "mse", run_eagerly=True)
    losses = []
    for _ in range(steps):
        before()
        losses.append(float(model.train_on_batch(X, X)))
    return losses


def test_flag_that_changes_after_the_proof(monkeypatch: Any) -> None:
    """As by another thread: what replicas call first is not what was proved."""
    split_call = data_parallel_call.call_on_replicas

    def later(*arguments: Any) -> Any:
        CONFIG.set(True)
        return split_call(*arguments)

    function = toggled(CONFIG, center).function
    monkeypatch.setattr(data_parallel_call, "call_on_replicas", later)
    CONFIG.set(True)
    expected = stepped(proofs.one_device(), function, lambda: None, 2)
    CONFIG.set(False)
    with pytest.warns(UserWarning, match="'Max'"):
        found = stepped(proofs.mirrored(), function, lambda: None, 2)
    CONFIG.set(False)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_conversion_that_rounds() -> None:
    """The conversion alone differs; replicas exchange a mean that is rounded."""

    def loss(x: Any) -> Any:
        found = ops.mean(ops.square(x)) * 37.0
        return ops.cast(ops.cast(found, "int32"), "float32") if CONFIG.get() else found

    assert not flagged(lambda: add_loss(loss))


def test_number_of_rows_in_an_array() -> None:
    """The same functions are called, with other values of an array."""

    def scaled(x: Any) -> Any:
        factor = x.shape[0] / 16 if CONFIG.get() else 0.5
        return ops.multiply(x, np.array([factor], "float32"))

    assert flagged(lambda: Apply(scaled))


def test_changed_call_that_is_row_wise_is_split_again() -> None:
    ROWS.clear()
    assert not flagged(lambda: toggled(CONFIG, tanh))
    assert {4, 1} <= set(ROWS) and ROWS.count(8) <= 4, ROWS


@pytest.mark.one_backend("torch", "tensorflow")
def test_numbers_that_change_in_each_call_end_the_split() -> None:
    """Each of them would need a proof."""

    def losses(strategy: Any) -> list[float]:
        factors = [0.0]

        def grow() -> None:
            factors.append(factors[-1] + 0.01)

        return stepped(strategy, lambda x: x * factors[-1], grow, 40)

    expected = losses(proofs.one_device())
    with pytest.warns(UserWarning, match="what else its code reads, change from call"):
        found = losses(proofs.mirrored())
    np.testing.assert_allclose(found, expected, rtol=1e-5)

"""Settings and state in objects that layers hold, or that their calls get.

What a call depends on is proved again where it changes, and a proof, which calls layers
too, leaves it as it was.
"""

from __future__ import annotations

import functools
import itertools
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import scipy.stats
from harness.training import as_arrays, assert_same
from keras import layers, ops

import keras_strategies as ks
from keras_strategies.rows.row_proofs import RowProofs
from row_proofs.proofs import assert_exact, needs_split

pytestmark = [pytest.mark.one_backend("torch", "tensorflow"), needs_split]

BACKEND = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
DEVICES = ["cpu:0", "cpu:1"]


@dataclass
class Config:
    mixes: bool = False
    kept: Any = None


class Slots:
    __slots__ = ("mixes",)

    def __init__(self) -> None:
        self.mixes = False


class Held(layers.Layer):
    """A function of what it holds and of its input."""

    def __init__(self, held: Any, function: Callable[[Any, Any], Any]):
        super().__init__()
        self.held, self.function = held, function

    def call(self, x: Any) -> Any:
        return self.function(self.held, x)


class Kind(NamedTuple):
    """What a layer holds, what it computes, and what a callback changes later."""

    make: Callable[[], Any]
    function: Callable[[Any, Any], Any]
    change: Callable[[Any], Any] = lambda held: None


def setting(
    make: Callable[[], Any], read: Callable[[Any], Any], change: Callable[[Any], Any]
) -> Kind:
    return Kind(make, lambda h, x: x - ops.max(x, 0) if read(h) else x, change)


def state(make: Callable[[], Any], read: Callable[[Any], float]) -> Kind:
    return Kind(make, lambda held, x: x * (1 + 0.02 * read(held)))


def on(held: Any) -> None:
    held.mixes = True


def grown(held: bytearray) -> int:
    held.append(1)
    return len(held)


def remembered(held: Config, x: Any) -> Any:
    """Reads a tensor of the call before."""
    found = x if held.kept is None else x + 0.1 * held.kept
    if held.mixes:  # Not while Keras computes shapes.
        held.kept = ops.stop_gradient(ops.mean(found, axis=0))
    return found


def drawn(held: Any, x: Any) -> Any:
    """A draw of Torch by a generator of the layer's."""
    import torch

    return x + torch.rand(x.shape, generator=held)


KINDS: dict[str, Kind] = {
    "dataclass": setting(Config, lambda h: h.mixes, on),
    "slots": setting(Slots, lambda h: h.mixes, on),
    "list of objects": setting(
        lambda: [Config()], lambda h: h[0].mixes, lambda h: on(h[0])
    ),
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
    "generator of NumPy": state(
        lambda: np.random.default_rng(1), lambda h: 5 * float(h.normal())
    ),
    "random state of NumPy": state(
        lambda: np.random.RandomState(1), lambda h: 5 * float(h.normal())
    ),
    "generator of Python": state(lambda: random.Random(1), lambda h: 5 * h.random()),
    "library": state(lambda: None, lambda h: 5 * float(scipy.stats.norm.rvs())),
    "iterator": state(itertools.count, next),
    "generator function": state(lambda: (10 * i for i in range(100)), next),
    "tensor": Kind(Config, remembered, on),
}
if BACKEND == "torch":
    import torch

    KINDS["generator of Torch"] = Kind(lambda: torch.Generator().manual_seed(3), drawn)


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("name", KINDS)
def test_numbers_are_those_of_one_device(name: str) -> None:
    kind = KINDS[name]

    def make() -> keras.Model:
        held = Held(kind.make(), kind.function)
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(4), held, layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.02), "mse", run_eagerly=True)
        return model

    def fit(model: keras.Model) -> Any:
        change = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: (
                epoch and kind.change(model.layers[1].held)
            )
        )
        options = {"epochs": 2, "shuffle": False, "verbose": 0, "callbacks": [change]}
        return model.fit(X, X[:, :1], batch_size=9, **options)

    assert assert_exact(make, fit)


class GivenFunction(layers.Layer):
    """Applies a function, or the one of an object, that its call gets."""

    def call(self, x: Any, given: Any) -> Any:
        return given(x) if callable(given) else given.function(x)


def _given(kind: str, mixes: bool, given: Any) -> Any:
    factor = 1.0 if mixes else 0.0
    if kind == "code":
        return (lambda h: h - ops.mean(h, 0)) if mixes else (lambda h: ops.tanh(h))
    if kind == "closure":
        return lambda h: h - ops.mean(h, 0) if factor > 0 else h
    given.function = (lambda h: h - ops.mean(h, 0)) if mixes else ops.tanh
    return given


@pytest.mark.parametrize("kind", ["code", "closure", "object"])
def test_an_argument_that_changes_is_proved_again(kind: str) -> None:
    found = []
    for strategy in ks.OneDeviceStrategy("cpu:0"), ks.MirroredStrategy(DEVICES):
        with strategy.scope():
            layer, given = GivenFunction(), types.SimpleNamespace()
        outputs = [
            layer(X, given=_given(kind, mixes, given))
            for mixes in (False, True, False, True)
        ]
        found.append(as_arrays([ops.convert_to_numpy(each) for each in outputs]))
    assert_same(found[0], found[1], 2e-5, kind)


def test_calls_and_training_change_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = []
    prove = RowProofs._proved

    def counted(self: Any, call: Any, *args: Any) -> Any:
        if call.layer is model:  # Losses and metrics are proved, too.
            proofs.append(call.layer)
        return prove(self, call, *args)

    monkeypatch.setattr(RowProofs, "_proved", counted)
    with ks.MirroredStrategy(DEVICES).scope():
        layers_ = [layers.Dense(4), Held(Config(), KINDS["dataclass"].function)]
        model = keras.Sequential([keras.Input((4,)), *layers_])
        model.compile("sgd", "mse", run_eagerly=True)
    for _ in range(3):
        model.predict_on_batch(X)
    assert len(proofs) == 1
    for _ in range(3):
        model.train_on_batch(X, X)
    # `training` is another argument.
    assert len(proofs) == 2

"""Settings in objects that layers hold: what a call depends on is proved again."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import as_arrays, assert_same
from keras import layers, ops

import keras_strategies as ks
from keras_strategies.rows.row_proofs import RowProofs
from row_proofs.proofs import SPLITS

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

BACKEND = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")


@dataclass
class Config:
    mixes: bool = False


class Plain:
    def __init__(self) -> None:
        self.config = Config()


class Slots:
    __slots__ = ("mixes",)

    def __init__(self) -> None:
        self.mixes = False


class Held(layers.Layer):
    """Mixes rows where a setting that it holds says so."""

    def __init__(self, held: Any, read: Callable[[Any], bool]):
        super().__init__()
        self.held, self.read = held, read

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(4, 4), name="kernel")

    def call(self, inputs: Any) -> Any:
        hidden = ops.matmul(inputs, self.kernel)
        return hidden - ops.mean(hidden, 0) if self.read(self.held) else hidden


def _set(held: Any) -> None:
    held.mixes = True


KINDS: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "dataclass": (Config, lambda h: h.mixes, _set),
    "slots": (Slots, lambda h: h.mixes, _set),
    "list of objects": (lambda: [Config()], lambda h: h[0].mixes, lambda h: _set(h[0])),
    "array": (lambda: np.zeros(2), lambda h: h[1] > 0, lambda h: h.fill(1)),
    "nested lists": (
        lambda: [[[[[[[0]]]]]]],
        lambda h: h[0][0][0][0][0][0][0] > 0,
        lambda h: h[0][0][0][0][0][0].__setitem__(0, 1),
    ),
    "argument of a partial function": (
        lambda: functools.partial(dict.get, {"a": 0}, "a"),
        lambda h: h(),
        lambda h: h.args[0].update({"a": 1}),
    ),
}


@pytest.mark.one_backend("torch")
@pytest.mark.skipif(BACKEND not in SPLITS, reason="this backend has no prover")
@pytest.mark.parametrize("name", KINDS)
def test_a_setting_in_an_object_is_proved_again(name: str) -> None:
    make, read, change = KINDS[name]
    found = []
    for strategy in (None, ks.MirroredStrategy(["cpu:0", "cpu:1"])):
        keras.utils.set_random_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer = Held(make(), read)
            if strategy is not None:
                with strategy.scope():
                    layer = Held(make(), read)
                    model = keras.Sequential([keras.Input((4,)), layer])
                    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
            else:
                model = keras.Sequential([keras.Input((4,)), layer])
                model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
            losses = [float(model.train_on_batch(X, X))]
            change(layer.held)
            losses += [float(model.train_on_batch(X, X)) for _ in range(2)]
        found.append(as_arrays({"losses": losses, "weights": model.get_weights()}))
    assert_same(found[0], found[1], 2e-5, name)


class GivenFunction(keras.Model):
    """Applies a function, or the one of an object, that its call gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(4), layers.Dense(1)
        self.first.build((None, 4))
        self.last.build((None, 4))
        self.built = True

    def call(self, inputs: Any, given: Any = None) -> Any:
        hidden = self.first(inputs)
        if given is not None:
            hidden = given(hidden) if callable(given) else given.function(hidden)
        return self.last(hidden)


@dataclass
class Given:
    function: Callable[[Any], Any]


def _given(kind: str, mixes: bool, given: Given) -> Any:
    factor = 1.0 if mixes else 0.0
    if kind == "code":
        return (lambda h: h - ops.mean(h, 0)) if mixes else (lambda h: ops.tanh(h))
    if kind == "closure":
        return lambda h: h - ops.mean(h, 0) if factor > 0 else h
    given.function = (lambda h: h - ops.mean(h, 0)) if mixes else ops.tanh
    return given


@pytest.mark.skipif(BACKEND not in SPLITS, reason="this backend has no prover")
@pytest.mark.parametrize("kind", ["code", "closure", "object"])
def test_an_argument_that_changes_is_proved_again(kind: str) -> None:
    found = []
    for strategy in (None, ks.MirroredStrategy(["cpu:0", "cpu:1"])):
        keras.utils.set_random_seed(3)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = GivenFunction()
        outputs, given = [], Given(ops.tanh)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for mixes in (False, True, False, True):
                outputs.append(model(X, given=_given(kind, mixes, given)))
        found.append(as_arrays([keras.ops.convert_to_numpy(o) for o in outputs]))
    assert_same(found[0], found[1], 2e-5, kind)


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.skipif(BACKEND not in SPLITS, reason="this backend has no prover")
def test_calls_and_training_change_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = []
    prove = RowProofs._proved

    def counted(self: Any, call: Any, *args: Any) -> Any:
        if call.layer is model:  # Losses and metrics are proved, too.
            proofs.append(call.layer)
        return prove(self, call, *args)

    monkeypatch.setattr(RowProofs, "_proved", counted)
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        layer = Held(Config(), lambda held: held.mixes)
        model = keras.Sequential([keras.Input((4,)), layer])
        model.compile("sgd", "mse", run_eagerly=True)
    for _ in range(3):
        model.predict_on_batch(X)
    assert len(proofs) == 1
    for _ in range(3):
        model.train_on_batch(X, X)
    # `training` is another argument.
    assert len(proofs) == 2

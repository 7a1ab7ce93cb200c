"""Settings in objects that layers hold: what a call depends on is proved again."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import os
import queue
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
from harness.training import as_arrays, assert_same
from keras import layers, ops

import keras_strategies as ks
from keras_strategies.runtime.row_proofs.layer_settings import (
    ArgumentSettings,
    LayerSettings,
)
from keras_strategies.runtime.row_proofs.row_proofs import RowProofs
from row_proofs import case_layers
from row_proofs.proofs import PROVERS

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


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    yield
    os.environ.pop("KERAS_STRATEGIES_TEST_MIXES", None)


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


def _unset(config: Config) -> Config:
    config.mixes = False
    return config


KINDS: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "dataclass": (Config, lambda h: h.mixes, _set),
    "object": (Plain, lambda h: h.config.mixes, lambda h: _set(h.config)),
    "slots": (Slots, lambda h: h.mixes, _set),
    "list of objects": (lambda: [Config()], lambda h: h[0].mixes, lambda h: _set(h[0])),
    "dict": (lambda: {"a": 0}, lambda h: h["a"], lambda h: h.update({"a": 1})),
    "long list": (
        lambda: [0.0] * 20,
        lambda h: h[19] > 0,
        lambda h: h.__setitem__(19, 1.0),
    ),
    "array": (lambda: np.zeros(2), lambda h: h[1] > 0, lambda h: h.fill(1)),
    "longer list": (
        lambda: [0] * 300,
        lambda h: h[299] > 0,
        lambda h: h.__setitem__(299, 1),
    ),
    "longer array": (
        lambda: np.zeros(600),
        lambda h: h[599] > 0,
        lambda h: h.__setitem__(599, 1),
    ),
    "nested lists": (
        lambda: [[[[[[[0]]]]]]],
        lambda h: h[0][0][0][0][0][0][0] > 0,
        lambda h: h[0][0][0][0][0][0].__setitem__(0, 1),
    ),
    "dict of a module of Python": (
        lambda: collections.UserDict(a=0),
        lambda h: h["a"],
        lambda h: h.update({"a": 1}),
    ),
    "argument of a partial function": (
        lambda: functools.partial(dict.get, {"a": 0}, "a"),
        lambda h: h(),
        lambda h: h.args[0].update({"a": 1}),
    ),
    "weak reference": (
        lambda: weakref.ref(_unset(CONFIG)),
        lambda h: h().mixes,
        lambda h: _set(h()),
    ),
}
#: Reached by a weak reference only.
CONFIG = Config()


@pytest.mark.skipif(BACKEND not in PROVERS, reason="this backend has no prover")
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


MIXES = False


class Settings:
    mixes = False


def helper() -> bool:
    return MIXES


def _of_closure() -> tuple[Callable[[], bool], Callable[[bool], None]]:
    mixes = False

    def change(value: bool) -> None:
        nonlocal mixes
        mixes = value

    return lambda: mixes, change


def _set_global(value: bool) -> None:
    global MIXES
    MIXES = value


def _set_of_module(value: bool) -> None:
    case_layers.mixes = value  # type: ignore[attr-defined]


def _set_environment(value: bool) -> None:
    os.environ["KERAS_STRATEGIES_TEST_MIXES"] = str(int(value))


def _set_queue(value: bool) -> None:
    while QUEUE.qsize():
        QUEUE.get()
    if value:
        QUEUE.put(True)


def _set_of_layer(value: bool) -> None:
    OTHER[0].mixes = value


class OfClassOfClasses(type):
    @property
    def mixes(cls) -> bool:
        return MIXES


class WithClass(metaclass=OfClassOfClasses):
    pass


class Descriptor:
    def __get__(self, owner: Any, kind: Any) -> bool:
        return MIXES


class WithDescriptor:
    mixes = Descriptor()
    options: ClassVar = {"mixes": False}


OF_CLOSURE, SET_CLOSURE = _of_closure()
OF_CONTEXT = contextvars.ContextVar("OF_CONTEXT", default=False)
OF_THREAD = threading.local()
QUEUE = queue.SimpleQueue[bool]()
OTHER = [layers.Identity()]
#: What a function reads that no layer holds, and its assignment.
OUTSIDE: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "global": (lambda: MIXES, _set_global),
    "global of a function": (helper, _set_global),
    "global of a function within": (lambda: (lambda: helper())(), _set_global),
    "attribute of a class": (
        lambda: Settings.mixes,
        lambda value: setattr(Settings, "mixes", value),
    ),
    "attribute of a module": (lambda: case_layers.mixes, _set_of_module),
    "variable of a closure": (OF_CLOSURE, SET_CLOSURE),
    "context variable": (lambda: OF_CONTEXT.get(), OF_CONTEXT.set),
    "environment": (
        lambda: os.environ["KERAS_STRATEGIES_TEST_MIXES"] == "1",
        _set_environment,
    ),
    "name in the text of the code": (lambda: globals()["MIXES"], _set_global),
    "name in the modules": (lambda: sys.modules[__name__].MIXES, _set_global),
    "attribute of another layer": (lambda: OTHER[0].mixes, _set_of_layer),
    "property of a class of classes": (lambda: WithClass.mixes, _set_global),
    "descriptor": (lambda: WithDescriptor().mixes, _set_global),
    "dict of a class": (
        lambda: WithDescriptor.options["mixes"],
        lambda value: WithDescriptor.options.update(mixes=value),
    ),
    "thread": (
        lambda: getattr(OF_THREAD, "mixes", False),
        lambda value: setattr(OF_THREAD, "mixes", value),
    ),
    "queue": (
        lambda: QUEUE.qsize() > 0,
        _set_queue,
    ),
}


@pytest.mark.skipif(BACKEND not in PROVERS, reason="this backend has no prover")
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_setting_outside_of_layers_is_proved_again(name: str) -> None:
    read, change = OUTSIDE[name]
    found = []
    for strategy in (None, ks.MirroredStrategy(["cpu:0", "cpu:1"])):
        keras.utils.set_random_seed(3)
        change(False)
        with (
            warnings.catch_warnings(),
            strategy.scope() if strategy else contextlib.nullcontext(),
        ):
            warnings.simplefilter("ignore")
            layer = Held(None, lambda held: read())
            model = keras.Sequential([keras.Input((4,)), layer])
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
            losses = [float(model.train_on_batch(X, X))]
            change(True)
            losses += [float(model.train_on_batch(X, X)) for _ in range(2)]
            change(False)
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


@pytest.mark.skipif(BACKEND not in PROVERS, reason="this backend has no prover")
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


def test_functions_with_equal_code_share_a_proof() -> None:
    first, second, third = (_given("closure", mixes, None) for mixes in (0, 0, 1))
    tokens = [ArgumentSettings(each).token for each in (first, second, third)]
    assert tokens[0] == tokens[1] != tokens[2]


def test_what_installed_packages_hold_is_not_followed() -> None:
    # By way of their modules, code can reach millions of values.
    settings = LayerSettings(Held(None, lambda held: getattr(pytest, "mixes", False)))
    settings.number()
    assert not settings.problem
    assert settings._values._count < 1000


def test_many_values_are_a_problem() -> None:
    few, many = Held([0] * 10, bool), Held([[0] * 1000 for _ in range(300)], bool)
    for layer, expected in ((few, False), (many, True)):
        settings = LayerSettings(layer)
        settings.number()
        assert ("too many" in settings.problem) is expected


class Counter:
    __slots__ = ("calls", "last")

    def __init__(self) -> None:
        self.calls = 0


class Counting(layers.Layer):
    """Counts its calls in an object with `__slots__`, which also keeps a tensor."""

    def __init__(self, keeps: bool):
        super().__init__()
        self.counter, self.keeps = [Counter()], keeps

    def call(self, inputs: Any) -> Any:
        self.counter[0].calls += 1
        if self.keeps:
            self.counter[0].last = inputs
        return inputs * 2.0


@pytest.mark.skipif(BACKEND not in PROVERS, reason="this backend has no prover")
@pytest.mark.parametrize("keeps", [False, True])
def test_slots_are_seen(keeps: bool) -> None:
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        layer = Counting(keeps)
        model = keras.Sequential([keras.Input((4,)), layer, layers.Dense(1)])
        model.compile(run_eagerly=True)
    before = layer.counter[0].calls
    with pytest.warns(UserWarning, match="split by rows: its code"):
        model.predict_on_batch(X)
    assert layer.counter[0].calls - before == 1
    if keeps:
        assert layer.counter[0].last.shape == (22, 4)


@pytest.mark.skipif(BACKEND not in PROVERS, reason="this backend has no prover")
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

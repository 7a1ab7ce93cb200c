"""Python state that calls change: proofs call layers too, and leave it as it was."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import scipy.stats
from harness.training import as_arrays, assert_same
from keras import layers, ops

import keras_strategies as ks

BACKEND = keras.backend.backend()
if BACKEND == "jax":
    pytest.skip("JAX has no proofs", allow_module_level=True)

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

X = np.random.default_rng(4).normal(size=(17, 4)).astype("float32")


class Held:
    """What layers hold, and how they read a number of it that changes."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.numbers = np.random.default_rng(1)
        self.state = np.random.RandomState(1)
        self.random = random.Random(1)
        self.count = itertools.count()
        self.generated = (10 * i for i in range(100))

    def grown(self) -> int:
        self.bytes.append(1)
        return len(self.bytes)


STATES: dict[str, Callable[[Held], float]] = {
    "bytes": lambda held: held.grown(),
    "method": lambda held: held.grown(),
    "generator of NumPy": lambda held: 5 * float(held.numbers.normal()),
    "random state of NumPy": lambda held: 5 * float(held.state.normal()),
    "generator of Python": lambda held: 5 * held.random.random(),
    "library": lambda held: 5 * float(scipy.stats.norm.rvs()),
    "iterator": lambda held: next(held.count),
    "generator function": lambda held: next(held.generated),
}


class Stateful(layers.Layer):
    """Its factor follows from state."""

    def __init__(self, name_of_state: str) -> None:
        super().__init__()
        held = Held()
        self.read = STATES[name_of_state]
        self.held: Any = held.grown if name_of_state == "method" else held

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(4, 4), name="kernel")

    def call(self, x: Any) -> Any:
        held = getattr(self.held, "__self__", self.held)
        return ops.matmul(x, self.kernel) * (1 + 0.02 * self.read(held))


class Remembering(layers.Layer):
    """Reads a tensor of the call before."""

    before: Any = None

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(4, 4), name="kernel")

    def call(self, x: Any, training: bool = False) -> Any:
        found = ops.matmul(x, self.kernel)
        if self.before is not None:
            found = found + 0.1 * self.before
        if training:  # Not while Keras computes shapes.
            self.before = ops.stop_gradient(ops.mean(found, axis=0))
        return found


def trained(name: str, strategy: Any) -> Any:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layer = Remembering() if name == "tensor" else Stateful(name)
        model = keras.Sequential([keras.Input((4,)), layer, layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.02), "mse", run_eagerly=True)
    history = model.fit(X, X[:, :1], batch_size=7, epochs=2, shuffle=False, verbose=0)
    return as_arrays((history.history["loss"], model.get_weights()))


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("name", [*STATES, "tensor"])
def test_state_is_that_of_one_device(name: str) -> None:
    expected = trained(name, ks.OneDeviceStrategy("cpu:0"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(name, ks.MirroredStrategy(["cpu:0", "cpu:1"]))
    assert_same(expected, found, 1e-5, name)
    assert any("cannot be split by rows" in str(each.message) for each in caught)


@pytest.mark.one_backend("torch")
@pytest.mark.skipif(BACKEND != "torch", reason="a generator of Torch")
def test_a_generator_of_torch_in_a_layer() -> None:
    import torch

    class Noisy(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = torch.Generator().manual_seed(3)

        def call(self, x: Any) -> Any:
            return x + torch.rand(x.shape, generator=self.numbers)

    def train(strategy: Any) -> Any:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), Noisy(), layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.02), "mse")
        model.fit(X, X[:, :1], batch_size=7, epochs=2, shuffle=False, verbose=0)
        return as_arrays(model.get_weights())

    expected = train(ks.OneDeviceStrategy("cpu:0"))
    with pytest.warns(UserWarning, match="uses 'torch' in 'call'"):
        found = train(ks.MirroredStrategy(["cpu:0", "cpu:1"]))
    assert_same(expected, found, 1e-5, "generator")

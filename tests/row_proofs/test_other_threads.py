"""Row proofs while other threads draw random numbers and train."""

from __future__ import annotations

import random
import threading
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

pytestmark = pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="JAX's programs need no row proofs"
)

X = np.random.default_rng(1).normal(size=(7, 4)).astype("float32")


class Drawer(threading.Thread):
    """Draws from the global generators of Python and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Any] = []
        self.another = threading.Condition()
        self.ends = threading.Event()

    def run(self) -> None:
        while not self.ends.wait(0.005):
            numbers = random.random(), float(np.random.normal()), random.randrange(100)
            self.drawn.append(numbers)
            with self.another:
                self.another.notify_all()


class WithDrawer(layers.Layer):
    """Multiplies, after another thread has drawn."""

    def __init__(self, drawer: Drawer):
        super().__init__()
        # Not the numbers, whose changes a proof would follow.
        self.another = drawer.another

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 2))

    def call(self, x: Any) -> Any:
        with self.another:
            self.another.wait(0.1)
        return ops.tanh(x @ self.kernel)


@pytest.mark.one_backend("torch", "tensorflow")
def test_numbers_that_another_thread_draws_are_not_drawn_again() -> None:
    # Such as the thread of a dataset that reads ahead from a generator.
    drawer = Drawer()
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((4,)), WithDrawer(drawer)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    random.seed(5)
    np.random.seed(5)
    drawer.start()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*cannot be split")
            model.fit(X, np.ones((7, 2)), batch_size=7, verbose=0)
    finally:
        drawer.ends.set()
        drawer.join()
    python, numpy = random.Random(5), np.random.RandomState(5)
    assert drawer.drawn == [
        (python.random(), float(numpy.normal()), python.randrange(100))
        for _ in drawer.drawn
    ]
    assert drawer.drawn

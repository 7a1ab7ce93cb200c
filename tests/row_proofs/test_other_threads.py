"""Row proofs while other threads draw random numbers and train."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import warnings
from collections.abc import Iterator
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


class Drawer:
    """A thread that draws from the global generators of Python and NumPy.

    Args:
        seed: int, the seed of both.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._drawn = queue.SimpleQueue[tuple[float, float, int]]()
        self.another = threading.Condition()
        self._ends = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        random.seed(self.seed)
        np.random.seed(self.seed)
        thread = threading.Thread(target=self._draw)
        thread.start()
        try:
            yield
        finally:
            self._ends.set()
            thread.join()

    def _draw(self) -> None:
        while not self._ends.wait(0.005):
            numbers = random.random(), float(np.random.normal()), random.randrange(100)
            self._drawn.put(numbers)
            with self.another:
                self.another.notify_all()

    def drawn(self) -> list[tuple[float, float, int]]:
        return [self._drawn.get() for _ in range(self._drawn.qsize())]


def expected_draws(seed: int, count: int) -> list[tuple[float, float, int]]:
    python, numpy = random.Random(seed), np.random.RandomState(seed)
    return [
        (python.random(), float(numpy.normal()), python.randrange(100))
        for _ in range(count)
    ]


class WithDrawer(layers.Layer):
    """Multiplies, after another thread has drawn."""

    def __init__(self, drawer: Drawer):
        super().__init__()
        # Not the queue, whose state a proof cannot follow.
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
    drawer = Drawer(5)
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((4,)), WithDrawer(drawer)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    with warnings.catch_warnings(), drawer.running():
        warnings.filterwarnings("error", ".*cannot be split")
        model.fit(X, np.ones((7, 2)), batch_size=7, verbose=0)
    drawn = drawer.drawn()
    assert drawn == expected_draws(5, len(drawn)) and drawn

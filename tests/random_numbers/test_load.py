"""Runs with one seed are equal bit for bit, whatever other threads do meanwhile."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

_RANDOM = np.random.default_rng(3)
IMAGES = _RANDOM.uniform(size=(11, 6, 6, 3)).astype("float32")
LABELS = np.eye(2, dtype="float32")[_RANDOM.integers(0, 2, 11)]


class Mixed(layers.Layer):
    """Mixes images, which Keras does by numbers of several distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = layers.MixUp(seed=4)

    def build(self, shape: Any) -> None:
        """It has no variables."""

    def call(self, images: Any, training: bool = False) -> Any:
        labels = ops.ones((ops.shape(images)[0], 2))
        data = {"images": images, "labels": labels}
        return self.mixing(data, training=training)["images"]


class Counted(layers.Layer):
    """Keeps what a call has drawn in an attribute until its end."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(8)
        self.noise: Any = None

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        self.noise = keras.random.normal(ops.shape(x), seed=self.seed)
        found = x + 0.1 * self.noise
        self.noise = None
        return found


@contextlib.contextmanager
def load() -> Iterator[None]:
    """Threads that run Python in bursts, with more switches than by default."""
    ended = threading.Event()

    def burn() -> None:
        while not ended.wait(0.001):
            sum(i * i for i in range(20_000))

    threads = [threading.Thread(target=burn) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-3)
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()


def trained(is_small: bool) -> list[np.ndarray]:
    """Losses and weights; the outputs of the model stay on replicas on Torch.

    Args:
        is_small: bool, whether the model omits what takes long to compile.
    """
    keras.utils.set_random_seed(6)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    with strategy.scope():
        first: list[layers.Layer] = [] if is_small else [Mixed()]
        second = layers.SimpleRNN(5, dropout=0.3, recurrent_dropout=0.2)
        model = keras.Sequential(
            [
                keras.Input((6, 6, 3)),
                *first,
                keras.Sequential(
                    [
                        layers.Reshape((3, 36)),
                        layers.Dropout(0.3),
                        layers.Flatten() if is_small else second,
                        Counted(),
                        layers.Dense(2, "softmax"),
                    ]
                ),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.1), "categorical_crossentropy", metrics=["accuracy"]
        )
    history = model.fit(
        IMAGES, LABELS, batch_size=6, epochs=1, shuffle=False, verbose=0
    ).history
    return [*(np.asarray(each) for each in history.values()), *model.get_weights()]


@pytest.mark.nightly
@pytest.mark.parametrize("is_small", [True, False])
def test_three_runs_under_load_are_equal(is_small: bool) -> None:
    expected = trained(is_small)
    with load():
        for _ in range(2):
            for one, other in zip(expected, trained(is_small), strict=True):
                np.testing.assert_array_equal(one, other)

"""`Resume` on parameter servers, and from there to one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.training.resume import resume_callback
from parameter_server import clusters

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.multiprocess,
]


class Interrupted(Exception):
    """An interruption of training."""


class Interruption(keras.callbacks.Callback):
    """Ends training after a number of steps."""

    def __init__(self, after: int):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise Interrupted


def fit(model: Any, folder: Path, after: int = 0) -> Any:
    x, y = clusters.clicks()
    resume = ks.callbacks.Resume(folder, every_steps=3)
    try:
        return model.fit(
            x,
            y,
            batch_size=8,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[resume, Interruption(after)],
        )
    finally:
        resume.wait()


def test_a_resumed_training_equals_one_device(synchronous, tmp_path: Path) -> None:
    def build() -> Any:
        keras.utils.set_random_seed(5)
        return clusters.two_inputs(keras.optimizers.SGD(0.05, momentum=0.9))

    expected = build()
    whole = fit(expected, tmp_path / "whole")
    with synchronous.scope():
        first = build()
    with pytest.raises(Interrupted):
        fit(first, tmp_path / "parts", after=16)
    with synchronous.scope():
        second = build()
    found = fit(second, tmp_path / "parts")
    for log, numbers in whole.history.items():
        np.testing.assert_allclose(found.history[log], numbers, rtol=1e-4, err_msg=log)
    pairs = zip(
        clusters.values(second.weights), clusters.values(expected.weights), strict=True
    )
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    resume_callback.finished_directories.clear()

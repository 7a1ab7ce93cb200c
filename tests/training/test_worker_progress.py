"""The progress bar of several workers, and the lines of a cluster that starts."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from keras_strategies.training.progress_bar import (
    WorkerProgress,
    with_progress,
)

pytestmark = pytest.mark.one_backend


def bar(computing: list[int], total: int = 3) -> WorkerProgress:
    return WorkerProgress(lambda: computing[0], lambda: total)


@pytest.mark.parametrize("verbose", [1, 2])
def test_the_bar_says_how_many_workers_compute(verbose, capsys) -> None:
    computing = [3]

    class Loses(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            computing[0] = 3 - epoch

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((4, 1), "float32")
    callbacks = with_progress([Loses()], verbose, bar(computing))
    model.fit(x, x, epochs=2, batch_size=2, verbose=verbose, callbacks=callbacks)
    first, second = capsys.readouterr().out.split("Epoch 2/2")
    assert "/step on 3 workers - loss: " in first
    assert "/step on 2 of 3 workers - loss: " in second


@pytest.mark.parametrize("method", ["train", "test", "predict"])
def test_the_bar_counts_forwards(method) -> None:
    ours = bar([1])
    ours.set_params({"verbose": 1, "epochs": 1, "steps": 9})
    begin = {"train": lambda: ours.on_epoch_begin(0)}.get(
        method, lambda: getattr(ours, f"on_{method}_begin")()
    )
    for _ in range(2):
        begin()
        seen = []
        for batch in (0, 2, 1, 4, 3):
            getattr(ours, f"on_{method}_batch_end")(batch, {"loss": 1.0})
            seen.append(ours.seen)
        assert seen == [1, 3, 3, 5, 5]

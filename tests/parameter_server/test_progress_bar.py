"""The progress bar of steps that end in any order."""

from __future__ import annotations

import keras
import pytest

from keras_strategies.training.progress_bar import WorkerProgress

pytestmark = pytest.mark.one_backend


@pytest.mark.parametrize("kind", ["train", "test", "predict"])
def test_a_bar_counts_forwards(monkeypatch, kind: str) -> None:
    shown: list[int] = []
    monkeypatch.setattr(
        keras.callbacks.ProgbarLogger,
        f"on_{kind}_batch_end",
        lambda self, batch, logs=None: shown.append(batch),
    )
    bar = WorkerProgress(lambda: 2, lambda: 2)
    bar.set_params({"verbose": 1, "epochs": 2, "steps": 5})
    for _ in range(2):
        if kind == "train":
            bar.on_epoch_begin(0)
        else:
            getattr(bar, f"on_{kind}_begin")()
        for batch in (1, 0, 3, 2, 4):
            getattr(bar, f"on_{kind}_batch_end")(batch, {})
    assert shown == [1, 3, 4] * 2

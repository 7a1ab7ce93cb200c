"""Logs that a new chief continues."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest

from keras_strategies.training.elastic.chief_callbacks import ChiefCallback


@pytest.mark.parametrize(
    "written",
    [
        "",
        "epoch,lo",
        "epoch,loss\n",
        "epoch,loss\n0,1.0\n",
        "epoch,loss\n0,1.0\n1,2",
        "epoch,loss\n0,1.0\n1,2.0\n",
        "epoch,loss\n0,1.0\n1,2.0\n2,3.0\n",
    ],
)
def test_a_new_chief_writes_what_is_missing(tmp_path: Path, written: str) -> None:
    path = tmp_path / "log.csv"
    logger = ChiefCallback(keras.callbacks.CSVLogger(path), lambda: is_chief)
    is_chief = False
    logger.on_train_begin()
    path.write_text(written)
    for epoch in range(2):
        logs = {"loss": epoch + 1.0}
        logger.on_epoch_end(epoch, logs)
        # As `ReduceLROnPlateau` does, afterwards.
        logs["learning_rate"] = 0.1
    is_chief = True
    logger.on_epoch_begin(2)
    logger.on_epoch_end(2, {"loss": 3.0})
    logger.on_train_end()
    first = ["0,1.0"] if "0,1.0" in written else []
    rows = path.read_text().splitlines()
    assert rows[0].startswith("epoch,loss")
    assert [row.rstrip(",NA") for row in rows[1:]] == [*first, "1,2.0", "2,3.0"]

"""Programs print what they print, and their engines nothing that can be silenced."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keras_strategies.processes.engine_messages import is_engine_line

pytestmark = pytest.mark.nightly

# Imports this package before Keras: TensorFlow reads its level when it is imported.
TRAINING = """
import keras_strategies as ks
strategy = {strategy}
import keras
import numpy as np

with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.ones((50, 4), "float32")
model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
for rows in range(7, 14):
    model.predict(x, batch_size=rows, verbose=0)
    model.evaluate(x, x[:, :1], batch_size=rows, verbose=0)
"""
LOOPS = """
@ks.function
def step(batch):
    return strategy.run(lambda rows: keras.ops.sum(model(rows)), args=(batch,))

for rows in range(7, 14):
    for batch in strategy.experimental_distribute_dataset([x[:rows]] * 2):
        step(batch)
"""
PRINTS = "print('done')\n"


def output_of(folder: Path, source: str, *before: str) -> tuple[list[str], list[str]]:
    """The lines that a program prints and those of its errors."""
    script = folder / "program.py"
    script.write_text(source)
    level = "TF_CPP_MIN_LOG_LEVEL"
    process = subprocess.run(
        [sys.executable, *before, str(script)],
        env={key: value for key, value in os.environ.items() if key != level},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines(), process.stderr.splitlines()


def test_two_replicas(tmp_path: Path) -> None:
    strategy = "ks.MirroredStrategy(['cpu:0', 'cpu:1'])"
    source = TRAINING.format(strategy=strategy) + LOOPS + PRINTS
    printed, errors = output_of(tmp_path, source)
    assert printed == ["done"]
    # Those for which TensorFlow has no switch are written before anything can be done.
    assert [line for line in errors if not is_engine_line(line)] == []


@pytest.mark.multiprocess
def test_two_workers_that_are_launched(tmp_path: Path) -> None:
    launch = ("-m", "keras_strategies", "launch", "--workers", "2")
    strategy = "ks.MultiWorkerMirroredStrategy()"
    source = TRAINING.format(strategy=strategy) + PRINTS
    printed, errors = output_of(tmp_path, source, *launch)
    assert sorted(printed) == ["[worker 0] done", "[worker 1] done"]
    progress = "[worker 0] keras_strategies: "
    assert [line for line in errors if not line.startswith(progress)] == []

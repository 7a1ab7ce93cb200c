"""A strategy that is never used, while a model trains without it, is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import keras, numpy as np, sys
import keras_strategies as ks
ks.set_virtual_cpu_devices(2)
strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])

def train():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    return model

model = train()
if sys.argv[1] == "compared":
    with strategy.scope():
        other = train()
"""


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["forgotten"])
@pytest.mark.slow(seconds=7)
@pytest.mark.parametrize("kind", ["forgotten", "compared"])
def test_it_is_named_at_exit(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(path), kind], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    text = f"{path}:5: UserWarning: The MirroredStrategy was never used, and `fit`"
    assert done.stderr.count(text) == (kind == "forgotten"), done.stderr

"""The example of a sharded transformer learns, as one device does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "sharded_transformer.py"


@pytest.mark.nightly
@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="each device needs a process"
)
def test_the_example_learns() -> None:
    process = subprocess.run(
        [sys.executable, str(EXAMPLE), "--model-parallel", "2"],
        env={**os.environ, "KERAS_BACKEND": keras.backend.backend()},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    found = {
        name: float(re.search(rf"{name}: ([\d.e+-]+)", process.stdout)[1])
        for name in ("accuracy", "largest difference to one device")
    }
    assert found["accuracy"] > 0.9
    assert found["largest difference to one device"] < 1e-3
    assert "saved in parts as checkpoint 1" in process.stdout
    if keras.backend.backend() == "jax":
        assert "peak of a step per device" in process.stdout

"""The example of a sharded transformer learns, as one device does."""

from __future__ import annotations

import re

import keras
import pytest
from harness.examples import run_example


@pytest.mark.nightly
@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="each device needs a process"
)
def test_the_example_learns() -> None:
    output = run_example("sharded_transformer.py", "--model-parallel", "2")
    found = {
        name: float(re.search(rf"{name}: ([\d.e+-]+)", output)[1])
        for name in ("accuracy", "largest difference to one device")
    }
    assert found["accuracy"] > 0.9
    assert found["largest difference to one device"] < 1e-3
    assert "saved in parts as checkpoint 1" in output
    if keras.backend.backend() == "jax":
        assert "peak of a step per device" in output

"""The wheel trains in an empty environment of each backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("try_wheel.py")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "arguments",
    [("jax",), ("torch",), ("tensorflow", "tensorflow-cpu")],
    ids=["jax", "torch", "tensorflow"],
)
def test_the_wheel_trains_in_an_empty_environment(arguments: tuple[str, ...]) -> None:
    process = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"{arguments[0]}: " in process.stdout

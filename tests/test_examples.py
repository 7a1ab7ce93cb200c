"""The examples run, and print what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str) -> str:
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.slow
def test_demo_trains_as_one_device_does(backend_name) -> None:
    row = json.loads(run("demo.py", "--backend", backend_name).splitlines()[-1])
    assert row["replicas"] == 2
    assert row["difference"] < 1e-5
    assert row["accuracy"] > 0.8


@pytest.mark.slow
def test_mnist_example_trains_without_a_network() -> None:
    output = run("mirrored_mnist.py", "--devices", "cpu:0,cpu:1", "--epochs", "4")
    accuracy = re.search(r"test accuracy: ([\d.]+)", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) > 0.5

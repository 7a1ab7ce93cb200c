"""The examples of custom loops run, and reach what they print."""

from __future__ import annotations

import re

import pytest
from harness.examples import run_example

# `test_documented_examples.py` runs such loops in one process.
pytestmark = pytest.mark.nightly


def test_the_portable_loop_equals_one_device(backend_name) -> None:
    arguments = ("--backend", backend_name, "--check", "--epochs", "2")
    output = run_example("custom_loop.py", *arguments)
    gap = re.search(r"largest difference to one device: (\S+)", output)
    assert gap is not None, output
    assert float(gap[1]) < 1e-4


def test_the_gan_reaches_the_whole_ring(backend_name) -> None:
    output = run_example("gan.py", "--backend", backend_name, "--steps", "1000")
    found = re.search(r"circle: ([\d.]+); sectors reached: (\d+)/12", output)
    assert found is not None, output
    assert float(found[1]) < 0.2
    assert int(found[2]) >= 8


def test_the_migrated_script_runs(backend_name) -> None:
    if backend_name != "tensorflow":
        pytest.skip("it is written with TensorFlow")
    output = run_example("migrate_from_tf_distribute/after.py")
    assert output.count("epoch") == 3

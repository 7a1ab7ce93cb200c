"""The recipe for an engine: the tests of custom loops pass on that of the tests."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from architecture.measures import lines_of
from architecture.package_source import Module
from harness.marks import ROTATION

pytestmark = pytest.mark.one_backend("jax")

TESTS = Path(__file__).parents[1]
#: All files of the engine, beside this one.
FILES = ("numpy_engine.py", "numpy_gradients.py", "numpy_replicas.py")
#: Tests of what `run` promises, whatever the framework.
LOOPS = (
    "test_run.py",
    "test_optimizers.py",
    "test_made_in_run.py",
    "test_extended.py",
    "test_checkpoints.py",
)
# Three of the optimizers with which a loop equals one device: optimizers are Keras's
# own, and gradients by finite differences take seconds.
NOT_REPEATED = "not (with and (global_clipnorm or average or accumulation))"


@pytest.mark.slow(seconds=37)
def test_custom_loops_pass_on_the_numpy_engine() -> None:
    files = [str(TESTS / "custom_loops" / name) for name in LOOPS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    process = subprocess.run(
        [*command, "-m", "not gpu and not nightly", "-k", NOT_REPEATED],
        cwd=TESTS.parent,
        # The tests that are named run here on any day.
        env={**os.environ, "KERAS_BACKEND": "numpy", ROTATION: ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stdout[-10_000:] + process.stderr[-2000:]
    passed = re.search(r"(\d+) passed", process.stdout)
    assert passed is not None and int(passed[1]) > 100, process.stdout[-2000:]


def test_the_numpy_engine_is_short() -> None:
    """Lines without blank ones, comments and docstrings."""
    total = 0
    for path in (Path(__file__).with_name(name) for name in FILES):
        found = lines_of(Module(path.stem, path, ast.parse(path.read_text())))
        total += found["code"] + found["imports"] + found["raises"]
    assert total < 300

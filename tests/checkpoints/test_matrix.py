"""What was trained under one strategy and backend goes on under any other.

Eleven pairs of strategy and backend train two epochs and save in every way; each of
them goes on for two epochs with what each has saved. The loss curves are to be that of
four epochs without interruption, on one device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("one_backend.py")
BACKENDS = ("jax", "torch", "tensorflow")
TIMEOUT = 300.0
# Backends sum in another order; Adam divides by small numbers.
TOLERANCE = 1e-4


def run(phase: str, folder: Path) -> dict:
    """All backends, one after the other, each in a process of its own."""
    found: dict = {}
    for backend in BACKENDS:
        log = folder / f"{phase}-{backend}.log"
        with log.open("wb") as output:
            process = subprocess.run(
                [sys.executable, str(SCRIPT), phase, str(folder)],
                env={**os.environ, "KERAS_BACKEND": backend},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT,
            )
        assert process.returncode == 0, log.read_text()[-4000:]
        results = json.loads((folder / f"{phase}-{backend}.json").read_text())
        found[f"{backend} uninterrupted"] = results.pop("uninterrupted", None)
        found |= results
    return found


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    start = time.monotonic()
    saved, continued = run("save", folder), run("continue", folder)
    print(f"matrix of checkpoints: {time.monotonic() - start:.0f} s")
    continued = {key: value for key, value in continued.items() if value is not None}
    return saved, continued


def close(found, expected) -> bool:
    a, b = np.asarray(found, "float64"), np.asarray(expected, "float64")
    scale = max(np.abs(b).max(), 1e-2)
    return a.shape == b.shape and bool(np.abs(a - b).max() <= TOLERANCE * scale)


def test_backends_agree_without_interruption(matrix) -> None:
    saved, _ = matrix
    expected = saved["jax uninterrupted"]
    for backend in BACKENDS[1:]:
        assert close(saved[f"{backend} uninterrupted"]["losses"], expected["losses"])


def test_every_strategy_was_saved_and_every_one_has_gone_on(matrix) -> None:
    saved, continued = matrix
    names = {name for name in saved if "uninterrupted" not in name}
    assert len(names) == 11
    weights = {key for key in continued if key.endswith(": weights")}
    assert weights == {f"{a} > {b}: weights" for a in names for b in names}
    ways = {"keras": 11, "checkpoint": 11, "backup": 11, "loop": 11}
    for way, targets in ways.items():
        own = [key for key in continued if key.endswith(f": {way}")]
        assert {key.split(": ")[0].split(" > ")[1] for key in own} == names
        assert len(own) >= targets


def test_loss_curves_go_on(matrix) -> None:
    saved, continued = matrix
    expected = saved["jax uninterrupted"]["losses"]
    wrong = {
        key: result["losses"]
        for key, result in continued.items()
        if not close(result["losses"], expected[-len(result["losses"]) :])
        or len(result["losses"]) != 2
    }
    assert not wrong, f"expected {expected}"


def test_what_is_learned_in_the_end_is_the_same(matrix) -> None:
    saved, continued = matrix
    expected = saved["jax uninterrupted"]
    for key, result in continued.items():
        assert result["iterations"] == expected["iterations"], key
        for found, wanted in zip(result["weights"], expected["weights"], strict=True):
            assert close(found, wanted), key


def test_optimizers_and_seeds_are_restored(matrix) -> None:
    saved, continued = matrix
    for key, result in continued.items():
        if "loaded" not in result:
            continue  # `fit` itself has restored it.
        source = saved[key.split(" > ")[0]]
        assert result["loaded"]["iterations"] == 6, key
        if not key.split(" > ")[0].endswith("default"):  # Keras leaves them out.
            assert result["loaded"]["seeds"] == source["seeds"], key
        assert close(result["loaded"]["slots"], source["slots"]), key


def test_seeds_count_the_same_under_every_strategy(matrix) -> None:
    saved, continued = matrix
    expected = saved["jax uninterrupted"]["seeds"]
    assert expected and expected[0][1] > 0
    for key, result in continued.items():
        if not key.split(" > ")[0].endswith("default"):
            assert result["seeds"] == expected, key

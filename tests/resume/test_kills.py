"""Trainings with killed processes end as those without."""

from __future__ import annotations

import random
from pathlib import Path

import keras
import pytest
from harness.forker import Forker
from harness.training import ADAM_TOLERANCE
from resume.resumed_training import STEPS, Resumed, assert_same_end

BACKEND = keras.backend.backend()
#: The strategies of the processes, the last of which is not killed.
STRATEGIES = {
    "torch": ("one_device", "mirrored", "workers", "central"),
    "jax": ("mirrored", "none", "model_parallel"),
    "tensorflow": ("mirrored", "none"),
}


def killed_after(seed: int, count: int) -> list[int]:
    """Steps of each process: one snapshot at least, and fewer than the training."""
    rng = random.Random(seed)
    return [rng.randint(4, STEPS // count - 1) for _ in range(count)]


@pytest.mark.one_backend("jax")
@pytest.mark.nightly(unless=["1"])
@pytest.mark.slow(seconds=9)
@pytest.mark.parametrize("kills", [1, 2])
def test_a_killed_training_ends_as_one_that_is_not(
    forker: Forker, tmp_path: Path, kills: int
) -> None:
    expected = Resumed(forker, tmp_path / "whole", dropout=0.3).finished("none")
    killed = Resumed(forker, tmp_path / "killed", dropout=0.3)
    for after in killed_after(1, 2)[:kills]:
        killed.killed("none", after)
    found = killed.finished("none")
    assert found.trained < expected.trained
    assert_same_end(found, expected, 1e-6)
    assert found.log == expected.log
    if kills == 1:
        return
    again = killed.finished("none")
    assert again.trained == 0, "a finished training has nothing left to do"
    assert_same_end(again, expected, 1e-6)


@pytest.mark.nightly
def test_the_strategy_changes_between_kills(forker: Forker, tmp_path: Path) -> None:
    *killed_under, last = STRATEGIES[BACKEND]
    # Random numbers on Torch are those of a strategy.
    alone = "one_device" if BACKEND == "torch" else "none"
    expected = Resumed(forker, tmp_path / "whole", dropout=0.3).finished(alone)
    killed = Resumed(forker, tmp_path / "killed", dropout=0.3)
    steps = killed_after(2, len(killed_under))
    for strategy, after in zip(killed_under, steps, strict=True):
        killed.killed(strategy, after)
    found = killed.finished(last)
    assert found.trained < expected.trained
    assert_same_end(found, expected, ADAM_TOLERANCE)


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["cnn", "transformer"])
def test_random_numbers_are_those_of_one_device(
    forker: Forker, tmp_path: Path, model: str
) -> None:
    """Of rows, on three workers and then on two."""
    alone = "one_device" if BACKEND == "torch" else "none"
    settings = {"epochs": 3, "model": model}
    expected = Resumed(forker, tmp_path / "whole", **settings).finished(alone)
    killed = Resumed(forker, tmp_path / "killed", **settings)
    killed.killed("three workers", 6)
    found = killed.finished("workers")
    assert 0 < found.trained < expected.trained
    assert_same_end(found, expected, ADAM_TOLERANCE)

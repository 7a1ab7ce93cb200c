"""Training under one strategy and backend continues under any other.

Pairs of backend and strategy train two epochs and save in every way; each of them goes
on for two epochs with what each has saved. The loss curves are to be that of four
epochs without interruption, on one device. By default there is a pair for each way in
which variables are placed; each night all eleven.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from harness.forker import Forker

# By day `test_model_integration` opens a saved model on another backend.
pytestmark = [pytest.mark.one_backend("jax"), pytest.mark.nightly]

SCRIPT = Path(__file__).with_name("one_backend.py")
SECONDS = 600.0
BACKENDS = ("jax", "torch", "tensorflow")
# Backends sum in another order; Adam divides by small numbers.
TOLERANCE = 1e-4
# Each pair goes on with the weights of all pairs, and in the ways that are named: each
# of the four once, those that do not depend on the placement on Torch.
PAIRS = {
    "jax-model_2x2": "keras",  # Variables in shards.
    "torch-mirrored": "checkpoint,backup",  # One variable for all replicas.
    "tensorflow-mirrored": "loop",  # A copy for each replica.
    "tensorflow-default": "backup",  # No strategy.
}
STRATEGIES = {
    "jax": ("default", "mirrored", "central", "model_2x2", "fsdp_4"),
    "torch": ("default", "mirrored", "central"),
    "tensorflow": ("default", "mirrored", "central"),
}
ALL_PAIRS = {
    f"{backend}-{name}": "keras,checkpoint,loop,backup"
    for backend, names in STRATEGIES.items()
    for name in names
}


def run(phase: str, folder: Path, pairs: dict[str, str]) -> dict:
    """Runs a phase on all backends; what each pair has found."""
    arguments = [f"{pair}:{ways}" for pair, ways in pairs.items()]
    found: dict = {}
    with contextlib.ExitStack() as stack:
        forkers = {name: stack.enter_context(Forker(name)) for name in BACKENDS}
        processes = {
            name: forker.start(
                folder / f"{phase}-{name}.log",
                str(SCRIPT),
                *(str(folder), phase, *arguments),
            )
            for name, forker in forkers.items()
        }
        for backend, process in processes.items():
            code, _ = process.wait(SECONDS)
            assert code == 0, process.text()[-4000:]
            results = json.loads((folder / f"{phase}-{backend}.json").read_text())
            found[f"{backend} uninterrupted"] = results.pop("uninterrupted", None)
            found |= results
    return found


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(PAIRS, id="placements"),
        pytest.param(ALL_PAIRS, id="all", marks=pytest.mark.nightly),
    ],
)
def matrix(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    saved = run("save", folder, request.param)
    continued = run("continue", folder, request.param)
    continued = {key: value for key, value in continued.items() if value is not None}
    assert {name for name in saved if "uninterrupted" not in name} == set(request.param)
    return saved, continued, request.param


def close(found, expected) -> bool:
    a, b = np.asarray(found, "float64"), np.asarray(expected, "float64")
    scale = max(np.abs(b).max(), 1e-2)
    return a.shape == b.shape and bool(np.abs(a - b).max() <= TOLERANCE * scale)


def has_seeds(key: str) -> bool:
    """Whether states of seed generators are saved and loaded in any process.

    Keras leaves them out: a model without a strategy loads them from a file only in a
    process in which a strategy has acted before.

    >>> has_seeds("torch-mirrored > jax-default: weights")
    False
    """
    pair, way = key.split(": ")
    source, target = pair.split(" > ")
    return not source.endswith("default") and (
        way == "loop" or not target.endswith("default")
    )


@pytest.mark.slow(seconds=59)
def test_backends_agree_without_interruption(matrix) -> None:
    saved, _, _ = matrix
    expected = saved["jax uninterrupted"]
    for backend in BACKENDS[1:]:
        assert close(saved[f"{backend} uninterrupted"]["losses"], expected["losses"])


@pytest.mark.slow(seconds=16)
def test_every_strategy_was_saved_and_every_one_has_gone_on(matrix) -> None:
    _, continued, pairs = matrix
    expected = {f"{a} > {b}: weights" for a in pairs for b in pairs}
    assert {key for key in continued if key.endswith(": weights")} == expected
    for target, ways in pairs.items():
        own = [key for key in continued if f"> {target}: " in key]
        assert {key.split(": ")[1] for key in own} == {"weights", *ways.split(",")}


def test_loss_curves_go_on(matrix) -> None:
    saved, continued, _ = matrix
    expected = saved["jax uninterrupted"]["losses"]
    wrong = {
        key: result["losses"]
        for key, result in continued.items()
        if not close(result["losses"], expected[-len(result["losses"]) :])
        or len(result["losses"]) != 2
    }
    assert not wrong, f"expected {expected}"


def test_what_is_learned_in_the_end_is_the_same(matrix) -> None:
    saved, continued, _ = matrix
    expected = saved["jax uninterrupted"]
    for key, result in continued.items():
        assert result["iterations"] == expected["iterations"], key
        for found, wanted in zip(result["weights"], expected["weights"], strict=True):
            assert close(found, wanted), key


def test_optimizers_and_seeds_are_restored(matrix) -> None:
    saved, continued, _ = matrix
    for key, result in continued.items():
        if "loaded" not in result:
            continue  # `fit` itself has restored it.
        source = saved[key.split(" > ")[0]]
        assert result["loaded"]["iterations"] == 6, key
        if has_seeds(key):
            assert result["loaded"]["seeds"] == source["seeds"], key
        assert close(result["loaded"]["slots"], source["slots"]), key


def test_seeds_count_the_same_under_every_strategy(matrix) -> None:
    saved, continued, _ = matrix
    expected = saved["jax uninterrupted"]["seeds"]
    assert expected and expected[0][1] > 0
    for key, result in continued.items():
        if has_seeds(key):
            assert result["seeds"] == expected, key

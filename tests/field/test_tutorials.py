"""TensorFlow's tutorials on distribution, retold, give the numbers of one device.

Each script is a process of its own, or one for each worker, and prints what it has
found as a line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.processes import output_of

pytestmark = [pytest.mark.nightly, pytest.mark.multiprocess]

TUTORIALS = Path(__file__).parent / "tutorials"
SGD, ADAM = 1e-5, 1e-4
TWO_WORKERS = ("-m", "keras_strategies", "launch", "--workers", "2")


def run(name: str, folder: Path, *arguments: str, launch: bool = False) -> Any:
    """What the script reports."""
    folder.mkdir(parents=True, exist_ok=True)
    before = TWO_WORKERS if launch else ()
    command = [sys.executable, *before, str(TUTORIALS / name), str(folder), *arguments]
    output = output_of(command, timeout=500)
    lines = [line for line in output.splitlines() if "RESULT " in line]
    assert len(lines) == 1, output
    return json.loads(lines[0].split("RESULT ", 1)[1])


def weights(folder: Path) -> list[np.ndarray]:
    with np.load(folder / "weights.npz") as arrays:
        return [arrays[name] for name in arrays.files]


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    """Relative to the largest magnitude of each array."""
    for a, b in zip(found, expected, strict=True):
        scale = max(float(np.abs(b).max()), 1e-2)
        assert float(np.abs(np.subtract(a, b)).max()) <= tolerance * scale


def test_keras_fit(tmp_path: Path) -> None:
    found = run("keras_fit.py", tmp_path)
    assert found["replicas"] == 2
    for name in ("weights", "losses", "test"):
        assert found[name] <= ADAM, name
    assert found["restored"] == 0
    assert found["loaded"] <= SGD
    assert found["accuracy"] > 0.7
    assert found["rates"] == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3])
    assert found["events"] >= 1


def test_custom_training(tmp_path: Path) -> None:
    found = run("custom_training.py", tmp_path)
    for name in ("weights", "history", "some"):
        assert found[name] <= SGD, name
    # Ten classes, three epochs.
    assert found["accuracy"] > 0.3
    assert found["accuracy_of_checkpoint"] == pytest.approx(found["accuracy"])


def test_multi_worker_fit(tmp_path: Path) -> None:
    alone = run("multi_worker_fit.py", tmp_path / "alone")
    found = run("multi_worker_fit.py", tmp_path / "two", launch=True)
    assert found["replicas"] >= 2
    assert found["saved"]
    for name in ("losses", "accuracies", "test"):
        assert found[name] == pytest.approx(alone[name], rel=SGD), name
    assert_close(weights(tmp_path / "two"), weights(tmp_path / "alone"), SGD)
    assert found["losses"][-1] < found["losses"][0]
    # What other workers save goes away with them.
    assert not (tmp_path / "two" / "worker_1").exists()


def test_multi_worker_loop_and_what_it_resumes(tmp_path: Path) -> None:
    alone = run("multi_worker_loop.py", tmp_path / "alone", "2")
    first = run("multi_worker_loop.py", tmp_path / "two", "1", launch=True)
    second = run("multi_worker_loop.py", tmp_path / "two", "1", launch=True)
    assert first["replicas"] >= 2
    assert (first["begun"], second["begun"], second["epoch"]) == (0, 1, 2)
    found = [*first["history"], *second["history"]]
    assert_close(found, alone["history"], SGD)
    assert_close(weights(tmp_path / "two"), weights(tmp_path / "alone"), SGD)
    assert second["iterations"] == alone["iterations"] == 12


def test_parameter_servers(tmp_path: Path) -> None:
    found = run("parameter_servers.py", tmp_path)
    fit, loop = found["fit"], found["loop"]
    assert fit["iterations"] == 100
    assert fit["losses"][-1] < 0.5 * fit["losses"][0]
    # Asynchronous steps use values that miss a few updates.
    assert fit["evaluated"] == pytest.approx(fit["alone"], rel=0.25)
    assert fit["evaluated"] == pytest.approx(fit["expected"], rel=SGD)
    assert fit["restored"] == 0
    # One step before, three times twenty, one after.
    assert loop["iterations"] == 62
    assert loop["last"] < 0.5 * loop["first"]
    assert loop["accuracies"][-1] == 1 and loop["test"] == 1
    # A table of 256 KiB in parts of 64 KiB or more, two at most.
    assert any("ps:0" in place and "ps:1" in place for place in loop["places"])


def test_distributed_input(tmp_path: Path) -> None:
    found = run("distributed_input.py", tmp_path)
    assert found["rebatching"] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]
    eight = [[*range(start, start + 4)] for start in range(0, 16, 4)]
    assert found["by_function"] == [eight[:2], eight[2:]]
    kind, images, labels = found["specification"]
    assert kind == "tuple" and "(None, 3)" in images and "(None,)" in labels
    assert found["doubled"] == [[0.0], [2.0]]
    random = np.random.default_rng(0).random((4, 2)).astype("float32")
    assert found["sums"] == pytest.approx([random.sum()] * 10)
    # Five batches of up to 16 of 71 rows, twice.
    assert found["steps"] == 10
    assert found["losses"] <= SGD and found["weights"] <= SGD


def test_save_and_load(tmp_path: Path, backend_name: str) -> None:
    found = run("save_and_load.py", tmp_path)
    assert found["between_strategies"] == 0
    for name in ("losses", "predictions", "went_on", "weights", "subclassed"):
        assert found[name] <= SGD, name
    if backend_name == "tensorflow":
        assert found["exported"] <= SGD


def test_guide(tmp_path: Path) -> None:
    found = run("guide.py", tmp_path)
    for kind in ("fits", "loops"):
        assert max(found[kind].values()) <= SGD, found[kind]
    assert found["replicas"]["central storage"] == 2
    assert found["replicas"]["one device"] == found["replicas"]["default"] == 1

"""A worker sends what it sends with DDP or `tf.distribute`, with any number of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest

BACKEND = keras.backend.backend()
if BACKEND == "jax":
    pytest.skip("JAX's programs are those of its peer", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "communication.py"
MOST_BYTES = 64 * 1024
MODELS = ["segmentation", "language model"]


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
def test_a_worker_sends_at_most_a_little_more_than_its_peer(
    model: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(SCRIPT), "--backends", BACKEND, "--models", model]
    command += ["--workers", "2,4", "--rows", "8", "--output", str(tmp_path)]
    subprocess.run(command, check=True, timeout=550)
    text = (tmp_path / "communication.json").read_text()
    results = json.loads(text)["results"]
    by_workers: dict[str, Any] = results[f"{BACKEND}, {model}"]
    assert set(by_workers) == {"2", "4"}
    for kinds in by_workers.values():
        own, peer = (
            kinds[kind]["gathered"] + kinds[kind]["reduced"]
            for kind in ("ours", "peer")
        )
        assert peer > MOST_BYTES / 2
        assert own <= peer + MOST_BYTES

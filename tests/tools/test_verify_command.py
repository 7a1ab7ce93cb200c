"""`keras-strategies verify`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keras_strategies.tools.cli import main

SCRIPT = """
import keras, numpy as np, keras_strategies as ks

random = np.random.default_rng(0)
data = {
    "x": random.normal(size=(10, 4)).astype("float32"),
    "y": random.normal(size=(10, 1)).astype("float32"),
    "batch_size": 5,
}

def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model

def wrong():
    model = build()
    model.optimizer.learning_rate = 0.1 * ks.get_strategy().num_replicas_in_sync
    return model
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch) -> Iterator[str]:
    path = tmp_path / "verified_script.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield str(path)
    sys.modules.pop(path.stem, None)


@pytest.mark.one_backend("jax")
def test_exit_codes_text_and_file(script, tmp_path, capsys) -> None:
    file = str(tmp_path / "report.json")
    options = ["--devices", "2", "--steps", "2"]
    assert main(["verify", f"{script}:build", *options, "--save", file]) == 0
    assert "equal in 2 steps" in capsys.readouterr().out
    assert json.loads(Path(file).read_text())["equal"]
    assert main(["verify", f"{script}:wrong", *options]) == 1
    assert "learning_rate_scaled" in capsys.readouterr().out


@pytest.mark.one_backend("jax")
@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("missing.py:build", "'missing.py' not found"),
        ("{script}", "is not FILE:FUNCTION"),
        ("{script}:bild", "has no 'bild'"),
        ("{folder}/json.py:build", "that of another module"),
    ],
)
def test_bad_input_is_exit_code_2(script, target, text, capsys) -> None:
    (Path(script).parent / "json.py").write_text(SCRIPT)
    given = target.format(script=script, folder=Path(script).parent)
    assert main(["verify", given]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.nightly
def test_workers_are_processes(script, capsys) -> None:
    options = ["--workers", "2", "--devices", "1", "--steps", "2"]
    assert main(["verify", f"{script}:build", *options]) == 0
    assert "equal in 2 steps" in capsys.readouterr().out

"""`keras-strategies verify`."""

from __future__ import annotations

import json
from pathlib import Path

import keras
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


TORCH_SCRIPT = """
import os, numpy as np, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(scaled=False):
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    x = torch.arange(6.0)[:, None]
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        loss = (model(x[rank::count]) - 1.0).square().mean() * (count if scaled else 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

def scaled():
    train(True)
"""


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="a script of Torch")
@pytest.mark.nightly
@pytest.mark.multiprocess
def test_a_training_function_on_processes(script, tmp_path, capsys) -> None:
    Path(script).write_text(TORCH_SCRIPT)
    file = str(tmp_path / "report.json")
    options = ["--processes", "2", "--save", file]
    assert main(["verify", f"{script}:train", *options]) == 0
    assert "equal in 2 steps" in capsys.readouterr().out
    assert main(["verify", f"{script}:scaled", *options]) == 1
    assert "2 times that of one device" in capsys.readouterr().out
    assert json.loads(Path(file).read_text())["cause"] == "scaled_by_replicas"


def test_processes_are_for_training_functions(script, capsys) -> None:
    options = ["--processes", "2", "--workers", "2"]
    assert main(["verify", f"{script}:build", *options]) == 2
    assert "Omit `--workers` and `--step`" in capsys.readouterr().err

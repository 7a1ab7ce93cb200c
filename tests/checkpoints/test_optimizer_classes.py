"""Files name the optimizers of Keras, not of a backend, or are read as if they did."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness.forker import Forker
from harness.training import assert_arrays

import keras_strategies as ks

pytestmark = pytest.mark.one_backend("jax")

#: Trains and saves a model, without a strategy or with one.
SAVER = """
import sys
import keras, numpy as np
make, path, scope = sys.argv[1:]
def model_of():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(eval(make, {"k": keras.optimizers}), "mse")
    return model
if scope:
    import keras_strategies as ks
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = model_of()
else:
    model = model_of()
model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)
model.save(path)
"""
OPTIMIZERS = {
    "adam": "k.Adam(0.01)",
    "scaled": "k.LossScaleOptimizer(k.SGD(0.01, momentum=0.9))",
}
DATA = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")


def saved_on_torch(make: str, scope: str, tmp_path: Path) -> Path:
    script, path = tmp_path / "saver.py", tmp_path / "m.keras"
    script.write_text(SAVER)
    with Forker("torch") as forker:
        process = forker.start(tmp_path / "log", str(script), make, str(path), scope)
        code, _ = process.wait(120)
        assert code == 0, process.text()
    return path


def modules_in(path: Path) -> set[str]:
    """The modules of the optimizers in a file."""
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
    found: set[str] = set()

    def visit(value: Any) -> None:
        if isinstance(value, dict) and "optimizer" in str(value.get("module")):
            found.add(value["module"])
        children = value.values() if isinstance(value, dict) else value
        for each in children if isinstance(value, (dict, list)) else ():
            visit(each)

    visit(config)
    return found


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_file_of_keras_on_torch_is_loaded(make: str, tmp_path: Path) -> None:
    path = saved_on_torch(OPTIMIZERS[make], "", tmp_path)
    assert any("backend.torch" in module for module in modules_in(path))
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.models.load_model(path)
    expected = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    expected.compile(eval(OPTIMIZERS[make], {"k": keras.optimizers}), "mse")
    expected.set_weights(model.get_weights())
    expected.optimizer.build(expected.trainable_variables)
    assert type(model.optimizer) is type(expected.optimizer)
    assert int(model.optimizer.iterations) == 1
    slots = [v.numpy() for v in model.optimizer.variables if v.shape == (3, 2)]
    assert slots and all(np.any(slot) for slot in slots)
    own = expected.optimizer.variables
    for mine, other in zip(own, model.optimizer.variables, strict=True):
        mine.assign(other.numpy())
    for each in (model, expected):
        each.fit(*DATA, epochs=2, verbose=0)
    assert_arrays(model.get_weights(), expected.get_weights(), 1e-5, 1e-6)


def test_a_file_under_a_strategy_on_torch_names_keras(tmp_path: Path) -> None:
    path = saved_on_torch(OPTIMIZERS["scaled"], "scope", tmp_path)
    assert modules_in(path) == {"keras.optimizers"}
    model = keras.models.load_model(path)
    assert int(model.optimizer.iterations) == 1

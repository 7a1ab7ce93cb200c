"""Every public way to a strategy gives one that trains, in a process of its own.

What has been imported, and in which order, must not matter: Keras is hooked when a
strategy is made. Each script is forked from a process that has imported Keras and
nothing of this package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.forker import Forked, Forker
from harness.processes import assert_gone
from strategies import entry_point

from keras_strategies.engines import get_engine
from keras_strategies.runtime.engine import Feature

pytestmark = pytest.mark.one_backend("jax")

SECONDS = 120.0
TWO = "['cpu:0', 'cpu:1']"
CORES = "[['cpu:0'], ['cpu:1']]"
# The module of each strategy, and arguments for one on CPUs.
STRATEGIES = {
    "OneDeviceStrategy": ("one_device", "'cpu:0'"),
    "MirroredStrategy": ("mirrored", TWO),
    "CentralStorageStrategy": ("central_storage", TWO),
    "MultiWorkerMirroredStrategy": ("multi_worker", f"devices={TWO}"),
    "ModelParallelStrategy": ("model_parallel", f"devices={TWO}"),
    "TPUStrategy": ("tpu", f"None, A({CORES})"),
}
engine = get_engine()
if engine.has_python_per_device or Feature.SHARDED_VARIABLES in engine.lacks:
    # Torch has a process for each device of it; such scripts are tested elsewhere.
    del STRATEGIES["ModelParallelStrategy"]
EXPERIMENTAL = ("CentralStorageStrategy", "MultiWorkerMirroredStrategy", "TPUStrategy")
ASSIGNMENT = "from keras_strategies.strategies.tpu import DeviceAssignment as A; "
CREATOR = "ks.DatasetCreator(lambda context: [(X, Y)])"


def ways_to_strategies() -> Iterator[str]:
    """Scripts that set `s`."""
    for name, (module, arguments) in STRATEGIES.items():
        call = f"{name}({arguments})"
        before = ASSIGNMENT if "A(" in arguments else ""
        yield f"{before}import keras_strategies as ks; s = ks.{call}"
        path = f"keras_strategies.strategies.{module}"
        yield f"{before}import {path} as m; s = m.{call}"
        if name in EXPERIMENTAL:
            yield f"{before}import keras_strategies as ks; s = ks.experimental.{call}"
            way = f"from keras_strategies.experimental import {name}; s = {call}"
            yield before + way


MIRRORED = f"s = ks.MirroredStrategy({TWO})"
CENTRAL = f"s = ks.experimental.CentralStorageStrategy({TWO})"
ORDERS = [
    f"import keras_strategies as ks; data = {CREATOR}",
    f"import keras_strategies as ks; data = {CREATOR}; {CENTRAL}",
    f"import keras_strategies.training.dataset_creator as ks; data = {CREATOR}",
    f"import keras_strategies as ks; assert not ks.has_strategy(); {CENTRAL}",
    f"import keras_strategies.runtime.context as c; assert not c.has_strategy(); "
    f"import keras_strategies as ks; {CENTRAL}",
    "import keras_strategies as ks; ks.set_virtual_cpu_devices(2); ks.get_strategy(); "
    f"{CENTRAL}",
    f"import keras_strategies as ks; ks.experimental.coordinator; {CENTRAL}",
    f"import keras_strategies.coordinator; import keras_strategies as ks; {CENTRAL}",
    f"import keras_strategies.experimental.coordinator; "
    f"import keras_strategies as ks; {MIRRORED}",
    f"import keras_strategies.training.model_hooks; "
    f"import keras_strategies as ks; {CENTRAL}",
    f"from keras_strategies import *; import keras_strategies as ks; {MIRRORED}",
]


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    with Forker(imports_strategies=False) as forker:
        yield forker


@pytest.fixture(scope="module")
def on_torch() -> Iterator[Forker]:
    """Scripts on the backend that compiles nothing."""
    with Forker("torch", imports_strategies=False) as forker:
        yield forker


def result(script: Forked) -> dict[str, Any]:
    code, _ = script.wait(SECONDS)
    text = script.text()
    assert code == 0, text
    line = re.search("^FOUND (.*)$", text, re.MULTILINE)
    assert line, text
    return dict(json.loads(line[1]))


# What every other test imports has less need of it by day.
@pytest.mark.nightly(unless=["keras_strategies.strategies.*"])
@pytest.mark.slow(seconds=7)
@pytest.mark.parametrize(
    "code", [*ways_to_strategies()], ids=lambda code: code.rpartition("import ")[2][:60]
)
def test_strategy_trains_its_models(forker, on_torch, tmp_path, code) -> None:
    used = forker if "ModelParallelStrategy" in code else on_torch
    found = result(used.start(tmp_path / "log", entry_point.__file__, code))
    assert found["owns"], found


@pytest.mark.nightly(unless=["code1", "code5"])
@pytest.mark.parametrize("code", ORDERS)
def test_order_of_names_does_not_matter(forker, on_torch, tmp_path, code) -> None:
    # An engine sees the order only where devices are chosen first.
    used = forker if "set_virtual_cpu_devices" in code else on_torch
    found = result(used.start(tmp_path / "log", entry_point.__file__, code))
    assert found.get("owns", "s = " not in code), found


def test_workers_train_together(on_torch: Forker, tmp_path: Path) -> None:
    code = (
        "import keras_strategies as ks; s = ks.experimental.MultiWorkerMirroredStrategy"
        "(devices=['cpu:0']); import numpy as np\n"
        # Each worker has one or two rows of the three.
        "i = s.cluster_resolver.task_id; part = slice(2 * i, 2 + i)\n"
        "data = ks.DatasetCreator(lambda context: [(X[part], Y[part])])"
    )
    logs = [tmp_path / f"worker{index}.log" for index in range(2)]
    scripts = on_torch.start_workers(logs, entry_point.__file__, code)
    assert [result(script)["owns"] for script in scripts] == [True, True]


@pytest.mark.slow(seconds=5)
def test_parameter_servers_train(forker: Forker, tmp_path: Path) -> None:
    code = (
        "import keras_strategies as ks; from keras_strategies import cluster\n"
        "local = cluster.LocalClusterResolver(1, 1)\n"
        "s = ks.experimental.ParameterServerStrategy(local)"
    )
    found = result(forker.start(tmp_path / "log", entry_point.__file__, code))
    assert found["owns"], found
    assert "on ps:0" in found["kernel"]
    # They end with the script, which has not closed the cluster.
    assert len(found["processes"]) == 2
    assert_gone(found["processes"])

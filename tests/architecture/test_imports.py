"""Imports change nothing in a process that Keras did not change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.forker import run_code

pytestmark = pytest.mark.one_backend("jax")

SCRIPT = """
import json, os, sys, threading
import keras
before = set(sys.modules), dict(os.environ), threading.active_count()
import keras_strategies as ks
for name in ks.__all__:
    getattr(ks, name)
print(json.dumps({
    "before": sorted({n.split(".")[0] for n in before[0]}),
    "modules": sorted({n.split(".")[0] for n in set(sys.modules) - before[0]}),
    "environment": dict(os.environ) != before[1],
    "threads": threading.active_count() - before[2],
}))
"""


@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
def test_import_loads_no_other_framework_and_starts_nothing(
    backend: str, tmp_path: Path
) -> None:
    found = json.loads(run_code(tmp_path, SCRIPT, backend=backend).splitlines()[-1])
    other = {"jax", "torch", "tensorflow", "ray", "zmq"}
    # Keras itself imports JAX for Orbax where it is installed.
    assert backend in found["before"] and not {"ray", "zmq"} & set(found["before"])
    assert not other & set(found["modules"])
    assert not found["environment"]
    assert found["threads"] == 0


LAZY = """
import json, sys
sys.modules["keras"] = None  # It cannot be imported, as without any backend.
import keras_strategies as ks, keras_strategies.tools.cli
import keras_strategies.processes.launch_function
ks.cluster_resolver.find_cluster()
del sys.modules["keras"]
before = sorted({name.split(".")[0] for name in sys.modules})
sys.modules["keras"] = None
try:
    ks.MirroredStrategy
except ImportError as error:
    print(json.dumps({"before": before, "missing": error.name}))
"""


def test_resolvers_and_launcher_need_neither_keras_nor_a_framework() -> None:
    process = subprocess.run(
        [sys.executable, "-c", LAZY],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(process.stdout.splitlines()[-1])
    loaded = {"keras", "jax", "torch", "tensorflow", "ray", "kubernetes", "google"}
    assert not loaded & set(found["before"])
    assert found["missing"].partition(".")[0] == "keras"


UNSET = """
import importlib.machinery, sys

class Missing:  # As if TensorFlow were not installed.
    def find_spec(self, name, path=None, target=None):
        if name == "tensorflow":
            raise ModuleNotFoundError("No module named 'tensorflow'", name=name)

sys.meta_path.insert(0, Missing())
import keras_strategies as ks
ks.MirroredStrategy()
"""


@pytest.mark.parametrize("chosen", [None, "tensorflow"])
def test_a_backend_that_is_not_installed_is_a_short_error(
    chosen: str | None, tmp_path: Path
) -> None:
    environment = {**os.environ, "KERAS_HOME": str(tmp_path)}
    environment.pop("KERAS_BACKEND", None)
    if chosen is not None:
        environment["KERAS_BACKEND"] = chosen
    process = subprocess.run(
        [sys.executable, "-c", UNSET], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 1
    *frames, error, _ = process.stderr.strip().splitlines()
    assert error.startswith("keras_strategies.errors.BackendError: Keras uses the")
    assert ("KERAS_BACKEND is not set" in error) == (chosen is None)
    assert "export KERAS_BACKEND=jax" in error
    assert len(frames) <= 8, process.stderr

"""Imports change nothing in a process that Keras did not change."""

from __future__ import annotations

import json
import os
import subprocess
import sys

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
def packages(modules):
    return sorted({name.split(".")[0] for name in modules})
after = set(sys.modules), dict(os.environ), threading.active_count()
new = packages(after[0] - before[0])
print(json.dumps([packages(before[0]), new, after[1:] == before[1:]]))
"""


@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
def test_import_loads_no_other_framework_and_starts_nothing(backend, tmp_path) -> None:
    output = run_code(tmp_path, SCRIPT, backend=backend)
    before, modules, is_same = json.loads(output.splitlines()[-1])
    # Keras itself imports JAX for Orbax where it is installed.
    assert backend in before and not {"ray", "zmq"} & {*before}
    assert not {"jax", "torch", "tensorflow", "ray", "zmq"} & {*modules}
    assert is_same, "the environment or the number of threads has changed"


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
    command = [sys.executable, "-c", LAZY]
    output = subprocess.check_output(command, text=True, timeout=120)
    found = json.loads(output.splitlines()[-1])
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
def test_a_backend_that_is_not_installed_is_a_short_error(chosen, tmp_path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    environment["KERAS_HOME"] = str(tmp_path)
    environment |= {"KERAS_BACKEND": chosen} if chosen else {}
    given = {"env": environment, "capture_output": True, "text": True}
    process = subprocess.run([sys.executable, "-c", UNSET], **given)
    assert process.returncode == 1
    *frames, error, _ = process.stderr.strip().splitlines()
    assert error.startswith("keras_strategies.errors.BackendError: Keras uses the")
    assert ("KERAS_BACKEND is not set" in error) == (chosen is None)
    assert "export KERAS_BACKEND=jax" in error
    assert len(frames) <= 8, process.stderr

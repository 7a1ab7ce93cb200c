"""What importing does to a process: nothing that Keras did not do."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, sys, threading
import keras
before = set(sys.modules), dict(os.environ), threading.active_count()
import keras_strategies as ks
for name in ks.__all__:
    getattr(ks, name)
print(json.dumps({
    "modules": sorted({n.split(".")[0] for n in set(sys.modules) - before[0]}),
    "environment": dict(os.environ) != before[1],
    "threads": threading.active_count() - before[2],
}))
"""


@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
def test_import_loads_no_other_framework_and_starts_nothing(backend: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(process.stdout.splitlines()[-1])
    other = {"jax", "torch", "tensorflow", "ray", "zmq"}
    assert not other & set(found["modules"])
    assert not found["environment"]
    assert found["threads"] == 0


LAZY = """
import json, sys
import keras_strategies as ks, keras_strategies.cli.main, keras_strategies.cli.function
ks.cluster_resolver.find_cluster()
before = sorted({name.split(".")[0] for name in sys.modules})
ks.MirroredStrategy
print(json.dumps({"before": before, "after": "keras" in sys.modules}))
"""


def test_resolvers_and_launcher_need_neither_keras_nor_a_framework() -> None:
    # Without any backend Keras itself cannot be imported, and the launcher works.
    process = subprocess.run(
        [sys.executable, "-c", LAZY],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(process.stdout.splitlines()[-1])
    loaded = {"keras", "jax", "torch", "tensorflow", "ray", "kubernetes", "google"}
    assert not loaded & set(found["before"])
    assert found["after"]

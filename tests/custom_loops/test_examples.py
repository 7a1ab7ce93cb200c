"""The examples of custom loops run, and reach what they print."""

from __future__ import annotations

import re
import runpy

import keras
import pytest
from harness.examples import EXAMPLES, run_example

import keras_strategies as ks


@pytest.mark.nightly
def test_the_portable_loop_equals_one_device(backend_name) -> None:
    arguments = ("--backend", backend_name, "--check", "--epochs", "2")
    output = run_example("custom_loop.py", *arguments)
    gap = re.search(r"largest difference to one device: (\S+)", output)
    assert gap is not None, output
    assert float(gap[1]) < 1e-4


@pytest.mark.nightly
def test_the_gan_reaches_the_whole_ring(backend_name) -> None:
    output = run_example("gan.py", "--backend", backend_name, "--steps", "1000")
    found = re.search(r"circle: ([\d.]+); sectors reached: (\d+)/12", output)
    assert found is not None, output
    assert float(found[1]) < 0.2
    assert int(found[2]) >= 8


@pytest.mark.one_backend("tensorflow")
@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="it is written with TensorFlow"
)
def test_the_migrated_script_trains_on_two_replicas(monkeypatch, capsys) -> None:
    two = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    monkeypatch.setattr(ks, "MirroredStrategy", lambda: two)
    script = EXAMPLES / "migrate_from_tf_distribute" / "after.py"
    runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert float(lines[-1].split()[-1]) > 0.8

"""TensorFlow: placement of variables."""

from __future__ import annotations

import textwrap

import keras
import pytest
from harness.forker import run_code

import keras_strategies as ks

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of the TensorFlow backend", allow_module_level=True)


ks.set_virtual_cpu_devices(4)


def test_virtual_cpus_in_a_new_process(tmp_path):
    code = """
        import keras, keras_strategies as ks
        from keras_strategies.engines import get_engine
        # To list devices does not fix them.
        print(get_engine().local_devices())
        ks.set_virtual_cpu_devices(2)
        ks.set_virtual_cpu_devices(3)
        print(ks.MirroredStrategy())
        # To use one does.
        keras.ops.ones(3) + 1
        try:
            ks.MirroredStrategy(["cpu:0", "cpu:3"])
        except RuntimeError as error:
            print(error)
    """
    printed = run_code(tmp_path, textwrap.dedent(code))
    assert "cpu:0, cpu:1, cpu:2" in printed
    assert "Call `ks.set_virtual_cpu_devices(4)` first" in printed

"""Calls of TensorFlow that are left in a script name their replacements."""

from __future__ import annotations

import sys
import types

import keras
import pytest

pytestmark = pytest.mark.skipif(
    keras.backend.backend() == "tensorflow", reason="they work on TensorFlow"
)


def test_run_in_a_tf_function_names_ks_function(mirrored, monkeypatch) -> None:
    module = types.SimpleNamespace(inside_function=lambda: True)
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    with pytest.raises(RuntimeError, match=r"Replace `tf.function` by `ks.function`"):
        mirrored.run(lambda: None)


def test_error_from_tensorflow_names_what_to_write(mirrored) -> None:
    # As `tape.gradient` fails with a tracer of JAX.
    code = "def gradient(x):\n    raise AttributeError('no attribute _id')\n"
    names: dict = {}
    exec(compile(code, "/lib/tensorflow/python/eager/backprop.py", "exec"), names)
    with pytest.raises(AttributeError) as error:
        mirrored.run(lambda: names["gradient"](keras.ops.ones(())))
    assert "ks.value_and_grad" in "".join(error.value.__notes__)


def test_numpy_of_a_tensor_names_convert_to_numpy(mirrored) -> None:
    class Loss:
        pass

    with pytest.raises(AttributeError) as error:
        mirrored.run(lambda: Loss().numpy())
    assert "keras.ops.convert_to_numpy" in "".join(error.value.__notes__)

"""Calls of TensorFlow that are left in a script name their replacements."""

from __future__ import annotations

import sys
import types

import keras
import pytest

not_on_tensorflow = pytest.mark.skipif(
    keras.backend.backend() == "tensorflow", reason="they work on TensorFlow"
)


@not_on_tensorflow
def test_run_in_a_tf_function_names_ks_function(mirrored, monkeypatch) -> None:
    module = types.SimpleNamespace(inside_function=lambda: True)
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    with pytest.raises(RuntimeError, match=r"Replace `tf.function` with `ks.function`"):
        mirrored.run(lambda: None)


#: As `tape.gradient` fails with a tracer of JAX.
TAPE: dict = {}
CODE = "def gradient(x):\n    raise AttributeError('no attribute _id')\n"
exec(compile(CODE, "/lib/tensorflow/python/eager/backprop.py", "exec"), TAPE)


@not_on_tensorflow
@pytest.mark.parametrize(
    ("fails", "note"),
    [
        (lambda: TAPE["gradient"](keras.ops.ones(())), "ks.value_and_grad"),
        (lambda: object().numpy(), "keras.ops.convert_to_numpy"),
    ],
    ids=["gradient", "numpy"],
)
def test_an_error_of_its_calls_names_what_to_write(mirrored, fails, note) -> None:
    with pytest.raises(AttributeError) as error:
        mirrored.run(fails)
    assert note in "".join(error.value.__notes__)


@not_on_tensorflow
def test_loss_of_tensorflow_names_what_to_write(mirrored, monkeypatch) -> None:
    # What `tf.nn.compute_average_loss` makes of a tensor of Torch.
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    members = {"dtype": types.SimpleNamespace(is_floating=True)}
    eager = type("EagerTensor", (), members)
    eager.__module__ = "tensorflow.python.framework.ops"
    with pytest.raises(RuntimeError, match=r"`ks.compute_average_loss` for `tf.nn"):
        mirrored.run(lambda: {"loss": eager()})


def test_numpy_of_a_value_per_replica_names_convert_to_numpy(mirrored) -> None:
    losses = mirrored.run(lambda: keras.ops.ones(()))
    with pytest.raises(AttributeError, match=r"per replica.*convert_to_numpy\(x\)"):
        losses.numpy()
    with pytest.raises(AttributeError, match="no attribute 'nump'"):
        _ = losses.nump
    assert not hasattr(losses, "shape")

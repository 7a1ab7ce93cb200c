"""`keras-strategies choose`."""

from __future__ import annotations

import pytest

from keras_strategies.tools.choose_command import Needs, choose
from keras_strategies.tools.cli import main

pytestmark = pytest.mark.one_backend("jax")

GB = 1 << 30
#: A model of 4 GiB of weights with Adam; 2 GiB of activations for each device.
LARGE = Needs(20 * GB, 18 * GB, 8 * GB, 6 * GB, 4 * GB, 0.1, True)


@pytest.mark.parametrize(
    ("devices", "machines", "memory", "strategy"),
    [
        (1, 1, 32, "OneDeviceStrategy()"),
        (4, 1, 32, "MirroredStrategy()"),
        (4, 2, 32, "MultiWorkerMirroredStrategy()"),
        (4, 1, 0, "MirroredStrategy()"),
        (4, 1, 12, "CentralStorageStrategy()"),
        (4, 2, 12, 'ModelParallelStrategy("fsdp")'),
        (4, 1, 8, 'ModelParallelStrategy("fsdp")'),
        (4, 1, 2, 'fit_into("2.0 GiB", build, shapes).strategy'),
    ],
)
def test_what_fits_is_chosen(devices, machines, memory, strategy) -> None:
    found = choose(LARGE, devices, machines, memory * GB)
    assert found.strategy == f"ks.{strategy}"
    assert ("torchrun" in found.launcher) is (machines > 1)


def test_tables_go_to_servers() -> None:
    tables = Needs(40 * GB, 40 * GB, 0, 20 * GB, 4 * GB, 0.99, True)
    assert choose(tables, 2, 1, 16 * GB).strategy == "ks.ParameterServerStrategy()"


SCRIPT = """
import keras, numpy as np

data = np.ones((10, 64), "float32"), np.ones((10, 1), "float32")

def build():
    layers = [keras.layers.Dense(256), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile("adam", "mse")
    return model
"""


@pytest.mark.filterwarnings("error:.*called for training outside")
def test_a_script_is_planned(script, monkeypatch, capsys) -> None:
    import keras_strategies as ks

    monkeypatch.setattr(ks, "set_virtual_cpu_devices", lambda count: None)
    options = ["--batch", "33", "--devices", "2", "--memory"]
    assert main(["choose", f"{script}:build", *options, "1 GiB"]) == 0
    text = capsys.readouterr().out
    assert "ks.MirroredStrategy()" in text and "16 to 17" in text
    assert main(["choose", f"{script}:build", *options, "1 KiB"]) == 0
    assert "ks.fit_into" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["missing.py:build", "--batch", "8"], "'missing.py' not found"),
        (["train.py", "--batch", "8"], "is not FILE:FUNCTION"),
        (["missing.py:build", "--batch", "0"], "`--batch` must be 1 or more"),
    ],
)
def test_errors_say_what_is_wrong(arguments, text, capsys) -> None:
    assert main(["choose", *arguments]) == 2
    assert text in capsys.readouterr().err

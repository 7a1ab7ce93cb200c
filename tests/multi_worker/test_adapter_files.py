"""Files of adapters are written once, by the chief, with the values of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
from harness.training import assert_arrays
from multi_worker.clusters import model_parallel, scope_of

pytestmark = pytest.mark.one_backend

keras_hub = pytest.importorskip("keras_hub", reason="keras_hub is not installed")


CONFIG = {
    **{"vocabulary_size": 37, "num_layers": 1, "num_query_heads": 2},
    **{"num_key_value_heads": 2, "hidden_dim": 16, "intermediate_dim": 24},
}


def with_adapters(strategy: Any, seed: int) -> Any:
    """A backbone with adapters of values that tell layers and entries apart."""
    keras.utils.set_random_seed(seed)
    with scope_of(strategy):
        model = keras_hub.models.Llama3Backbone(**CONFIG)
        model.enable_lora(3)
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape).astype("float32"))
    return model


def entries(path: Path) -> dict[str, bytes]:
    """The bytes of each array in a file."""
    found: dict[str, bytes] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, h5py.Dataset):
            found[name] = value[()].tobytes()

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


def program(strategy: Any, folder: str, is_sharded: bool) -> list[Any]:
    own = model_parallel() if is_sharded else strategy
    model = with_adapters(own, 1)
    path = str(Path(folder) / "own.lora.h5")
    model.save_lora_weights(path)
    # A worker that has returned finds the complete file.
    written = entries(Path(path))
    other = with_adapters(own, 2)
    other.load_lora_weights(str(Path(folder) / "alone.lora.h5"))
    values = [keras.ops.convert_to_numpy(v) for v in other.trainable_variables]
    return [written, [np.array(value) for value in values]]


@pytest.mark.parametrize("is_sharded", [False, True], ids=["copies", "shards"])
def test_workers_write_and_read_the_file_of_one_device(cluster, tmp_path, is_sharded):
    alone = with_adapters(None, 1)
    alone.save_lora_weights(str(tmp_path / "alone.lora.h5"))
    expected = entries(tmp_path / "alone.lora.h5")
    assert any(name.endswith("lora_kernel_a") for name in expected)
    for written, values in cluster(program, str(tmp_path), is_sharded):
        assert written == expected
        own = map(keras.ops.convert_to_numpy, alone.trainable_variables)
        assert_arrays(values, own)
    left = sorted(file.name for file in tmp_path.iterdir())
    assert left == ["alone.lora.h5", "own.lora.h5"]

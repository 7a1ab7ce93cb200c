"""Models that are made to be loaded: values of files, and no initial ones before."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.keras_compat.variables import loaded_variables

pytestmark = pytest.mark.one_backend

keras_hub = pytest.importorskip("keras_hub", reason="keras_hub is not installed")

TORCH = keras.backend.backend() == "torch"
WIDTH, INNER, VOCABULARY, HEADS = 16, 24, 37, 2


def several() -> Any:
    """Shards, or copies where a process has one device."""
    devices = ["cpu:0", "cpu:1"]
    if TORCH:
        return ks.MirroredStrategy(devices)
    return ks.ModelParallelStrategy("fsdp", devices, min_shard_bytes=0)


def tensors() -> dict[str, np.ndarray]:
    """A Llama's weights, by the names that Hugging Face gives them."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="not installed")
    of_layer = {
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (WIDTH,)),
        **{f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"},
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (INNER, WIDTH)),
        "mlp.down_proj": (WIDTH, INNER),
    }
    shapes = {
        **dict.fromkeys(("model.embed_tokens", "lm_head"), (VOCABULARY, WIDTH)),
        **{f"model.layers.0.{name}": shape for name, shape in of_layer.items()},
        "model.norm": (WIDTH,),
    }
    rng = np.random.default_rng(3)
    return {
        f"{name}.weight": rng.normal(size=shape).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }


@pytest.fixture
def folder(tmp_path) -> str:
    numpy = pytest.importorskip("safetensors.numpy", reason="not installed")
    config = {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        **{"vocab_size": VOCABULARY, "num_hidden_layers": 1},
        **{"num_attention_heads": HEADS, "num_key_value_heads": HEADS},
        **{"hidden_size": WIDTH, "intermediate_size": INNER},
        **{"tie_word_embeddings": False, "rope_theta": 10000.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    numpy.save_file(tensors(), tmp_path / "model.safetensors")
    return str(tmp_path)


def loaded(folder: str, scope: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(5)
    with scope:
        return keras_hub.models.Llama3Backbone.from_preset(folder, **options)


def values(model: Any) -> list[np.ndarray]:
    found = [keras.ops.convert_to_numpy(v) for v in model.variables]
    return [np.asarray(value, "float32") for value in found]


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert found
    for own, one in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, one)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_preset_of_safetensors_is_that_of_keras(folder, dtype) -> None:
    for options in ({}, {"load_weights": False}):
        expected = loaded(folder, contextlib.nullcontext(), dtype=dtype, **options)
        found = loaded(folder, several().scope(), dtype=dtype, **options)
        assert_equal(values(found), values(expected))


def test_values_that_the_file_lacks_are_initial_ones(folder, monkeypatch) -> None:
    from keras_hub.src.utils.transformers import safetensor_utils

    original = safetensor_utils.SafetensorLoader.port_weight

    def port(self: Any, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None):
        if "down_proj" not in hf_weight_key:
            original(self, keras_variable, hf_weight_key, hook_fn)

    monkeypatch.setattr(safetensor_utils.SafetensorLoader, "port_weight", port)
    expected = loaded(folder, contextlib.nullcontext())
    assert_equal(values(loaded(folder, several().scope())), values(expected))


def test_weights_are_not_the_memory_of_the_file(folder) -> None:
    """The file may be replaced while the model is in use."""
    model = loaded(folder, several().scope(), dtype="bfloat16")
    before = values(model)
    file = Path(folder) / "model.safetensors"
    with file.open("r+b") as stream:
        size = file.stat().st_size
        stream.seek(size // 2)
        stream.write(bytes(size - size // 2))
    assert_equal(values(model), before)


@pytest.mark.parametrize("least", [1, 2**28])
def test_the_progress_of_large_models_is_shown(folder, least, monkeypatch, capsys):
    monkeypatch.setattr(loaded_variables, "_LARGE", least)
    model = loaded(folder, several().scope())
    count = len(model.variables)
    assert (f"{count}/{count}" in capsys.readouterr().out) == (least == 1)

"""Models of keras-hub in shards, on JAX and TensorFlow: no layout is given.

`tests/multi_worker/test_torch_backbones.py` trains them on Torch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import pytest

import keras_strategies as ks

pytest.importorskip("keras_hub", reason="keras_hub is not installed")
if keras.backend.backend() == "torch":
    pytest.skip("on Torch a process has one device", allow_module_level=True)

from field.compare import FieldCase, assert_trains_as_one_device
from field.models import CASES, DIFFUSION

from keras_strategies.runtime.placement import axes_of, nbytes_of

DEVICES = [f"cpu:{i}" for i in range(4)]
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "model-parallel.md"
BACKBONES = (
    *("bert", "gpt2", "llama_adam", "gemma", "mistral", "qwen", "vit", "resnet"),
    "whisper",
    *(case.name for case in DIFFUSION),
)


def auto() -> Any:
    return ks.ModelParallelStrategy("auto", DEVICES, 2, min_shard_bytes=0)


def shares() -> dict[str, float]:
    """The percent of bytes that are sharded, in the table of the guide."""
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) % \|", GUIDE.read_text(), re.M)
    return {name: float(share) for name, share in rows}


def sharded_share(case: FieldCase) -> float:
    """The part of a model's bytes that "auto" shards along the model axis."""
    strategy = auto()
    with strategy.scope():
        model = case.build()
    mesh = strategy.placement.mesh
    cut = sum(nbytes_of(v) for v in model.variables if any(axes_of(mesh, v)))
    return cut / sum(map(nbytes_of, model.variables))


@pytest.mark.one_backend("jax")
@pytest.mark.nightly(unless=["resnet"])
@pytest.mark.parametrize(
    "case",
    [case for case in [*CASES, *DIFFUSION] if case.name in BACKBONES],
    ids=lambda case: case.name,
)
def test_a_backbone_equals_one_device(case: FieldCase) -> None:
    assert_trains_as_one_device(case, auto)
    assert 100 * sharded_share(case) == pytest.approx(shares()[case.name], abs=0.1)


def test_the_guide_lists_all_of_them() -> None:
    assert list(shares()) == list(BACKBONES)

"""The strategies that every case can be trained under."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import pytest

import keras_strategies as ks
from harness import devices


@dataclass(frozen=True)
class StrategyCase:
    """A strategy under a name: what `pytest` shows, and how to make it."""

    name: str
    replicas: int
    make: Callable[[], Any]


#: Cases are compared with Keras without a strategy, random numbers too.
_OPTIONS: Any = {"random_numbers": "keras"}


def _devices(count: int, first: int = 0) -> list[str]:
    return [f"{devices.KIND}:{i}" for i in range(first, first + count)]


def _one_device() -> Any:
    return ks.OneDeviceStrategy(_devices(1)[0], **_OPTIONS)


def _central() -> Any:
    # Others than that of the storage.
    others = _devices(2, first=int(devices.KIND == "cpu"))
    return ks.CentralStorageStrategy(others, "cpu:0", **_OPTIONS)


def _mirrored(count: int) -> Any:
    return ks.MirroredStrategy(_devices(count), **_OPTIONS)


def _grid(name: str, layout_map: str, count: int) -> StrategyCase:
    """Four devices, data x model; `count` is the number along the second axis."""
    # On TensorFlow each device is a replica. The variables of the tests are small, too.
    replicas = 4 if keras.backend.backend() == "tensorflow" else 4 // count
    strategy = ks.ModelParallelStrategy
    return StrategyCase(
        name,
        replicas,
        lambda: strategy(layout_map, _devices(4), count, min_shard_bytes=0),
    )


# On Torch, each device has a process.
MODEL_PARALLEL = {
    case.name: case
    for case in (
        _grid("model_2x2", "auto", 2),
        _grid("model_1x4", "auto", 4),
        _grid("model_4x1", "auto", 1),
        _grid("fsdp_4", "fsdp", 1),
        _grid("fsdp_2x2", "fsdp", 2),
    )
}

STRATEGIES = {
    case.name: case
    for case in (
        StrategyCase("one_device", 1, _one_device),
        StrategyCase("mirrored_2", 2, lambda: _mirrored(2)),
        StrategyCase("mirrored_4", 4, lambda: _mirrored(4)),
        StrategyCase("central", 2, _central),
    )
}
if devices.KIND != "cpu":
    # All accelerators, as users write it.
    STRATEGIES["default_options"] = StrategyCase(
        "default_options", devices.COUNT, lambda: ks.MirroredStrategy()
    )
if keras.backend.backend() != "torch":
    STRATEGIES |= {name: MODEL_PARALLEL[name] for name in ("model_2x2", "fsdp_2x2")}

#: Of a test of each strategy that is slow and would say much the same of each: two
#: replicas by day, the others at night.
TWO_REPLICAS_BY_DAY = pytest.mark.nightly(unless=["*mirrored_2*"])

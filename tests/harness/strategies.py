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


def _mirrored(count: int) -> Any:
    return ks.MirroredStrategy(_devices(count), **_OPTIONS)


def _model_parallel(layout_map: str, model_parallel: int) -> Any:
    # The variables of the tests are small, too.
    return ks.ModelParallelStrategy(
        layout_map, _devices(4), model_parallel, min_shard_bytes=0
    )


def _replicas(data_parallel: int) -> int:
    # On TensorFlow each device is a replica.
    return 4 if keras.backend.backend() == "tensorflow" else data_parallel


# Grids of four devices, data x model. On Torch, each device has a process.
MODEL_PARALLEL = {
    case.name: case
    for case in (
        StrategyCase("model_2x2", _replicas(2), lambda: _model_parallel("auto", 2)),
        StrategyCase("model_1x4", _replicas(1), lambda: _model_parallel("auto", 4)),
        StrategyCase("model_4x1", _replicas(4), lambda: _model_parallel("auto", 1)),
        StrategyCase("fsdp_4", _replicas(4), lambda: _model_parallel("fsdp", 1)),
        StrategyCase("fsdp_2x2", _replicas(2), lambda: _model_parallel("fsdp", 2)),
    )
}

STRATEGIES = {
    case.name: case
    for case in (
        StrategyCase(
            "one_device", 1, lambda: ks.OneDeviceStrategy(_devices(1)[0], **_OPTIONS)
        ),
        StrategyCase("mirrored_2", 2, lambda: _mirrored(2)),
        StrategyCase("mirrored_4", 4, lambda: _mirrored(4)),
        StrategyCase(
            "central",
            2,
            lambda: ks.CentralStorageStrategy(
                # Others than that of the storage.
                _devices(2, first=int(devices.KIND == "cpu")),
                "cpu:0",
                **_OPTIONS,
            ),
        ),
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

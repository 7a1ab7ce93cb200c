"""The strategies that every case can be trained under."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras_strategies as ks


@dataclass(frozen=True)
class StrategyCase:
    """A strategy under a name: what `pytest` shows, and how to make it."""

    name: str
    replicas: int
    make: Callable[[], Any]


def _devices(count: int) -> list[str]:
    return [f"cpu:{i}" for i in range(count)]


STRATEGIES = {
    case.name: case
    for case in (
        StrategyCase("one_device", 1, lambda: ks.OneDeviceStrategy("cpu:0")),
        StrategyCase("mirrored_2", 2, lambda: ks.MirroredStrategy(_devices(2))),
        StrategyCase("mirrored_4", 4, lambda: ks.MirroredStrategy(_devices(4))),
        StrategyCase(
            "central",
            2,
            lambda: ks.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:0"),
        ),
    )
}

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


def _mirrored(count: int) -> Any:
    # The models of the tests are so small that Torch would call them whole.
    return ks.MirroredStrategy(_devices(count), always_split=True)


STRATEGIES = {
    case.name: case
    for case in (
        StrategyCase("one_device", 1, lambda: ks.OneDeviceStrategy("cpu:0")),
        StrategyCase("mirrored_2", 2, lambda: _mirrored(2)),
        StrategyCase("mirrored_4", 4, lambda: _mirrored(4)),
        StrategyCase(
            "central",
            2,
            lambda: ks.CentralStorageStrategy(
                ["cpu:1", "cpu:2"], "cpu:0", always_split=True
            ),
        ),
    )
}

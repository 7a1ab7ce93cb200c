"""The stack of contexts of a thread.

A frame is a strategy in *cross-replica* context (its scope is open: code runs once,
for all replicas) or in *replica* context (code runs once on each). An empty stack means
the default strategy.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


@dataclass(frozen=True)
class Frame:
    """A context of code.

    Args:
        strategy: the strategy.
        replica: the `ReplicaContext`; None in cross-replica context.
    """

    strategy: StrategyCore
    replica: Any


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


contexts = _Thread()


class Pushed:
    """A context with one more frame in this thread.

    The frames are restored by depth, so that a generator that exits out of order cannot
    remove another frame.
    """

    def __init__(self, frame: Frame):
        self._frame = frame

    def __enter__(self) -> None:
        self._frames = contexts.frames
        self._depth = len(self._frames)
        self._frames.append(self._frame)

    def __exit__(self, *exception: Any) -> None:
        del self._frames[self._depth :]


def merged_replicas(
    strategy: StrategyCore,
) -> contextlib.AbstractContextManager[None]:
    """Cross-replica context inside replicas, for the function of a `merge_call`."""
    return Pushed(Frame(strategy, None))

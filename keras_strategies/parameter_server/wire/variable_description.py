"""Descriptions of variables: number, kind, shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ShardRange:
    """Consecutive rows of a variable on one server.

    Args:
        server: int, the number of the parameter server.
        start: int, the first row. A scalar is one row.
        stop: int, the row after the last.
    """

    server: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """int, how many rows there are."""
        return self.stop - self.start


@dataclass(frozen=True)
class VariableDescription:
    """What is said of a variable that is sent.

    Args:
        number: int, its name in the cluster.
        path: str.
        shape: tuple of int.
        dtype: str.
        trainable: bool.
        kind: str, `"weight"`, `"slot"` (an optimizer's, for one weight), `"scalar"`
            (an optimizer's own) or `"local"` (a metric's, which no server has).
        parts: where its rows are.
        regularizer: adds to the losses of each step what the whole variable costs;
            None for nothing.
    """

    number: int
    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    kind: str
    parts: tuple[ShardRange, ...]
    regularizer: Any = None


def is_sharded(description: VariableDescription) -> bool:
    """Whether a variable is in several parts; scalars of optimizers are copied."""
    return len(description.parts) > 1 and description.kind != "scalar"


def device_places(description: VariableDescription) -> list[tuple[str, int, int]]:
    """Device, first row and the row after the last of each part of a variable."""
    if description.kind == "local":
        rows = description.shape[0] if description.shape else 1
        return [(_device("chief", 0), 0, rows)]
    return [(server_device(p.server), p.start, p.stop) for p in description.parts]


def server_device(server: int) -> str:
    """A parameter server's device, as `tf.distribute` names it."""
    return _device("ps", server)


def _device(job: str, index: int) -> str:
    return f"/job:{job}/replica:0/task:{index}/device:CPU:0"

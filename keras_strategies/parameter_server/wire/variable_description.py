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
        """int, number of rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class VariableDescription:
    """Description of a variable for workers and servers.

    Args:
        number: int, its number in the cluster.
        path: str.
        shape: tuple of int.
        dtype: str.
        trainable: bool.
        kind: str, `"weight"`, `"slot"` (an optimizer's, for one weight), `"scalar"`
            (an optimizer's own) or `"local"` (a metric's, on the coordinator).
        shards: its shards.
        regularizer: Keras regularizer of the unsharded variable, or None.
        is_idle: bool, whether its `synchronization` is `"none"`: steps hardly use it,
            so of integers, too, only the rows that a step looks up travel.
    """

    number: int
    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    kind: str
    shards: tuple[ShardRange, ...]
    regularizer: Any = None
    is_idle: bool = False


def is_sharded(description: VariableDescription) -> bool:
    """Whether a variable has several shards; scalars of optimizers are copied."""
    return len(description.shards) > 1 and description.kind != "scalar"


def shard_devices(description: VariableDescription) -> list[tuple[str, int, int]]:
    """Device, first and last row (exclusive) of each shard of a variable."""
    if description.kind == "local":
        rows = description.shape[0] if description.shape else 1
        return [(_device("chief", 0), 0, rows)]
    return [(server_device(p.server), p.start, p.stop) for p in description.shards]


def server_device(server: int) -> str:
    """The device of a parameter server, as named in `tf.distribute`."""
    return _device("ps", server)


def worker_device(worker: int, device: str) -> str:
    """The device of a worker's steps, as named in `tf.distribute`."""
    return _device("worker", worker, device)


def _device(job: str, index: int, device: str = "cpu:0") -> str:
    return f"/job:{job}/replica:0/task:{index}/device:{device.upper()}"

"""Bytes that a worker sends to all arrive as they were sent, of any size."""

from __future__ import annotations

from typing import Any

import pytest
from multi_worker.clusters import on_clusters

# The last are more than two tensors of a message.
SIZES = (0, 5, 40_000_001)


def data_of(size: int) -> bytes:
    return (b"0123456" * (size // 7 + 1))[:size]


@pytest.mark.one_backend
@pytest.mark.parametrize("source", [0, 2])
@on_clusters("three")
def test_bytes_of_a_worker_arrive(cluster: Any, source: int) -> None:
    def program(strategy: Any) -> list[bool]:
        is_source, found = strategy.workers.group.index == source, []
        for data in map(data_of, SIZES):
            given = data if is_source else None
            found.append(
                strategy.workers.broadcast_bytes("a test", given, source) == data
            )
        return found

    assert cluster(program) == [[True] * len(SIZES)] * 3

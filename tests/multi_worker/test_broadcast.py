"""Bytes that a worker sends to all: by the collectives of the engine, not the lead."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

from keras_strategies.lead.connection import LeadConnection
from keras_strategies.lead.wire import encoded

pytestmark = pytest.mark.one_backend

# Bytes of messages to the group of workers, which say how many bytes follow.
FEW = 20_000
# More than two tensors of a message.
SIZES = (0, 5, 40_000_001)


def exchanged(strategy: Any, source: int) -> tuple[list[bytes], int]:
    """What this worker receives of another one, and bytes of its messages."""
    workers = strategy.workers
    sent = 0
    send = LeadConnection.send

    def counted(self: LeadConnection, kind: str, body: dict[str, Any]) -> None:
        nonlocal sent
        sent += len(encoded(kind, body))
        send(self, kind, body)

    with mock.patch.object(LeadConnection, "send", counted):
        found = [
            workers.broadcast_bytes(
                "a test",
                data_of(size) if workers.group.index == source else None,
                source,
            )
            for size in SIZES
        ]
    ends = [each[:7] + each[-7:] + len(each).to_bytes(8) for each in found]
    return ends, sent


def data_of(size: int) -> bytes:
    return (b"0123456" * (size // 7 + 1))[:size]


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("source", [0, 1, 2])
@pytest.mark.parametrize("cluster", ["three"], indirect=True, scope="session")
def test_bytes_of_a_worker_arrive_and_do_not_pass_the_lead(
    cluster: Any, source: int
) -> None:
    expected = [
        data[:7] + data[-7:] + len(data).to_bytes(8) for data in map(data_of, SIZES)
    ]
    for ends, sent in cluster(exchanged, source):
        assert ends == expected
        assert 0 < sent < FEW


@pytest.mark.one_backend("jax")
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="programs of XLA")
def test_the_program_of_a_broadcast_gathers_nothing() -> None:
    import jax

    from keras_strategies.engines.jax.workers import jax_workers

    axis = jax_workers._WORKER_AXIS
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), (axis,))
    split = jax.NamedSharding(mesh, jax.P(axis))
    stacked = jax.ShapeDtypeStruct((mesh.size, 1 << 16), np.uint8, sharding=split)
    program = jax_workers._from(1, mesh).lower(stacked).compile().as_text()
    # What a worker sends and receives does not depend on the number of workers.
    assert "all-gather" not in program
    results = re.findall(r"= u8\[([\d,]+)\].* (?:all-reduce|\S*permute)\(", program)
    assert mesh.size == 4 and results
    assert all(each == f"1,{1 << 16}" for each in results), results

"""The arithmetic of dividing rows and elements, in tables."""

from __future__ import annotations

import pytest

from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.input.auto_shard import resolve_policy
from keras_strategies.runtime.row_splits import replica_ranges
from keras_strategies.types import AutoShardPolicy

pytestmark = pytest.mark.one_backend("jax")


@pytest.mark.parametrize(
    ("rows", "counts", "ranges"),
    [
        (7, ReplicaCounts((2,)), [(0, 4), (4, 7)]),
        (1, ReplicaCounts((4,)), [(0, 1), (1, 1), (1, 1), (1, 1)]),
        (0, ReplicaCounts((2,)), [(0, 0), (0, 0)]),
        (7, ReplicaCounts((2, 2), 1), [(4, 6), (6, 7)]),
        (2, ReplicaCounts((2, 2), 1), [(2, 2), (2, 2)]),
        (5, ReplicaCounts((1, 1, 1), 1), [(2, 4)]),
        # Workers that form one replica take its rows.
        (5, ReplicaCounts((1,) * 4, 1, span=2), [(0, 3)]),
        (5, ReplicaCounts((1,) * 4, 2, span=2), [(3, 5)]),
    ],
)
def test_replica_ranges(rows, counts, ranges) -> None:
    assert replica_ranges(rows, counts) == ranges


@pytest.mark.parametrize("replicas", [[1], [2], [2, 2], [3, 1], [1, 2, 3]])
def test_workers_share_every_row_once(replicas) -> None:
    for rows in range(12):
        taken = []
        for worker in range(len(replicas)):
            counts = ReplicaCounts(tuple(replicas), worker)
            for start, stop in replica_ranges(rows, counts):
                taken.extend(range(start, stop))
        assert taken == list(range(rows))


AUTO, FILE, DATA, OFF, HINT = (
    AutoShardPolicy.parse(name) for name in ("auto", "file", "data", "off", "hint")
)


@pytest.mark.parametrize(
    ("policy", "workers", "files", "expected"),
    [
        *((policy, 1, 5, OFF) for policy in AutoShardPolicy),
        (AUTO, 2, 2, FILE),
        (AUTO, 3, 2, DATA),
        (AUTO, 2, None, DATA),
        (FILE, 2, 4, FILE),
        (DATA, 2, 4, DATA),
        (HINT, 2, None, HINT),
        (OFF, 2, 4, OFF),
    ],
)
def test_resolve_policy(policy, workers, files, expected) -> None:
    assert resolve_policy(policy, workers, files) is expected
    with pytest.raises(ValueError, match=r"each of the 3 workers.*reads 2 files"):
        resolve_policy(FILE, 3, 2)

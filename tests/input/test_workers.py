"""The arithmetic of dividing rows and elements, in tables."""

from __future__ import annotations

import pytest

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.input.worker_shares import (
    Share,
    replica_ranges,
    resolve_policy,
)
from keras_strategies.types import AutoShardPolicy


@pytest.mark.parametrize(
    ("rows", "share", "ranges"),
    [
        (8, Share(0, 2, 2), [(0, 4), (4, 8)]),
        (7, Share(0, 2, 2), [(0, 4), (4, 7)]),
        (1, Share(0, 4, 4), [(0, 1), (1, 1), (1, 1), (1, 1)]),
        (0, Share(0, 2, 2), [(0, 0), (0, 0)]),
        (7, Share(2, 2, 4), [(4, 6), (6, 7)]),
        (2, Share(2, 2, 4), [(2, 2), (2, 2)]),
        (5, Share(1, 1, 3), [(2, 4)]),
    ],
)
def test_replica_ranges(rows, share, ranges) -> None:
    assert replica_ranges(rows, share) == ranges


@pytest.mark.parametrize("rows", range(12))
@pytest.mark.parametrize("replicas", [[1], [2], [2, 2], [3, 1], [1, 2, 3]])
def test_workers_share_every_row_once(rows, replicas) -> None:
    taken = []
    for worker in range(len(replicas)):
        share = Share.of_worker(replicas, worker)
        for start, stop in replica_ranges(rows, share):
            taken.extend(range(start, stop))
    assert taken == list(range(rows))


@pytest.mark.parametrize("arguments", [(-1, 1, 2), (0, 0, 2), (1, 2, 2)])
def test_share_outside_of_all_replicas(arguments) -> None:
    with pytest.raises(InvalidArgumentError, match="a range of all replicas"):
        Share(*arguments)


AUTO, FILE, DATA, OFF, HINT = (
    AutoShardPolicy[name] for name in ("AUTO", "FILE", "DATA", "OFF", "HINT")
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


def test_too_few_files() -> None:
    with pytest.raises(ValueError, match=r"each of the 3 workers.*reads 2 files"):
        resolve_policy(FILE, 3, 2)


def test_policies_are_parsed_by_name() -> None:
    assert AutoShardPolicy.parse("data") is DATA

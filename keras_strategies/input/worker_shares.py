"""Division of rows and files between workers and replicas, in pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.input.row_splits import split_sizes
from keras_strategies.types import AutoShardPolicy


@dataclass(frozen=True)
class Share:
    """The replicas of one process among all replicas.

    Args:
        first: int, the number of the process's first replica.
        count: int, the number of replicas of the process.
        total: int, the number of replicas of all processes.
    """

    first: int
    count: int
    total: int

    def __post_init__(self) -> None:
        if self.count < 1 or self.first < 0 or self.first + self.count > self.total:
            raise InvalidArgumentError(
                "The replicas of a process must be a range of all replicas. "
                f"Received: {self!r}"
            )

    @classmethod
    def of_worker(cls, replicas: Sequence[int], worker: int) -> Share:
        """The share of one worker, given the number of replicas of each worker.

        >>> Share.of_worker([2, 1, 3], 2)
        Share(first=3, count=3, total=6)
        """
        return cls(sum(replicas[:worker]), replicas[worker], sum(replicas))


def replica_ranges(rows: int, share: Share) -> list[tuple[int, int]]:
    """The rows of a global batch that each local replica takes.

    Args:
        rows: int, rows of the global batch.
        share: the local replicas.

    Returns:
        list of pairs `(start, stop)`, one for each local replica.

    >>> replica_ranges(7, Share(0, 2, 2))
    [(0, 4), (4, 7)]
    >>> replica_ranges(7, Share(2, 2, 4))
    [(4, 6), (6, 7)]
    """
    sizes = split_sizes(rows, share.total)
    start = sum(sizes[: share.first])
    ranges = []
    for size in sizes[share.first : share.first + share.count]:
        ranges.append((start, start + size))
        start += size
    return ranges


def worker_rows(rows: int, replicas: Sequence[int]) -> list[int]:
    """The rows of a global batch that each worker takes.

    Args:
        rows: int, rows of the global batch.
        replicas: sequence of int, the replicas of each worker.

    >>> worker_rows(7, [2, 1, 1]), worker_rows(2, [1, 2])
    ([4, 2, 1], [1, 1])
    """
    sizes = iter(split_sizes(rows, sum(replicas)))
    return [sum(next(sizes) for _ in range(count)) for count in replicas]


def resolve_policy(
    policy: AutoShardPolicy, num_workers: int, num_files: int | None
) -> AutoShardPolicy:
    """The effective policy.

    Args:
        policy: the requested policy.
        num_workers: int, the number of workers.
        num_files: int, the number of files that the dataset reads; None for no files.

    Returns:
        `OFF` for one worker; for `AUTO`, either `FILE` or `DATA`; else the policy.

    Raises:
        ValueError: for `FILE` without a file for each worker.
    """
    if num_workers == 1:
        return AutoShardPolicy.OFF
    enough = num_files is not None and num_files >= num_workers
    if policy is AutoShardPolicy.AUTO:
        return AutoShardPolicy.FILE if enough else AutoShardPolicy.DATA
    if policy is AutoShardPolicy.FILE and not enough:
        raise InvalidArgumentError(
            f"AutoShardPolicy.FILE needs a file for each of the {num_workers} "
            f"workers, but the dataset reads {num_files or 'no'} files. Split the "
            "data into more files, or use AutoShardPolicy.DATA."
        )
    return policy

"""Settings of an elastic group of workers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Self

from keras_strategies.errors import ClusterError
from keras_strategies.types import Elastic


@dataclass(frozen=True)
class Limits:
    """Numbers and times of an elastic group.

    Args:
        min_workers: int, the smallest group.
        max_workers: int or None, the largest one.
        rejoin: bool, whether workers may join after the start.
        timeout: float, seconds without an answer after which a worker is excluded.
        patience: float, seconds to wait for busy workers and for `min_workers`.
    """

    min_workers: int
    max_workers: int | None
    rejoin: bool
    timeout: float
    patience: float

    @classmethod
    def of(cls, elastic: Elastic, count: int, timeout: float) -> Self:
        """The limits of a cluster.

        Args:
            elastic: `Elastic`.
            count: int, the workers of the cluster.
            timeout: float, seconds without a heartbeat until a worker is lost.

        Raises:
            ClusterError: if the cluster has fewer than `min_workers`.
        """
        if elastic.min_workers > count:
            raise ClusterError(
                f"`Elastic(min_workers={elastic.min_workers})` needs more workers than "
                f"the cluster describes: {count}. Add workers to the cluster, or lower "
                "`min_workers`."
            )
        return cls(
            elastic.min_workers,
            elastic.max_workers,
            elastic.rejoin,
            timeout,
            elastic.timeout_seconds,
        )


@dataclass(frozen=True)
class GroupSettings:
    """One worker's settings of an elastic group.

    Args:
        addresses: list of str, the addresses of all workers that may take part; each
            listens at its own.
        index: int, the number of this worker.
        limits: `Limits`.
        same: dict of values that must agree on all workers, by name.
        job: str, identifies this cluster among others at the same addresses; None to
            use the addresses.
    """

    addresses: list[str]
    index: int
    limits: Limits
    same: dict[str, Any] = field(default_factory=dict)
    job: str | None = None

    @property
    def job_id(self) -> str:
        """str, the job, or a hash of the addresses."""
        addresses = json.dumps(self.addresses).encode()
        return self.job or hashlib.sha256(addresses).hexdigest()[:16]

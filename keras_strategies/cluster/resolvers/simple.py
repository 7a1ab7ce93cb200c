"""Clusters described in code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras_strategies.cluster.resolver import FixedClusterResolver
from keras_strategies.cluster.spec import ClusterSpec


class SimpleClusterResolver(FixedClusterResolver):
    """A resolver for a given cluster and task.

    Args:
        cluster_spec: `ClusterSpec` or a dict for one.
        master: str, what `master()` returns; empty for the task's address.
        task_type: str, the job of this process.
        task_id: int, its number within the job.
        environment: str.
        num_accelerators: dict from kind to number.
        rpc_layer: str, the protocol for `master()`.

    Raises:
        ValueError: if the task is not one of the cluster's.

    Example:

    >>> resolver = ks.cluster_resolver.SimpleClusterResolver(
    ...     {"worker": ["a:2222", "b:2222"]}, task_type="worker", task_id=0)
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, Any],
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ):
        super().__init__(task_type, task_id, rpc_layer)
        self._spec = ClusterSpec(cluster_spec)
        self._master = master
        self._environment = environment
        self._accelerators = dict(num_accelerators or {})
        if task_type is not None or task_id is not None:
            self.check_task()

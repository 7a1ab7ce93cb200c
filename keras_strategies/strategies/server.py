"""`Server`: a worker or parameter server of a cluster that `TF_CONFIG` describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.spec import (
    ClusterSpec,
    check_parameter_server_cluster,
)
from keras_strategies.coordinator.cluster import server_process
from keras_strategies.coordinator.secret import cluster_keys
from keras_strategies.coordinator.snapshots import check_folder
from keras_strategies.errors import ClusterError
from keras_strategies.strategies.parameter_server import worker_main


class Server:
    """A worker's or a parameter server's process, on a machine of a cluster.

    The tasks may be started in any order. They listen at the addresses that the cluster
    names, over CurveZMQ with keys from the variable `KS_CLUSTER_SECRET`, which all of
    them need.

    Args:
        cluster_spec: `ClusterSpec`, a dict for one, or a resolver.
        job_name: str, `"worker"` or `"ps"`; None for the resolver's task.
        task_index: int, the number in the job.
        snapshot_folder: str, where a parameter server writes snapshots; None for none.
        snapshot_seconds: float, seconds between snapshots.
        timeout_seconds: float, seconds that a server may take to answer a worker.
        coordinator_seconds: float, seconds that the coordinator may be gone once it was
            there. One that is started anew in this time finds this task waiting.

    Raises:
        ValueError: for a cluster or a task that cannot be, or without the secret.
        RuntimeError: as `ks.errors.SnapshotError`, if a parameter server cannot write
            to `snapshot_folder`.

    Example:

    >>> resolver = ks.cluster_resolver.TFConfigClusterResolver()
    >>> ks.Server(resolver).join()
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, Any] | ClusterResolver,
        job_name: str | None = None,
        task_index: int | None = None,
        *,
        snapshot_folder: str | None = None,
        snapshot_seconds: float | None = None,
        timeout_seconds: float = 120.0,
        coordinator_seconds: float = 300.0,
    ):
        if isinstance(cluster_spec, ClusterResolver):
            job_name = cluster_spec.task_type if job_name is None else job_name
            task_index = cluster_spec.task_id if task_index is None else task_index
            cluster_spec = cluster_spec.cluster_spec()
        self._spec = ClusterSpec(cluster_spec)
        check_parameter_server_cluster(self._spec)
        if "chief" not in self._spec.jobs:
            raise ClusterError(
                f"The cluster {self._spec!r} has no chief, which coordinates workers "
                "and parameter servers. Name its address under 'chief'."
            )
        if job_name not in ("worker", "ps"):
            raise ClusterError(
                "A Server is a 'worker' or a 'ps'. Received: "
                f"job_name={job_name!r}. The chief makes the strategy instead, and an "
                "evaluator calls ks.SidecarEvaluator(...).start()."
            )
        self._job = job_name
        self._index = int(task_index or 0)
        self._spec.task_address(self._job, self._index)
        self._keys = cluster_keys()
        if snapshot_folder is not None and job_name == "ps":
            check_folder(snapshot_folder)
        self._snapshots = (snapshot_folder, snapshot_seconds)
        self._timeout = timeout_seconds
        self._patience = coordinator_seconds

    def __repr__(self) -> str:
        return f"<Server of {self._job} {self._index} at {self.target}>"

    @property
    def target(self) -> str:
        """str, the address of this task."""
        return self._spec.task_address(self._job, self._index)

    def join(self) -> None:
        """Serves until the coordinator ends.

        Raises:
            RuntimeError: as `ks.errors.WorkerError`, if the coordinator is gone for
                longer than `coordinator_seconds`.
        """
        control = f"tcp://{self._spec.task_address('chief', 0)}"
        servers = [
            f"tcp://{self._spec.task_address('ps', i)}"
            for i in self._spec.task_indices("ps")
        ]
        if self._job == "ps":
            own = servers[self._index]
            server_process(
                self._index,
                0,
                control,
                self._keys,
                own,
                *self._snapshots,
                patience=self._patience,
            )
            return
        worker_main(
            index=self._index,
            incarnation=0,
            control=control,
            keys=self._keys,
            addresses=servers,
            timeout=self._timeout,
            patience=self._patience,
        )

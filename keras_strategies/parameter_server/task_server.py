"""`Server`: the process of one worker or parameter-server task."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Mapping
from typing import Any

from keras_strategies.cluster.environment import SECRET
from keras_strategies.cluster.resolver import ClusterResolver, as_resolver
from keras_strategies.cluster.resolvers.local_processes import free_addresses
from keras_strategies.cluster.spec import (
    ClusterSpec,
    check_parameter_server_cluster,
)
from keras_strategies.errors import (
    BackendError,
    ClusterError,
    ContextError,
    InvalidArgumentError,
)
from keras_strategies.parameter_server.server.server_process import run_server
from keras_strategies.parameter_server.server.snapshots import check_folder
from keras_strategies.parameter_server.wire.cluster_keys import cluster_keys
from keras_strategies.parameter_server.worker.worker_process import run_worker


def _check_config(config: Any) -> None:
    if config is None:
        return
    import keras

    if keras.backend.backend() != "tensorflow":
        raise BackendError(
            "`config` has settings of TensorFlow, but Keras runs on "
            f"{keras.backend.backend()!r}. Leave it out; OMP_NUM_THREADS sets the "
            "threads of a task."
        )
    if not hasattr(config, "inter_op_parallelism_threads"):
        raise InvalidArgumentError(
            "`config` must be a tf.compat.v1.ConfigProto; its numbers of threads are "
            f"used. Received: {config!r}"
        )


def _use_threads(config: Any) -> None:
    """Configures TensorFlow's numbers of threads."""
    threading = importlib.import_module("tensorflow").config.threading
    if config.inter_op_parallelism_threads:
        threading.set_inter_op_parallelism_threads(config.inter_op_parallelism_threads)
    if config.intra_op_parallelism_threads:
        threading.set_intra_op_parallelism_threads(config.intra_op_parallelism_threads)


class Server:
    """The process of a worker or parameter server, on a machine of a cluster.

    The tasks may be started in any order. They listen at the cluster's addresses, over
    CurveZMQ with keys derived from the environment variable `KS_CLUSTER_SECRET`, which
    all tasks need.

    Args:
        cluster_spec: `ClusterSpec`, a dict for one, or a resolver.
        job_name: str, `"worker"` or `"ps"`; None for the resolver's task.
        task_index: int, the number in the job.
        protocol: str; None or, as in scripts for `tf.distribute`, `"grpc"`: both mean
            the transport of this library. Others are refused.
        config: `tf.compat.v1.ConfigProto` with TensorFlow's numbers of threads in this
            task; None for the defaults. Refused on other backends.
        start: bool, whether `join` may serve immediately; with False, after `start()`.
        snapshot_folder: str, a parameter server's folder for snapshots; None for none.
        snapshot_seconds: float, seconds between snapshots.
        timeout_seconds: float, timeout for a server's reply to a worker.
        coordinator_seconds: float, timeout for a lost coordinator; until then this task
            waits for a restarted one.

    Raises:
        ValueError: for an invalid cluster or task, or without the secret.
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
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
        *,
        snapshot_folder: str | None = None,
        snapshot_seconds: float | None = None,
        timeout_seconds: float = 120.0,
        coordinator_seconds: float = 300.0,
    ):
        if callable(getattr(cluster_spec, "cluster_spec", None)):
            cluster_spec = as_resolver(cluster_spec, "cluster_spec")
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
                "`job_name` must be 'worker' or 'ps'. Received: "
                f"job_name={job_name!r}. The chief creates the strategy instead, an "
                "evaluator calls ks.SidecarEvaluator(...).start()."
            )
        self._job = job_name
        self._index = int(task_index or 0)
        self._spec.task_address(self._job, self._index)
        self._keys = cluster_keys()
        if protocol not in (None, "grpc"):
            raise InvalidArgumentError(
                "Tasks communicate over ZeroMQ, encrypted by CurveZMQ; no other "
                "transport is available. Leave `protocol` out. Received: "
                f"protocol={protocol!r}"
            )
        _check_config(config)
        self._config = config
        self._is_started = bool(start)
        if snapshot_folder is not None and job_name == "ps":
            check_folder(snapshot_folder)
        self._snapshots = (snapshot_folder, snapshot_seconds)
        self._timeout = timeout_seconds
        self._coordinator_seconds = coordinator_seconds

    def __repr__(self) -> str:
        return f"<Server of {self._job} {self._index} at {self.target}>"

    @property
    def target(self) -> str:
        """str, the address of this task."""
        return self._spec.task_address(self._job, self._index)

    @property
    def server_def(self) -> dict[str, Any]:
        """dict, the cluster, the job's name and the task's index."""
        return {
            "cluster": self._spec.as_dict(),
            "job_name": self._job,
            "task_index": self._index,
        }

    def start(self) -> None:
        """Allows `join` to serve, for a server created with `start=False`."""
        self._is_started = True

    @classmethod
    def create_local_server(cls, config: Any = None, start: bool = True) -> Server:
        """A worker of a new cluster on this machine, at free ports of the loopback.

        `server_def` has the addresses of its chief and its parameter server. If
        `KS_CLUSTER_SECRET` is not set, it is set to a new secret, which processes
        started from this one inherit.

        Args:
            config: as for `Server`.
            start: as for `Server`.
        """
        os.environ.setdefault(SECRET, secrets.token_hex())
        chief, worker, ps = free_addresses(3)
        cluster = {"chief": [chief], "worker": [worker], "ps": [ps]}
        return cls(cluster, "worker", 0, config=config, start=start)

    def join(self) -> None:
        """Serves until the coordinator ends.

        Raises:
            RuntimeError: if it was created with `start=False` and not started.
            RuntimeError: as `ks.errors.WorkerError`, if the coordinator is lost for
                longer than `coordinator_seconds`.
        """
        if not self._is_started:
            raise ContextError(
                f"{self!r} was made with start=False. Call `start()` before `join()`."
            )
        if self._config is not None:
            _use_threads(self._config)
        control = f"tcp://{self._spec.task_address('chief', 0)}"
        servers = [
            f"tcp://{self._spec.task_address('ps', i)}"
            for i in self._spec.task_indices("ps")
        ]
        if self._job == "ps":
            own = servers[self._index]
            run_server(
                self._index,
                0,
                control,
                self._keys,
                own,
                *self._snapshots,
                coordinator_seconds=self._coordinator_seconds,
            )
            return
        run_worker(
            index=self._index,
            incarnation=0,
            control=control,
            keys=self._keys,
            addresses=servers,
            timeout=self._timeout,
            coordinator_seconds=self._coordinator_seconds,
        )

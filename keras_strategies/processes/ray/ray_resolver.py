"""Clusters on Ray: each task is an actor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.resolvers.environment import tf_config
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.errors import ContextError, InvalidArgumentError
from keras_strategies.processes.launched_call import pickled_call
from keras_strategies.processes.ray.connection import connect
from keras_strategies.processes.ray.task_placement import PLACEMENTS, ClusterPlan
from keras_strategies.processes.ray.train_context import TrainWorker, is_train_worker
from keras_strategies.processes.ray.worker_run import ENGINE, RunSettings, run_workers
from keras_strategies.types import Elastic, check_count, check_seconds


class RayClusterResolver(ClusterResolver):
    """A cluster of workers and parameter servers that Ray starts on its nodes.

    In the driver, `run` calls a function on each of the workers, for
    `MultiWorkerMirroredStrategy`; and `ParameterServerStrategy` starts workers and
    servers, as actors. The resources of all of them are reserved together, in a
    placement group. In a worker that `run` has started, and in those of Ray Train, the
    resolver is the cluster of that worker.

    Args:
        address: str, the cluster's `"host:6379"`; None for the cluster that this
            process is connected to, else for that of the environment variable
            `RAY_ADDRESS` or of this machine.
        workers: int, 1 or more.
        ps: int, parameter servers; `run` starts none.
        min_workers: int, workers with which `ParameterServerStrategy` begins; others
            join when their resources are free. None for all.
        resources_per_worker: dict, such as `{"CPU": 4, "GPU": 1}`, with Ray's names;
            custom ones and `"memory"`, in bytes, too. None for `{"CPU": 1}`.
        resources_per_server: dict for each parameter server. None for `{"CPU": 1}`.
        placement: str, Ray's strategy: `"SPREAD"` over the nodes, `"PACK"` on few,
            `"STRICT_SPREAD"` or `"STRICT_PACK"`.
        runtime_env: dict, Ray's runtime environment of the tasks, such as
            `{"working_dir": ".", "pip": [...]}`.
        start_seconds: float, seconds to wait for free resources.

    Raises:
        ValueError: for invalid numbers, resources or placements.

    Example:

    >>> resolver = ks.cluster_resolver.RayClusterResolver(
    ...     workers=8, resources_per_worker={"CPU": 4, "GPU": 1})
    >>> histories = resolver.run(train)
    """

    _environment = ENGINE

    def __init__(
        self,
        address: str | None = None,
        workers: int = 2,
        ps: int = 0,
        *,
        min_workers: int | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        resources_per_server: Mapping[str, float] | None = None,
        placement: str = "SPREAD",
        runtime_env: Mapping[str, Any] | None = None,
        start_seconds: float = 180.0,
    ):
        check_count("workers", workers, 1)
        check_count("ps", ps, 0)
        least = workers if min_workers is None else min_workers
        check_count("min_workers", least, 1)
        if least > workers:
            raise InvalidArgumentError(
                "`min_workers` must be `workers` or fewer. Received: "
                f"min_workers={least}, workers={workers}"
            )
        if placement not in PLACEMENTS:
            raise InvalidArgumentError(
                f"`placement` must be one of {', '.join(map(repr, PLACEMENTS))}. "
                f"Received: {placement!r}"
            )
        check_seconds("start_seconds", start_seconds)
        super().__init__()
        self._address = address
        self.min_workers = least
        self.plan = ClusterPlan(
            workers,
            ps,
            {
                "worker": _resources("resources_per_worker", resources_per_worker),
                "ps": _resources("resources_per_server", resources_per_server),
            },
            placement,
            dict(runtime_env or {}),
            start_seconds,
        )

    @property
    def _inner(self) -> ClusterResolver | None:
        """The resolver of this worker; None in the driver."""
        if is_train_worker():
            # A `TensorflowTrainer` sets TF_CONFIG, too.
            return TrainWorker()
        if os.environ.get(tf_config.VARIABLE):
            own = tf_config.TFConfigClusterResolver()
            return own if own.environment == ENGINE else None
        return None

    @property
    def is_driver(self) -> bool:
        """bool, whether this process starts the tasks."""
        return self._inner is None

    def cluster_spec(self) -> ClusterSpec:
        """The tasks; in the driver with names instead of addresses."""
        if (inner := self._inner) is not None:
            return inner.cluster_spec()
        tasks = {"worker": [f"worker-{i}" for i in range(self.plan.workers)]}
        if self.plan.ps:
            tasks["chief"] = ["driver"]
            tasks["ps"] = [f"ps-{i}" for i in range(self.plan.ps)]
        return ClusterSpec(tasks)

    def _found_task(self) -> tuple[str | None, int | None]:
        inner = self._inner
        return ("chief", 0) if inner is None else (inner.task_type, inner.task_id)

    def _accelerators_of(self, job: str | None, index: int | None) -> dict[str, int]:
        resources = self.plan.resources["ps" if job == "ps" else "worker"]
        gpus = int(resources.get("GPU", 0))
        return {"GPU": gpus} if gpus else {}

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        max_restarts: int = 0,
        elastic: Elastic | None = None,
        timeout_seconds: float | None = None,
    ) -> list[Any]:
        """Calls a function on each worker, in processes that Ray starts.

        `ks.MultiWorkerMirroredStrategy()` in the function connects the workers. The
        function, its arguments and its results are sent by cloudpickle: import modules
        inside of it. All processes have ended when `run` returns.

        Args:
            function: callable, called once in each process.
            args: sequence of arguments for each call.
            kwargs: dict of keyword arguments for each call.
            max_restarts: int, restarts after a failure: of all workers, in new
                processes, on other nodes where one is lost, so that the function
                continues with `ks.callbacks.Resume`. With `elastic`, the number of
                workers that are replaced.
            elastic: `Elastic`, so that training continues without lost workers, and
                with those that replace them.
            timeout_seconds: float, seconds after which the processes are ended; None to
                wait as long as it takes.

        Returns:
            list of the workers' results, in their order; with `elastic` None for a
            lost worker.

        Raises:
            Exception: the error of the function on a worker, with the traceback of
                that process as a note.
            RuntimeError: as `ks.errors.WorkerError`, if a worker or its node was lost,
                or had not returned in time.
            ValueError: as `ks.errors.ClusterError`, without a Ray cluster, or if its
                resources are not free within `start_seconds`.
            ImportError: without ray.

        Example:

        >>> def train():
        ...     import keras, keras_strategies as ks
        ...     strategy = ks.MultiWorkerMirroredStrategy()
        ...     with strategy.scope():
        ...         model = ...
        ...     resume = ks.callbacks.Resume("/shared/run-1")
        ...     return model.fit(x, y, callbacks=[resume]).history
        >>> histories = resolver.run(train, max_restarts=3)
        """
        if not callable(function):
            raise InvalidArgumentError(
                "`function` of `run` must be callable. Received: "
                f"{function!r} of type {type(function).__name__}"
            )
        check_count("max_restarts", max_restarts, 0)
        Elastic.check(elastic)
        if timeout_seconds is not None:
            check_seconds("timeout_seconds", timeout_seconds, ", or None")
        if not self.is_driver:
            raise ContextError(
                f"`run` was called in {self.task_type} {self.task_id}, which is a task "
                "of the cluster. Call it in the driver."
            )
        self.connect()
        pickled = pickled_call(function, args, kwargs)
        settings = RunSettings(pickled, max_restarts, elastic, timeout_seconds)
        return run_workers(self.plan, settings)

    def connect(self) -> None:
        """Connects this process to the Ray cluster.

        Raises:
            ValueError: as `ks.errors.ClusterError`, if there is none.
            ImportError: without ray.
        """
        connect(self._address)

    def __repr__(self) -> str:
        if self._inner is not None:
            return super().__repr__()
        plan = self.plan
        return f"<RayClusterResolver: {plan.workers} workers, {plan.ps} ps>"


def _resources(name: str, given: Mapping[str, float] | None) -> dict[str, float]:
    resources = {"CPU": 1.0} if given is None else dict(given)
    if not resources or not all(
        isinstance(amount, (int, float)) and amount > 0 for amount in resources.values()
    ):
        raise InvalidArgumentError(
            f"`{name}` must be a dict of Ray's resources and amounts above 0, such as "
            f'{{"CPU": 4, "GPU": 1}}. Received: {given!r}'
        )
    return resources

"""Interface of cluster resolvers."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

from keras_strategies.cluster.spec import ClusterSpec, is_chief, worker_count
from keras_strategies.errors import ClusterError, InvalidArgumentError


def as_resolver(given: object, argument: str) -> ClusterResolver:
    """Wraps a resolver of TensorFlow; returns others unchanged.

    Args:
        given: a `ClusterResolver`, or an object with `cluster_spec()`, `task_type` and
            `task_id`, as those of `tf.distribute.cluster_resolver` are.
        argument: str, the name of the argument, for the error.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(given, ClusterResolver):
        return given
    if not callable(getattr(given, "cluster_spec", None)):
        raise InvalidArgumentError(
            f"`{argument}` must be a resolver of ks.cluster_resolver or "
            f"tf.distribute.cluster_resolver. Received: {given!r} of type "
            f"{type(given).__name__}"
        )
    return _OtherResolver(given)


class ClusterResolver(abc.ABC):
    """Describes the tasks of a cluster, and the task of this process.

    Args:
        task_type: str or None, the job of this process.
        task_id: int or None, its number within the job.
        rpc_layer: str or None, the protocol for `master()`, as TensorFlow has it.
    """

    # Defaults for subclasses that do not call `super().__init__()`.
    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str = ""
    _master: str = ""

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ):
        self._task_type = task_type
        self._task_id = None if task_id is None else int(task_id)
        self._rpc_layer = rpc_layer

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The current tasks and their addresses."""

    @property
    def task_type(self) -> str | None:
        """str or None, the job of this process."""
        return self._found_task()[0] if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """int or None, the number of this process within its job."""
        return self._found_task()[1] if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def _found_task(self) -> tuple[str | None, int | None]:
        """The task of this process, where a service has to be queried for it."""
        return None, None

    @property
    def rpc_layer(self) -> str | None:
        """str or None, the protocol in front of addresses in `master()`."""
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str:
        """str, the platform of the cluster, such as `"google"`; `""` if unknown."""
        return self._environment

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task, this process's by default.

        Args:
            task_type: str, another job.
            task_id: int, the task's number in it.
            rpc_layer: str, another protocol than the resolver's.

        Returns:
            str, such as `"grpc://host:2222"`; `""` where there is no cluster.

        Raises:
            ValueError: if the cluster has no such task.
        """
        if self._master and task_type is None and task_id is None:
            return self._master
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        layer = self.rpc_layer if rpc_layer is None else rpc_layer
        return f"{layer}://{address}" if layer else address

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """The accelerators of a task, according to the cluster.

        Args:
            task_type: str, another job than this process's.
            task_id: int, the task's number in it.
            config_proto: not used: it configures sessions of TensorFlow 1.

        Returns:
            dict from kind to number, such as `{"GPU": 2}`; empty if the
            resolver has no such number.
        """
        return self._accelerators_of(task_type, task_id)

    def _accelerators_of(self, job: str | None, index: int | None) -> dict[str, int]:
        """What `num_accelerators` returns."""
        return {}

    @property
    def is_chief(self) -> bool:
        """bool, whether this process is the chief: the `chief` task, else worker 0."""
        return is_chief(self.cluster_spec(), self.task_type, self.task_id)

    @property
    def num_workers(self) -> int:
        """int, the number of training tasks; 1 without a cluster."""
        return max(1, worker_count(self.cluster_spec()))

    def check_task(self) -> None:
        """Checks that this process is one of the cluster's tasks.

        Raises:
            ValueError: if it is not.
        """
        spec = self.cluster_spec()
        if not spec:
            return
        if self.task_type is None or self.task_id is None:
            raise ClusterError(
                f"The cluster is {spec!r}, but the task of this process is unknown. "
                f"Pass `task_type` and `task_id` to {type(self).__name__}."
            )
        if self.task_type == "evaluator" and "evaluator" not in spec.jobs:
            return  # A separate cluster, which need not be listed.
        if self.task_type not in spec.jobs:
            raise ClusterError(
                f"This process is the task {self.task_type!r} {self.task_id}, but "
                f"the cluster has the jobs {spec.jobs}. Correct the task's type, or "
                "add the job."
            )
        if self.task_id not in spec.task_indices(self.task_type):
            raise ClusterError(
                f"This process is the task {self.task_type!r} {self.task_id}, but "
                f"the cluster has {spec.num_tasks(self.task_type)} of them, numbered "
                f"{spec.task_indices(self.task_type)}: "
                f"{spec.job_tasks(self.task_type)}. Correct the task's index, or add "
                "its address."
            )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: {self.task_type} {self.task_id} of "
            f"{self.cluster_spec()!r}>"
        )


class FixedClusterResolver(ClusterResolver):
    """A resolver that finds the cluster once, when it is made."""

    _spec: ClusterSpec
    _accelerators: Mapping[str, int] = {}

    def cluster_spec(self) -> ClusterSpec:
        return self._spec

    def _accelerators_of(self, job: str | None, index: int | None) -> dict[str, int]:
        return dict(self._accelerators)


class _OtherResolver(ClusterResolver):
    """Adapter for a resolver that is not a subclass, such as TensorFlow's.

    Args:
        resolver: the object with `cluster_spec()`.
    """

    def __init__(self, resolver: Any):
        super().__init__(
            getattr(resolver, "task_type", None) or None,
            getattr(resolver, "task_id", None),
            getattr(resolver, "rpc_layer", None),
        )
        self._environment = str(getattr(resolver, "environment", ""))
        self._resolver = resolver

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(self._resolver.cluster_spec())

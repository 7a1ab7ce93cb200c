"""Cluster specification: the tasks of each job and their addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keras_strategies.errors import ClusterError

# The supported jobs, in the order of their tasks.
JOBS = ("chief", "worker", "ps", "evaluator")


class ClusterSpec:
    """The addresses of a cluster's tasks, by job.

    Args:
        cluster: dict from the name of a job to the addresses of its tasks
            (`"host:port"`): a list, or a dict from task number to address where
            some addresses are unknown. Or another `ClusterSpec`.

    Raises:
        ValueError: for anything else, an address that is not a string, or one that
            two tasks share.

    Example:

    >>> spec = ks.cluster_resolver.ClusterSpec({"worker": ["a:2222", "b:2222"]})
    >>> spec.num_tasks("worker")
    2
    """

    def __init__(self, cluster: Mapping[str, Any] | ClusterSpec):
        self._tasks: dict[str, dict[int, str]]
        if isinstance(cluster, ClusterSpec):
            self._tasks = {job: dict(tasks) for job, tasks in cluster._tasks.items()}
            return
        if callable(as_dict := getattr(cluster, "as_dict", None)):
            cluster = as_dict()  # `tf.train.ClusterSpec`
        if not isinstance(cluster, Mapping):
            raise ClusterError(
                "A cluster must be a dict from job names to addresses of tasks. "
                f"Received: {cluster!r}."
            )
        self._tasks = {job: _tasks(job, given) for job, given in cluster.items()}
        self._check_addresses()

    def _check_addresses(self) -> None:
        seen: dict[str, str] = {}
        for job, tasks in self._tasks.items():
            for index, address in tasks.items():
                task = f"{job} {index}"
                if address in seen:
                    raise ClusterError(
                        f"Address {address!r} is used by both {seen[address]} and "
                        f"{task}. Each task needs its own address."
                    )
                seen[address] = task

    @property
    def jobs(self) -> list[str]:
        """list of str, the names of the jobs."""
        return list(self._tasks)

    def num_tasks(self, job_name: str) -> int:
        """The number of tasks of a job with an address.

        Args:
            job_name: str.

        Returns:
            int.

        Raises:
            ValueError: if there is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The numbers of a job's tasks, in order."""
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """The address of one task.

        Raises:
            ValueError: if there is no such job or task.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ClusterError(
                f"Job {job_name!r} has no task {task_index}; its tasks are "
                f"{sorted(tasks)}."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The addresses of a job, with None for tasks without one."""
        tasks = self._job(job_name)
        return [tasks.get(i) for i in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, Any]:
        """The addresses: a list for each job, a dict where tasks are missing."""
        found: dict[str, Any] = {}
        for job in self._tasks:
            addresses = self.job_tasks(job)
            is_complete = all(address is not None for address in addresses)
            found[job] = addresses if is_complete else dict(self._tasks[job])
        return found

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._tasks:
            raise ClusterError(
                f"The cluster has no job {name!r}. Its jobs are {self.jobs}."
            )
        return self._tasks[name]

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._tasks == other._tasks
        # `tf.train.ClusterSpec` can be compared with a dict too.
        return self.as_dict() == other if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        # The order of the jobs is no part of equality.
        return hash(
            frozenset((job, frozenset(t.items())) for job, t in self._tasks.items())
        )

    def __repr__(self) -> str:
        tasks = self.as_dict()
        return f"ClusterSpec({ {job: tasks[job] for job in sorted(tasks)}!r})"


def _tasks(job: Any, given: Any) -> dict[int, str]:
    if not isinstance(job, str):
        raise ClusterError(f"Job names must be strings. Received: {job!r}.")
    if isinstance(given, Mapping):
        tasks = dict(given)
    elif isinstance(given, Sequence) and not isinstance(given, str):
        tasks = dict(enumerate(given))
    else:
        raise ClusterError(
            f"The tasks of job {job!r} must be a list of addresses, or a dict from "
            f"task number to address. Received: {given!r}."
        )
    found: dict[int, str] = {}
    for index, address in tasks.items():
        try:
            number = int(index)  # JSON has strings for keys.
        except (TypeError, ValueError):
            number = -1
        if number < 0 or not isinstance(address, str) or not address:
            raise ClusterError(
                f"Job {job!r} has the task {index!r} with the address {address!r}. "
                'Task indices start at 0, and addresses look like "host:2222".'
            )
        found[number] = address
    return found


def check_training_cluster(spec: ClusterSpec) -> None:
    """Validates a cluster of workers.

    Raises:
        ValueError: for an unknown job, two chiefs, two evaluators, or no worker and
            no chief.
    """
    unknown = sorted(set(spec.jobs) - set(JOBS))
    if unknown:
        raise ClusterError(
            f"The cluster has the unknown jobs {unknown}. Supported jobs are "
            f"{list(JOBS)}."
        )
    for job in ("chief", "evaluator"):
        if job in spec.jobs and spec.num_tasks(job) > 1:
            raise ClusterError(
                f"The cluster has {spec.num_tasks(job)} {job}s, at "
                f"{spec.job_tasks(job)}. At most one is allowed; make the others "
                "workers, or remove them."
            )
    if worker_count(spec) == 0:
        raise ClusterError(
            f"The cluster {spec!r} has no worker. Add the address of at least one "
            "under 'worker' or 'chief'."
        )


def check_parameter_server_cluster(spec: ClusterSpec) -> None:
    """Validates a cluster with parameter servers.

    Raises:
        ValueError: as `check_training_cluster`, and without a worker or a server.
    """
    check_training_cluster(spec)
    for job in ("worker", "ps"):
        if job not in spec.jobs or spec.num_tasks(job) == 0:
            raise ClusterError(
                f"The cluster {spec!r} has no {job!r}. ParameterServerStrategy needs "
                "at least one worker and one parameter server ('ps')."
            )


def worker_count(spec: ClusterSpec) -> int:
    """int, the number of training tasks: the chief and the workers."""
    return sum(spec.num_tasks(job) for job in ("chief", "worker") if job in spec.jobs)


def is_chief(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> bool:
    """Whether a task is the chief: the `chief` task, or worker 0 without one."""
    if not spec or task_type is None:
        return True
    if "chief" in spec.jobs and spec.num_tasks("chief"):
        return task_type == "chief"
    return task_type == "worker" and task_id == 0


def id_in_cluster(spec: ClusterSpec, task_type: str, task_id: int) -> int:
    """The index of a training task: the chief, then the workers.

    An evaluator is a separate cluster, as in `tf.distribute`, and has its own index.

    Args:
        spec: `ClusterSpec`.
        task_type: str, the task's job.
        task_id: int, its number within the job.

    Returns:
        int, from 0 to `worker_count(spec) - 1`.

    Raises:
        ValueError: for a task that is not a training task, or does not exist.
    """
    if task_type == "evaluator":
        return task_id
    if task_type not in ("chief", "worker"):
        raise ClusterError(
            f"Task {task_type!r} {task_id} is not a worker, so it has no worker index."
        )
    spec.task_address(task_type, task_id)
    before = 0
    if task_type == "worker" and "chief" in spec.jobs:
        before = spec.num_tasks("chief")
    return before + spec.task_indices(task_type).index(task_id)


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of an address.

    Args:
        address: str, `"host:2222"`, `"10.0.0.1:2222"` or `"[fe80::1]:2222"`, with or
            without a protocol in front, as in `"grpc://host:2222"`.

    Returns:
        tuple of str and int.

    Raises:
        ValueError: if there is no host, or no port from 1 to 65535.

    >>> split_address("[::1]:2222")
    ('::1', 2222)
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ClusterError(
            f"{address!r} is not a task address. Expected a host and a port from 1 "
            'to 65535, such as "host:2222".'
        )
    return host, int(port)


def worker_addresses(spec: ClusterSpec) -> list[str]:
    """list of str, the addresses of all training tasks, in order."""
    return [
        spec.task_address(job, index)
        for job in ("chief", "worker")
        if job in spec.jobs
        for index in spec.task_indices(job)
    ]

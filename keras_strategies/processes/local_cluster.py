"""Clusters on this machine: tasks and their environment variables."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from keras_strategies.cluster.environment import (
    DEVICES_PER_WORKER,
    KEPT_MEMORY,
    QUIET,
    RANK_VARIABLES,
    SECRET,
)
from keras_strategies.cluster.resolvers.environment import tf_config
from keras_strategies.cluster.resolvers.local_processes import free_addresses
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.types import check_count

GPUS = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class LocalTask:
    """One process of a cluster: `LocalTask("worker", 1)`, written `worker 1`.

    Args:
        job: str.
        index: int, its number in the job.
        incarnation: int, number of earlier processes of this task.
    """

    job: str
    index: int
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.job} {self.index}"


@dataclass(frozen=True)
class LocalCluster:
    """The tasks of a cluster on this machine.

    Args:
        workers: int, 1 or more.
        ps: int, parameter servers.
        chief: bool, whether there is a chief. With parameter servers it coordinates;
            otherwise it computes as the workers do.
        evaluator: bool, whether there is an evaluator.
        devices_per_worker: int or None. That many GPUs of this machine for each
            task that computes, or virtual CPU devices where it has none; None to
            share the GPUs equally.

    Raises:
        ValueError: for invalid numbers.
    """

    workers: int
    ps: int = 0
    chief: bool = False
    evaluator: bool = False
    devices_per_worker: int | None = None

    def __post_init__(self) -> None:
        check_count("workers", self.workers, 1)
        check_count("ps", self.ps, 0)
        if self.devices_per_worker is not None:
            check_count("devices_per_worker", self.devices_per_worker, 1)

    @property
    def tasks(self) -> tuple[LocalTask, ...]:
        """The tasks, the chief first."""
        counts = {
            "chief": int(self.chief),
            "worker": self.workers,
            "ps": self.ps,
            "evaluator": int(self.evaluator),
        }
        return tuple(LocalTask(job, i) for job, n in counts.items() for i in range(n))

    @property
    def decisive(self) -> frozenset[LocalTask]:
        """The cluster has ended when these tasks have.

        The others, which are parameter servers, workers with a coordinator, and
        evaluators, run until they are terminated.
        """
        serving = {"ps", "evaluator"}
        if self.ps and self.chief:
            serving.add("worker")
        return frozenset(task for task in self.tasks if task.job not in serving)

    @property
    def computing(self) -> tuple[LocalTask, ...]:
        """The tasks that need devices."""
        idle = {"ps", "chief"} if self.ps else {"ps"}
        return tuple(task for task in self.tasks if task.job not in idle)

    def environments(self, outer: Mapping[str, str]) -> dict[LocalTask, dict[str, str]]:
        """The environment of each task, with free addresses.

        Args:
            outer: the inherited environment, which is extended; process numbers of
                another launcher are removed.

        Returns:
            dict from task to its environment.

        Raises:
            ValueError: if there are fewer GPUs than requested.
        """
        cluster: dict[str, list[str]] = {}
        addresses = free_addresses(len(self.tasks))
        for task, address in zip(self.tasks, addresses, strict=True):
            cluster.setdefault(task.job, []).append(address)
        # Processes share the cores instead of competing for them.
        threads = max(1, core_count() // len(self.tasks))
        devices = self._devices(visible_gpus(outer))
        secret = {SECRET: secrets.token_hex()}
        outer = {k: text for k, text in outer.items() if k not in RANK_VARIABLES}
        return {
            task: {
                THREADS: str(threads),
                **QUIET,
                **KEPT_MEMORY,
                **secret,
                **outer,
                "PYTHONUNBUFFERED": "1",
                tf_config.VARIABLE: json.dumps(
                    {
                        "cluster": cluster,
                        "task": {"type": task.job, "index": task.index},
                    }
                ),
                **devices[task],
            }
            for task in self.tasks
        }

    def _devices(self, gpus: list[str]) -> dict[LocalTask, dict[str, str]]:
        computing = self.computing
        each = self.devices_per_worker
        if not gpus:
            set_for = {} if each is None else {DEVICES_PER_WORKER: str(each)}
            return {task: set_for if task in computing else {} for task in self.tasks}
        if each is None:
            each = len(gpus) // len(computing)
            if not each:  # Fewer GPUs than tasks: all tasks share all GPUs.
                return {t: {} if t in computing else {GPUS: ""} for t in self.tasks}
        if each * len(computing) > len(gpus):
            raise InvalidArgumentError(
                f"{len(computing)} tasks with {each} devices each need "
                f"{each * len(computing)} GPUs, but {len(gpus)} are visible: "
                f"{', '.join(gpus)}. Request fewer, or set {GPUS} to the empty text "
                "for virtual CPU devices."
            )
        shares = {
            task: ",".join(gpus[i * each : (i + 1) * each])
            for i, task in enumerate(computing)
        }
        return {task: {GPUS: shares.get(task, "")} for task in self.tasks}


def core_count() -> int:
    """Number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs of this machine that processes may use, without a framework.

    Returns:
        list of str, numbers or names as `CUDA_VISIBLE_DEVICES` has them.
    """
    given = environment.get(GPUS)
    if given is not None:
        names = [name.strip() for name in given.split(",") if name.strip()]
        # CUDA reads up to the first number that is none.
        return names[: names.index("-1")] if "-1" in names else names
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60
    )
    if listed.returncode:
        return []
    gpus = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [str(i) for i in range(len(gpus))]

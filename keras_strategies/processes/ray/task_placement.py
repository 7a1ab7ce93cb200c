"""Placement of a cluster's tasks: resources reserved on the nodes, in one group."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from keras_strategies.cluster.startup_report import Progress
from keras_strategies.errors import ClusterError
from keras_strategies.processes.local_cluster import LocalTask
from keras_strategies.processes.ray.connection import import_ray
from keras_strategies.text_tables import readable_bytes

PLACEMENTS = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
# Longer waits are reported.
_SHORT_SECONDS = 2.0
#: Arguments of Ray for its predefined resources.
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


@dataclass(frozen=True)
class ClusterPlan:
    """Tasks of a cluster and their placement.

    Args:
        workers: int.
        ps: int, parameter servers.
        resources: dict from job to the resources of one task, `{"CPU": 1, "GPU": 1}`.
        placement: str, one of `PLACEMENTS`.
        runtime_env: dict, Ray's runtime environment of all tasks.
        start_seconds: float, time to wait for resources and processes.
    """

    workers: int
    ps: int
    resources: Mapping[str, Mapping[str, float]]
    placement: str
    runtime_env: Mapping[str, Any]
    start_seconds: float

    def options(self, task: LocalTask) -> dict[str, Any]:
        """Ray's options for the resources of a task's actor."""
        given = self.resources[task.job]
        found: dict[str, Any] = {
            "num_cpus": 0,
            "resources": {k: v for k, v in given.items() if k not in _OPTIONS},
        }
        return found | {_OPTIONS[k]: v for k, v in given.items() if k in _OPTIONS}


class Reservation:
    """Resources of a cluster's tasks, reserved until the context is left.

    Ray reserves the resources of a lost node on other nodes, as soon as they are free.

    Args:
        plan: `ClusterPlan`.
        tasks: the tasks to reserve resources for; others wait for free resources.

    Raises:
        ClusterError: from `__enter__`, if resources are missing after `start_seconds`.
    """

    def __init__(self, plan: ClusterPlan, tasks: tuple[LocalTask, ...]):
        self._plan = plan
        self._bundles = {(task.job, task.index): i for i, task in enumerate(tasks)}
        self._groups = importlib.import_module("ray.util.placement_group")
        self._strategies = importlib.import_module("ray.util.scheduling_strategies")
        self._group: Any = None

    def __enter__(self) -> Reservation:
        bundles = [dict(self._plan.resources[job]) for job, _ in self._bundles]
        self._group = self._groups.placement_group(bundles, self._plan.placement)
        try:
            self._await()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Releases the resources."""
        if import_ray().is_initialized():
            self._groups.remove_placement_group(self._group)

    def _await(self) -> None:
        seconds = self._plan.start_seconds
        short = min(seconds, _SHORT_SECONDS)
        if self._group.wait(short):
            return
        Progress().report(f"waiting for room for {self._requested()}; {_available()}")
        if seconds > short and self._group.wait(seconds - short):
            return
        raise ClusterError(
            f"The Ray cluster has had no room for {self._requested()} for {seconds:g} "
            f"seconds (`start_seconds`): {_available()} Add nodes, request fewer or "
            "smaller tasks, or end other programs of the cluster (`ray status` shows "
            "what they use)."
        )

    def _requested(self) -> str:
        jobs = {"worker": "worker", "ps": "parameter server"}
        counts = {job: [j for j, _ in self._bundles].count(job) for job in jobs}
        parts = [
            f"{count} {jobs[job]}{'' if count == 1 else 's'} with "
            f"{_shown(self._plan.resources[job])} each"
            for job, count in counts.items()
            if count
        ]
        return f"{' and '.join(parts)} ({self._plan.placement})"

    def scheduling(self, task: LocalTask) -> Any:
        """Ray's scheduling strategy for a task."""
        bundle = self._bundles.get((task.job, task.index))
        if bundle is None:
            return "SPREAD"
        return self._strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )


def _available() -> str:
    """The resources of each node, and those that are free, as a sentence."""
    ray = import_ray()
    nodes = [
        f"{node['NodeManagerAddress']} has {_shown(node['Resources']) or 'none'}"
        for node in ray.nodes()
        if node["Alive"]
    ]
    free = _shown(ray.available_resources()) or "nothing"
    return f"{'; '.join(nodes)}. Of all that, {free} is free."


def _shown(resources: Mapping[str, float]) -> str:
    """Resources as text, such as `CPU 2, GPU 1, memory 1.5 GiB`."""
    shown = []
    for name, value in sorted(resources.items()):
        if name == "memory":
            shown.append(f"{name} {readable_bytes(value)}")
        elif not _is_internal(name):
            shown.append(f"{name} {value:g}")
    return ", ".join(shown)


def _is_internal(name: str) -> bool:
    """Whether a resource is one that Ray has for each node, store or group."""
    prefixes = ("node:", "object_store_memory", "bundle_group")
    return name.startswith(prefixes) or "_group_" in name

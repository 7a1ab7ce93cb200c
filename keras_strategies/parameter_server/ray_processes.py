"""Workers and parameter servers as actors of Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.parameter_server.coordinator.cluster_options import ClusterOptions
from keras_strategies.parameter_server.coordinator.cluster_processes import (
    SHARED_GPU,
    EndCause,
    ProcessCall,
    TaskProcesses,
    environment,
)
from keras_strategies.parameter_server.coordinator.process_cluster import (
    ProcessCluster,
)
from keras_strategies.parameter_server.wire.cluster_keys import Keys
from keras_strategies.processes.local_cluster import LocalTask
from keras_strategies.processes.ray.actors import TaskActors
from keras_strategies.processes.ray.connection import node_address
from keras_strategies.processes.ray.ray_resolver import RayClusterResolver
from keras_strategies.processes.ray.task_placement import Reservation


def start_on_ray(
    resolver: RayClusterResolver, options: ClusterOptions
) -> ProcessCluster:
    """Starts workers and servers on the nodes of a Ray cluster.

    Connections are encrypted with keys that the coordinator creates and Ray delivers.

    Args:
        resolver: `RayClusterResolver` of the driver.
        options: `ClusterOptions`.

    Raises:
        ValueError: without a Ray cluster or enough free resources in it, or for
            snapshots without a folder that all nodes share.
    """
    if options.snapshot_seconds is not None and options.snapshot_folder is None:
        raise InvalidArgumentError(
            "`snapshot_seconds` needs `snapshot_folder` on Ray: a folder that all "
            "nodes share, since a server may be restarted on another one."
        )
    resolver.connect()
    return ProcessCluster(
        options,
        f"tcp://{node_address(0)}",
        [""] * options.servers,
        Keys.new(),
        lambda call_of: RayProcesses(resolver, call_of),
    )


class RayProcesses(TaskProcesses):
    """Workers and parameter servers in actors.

    Resources of the servers and of `min_workers` workers are reserved. Other workers
    start as soon as the cluster has the resources.

    Args:
        resolver: `RayClusterResolver`.
        call_of: callable of a task that returns its `ProcessCall`.
    """

    def __init__(
        self,
        resolver: RayClusterResolver,
        call_of: Callable[[LocalTask], ProcessCall],
    ):
        self._call_of = call_of
        plan = resolver.plan
        tasks = [LocalTask("ps", i) for i in range(plan.ps)]
        tasks += [LocalTask("worker", i) for i in range(resolver.min_workers)]
        threads = max(1, int(plan.resources["worker"].get("CPU", 1)))
        shared = SHARED_GPU if plan.resources["worker"].get("GPU", 0) % 1 else {}
        with contextlib.ExitStack() as stack:
            reservation = stack.enter_context(Reservation(plan, tuple(tasks)))
            actors = TaskActors(plan, reservation, environment(threads, shared))
            self._actors = stack.enter_context(actors)
            self._open = stack.pop_all()

    def start(self, task: LocalTask) -> None:
        call = self._call_of(task)
        self._actors.start(task)
        self._actors.call(task, "serve", call.entry, call.arguments)

    def kill(self, task: LocalTask) -> None:
        self._actors.kill(task)

    def ended(self) -> Iterator[tuple[LocalTask, EndCause]]:
        while (reply := self._actors.next_reply(0.0)) is not None:
            # Ray has no exit codes: the node may have been taken away.
            cause = EndCause(reply.lost or "it ended", bool(reply.lost))
            yield reply.task, cause

    def close(self) -> None:
        self._open.close()

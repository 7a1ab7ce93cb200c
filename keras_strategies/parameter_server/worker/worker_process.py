"""Entry point of a worker's process, and the strategy of its tasks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_strategies.devices import Device
from keras_strategies.engines import get_engine
from keras_strategies.parameter_server.engines import parameter_server_engine
from keras_strategies.parameter_server.wire.cluster_keys import Keys
from keras_strategies.parameter_server.wire.heartbeat import start_heartbeats
from keras_strategies.parameter_server.wire.request_connection import Connection
from keras_strategies.parameter_server.wire.server_addresses import ServerAddresses
from keras_strategies.parameter_server.wire.server_connections import ServerConnections
from keras_strategies.parameter_server.worker.current_worker import CurrentWorker
from keras_strategies.parameter_server.worker.step_execution import (
    StepExecution,
    WorkerVariables,
)
from keras_strategies.parameter_server.worker.worker_loop import Worker
from keras_strategies.parameter_server.worker.worker_models import WorkerModels
from keras_strategies.runtime import context
from keras_strategies.runtime.placement import Placement
from keras_strategies.runtime.replica_context import ReplicaContext
from keras_strategies.runtime.replicas.collectives import SingleReplica
from keras_strategies.runtime.thread_scheduling import scheduled_as_batch
from keras_strategies.strategies.base.strategy import Strategy
from keras_strategies.training.model_hooks import install_hooks
from keras_strategies.types import RunOptions


class WorkerStrategy(Strategy):
    """The current strategy in a scheduled function.

    Args:
        worker: the worker of this process.
        device: `Device` of its steps.
    """

    def __init__(self, worker: Worker, device: Device):
        super().__init__(Placement((device,), device, mirrored=False))
        models = WorkerModels(self.placement)
        self._drivers = dataclasses.replace(self._drivers, fit=models)
        self._worker = worker
        self._replica = ReplicaContext(self, 0, SingleReplica())

    @property
    def replica_context_in_scope(self) -> ReplicaContext | None:
        """This worker's only replica during a step; None outside."""
        return self._replica if self._worker.programs.in_program else None

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Runs a step: pulls the values that `fn` needs, computes, pushes updates."""
        RunOptions.parse(options)
        running_task = self._worker.host.running_task
        assert running_task is not None, "outside of a scheduled function"
        return running_task.run(fn, tuple(args), dict(kwargs or {}))

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        with context.cross_replica(self):
            yield self


def _default_device(device: Device) -> contextlib.AbstractContextManager[Any]:
    """A context with the worker's device as this thread's default device."""
    if device == Device("cpu", 0):
        return contextlib.nullcontext()  # The default without accelerators.
    return get_engine().on_device(device)


# Outermost, as threads of the engine and of connections inherit the policy.
@scheduled_as_batch()
def run_worker(
    index: int,
    incarnation: int,
    control: str,
    keys: Keys | None,
    addresses: list[str],
    timeout: float,
    coordinator_seconds: float = math.inf,
) -> None:
    """Runs a worker's process until the coordinator ends.

    Steps run on the first accelerator that the process sees, without any on the CPU.

    Args:
        index: int, its number.
        incarnation: int, number of earlier processes of this worker.
        control: str, the coordinator's address.
        keys: `Keys` where addresses are not local.
        addresses: list of str, the servers'; `""` for those that the coordinator sends.
        timeout: float, timeout in seconds for a server's reply.
        coordinator_seconds: float, timeout for a lost coordinator.
    """
    install_hooks()
    engine = parameter_server_engine()
    engine.install()
    device = get_engine().local_devices()[0]
    variables = WorkerVariables(engine)
    found = ServerAddresses(addresses)
    servers = ServerConnections(found, keys, timeout)
    connection = Connection(control, keys, "the coordinator")
    worker = Worker(
        index,
        connection,
        StepExecution(servers, variables, engine),
        incarnation,
        coordinator_seconds,
        str(device),
    )
    variables.set_strategy(WorkerStrategy(worker, device))
    CurrentWorker.index = index
    start_heartbeats(control, keys, index, incarnation, addresses=found)
    try:
        with _default_device(device):
            worker.work()
    finally:
        servers.close()
        connection.close()

"""Parameter servers, a coordinator and a worker in this process, without steps.

A test gives the gradients. What follows them is the library's: the model goes to a
worker as a message, which clips its gradients, splits them by optimizer, server and
shard, and sends them to servers that apply them to their stores.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.parameter_server import parameter_server_strategy
from keras_strategies.parameter_server.coordinator.cluster_options import ClusterOptions
from keras_strategies.parameter_server.engines import parameter_server_engine
from keras_strategies.parameter_server.engines.engine_interface import (
    OptimizerCall,
    StepResult,
)
from keras_strategies.parameter_server.server.request_handler import ParameterServer
from keras_strategies.parameter_server.variables.coordinator_variables import (
    CoordinatorVariables,
)
from keras_strategies.parameter_server.wire import server_connections
from keras_strategies.parameter_server.wire.arrays.array_messages import pack, unpack
from keras_strategies.parameter_server.wire.server_addresses import ServerAddresses
from keras_strategies.parameter_server.wire.server_connections import ServerConnections
from keras_strategies.parameter_server.wire.task_messages import FunctionDefinition
from keras_strategies.parameter_server.worker.step_execution import (
    PullPlan,
    StepExecution,
    WorkerVariables,
)
from keras_strategies.parameter_server.worker.task_functions import TaskFunctions
from parameter_server import clusters


class DirectConnection:
    """Stands in for `Connection`: handles requests at once, as messages."""

    sent_bytes = received_bytes = 0

    def __init__(self, address: Callable[[], str], *_: Any):
        self._server = ParameterServer(int(address()))
        self._replies: dict[int, Any] = {}
        self._numbers = itertools.count()

    def begin(self, message: Any, shares_memory: bool = False) -> int:
        number = next(self._numbers)
        self._replies[number] = copied(self._server.handle(copied(message)))
        return number

    def finish(self, number: int, timeout: float) -> Any:
        return self._replies.pop(number)

    def request(self, message: Any, timeout: float) -> Any:
        return self.finish(self.begin(message), timeout)

    def close(self) -> None:
        pass


def copied(message: Any) -> Any:
    return unpack([bytes(part) for part in pack(message)])


class ClusterInProcess:
    """Stands in for `ProcessCluster`; runs no tasks, keeps definitions of models.

    Args:
        options: `ClusterOptions`.
    """

    def __init__(self, options: ClusterOptions):
        self.options = options
        self.local = CoordinatorVariables()
        self.definitions: list[FunctionDefinition] = []
        #: Numbers of tasks; a server takes each once.
        self.tasks = itertools.count()
        self.scheduler = SimpleNamespace(
            define=self.definitions.append,
            release=lambda released: None,
            servers=dict.fromkeys(range(options.servers)),
            tasks=SimpleNamespace(wait_until_done=lambda: None),
        )
        addresses = ServerAddresses([str(i) for i in range(options.servers)])
        self.servers = ServerConnections(addresses, None, clusters.SECONDS, "me")
        everyone = dict.fromkeys(range(options.servers), "me")
        self.servers.request_all("begin", everyone)

    def close(self) -> None:
        self.servers.close()


@contextmanager
def start(servers: int, **options: Any) -> Iterator[ks.ParameterServerStrategy]:
    """A strategy without staleness on servers of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_connections, "Connection", DirectConnection)
        patch.setattr(
            parameter_server_strategy,
            "_cluster",
            lambda resolver, options: ClusterInProcess(options),
        )
        options = {"max_staleness": 0, **options}
        with clusters.start(workers=1, ps=servers, **options) as strategy:
            yield strategy


class GradientPusher:
    """A worker that pushes gradients of a model instead of computing them.

    Args:
        strategy: of `start`.
        model: built and compiled in its scope.
    """

    def __init__(self, strategy: ks.ParameterServerStrategy, model: keras.Model):
        number = strategy.functions.model_definition(model, "train").number
        definitions = strategy.cluster.definitions
        [definition] = [d for d in definitions if d.number == number]
        engine = parameter_server_engine()
        variables = WorkerVariables(engine)
        self._model = TaskFunctions(variables, contextlib.nullcontext).function(
            definition
        )
        self._execution = StepExecution(strategy.cluster.servers, variables, engine)
        self._tasks = strategy.cluster.tasks

    def push(self, ids: np.ndarray, gradients: Sequence[np.ndarray | None]) -> None:
        """Pushes the gradients of a step, once.

        Args:
            ids: the rows of the first variable, a table, that have a gradient; sorted.
            gradients: of all trainable variables, `(n, ...)` for these rows.
        """
        trained = self._model.trainable_variables
        call = OptimizerCall(self._model.optimizer, trained, list(gradients))
        task = next(self._tasks)
        pushes, _ = self._execution.split_result(
            PullPlan(ids=[(trained[0], ids)]), StepResult(None, [call]), (task, 0), task
        )
        servers = self._execution.servers
        with parameter_server_engine().on_cpu():
            servers.receive_steps(servers.send_steps(pushes))

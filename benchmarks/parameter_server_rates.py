"""The coordinator and one parameter server, each alone, by the number of workers.

Workers are threads of one process, which compute nothing, so that 100 of them need no
100 processes:

- coordinator: `fit` schedules steps with their rows to threads that answer at once;
- server: threads send it steps of the sparse model, an update of 8,000 rows and the
  next 8,000 rows, and wait for the reply.

Steps per second are those of all workers while everything shares this machine's cores.
The milliseconds of CPU are those of the coordinator or of the server alone: on a core
of its own it makes 1000 / milliseconds steps per second.

    python parameter_server_rates.py        # prints a line of JSON
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import psutil
from parameter_server_contestants import WORKLOADS, clicks, sparse

WORKERS = (1, 2, 4, 8, 100)
COORDINATOR_STEPS, SERVER_STEPS, TIMEOUT = 1500, 200, 120.0
BATCH, BATCHES = WORKLOADS["sparse"].batch, 8


# --- Threads as workers -------------------------------------------------------


def answer(control: str, index: int) -> None:
    """A worker that answers each task at once."""
    from keras_strategies.parameter_server.wire.request_connection import Connection
    from keras_strategies.parameter_server.wire.task_messages import TaskResult

    connection = Connection(control, None, "the coordinator")
    connection.post((0, ("worker", (index, 0, os.getpid(), "cpu:0"))))
    logs = {"loss": np.float32(1)}
    while True:
        message = connection.receive(1.0)
        kind, value = (None, None) if message is None else message[1]
        if kind == "task":
            connection.post((0, ("result", TaskResult(value.number, logs))))
        elif kind == "stop":
            connection.close()
            return


def answer_in_threads(control: str, count: str) -> None:
    threads = [
        threading.Thread(target=answer, args=(control, i)) for i in range(int(count))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def use_threads(count: int) -> None:
    """Clusters that are made from now on start servers, and one process for workers."""
    from keras_strategies.parameter_server.coordinator import process_cluster

    class WorkersInThreads(process_cluster.ClusterProcesses):
        def start(self, task: Any) -> None:
            if task.job == "ps":
                super().start(task)
            elif task.index == 0:
                control = self._call_of(task).arguments["control"]
                command = [sys.executable, __file__, control, str(count)]
                self._process = subprocess.Popen(command)

        def close(self) -> None:
            self._process.wait(TIMEOUT)
            super().close()

    process_cluster.ClusterProcesses = WorkersInThreads  # type: ignore[misc]


# --- Measurements -------------------------------------------------------------


def rates(count: int) -> dict[str, float]:
    """Rates with so many workers."""
    import keras

    import keras_strategies as ks

    use_threads(count)
    resolver = ks.cluster_resolver.LocalClusterResolver(count, 1)
    with ks.ParameterServerStrategy(resolver, silence_seconds=3600.0) as strategy:
        with strategy.scope():
            model = sparse(keras, 1)
        return {**coordinator(model), **server(strategy, model, count)}


def coordinator(model: Any) -> dict[str, float]:
    x, y = clicks(BATCH * COORDINATOR_STEPS)

    def fit(steps: int) -> None:
        rows = slice(0, BATCH * steps)
        model.fit(x[rows], y[rows], batch_size=BATCH, shuffle=False, verbose=0)

    fit(100)
    cpu, begun = time.process_time(), time.perf_counter()
    fit(COORDINATOR_STEPS)
    cpu, passed = time.process_time() - cpu, time.perf_counter() - begun
    return {
        "coordinator, steps/s": COORDINATOR_STEPS / passed,
        "coordinator, ms of CPU": 1000 * cpu / COORDINATOR_STEPS,
    }


def steps_of(strategy: Any, model: Any) -> list[Any]:
    """Requests of a worker of the sparse model, for different batches."""
    from keras_strategies.parameter_server.wire.step_messages import StepRequest

    strategy.functions.model_definition(model, "train")  # The server has its optimizer.
    optimizer = strategy.functions._pickler.number_of(model.optimizer)
    table, *others = [
        ((strategy.registry.describe(variable).number, 0), tuple(variable.shape))
        for variable in model.trainable_variables
    ]
    dense = [(key, np.full(shape, 1e-3, np.float32)) for key, shape in others]
    requests = []
    for i in range(BATCHES):
        ids = np.unique(clicks(BATCH * (i + 1))[0][-BATCH:]).astype("int64")
        gradients = np.full((len(ids), table[1][1]), 1e-3, np.float32)
        request = StepRequest(
            optimizers=((optimizer, dense, [(table[0], ids, gradients)]),),
            pull=tuple(key for key, _ in others),
            pull_rows=((table[0], ids, len(ids)),),
        )
        requests.append(request)
    return requests


def server(strategy: Any, model: Any, count: int) -> dict[str, float]:
    from keras_strategies.parameter_server.wire.request_connection import Connection
    from keras_strategies.processes.local_cluster import LocalTask

    requests = steps_of(strategy, model)
    address = strategy.cluster.process_call(LocalTask("ps", 0, 0)).arguments["address"]
    process = psutil.Process(strategy.cluster.scheduler.servers[0].pid)
    numbers = itertools.count(1)
    last = 0

    def push() -> None:
        connection = Connection(address)
        while (number := next(numbers)) <= last:
            request = dataclasses.replace(
                requests[number % len(requests)],
                update=(number, 0),
                done=max(0, number - 10 * max(WORKERS)),
            )
            connection.request(("step", request), TIMEOUT)
        connection.close()

    for steps in (2 * count + 20, SERVER_STEPS):
        first, last = last, last + steps
        numbers = itertools.count(first + 1)
        threads = [threading.Thread(target=push) for _ in range(count)]
        cpu, begun = sum(process.cpu_times()[:2]), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        passed = time.perf_counter() - begun
        cpu = sum(process.cpu_times()[:2]) - cpu
    status = strategy.cluster.servers.request(0, "status")
    assert status["version"] >= last, "each update has been applied"
    return {
        "server, steps/s": SERVER_STEPS / passed,
        "server, ms of CPU": 1000 * cpu / SERVER_STEPS,
    }


def main() -> None:
    if len(sys.argv) > 1:
        answer_in_threads(*sys.argv[1:])
        return
    found = {}
    for count in WORKERS:
        found[str(count)] = {name: round(v, 3) for name, v in rates(count).items()}
        print(count, found[str(count)], file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

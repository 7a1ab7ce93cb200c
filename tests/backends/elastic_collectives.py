"""A worker of an elastic group that makes collectives of its engine, as a process.

`python elastic_collectives.py SETTINGS INDEX` takes steps until a file `stop` exists.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness.elastic_processes import join, run, write, write_members

from keras_strategies.cluster.group.membership import Membership
from keras_strategies.cluster.group.worker_group import WorkerGroup
from keras_strategies.communication.communicator import Communicator
from keras_strategies.devices import Device
from keras_strategies.engines import get_engine
from keras_strategies.errors import WorkerError
from keras_strategies.types import CommunicationOptions, ReduceOp


class Training:
    """Steps of collectives, each compared with what it must give.

    Args:
        membership: the group.
        folder: for files; `PID.members` has the members of the last generation
            that has finished a step. A worker with a file `PID.dies` kills itself
            before the first collective of a generation; one with a file
            `PID.sleeps` waits so many seconds before that of a step.
    """

    is_fixed = False

    def __init__(self, membership: Membership, folder: Path):
        self.membership = membership
        self.folder = folder
        self.step = 0
        self.times: list[float] = []
        self._is_over = False
        # Whether this generation has finished a step, and so all of its connections.
        self._is_noted = False
        self._ending = threading.Lock()
        group = membership.group
        self.workers: Communicator = get_engine().connect(group, CommunicationOptions())
        # Of the actions of such workers, only these are read here.
        self.workers.actions = self  # type: ignore[assignment]
        self.workers.start()
        self.workers = self.workers.with_replicas(lambda: 1)
        if hasattr(self.workers, "devices_of"):
            self.workers.devices_of([Device("cpu", 0)])
        if hasattr(self.workers, "use_device"):
            self.workers.use_device("/device:CPU:0")
        self._watch(group)

    def prepare(self, call: Callable[[], Any]) -> Any:
        return call()

    def register(self, workers: Communicator) -> None:
        pass

    def run(self) -> None:
        if not self.membership.is_member:
            # As a new worker, in a group of itself until now.
            self._reform()
        while not self._is_over:
            try:
                if self.membership.group.begin_step():
                    self._take()
                    continue
            except WorkerError as error:
                print(error, flush=True)
            self._reform()

    def _take(self) -> None:
        workers, members = self.workers, self.membership.generation.members
        rank = workers.group.index
        numbers = [index + 1 for index in members]
        own = numbers[rank]
        workers.group.progress = f"step {self.step}"
        stop = workers.group.gather_values("stop", (self.folder / "stop").exists())
        if not self._is_noted and (self.folder / f"{os.getpid()}.dies").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if (sleeps := self.folder / f"{os.getpid()}.sleeps").exists():
            time.sleep(float(sleeps.read_text()))
            sleeps.unlink()
        total, most = (
            workers.all_reduce(op, [_tensor([own * self.step, 1])])[0]
            for op in (ReduceOp.SUM, ReduceOp.MAX)
        )
        rows = workers.gather_rows(_tensor([[own, self.step]] * own), numbers)
        chief = workers.broadcast([_tensor([own, self.step])])[0]
        _check(total, [sum(numbers) * self.step, len(members)])
        _check(most, [max(numbers) * self.step, 1])
        _check(rows, [[each, self.step] for each in numbers for _ in range(each)])
        _check(chief, [numbers[0], self.step])
        self.step += 1
        self.membership.client.step = self.step
        self._is_over = any(stop)
        if not self._is_noted:
            self._note()

    def _reform(self) -> None:
        begun = time.monotonic()
        self._is_noted = False
        while True:
            is_new = not self.membership.is_member
            self.membership.reform(None if is_new else self.step)
            try:
                group = self.membership.group
                with self._ending:
                    pass
                self.workers.replace(group)
                self._watch(group)
                self.step = max(group.gather_values("the step", self.step))
                self.membership.confirm()
            except WorkerError as error:
                print(error, flush=True)
            else:
                break
        self.times.append(time.monotonic() - begun)

    def _watch(self, group: WorkerGroup) -> None:
        def end(loss: Any) -> None:
            with self._ending:
                if self.workers.group is group:
                    self.workers.end_waits()

        group.on_loss(end)

    def _note(self) -> None:
        self._is_noted = True
        write_members(self.folder, self.membership)


def _tensor(values: Any) -> Any:
    import keras

    return keras.ops.convert_to_tensor(np.array(values, "float32"))


def _check(found: Any, expected: Any) -> None:
    found = np.asarray(found)
    assert np.array_equal(found, np.array(expected, "float32")), (found, expected)


def train(settings: dict[str, Any], index: int) -> Membership:
    folder = Path(settings["folder"])
    training = Training(join(settings, index, is_ready=False), folder)
    training.run()
    write(folder, "json", {"steps": training.step, "times": training.times})
    training.membership.group.barrier("the last collective")
    training.workers.close()
    return training.membership


if __name__ == "__main__":
    run(train)

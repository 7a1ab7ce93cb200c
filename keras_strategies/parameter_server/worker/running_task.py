"""A task that a worker runs: names of its updates, reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from keras_strategies.errors import ContextError
from keras_strategies.keras_compat.optimizers.optimizer_parts import trained_variables
from keras_strategies.parameter_server.engines.composite_tensors import is_composite
from keras_strategies.parameter_server.engines.engine_interface import (
    OptimizerCall,
    StepResult,
)
from keras_strategies.parameter_server.wire.row_indexing import indexed
from keras_strategies.parameter_server.wire.step_messages import StepReply, StepRequest
from keras_strategies.parameter_server.wire.task_messages import ScheduledTask
from keras_strategies.parameter_server.wire.variable_description import shard_devices
from keras_strategies.parameter_server.worker.step_execution import PullPlan
from keras_strategies.parameter_server.worker.step_programs import (
    StepPrograms,
    to_numpy,
)


class RunningTask:
    """A running task: names its updates, reads and writes variables.

    Args:
        programs: runs its steps.
        task: the message.
        numbers: tuple of int, the variables of its function and its arguments.
    """

    def __init__(
        self, programs: StepPrograms, task: ScheduledTask, numbers: tuple[int, ...]
    ):
        self._programs = programs
        self._execution = programs.execution
        self._variables = programs.variables
        self.task = task
        self.numbers = numbers
        self.local: dict[int, np.ndarray] = {}
        self.steps = 0
        #: Updates that its steps have missed: total and maximum.
        self.staleness = (0, 0)
        #: See `TaskResult`.
        self.changes: tuple[str, ...] = ()
        self._next_update = 0

    def next_update(self) -> tuple[int, int]:
        """The name of the next update."""
        self._next_update += 1
        return self.task.number, self._next_update - 1

    # Variables outside of programs (`VariableHost`)

    def read(self, variable: Any) -> np.ndarray:
        description = self._variables.describe(variable)
        if description.kind == "local":
            return self._local(description.number)
        # At each read, as others may have written: the task may wait for it.
        return self._execution.servers.read(description)

    def read_slice(self, variable: Any, index: Any) -> np.ndarray:
        description = self._variables.describe(variable)
        if description.kind == "local":
            return indexed(index, self._local(description.number))
        return self._execution.servers.read_slice(description, index)

    def _local(self, number: int) -> np.ndarray:
        value = self.task.local[number]
        return value + self.local[number] if number in self.local else value

    def write(self, variable: Any, value: np.ndarray) -> None:
        description = self._variables.describe(variable)
        if description.kind == "local":
            self.local[description.number] = value - self.task.local[description.number]
            return
        writes: dict[int, list[Any]] = {}
        for shard in description.shards:
            rows = value[shard.start : shard.stop] if description.shape else value
            key = (description.number, shard.start)
            writes.setdefault(shard.server, []).append((key, rows))
        self._send({i: StepRequest(writes=tuple(w)) for i, w in writes.items()})

    def add(self, variable: Any, delta: np.ndarray) -> None:
        description = self._variables.describe(variable)
        if description.kind == "local":
            self.write(variable, self.read(variable) + delta)
            return
        adds: dict[int, list[Any]] = {}
        for shard in description.shards:
            rows = delta[shard.start : shard.stop] if description.shape else delta
            key = (description.number, shard.start)
            adds.setdefault(shard.server, []).append((key, rows))
        self._send({i: StepRequest(adds=tuple(a)) for i, a in adds.items()})

    def _send(self, steps: dict[int, StepRequest]) -> None:
        update = self.next_update()
        done = self.task.done
        named = {i: replace(s, update=update, done=done) for i, s in steps.items()}
        servers = self._execution.servers
        servers.receive_steps(servers.send_steps(named))

    def apply(self, optimizer: Any, gradients: Any, variables: Any) -> Any:
        """Runs `optimizer.apply` outside of a program."""
        if variables is None:
            variables = trained_variables(optimizer)
        arrays = [None if g is None else to_numpy(g) for g in gradients]
        applied = OptimizerCall(optimizer, list(variables), arrays)
        result = StepResult(None, [applied])
        self.push(PullPlan(), result, {})
        return optimizer.iterations

    def push(
        self, plan: PullPlan, result: StepResult, pulled: Mapping[int, StepReply]
    ) -> None:
        """Pushes the result of a step and waits for the replies.

        Args:
            plan: the pull plan of the step.
            result: its result.
            pulled: the replies to its pull, by server.
        """
        steps, local = self._execution.split_result(
            plan, result, self.next_update(), self.task.done
        )
        self.merge_local(local)
        servers = self._execution.servers
        self.record_staleness(pulled, servers.receive_steps(servers.send_steps(steps)))

    def record_staleness(
        self, pulled: Mapping[int, StepReply], pushed: Mapping[int, StepReply]
    ) -> None:
        """Counts the updates between the pull and the push of a step."""
        missed = [
            answer.version - pulled[server].version - 1
            for server, answer in pushed.items()
            if server in pulled
        ]
        most = max([0, *missed])
        total, highest = self.staleness
        self.staleness = total + most, max(highest, most)

    def merge_local(self, changes: dict[int, np.ndarray]) -> None:
        """Adds changes of variables that are on no server."""
        for number, change in changes.items():
            self.local[number] = self.local.get(number, 0) + change

    # Programs

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a function as a program: pull, compute, push."""
        if self._programs.in_program:
            return fn(*args, **kwargs)
        program, batch = self._programs.of_function(
            self.task.definition, fn, (args, kwargs), self.numbers
        )
        with self._programs.inside_program():
            plan = self._execution.plan(program, batch)
        servers = self._execution.servers
        pulled = servers.receive_steps(servers.send_steps(plan.pulls))
        self.steps += 1
        result = self._programs.compute(program, plan, pulled, batch)
        self.push(plan, result, pulled)
        return keras.tree.map_structure(_to_tensor, result.outputs)


class WorkerVariableHost:
    """Host of a worker's variables: reads and writes of the running task.

    Args:
        programs: of this worker.
    """

    def __init__(self, programs: StepPrograms):
        self._programs = programs
        self.running_task: RunningTask | None = None

    @property
    def is_local(self) -> bool:
        return self._programs.in_program

    def _running_task(self) -> RunningTask:
        assert self.running_task is not None, "outside of a task"
        return self.running_task

    def read(self, variable: Any) -> Any:
        return self._running_task().read(variable)

    def read_slice(self, variable: Any, index: Any) -> Any:
        return self._running_task().read_slice(variable, index)

    def write(self, variable: Any, value: Any) -> None:
        self._running_task().write(variable, to_numpy(value))

    def add(self, variable: Any, delta: Any) -> Any:
        self._running_task().add(variable, to_numpy(delta))
        return variable.value

    def is_large(self, variable: Any) -> bool:
        return False

    def pieces(self, variable: Any) -> Iterator[tuple[int, Any]]:
        yield 0, self.read(variable)

    def write_pieces(self, variable: Any, pieces: Iterable[tuple[int, Any]]) -> None:
        value = np.array(self.read(variable))
        for start, rows in pieces:
            value[start : start + len(rows)] = rows
        self.write(variable, value)

    def write_durably(self, write: Callable[[], None]) -> None:
        raise ContextError(
            "`adapt` and `expire` write to all parameter servers between two calls of "
            "`fit`. Call them on the coordinator; `rows` may be called here."
        )

    def places(self, variable: Any) -> list[tuple[str, int, int]]:
        return shard_devices(self._programs.variables.describe(variable))

    def place(self, variable: Any) -> str:
        return "on parameter servers"

    def create(self, variable: Any, value: Any) -> None:
        raise AssertionError("only the coordinator creates variables")

    create_with = create


def _to_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return keras.ops.convert_to_tensor(value)
    return value


def portable_value(value: Any) -> Any:
    """A tensor or variable as a NumPy array; other values unchanged.

    Ragged and sparse tensors have no array, and are sent as they are.
    """
    if is_composite(value):
        return value
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        return to_numpy(value)
    return value

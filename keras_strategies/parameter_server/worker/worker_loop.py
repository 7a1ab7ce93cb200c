"""The main loop of a worker: tasks from the coordinator, steps against the servers."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_strategies import keras_compat
from keras_strategies.errors import WorkerError
from keras_strategies.parameter_server.engines.engine_interface import (
    LookupMismatchError,
    StepProgram,
    StepResult,
)
from keras_strategies.parameter_server.wire.heartbeat import coordinator_lost_message
from keras_strategies.parameter_server.wire.object_pickling import load
from keras_strategies.parameter_server.wire.task_messages import (
    FunctionDefinition,
    ScheduledTask,
    TaskResult,
    WorkerReference,
    WorkerResource,
)
from keras_strategies.parameter_server.wire.transport import Connection
from keras_strategies.parameter_server.worker.pull_ahead import (
    PULL_AHEAD_STEPS,
    PrefetchedStep,
    PullAheadQueue,
)
from keras_strategies.parameter_server.worker.running_task import (
    RunningTask,
    WorkerVariableHost,
    is_array,
    portable_value,
    to_numpy,
)
from keras_strategies.parameter_server.worker.step_execution import (
    PullPlan,
    StepExecution,
    StepVariables,
)
from keras_strategies.processes.portable_exceptions import portable_exception

#: Seconds between checks of the connection to the coordinator.
_CHECK_SECONDS = 1.0


class Worker:
    """Runs tasks, one after the other, in the thread that calls `work`.

    Args:
        index: int, the number of this worker.
        connection: to the coordinator.
        execution: servers, variables and engine.
        incarnation: int, number of earlier processes of this worker.
        coordinator_seconds: float, timeout for a lost coordinator.
    """

    def __init__(
        self,
        index: int,
        connection: Connection,
        execution: StepExecution,
        incarnation: int,
        coordinator_seconds: float = math.inf,
    ):
        self.index = index
        self.execution = execution
        self.variables = execution.variables
        self.variables.host = WorkerVariableHost(self)
        self.running_task: RunningTask | None = None
        self.in_program = True  # Until a task runs.
        self._connection = connection
        self._incarnation = incarnation
        self._coordinator_seconds = coordinator_seconds
        self._reconnects = 0
        self._counted = (0, 0)
        self._is_stopped = False
        self._owner: str | None = None
        self._reset()

    def _reset(self) -> None:
        """Discards the state of an earlier coordinator."""
        self._definitions: dict[int, FunctionDefinition] = {}
        self._functions: dict[int, Any] = {}
        self._programs: dict[Any, StepProgram] = {}
        self._functions_in_use: list[Any] = []
        self._resources: dict[int, WorkerResource] = {}
        self._values: dict[int, Any] = {}
        self._tasks: collections.deque[ScheduledTask] = collections.deque()
        self._pipeline = PullAheadQueue(self.execution.servers)
        # Computed tasks whose last updates have not been confirmed.
        self._unreported: collections.deque[Callable[[], TaskResult]] = (
            collections.deque()
        )

    # Messages

    def work(self) -> None:
        """Runs tasks until the coordinator stops this worker.

        Raises:
            RuntimeError: `WorkerError` if the coordinator is lost for too long.
        """
        self._post("worker", (self.index, self._incarnation, os.getpid()))
        while not self._is_stopped:
            self._receive(_CHECK_SECONDS if not self._tasks else 0.0)
            self._check_coordinator()
            while self._tasks and not self._is_stopped:
                self._run_task(self._tasks.popleft())
                self._receive(0.0)

    def _check_coordinator(self) -> None:
        connection = self._connection
        if connection.is_lost_for(self._coordinator_seconds):
            raise WorkerError(
                coordinator_lost_message(connection, self._coordinator_seconds)
            )
        if connection.reconnects > self._reconnects:
            # A new coordinator does not have this worker yet.
            self._reconnects = connection.reconnects
            self._post("worker", (self.index, self._incarnation, os.getpid()))

    def _post(self, kind: str, value: Any) -> None:
        self._connection.post((0, (kind, value)))

    def _receive(self, timeout: float) -> None:
        """Handles messages; waits only for the first one."""
        while True:
            message = self._connection.receive(timeout)
            if message is None:
                return
            _, (kind, value) = message
            if kind == "task":
                self._tasks.append(value)
            elif kind == "define":
                self._definitions[value.number] = value
            elif kind == "resource":
                self._resources[value.number] = value
            elif kind == "registered":
                if self._owner not in (None, value):
                    self._reset()
                    self.variables.reset()
                self._owner = self.execution.servers.owner = value
            elif kind == "stop":
                self._is_stopped = True
                return
            timeout = 0.0

    # Tasks

    def _run_task(self, task: ScheduledTask) -> None:
        start = time.monotonic()
        definition = self._definitions[task.definition]
        try:
            function = self._function(definition)
            self._load_local(task)
            running_task = RunningTask(self, task, definition.variables)
            self.running_task = running_task
            if definition.kind == "call":
                self._await_replies()
                value = self._call(running_task, function)
                steps = max(1, running_task.steps)
            else:
                value = self._model_steps(running_task, definition)
                steps = len(task.arguments)
            seconds = time.monotonic() - start
            # It is complete once the servers confirm its last update.
            self._unreported.append(
                lambda: TaskResult(
                    task.number,
                    value,
                    None,
                    running_task.local,
                    seconds,
                    steps,
                    self._traffic(),
                    running_task.staleness,
                )
            )
            self._receive(0.0)
            if not self._tasks or not task.pulls_ahead:
                self._await_replies()
        except Exception as error:  # The user's; raised on the coordinator.
            failed = TaskResult(task.number, error=self._portable(error))
            self._pipeline.drop()
            with contextlib.suppress(Exception):  # The first error is reported.
                self._await_replies()
            self._report(failed)
        finally:
            self.running_task = None
            self.in_program = True

    def _traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from the servers since the last call."""
        before = self._counted
        self._counted = self.execution.servers.traffic
        return self._counted[0] - before[0], self._counted[1] - before[1]

    def _portable(self, error: Exception) -> Exception:
        return portable_exception(error, f"on worker {self.index}")

    def _report(self, result: TaskResult) -> None:
        try:
            self._post("result", result)
        except (
            Exception
        ) as error:  # Pickling runs the user's code, which may raise anything.
            failed = TaskResult(result.number, error=self._portable(error))
            self._post("result", failed)

    def _function(self, definition: FunctionDefinition) -> Any:
        number = definition.number
        if number not in self._functions:
            self._functions[number] = load(
                definition.blob, self.variables, definition.generation
            )
        return self._functions[number]

    def _load_local(self, task: ScheduledTask) -> None:
        for number, value in task.local.items():
            if number in self.variables.by_number:
                self.execution.engine.set_value(self.variables.by_number[number], value)

    def _call(self, running_task: RunningTask, function: Callable[..., Any]) -> Any:
        args, kwargs = load(
            running_task.task.arguments, self.variables, running_task.task.generation
        )
        args, kwargs = self._resolved((args, kwargs))
        self.in_program = False
        strategy = self.variables.strategy()
        with strategy.scope(), keras_compat.applying_through(running_task.apply):
            value = function(*args, **kwargs)
        return keras.tree.map_structure(portable_value, value)

    def _resolved(self, structure: Any) -> Any:
        if isinstance(structure, WorkerReference):
            return self._value(structure.number)
        if isinstance(structure, (list, tuple)) and type(structure) in (list, tuple):
            return type(structure)(self._resolved(item) for item in structure)
        if type(structure) is dict:
            return {key: self._resolved(item) for key, item in structure.items()}
        return structure

    def _value(self, number: int) -> Any:
        if number not in self._values:
            resource = self._resources[number]
            if resource.kind == "iterator":
                self._values[number] = iter(self._value(resource.blob))
            else:
                make = load(resource.blob, self.variables, resource.generation)
                self._values[number] = make()
        return self._values[number]

    def _model_steps(
        self, running_task: RunningTask, definition: FunctionDefinition
    ) -> Any:
        """Runs a model's steps on one or several batches."""
        program = self._model_program(definition)
        batches = running_task.task.arguments
        outputs = []
        for i, batch in enumerate(batches):
            if self._pipeline.is_waiting:
                self._await_replies()
            ready = self._pipeline.take(running_task.task, i)
            if ready is None:
                plan = self.execution.plan(program, batch)
                servers = self.execution.servers
                pulled = servers.receive_steps(servers.send_steps(plan.pulls))
            else:
                plan, pulled = ready
            result = self.compute(running_task, program, plan, pulled, batch)
            outputs.append(result.outputs)
            self._push(running_task, plan, result, pulled, i)
            if i + 1 < len(batches):
                self._advance_local(running_task)
        if definition.kind == "predict":
            return outputs
        return outputs[-1]

    def _advance_local(self, running_task: RunningTask) -> None:
        """Applies the last step's changes to metrics."""
        for number, change in running_task.local.items():
            value = running_task.task.local[number] + change
            self.execution.engine.set_value(self.variables.by_number[number], value)

    def _push(
        self,
        running_task: RunningTask,
        plan: PullPlan,
        result: StepResult,
        pulled: Any,
        i: int,
    ) -> None:
        """Pushes the result of a step and pulls the values of later ones."""
        pushes, local = self.execution.split_result(
            plan, result, running_task.next_update(), running_task.task.done
        )
        running_task.local = (
            local
            if i == 0
            else {
                n: _sum(running_task.local.get(n), local.get(n))
                for n in {*running_task.local, *local}
            }
        )
        # Replies to the steps before this one.
        self._await_replies()
        depth = PULL_AHEAD_STEPS if running_task.task.pulls_ahead else 1
        following = self._upcoming_steps(running_task.task, i, depth)[
            len(self._pipeline) :
        ]
        steps = []
        for task, index in following:
            try:
                program = self._model_program(self._definitions[task.definition])
                plan_ahead = self.execution.plan(program, task.arguments[index])
            except Exception:  # Raised again when that step runs.
                break
            steps.append(PrefetchedStep(task, index, plan_ahead))
        self._pipeline.send(
            pushes, steps, lambda found: running_task.record_staleness(pulled, found)
        )

    def _upcoming_steps(
        self, task: ScheduledTask, i: int, count: int
    ) -> list[tuple[ScheduledTask, int]]:
        """The next known steps of models."""
        found = [(task, index) for index in range(i + 1, len(task.arguments))]
        if len(found) < count:
            self._receive(0.0)
        for following in self._tasks:
            definition = self._definitions[following.definition]
            if definition.kind == "call" or len(found) >= count:
                break
            found += [(following, index) for index in range(len(following.arguments))]
        return found[:count]

    def _await_replies(self) -> None:
        """Waits for the servers' replies and reports the tasks that they complete.

        Raises:
            Exception: a server's, for an update of the running task.
        """
        error = None
        try:
            self._pipeline.await_replies()
        except Exception as found:  # A server's; raised on the coordinator.
            self._pipeline.drop()
            error = found
            if not self._unreported:
                raise
        while self._unreported:
            result = self._unreported.popleft()()
            if error is not None:
                result = TaskResult(result.number, error=self._portable(error))
            self._report(result)

    def _model_program(self, definition: FunctionDefinition) -> StepProgram:
        if definition.number not in self._programs:
            model = self._function(definition)
            engine = self.execution.engine
            variables = self.execution.step_variables(definition.variables)
            body = engine.model_body(model, definition.kind)
            self._programs[definition.number] = engine.program(
                body, variables, definition.kind == "train"
            )
        return self._programs[definition.number]

    def function_program(
        self, fn: Callable[..., Any], arguments: Any, numbers: tuple[int, ...]
    ) -> tuple[StepProgram, Any]:
        """The program of a function, and the arrays among its arguments."""
        leaves = keras.tree.flatten(arguments)
        sent = [is_array(leaf) for leaf in leaves]
        rest = [None if a else x for a, x in zip(sent, leaves, strict=True)]
        shape = keras.tree.map_structure(lambda leaf: 0, arguments)
        key = (id(fn), repr(shape), repr(rest))
        if key not in self._programs:
            self._functions_in_use.append(fn)

            def body(arrays: Any) -> Any:
                found = iter(arrays)
                filled = [
                    next(found) if a else x for a, x in zip(sent, rest, strict=True)
                ]
                args, kwargs = keras.tree.pack_sequence_as(arguments, filled)
                return fn(*args, **kwargs)

            variables: StepVariables = self.execution.step_variables(numbers)
            self._programs[key] = self.execution.engine.program(body, variables, True)
        batch = [to_numpy(leaf) for a, leaf in zip(sent, leaves, strict=True) if a]
        return self._programs[key], batch

    def compute(
        self,
        running_task: RunningTask,
        program: StepProgram,
        plan: PullPlan,
        pulled: Any,
        batch: Any,
    ) -> StepResult:
        """Runs a program on the pulled values."""
        running_task.steps += 1
        result = self._run(program, plan, pulled, batch)
        # A program may return a variable as it is.
        result.outputs = keras.tree.map_structure(self._copy_shared, result.outputs)
        return result

    def _copy_shared(self, value: Any) -> Any:
        """A copy of an array in shared memory; other values unchanged."""
        if isinstance(value, np.ndarray) and self.execution.servers.is_shared(value):
            return np.array(value)
        return value

    def _run(
        self, program: StepProgram, plan: PullPlan, pulled: Any, batch: Any
    ) -> StepResult:
        with self.inside_program():
            if plan.matches(program):
                self.execution.load_values(program, plan, pulled)
                try:
                    return program.run(batch, plan.lookups, plan.positions)
                except LookupMismatchError:
                    program.disable_lookup_prediction()
            # Nothing has been pushed: the step restarts without predicted lookups.
            again = self.execution.plan(program, batch)
            plan.ids, plan.lookups = again.ids, again.lookups
            plan.positions = again.positions
            plan.pulls, plan.dense = again.pulls, again.dense
            servers = self.execution.servers
            # Without shared memory: values of later steps may be in it.
            numbers = servers.send_steps(plan.pulls, shares_memory=False)
            self.execution.load_values(program, plan, servers.receive_steps(numbers))
            return program.run(batch, plan.lookups, plan.positions)

    @contextlib.contextmanager
    def inside_program(self) -> Iterator[None]:
        """Variables have local values in this context, instead of the servers'."""
        before, self.in_program = self.in_program, True
        try:
            yield
        finally:
            self.in_program = before


def _sum(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return one + other

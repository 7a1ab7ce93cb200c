"""The main loop of a worker: tasks from the coordinator, steps against the servers."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_strategies.engines import get_engine
from keras_strategies.errors import OutOfRangeError, WorkerError
from keras_strategies.keras_compat.models.building import has_custom_step
from keras_strategies.keras_compat.optimizers.applying import applying_through
from keras_strategies.parameter_server.engines.composite_tensors import (
    expanded,
    on_host,
)
from keras_strategies.parameter_server.engines.engine_interface import (
    StepProgram,
    StepResult,
)
from keras_strategies.parameter_server.variables.object_pickling import dump_result
from keras_strategies.parameter_server.wire.batch_references import BatchReference
from keras_strategies.parameter_server.wire.heartbeat import coordinator_lost_message
from keras_strategies.parameter_server.wire.request_connection import Connection
from keras_strategies.parameter_server.wire.step_messages import StepReply
from keras_strategies.parameter_server.wire.task_messages import (
    FunctionDefinition,
    ReleasedNumbers,
    ScheduledTask,
    TaskResult,
)
from keras_strategies.parameter_server.worker.pull_ahead import (
    PULL_AHEAD_STEPS,
    PrefetchedStep,
    PullAheadQueue,
)
from keras_strategies.parameter_server.worker.running_task import (
    RunningTask,
    WorkerVariableHost,
    portable_value,
)
from keras_strategies.parameter_server.worker.step_execution import (
    PullPlan,
    StepExecution,
)
from keras_strategies.parameter_server.worker.step_programs import StepPrograms
from keras_strategies.parameter_server.worker.task_functions import TaskFunctions
from keras_strategies.processes.portable_exceptions import PortableException
from keras_strategies.runtime.row_splits import batches_of_custom_step, check_batch

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
        device: str, the device of its steps.
    """

    def __init__(
        self,
        index: int,
        connection: Connection,
        execution: StepExecution,
        incarnation: int,
        coordinator_seconds: float = math.inf,
        device: str = "cpu:0",
    ):
        self.index = index
        self.programs = StepPrograms(execution)
        self.host = execution.variables.host = WorkerVariableHost(self.programs)
        self._execution = execution
        self._variables = execution.variables
        self._functions = TaskFunctions(execution.variables, self._running)
        self._connection = connection
        self._registration = (index, incarnation, os.getpid(), device)
        self._coordinator_seconds = coordinator_seconds
        self._reconnects = 0
        self._last_traffic = (0, 0)
        self._is_stopped = False
        self._owner: str | None = None
        self._reset()

    def _reset(self) -> None:
        """Discards the state of an earlier coordinator."""
        self.programs.clear()
        self._functions.clear()
        self._tasks: collections.deque[ScheduledTask] = collections.deque()
        self._pipeline = PullAheadQueue(self._execution.servers)
        # Computed tasks with unconfirmed last updates.
        self._unconfirmed: collections.deque[Callable[[], TaskResult]] = (
            collections.deque()
        )

    # Messages

    def work(self) -> None:
        """Runs tasks until the coordinator stops this worker.

        Raises:
            RuntimeError: `WorkerError` if the coordinator is lost for too long.
        """
        self._post("worker", self._registration)
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
            # A restarted coordinator has no registration of this worker.
            self._reconnects = connection.reconnects
            self._post("worker", self._registration)

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
                self._functions.define(value)
            elif kind == "resource":
                self._functions.add_resource(value)
            elif kind == "release":
                self._release(value)
            elif kind == "registered":
                if self._owner not in (None, value):
                    self._reset()
                    self._variables.reset()
                self._owner = self._execution.servers.owner = value
            elif kind == "stop":
                self._is_stopped = True
                return
            timeout = 0.0

    def _release(self, released: ReleasedNumbers) -> None:
        for number in released.definitions:
            self._functions.release(number)
            self.programs.release(number)
        self._variables.release(released.variables)
        self._variables.release_objects(released.objects)
        for value in self._functions.release_values(released.resources):
            self.programs.release_argument(value)

    # Tasks

    def _run_task(self, task: ScheduledTask) -> None:
        start = time.monotonic()
        definition = self._functions.definition(task)
        try:
            numbers = tuple(dict.fromkeys((*definition.variables, *task.variables)))
            running_task = RunningTask(self.programs, task, numbers)
            self.host.running_task = running_task
            if definition.kind == "call":
                self._await_replies()
                value = self._call(running_task, definition)
                steps = max(1, running_task.steps)
            else:
                value = self._model_steps(running_task, definition)
                steps = running_task.steps
            seconds = time.monotonic() - start
            # It is complete once the servers confirm its last update.
            self._unconfirmed.append(
                lambda: TaskResult(
                    task.number,
                    value,
                    None,
                    running_task.local,
                    seconds,
                    steps,
                    self._traffic(),
                    running_task.staleness,
                    running_task.changes,
                    self._execution.take_full_tables(),
                )
            )
            self._receive(0.0)
            if not self._tasks or not task.pulls_ahead:
                self._await_replies()
        except Exception as error:  # The user's; raised on the coordinator.
            found = self._portable(_raised_again(error, definition.name))
            failed = TaskResult(task.number, error=found)
            self._pipeline.drop()
            with contextlib.suppress(Exception):  # The first error is reported.
                self._await_replies()
            self._report(failed)
        finally:
            self.host.running_task = None
            self.programs.in_program = True

    def _traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from the servers since the last call."""
        before, self._last_traffic = self._last_traffic, self._execution.servers.traffic
        return self._last_traffic[0] - before[0], self._last_traffic[1] - before[1]

    def _portable(self, error: Exception) -> PortableException:
        return PortableException.of(error, f"on worker {self.index}")

    def _report(self, result: TaskResult) -> None:
        try:
            self._post("result", result)
        except Exception as error:  # Pickling runs the user's code.
            failed = TaskResult(result.number, error=self._portable(error))
            self._post("result", failed)

    def _load_local(self, task: ScheduledTask) -> None:
        for number, value in task.local.items():
            if number in self._variables.by_number:
                self._set_value(number, value)

    def _set_value(self, number: int, value: Any) -> None:
        self._execution.engine.set_value(self._variables.by_number[number], value)

    def _call(self, running_task: RunningTask, definition: FunctionDefinition) -> Any:
        function = self._functions.function(definition)
        args, kwargs = self._functions.arguments(running_task.task)
        self._load_local(running_task.task)
        with (
            self._functions.detecting_changes(definition) as changes,
            self._running(),
        ):
            value = function(*args, **kwargs)
        running_task.changes = tuple(changes)
        return dump_result(keras.tree.map_structure(portable_value, value))

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """A context for functions of users: variables are those of the servers."""
        task = self.host.running_task
        assert task is not None, "outside of a task"
        before, self.programs.in_program = self.programs.in_program, False
        try:
            with self._variables.strategy().scope(), applying_through(task.apply):
                yield
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:  # `SystemExit` would end this worker.
            raise WorkerError(
                f"A scheduled function ended with {type(error).__name__}: {error}. "
                "Raise an `Exception` to stop training, or return a value."
            ) from error
        finally:
            self.programs.in_program = before

    def _model_steps(
        self, running_task: RunningTask, definition: FunctionDefinition
    ) -> Any:
        """Runs a model's steps on one or several batches."""
        # Unpickled before values are loaded: the task may have its first variables.
        self._functions.function(definition)
        self._load_local(running_task.task)
        batches = running_task.task.arguments
        outputs = []
        for i in range(len(batches)):
            given = self._batch(running_task.task, i)
            if given is None:
                break
            program, batch = self._model_program(definition, given)
            if self._pipeline.is_waiting:
                self._await_replies()
            ready = self._pipeline.take(running_task.task, i)
            if ready is None:
                ready = self._pull(program, batch, running_task.task, i)
            plan, pulled = ready
            running_task.steps += 1
            result = self.programs.compute(program, plan, pulled, batch)
            outputs.append(result.outputs)
            self._push(running_task, plan, result, pulled, i)
            if i + 1 < len(batches):
                self._advance_local(running_task)
        if definition.kind == "predict":
            return outputs
        return outputs[-1] if outputs else None

    def _batch(self, task: ScheduledTask, i: int) -> Any:
        """A batch of a task, read from a pipeline at first; None at its end."""
        batch = task.arguments[i]
        if isinstance(batch, BatchReference):
            definition = self._functions.definition(task)
            is_custom = has_custom_step(self._functions.function(definition))
            with self._running(), batches_of_custom_step(is_custom):
                batch = self._functions.value(batch.reader).read(batch)
                check_batch(batch)
            task.arguments[i] = batch = expanded(batch, on_host)
        return batch

    def _pull(
        self, program: StepProgram, batch: Any, task: ScheduledTask, i: int
    ) -> tuple[PullPlan, dict[int, StepReply]]:
        """Pulls the values of a step, and begins to pull those of the next one."""
        plan = self._execution.plan(program, batch)
        numbers = self._execution.servers.send_steps(plan.pulls)
        if task.pulls_ahead:
            self._pipeline.send({}, self._planned(self._upcoming_steps(task, i, 1)))
        return plan, self._execution.servers.receive_steps(numbers)

    def _advance_local(self, running_task: RunningTask) -> None:
        """Applies the last step's changes to metrics."""
        for number, change in running_task.local.items():
            value = running_task.task.local[number] + change
            self._set_value(number, value)

    def _push(
        self,
        running_task: RunningTask,
        plan: PullPlan,
        result: StepResult,
        pulled: Any,
        i: int,
    ) -> None:
        """Pushes the result of a step and pulls the values of later ones."""
        pushes, local = self._execution.split_result(
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
        depth = PULL_AHEAD_STEPS if running_task.task.pulls_ahead else 1
        following = self._upcoming_steps(running_task.task, i, depth)[
            len(self._pipeline) :
        ]
        self._pipeline.send(
            pushes,
            self._planned(following),
            lambda found: running_task.record_staleness(pulled, found),
        )
        self._await_replies(wait_last=False)

    def _planned(
        self, following: Sequence[tuple[ScheduledTask, int]]
    ) -> list[PrefetchedStep]:
        """Later steps with their pull plans."""
        steps = []
        for task, index in following:
            try:
                given = self._batch(task, index)
                if given is None:
                    break
                program, batch = self._model_program(
                    self._functions.definition(task), given
                )
                plan = self._execution.plan(program, batch)
            except Exception:  # Raised again when that step runs.
                break
            steps.append(PrefetchedStep(task, index, plan))
        return steps

    def _upcoming_steps(
        self, task: ScheduledTask, i: int, count: int
    ) -> list[tuple[ScheduledTask, int]]:
        """The next received steps of models."""
        found = [(task, index) for index in range(i + 1, len(task.arguments))]
        if len(found) < count:
            self._receive(0.0)
        for following in self._tasks:
            definition = self._functions.definition(following)
            if definition.kind == "call" or len(found) >= count:
                break
            found += [(following, index) for index in range(len(following.arguments))]
        return found[:count]

    def _await_replies(self, *, wait_last: bool = True) -> None:
        """Waits for the servers' replies and reports the tasks that they complete.

        Args:
            wait_last: bool, whether to wait for those to the last push too.

        Raises:
            Exception: a server's, for an update of the running task.
        """
        error = None
        try:
            self._pipeline.await_replies(wait_last=wait_last)
        except Exception as found:  # A server's; raised on the coordinator.
            self._pipeline.drop()
            error = found
            if not self._unconfirmed:
                raise
        while self._unconfirmed:
            result = self._unconfirmed.popleft()()
            if error is not None:
                result = TaskResult(result.number, error=self._portable(error))
            self._report(result)

    def _model_program(
        self, definition: FunctionDefinition, batch: Any
    ) -> tuple[StepProgram, Any]:
        """The program of a model's step on a batch, and the batch for it."""
        return self.programs.of_model(
            definition.number,
            self._functions.function(definition),
            definition.kind,
            definition.variables,
            batch,
        )


def _raised_again(error: Exception, name: str) -> Exception:
    """The error that a task raises on the coordinator.

    Not `StopIteration`, which would end generators and loops of the coordinator that
    call `fetch`, nor an error of TensorFlow that is no `OutOfRangeError` of this
    package.
    """
    engine = get_engine()
    if not isinstance(error, engine.end_errors) or isinstance(error, OutOfRangeError):
        return error
    exhausted = engine.out_of_range_error(
        f"An iterator in {name} has no more values: {type(error).__name__} was raised. "
        "Schedule as many steps as each worker has batches, repeat the dataset in "
        "`dataset_fn`, or pass a new `iter(per_worker_dataset)`."
    )
    exhausted.__cause__ = error
    return exhausted


def _sum(left: Any, right: Any) -> Any:
    if left is None or right is None:
        return right if left is None else left
    return left + right

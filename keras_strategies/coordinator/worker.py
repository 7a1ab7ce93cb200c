"""A worker: takes tasks from the coordinator and runs them against the servers."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import keras
import numpy as np

from keras_strategies import keras_compat
from keras_strategies.backends.parameter_server import (
    Applied,
    OtherLookupsError,
    Program,
    StepResult,
)
from keras_strategies.coordinator.execution import (
    Execution,
    Plan,
    ProgramVariables,
    merge,
)
from keras_strategies.coordinator.pickling import load
from keras_strategies.coordinator.server import Step
from keras_strategies.coordinator.tasks import (
    Definition,
    Outcome,
    Reference,
    Resource,
    Task,
)
from keras_strategies.coordinator.transport import Connection, Keys

#: Seconds between signs of life.
BEAT_SECONDS = 0.5


class Closure:
    """A closure under way: names its updates, and keeps what it has read."""

    def __init__(self, worker: Worker, task: Task, numbers: tuple[int, ...]):
        self.worker = worker
        self.task = task
        self.numbers = numbers
        self.local: dict[int, np.ndarray] = {}
        self.steps = 0
        self._next_update = 0
        self._cache: dict[int, np.ndarray] = {}

    def next_update(self) -> tuple[int, int]:
        """The name of the next update."""
        self._next_update += 1
        return self.task.number, self._next_update - 1

    # Variables outside of programs (`keras_compat.VariableHost`)

    def read(self, variable: Any) -> np.ndarray:
        about = self.worker.receiver.describe(variable)
        if about.kind == "local":
            return self._local(about.number)
        if about.number not in self._cache:
            self._cache[about.number] = self.worker.execution.servers.read(about)
        return self._cache[about.number]

    def _local(self, number: int) -> np.ndarray:
        value = self.task.local[number]
        return value + self.local[number] if number in self.local else value

    def write(self, variable: Any, value: np.ndarray) -> None:
        about = self.worker.receiver.describe(variable)
        if about.kind == "local":
            self.local[about.number] = value - self.task.local[about.number]
            return
        writes: dict[int, list[Any]] = {}
        for part in about.parts:
            cut = value[part.start : part.stop] if about.shape else value
            key = (about.number, part.start)
            writes.setdefault(part.server, []).append((key, cut))
        self._send({i: Step(writes=tuple(w)) for i, w in writes.items()})

    def add(self, variable: Any, delta: np.ndarray) -> None:
        about = self.worker.receiver.describe(variable)
        if about.kind == "local":
            self.write(variable, self.read(variable) + delta)
            return
        adds: dict[int, list[Any]] = {}
        for part in about.parts:
            cut = delta[part.start : part.stop] if about.shape else delta
            key = (about.number, part.start)
            adds.setdefault(part.server, []).append((key, cut))
        self._send({i: Step(adds=tuple(a)) for i, a in adds.items()})

    def _send(self, steps: dict[int, Step]) -> None:
        from dataclasses import replace

        update = self.next_update()
        done = self.task.done
        named = {i: replace(s, update=update, done=done) for i, s in steps.items()}
        servers = self.worker.execution.servers
        servers.finish_steps(servers.begin_steps(named))
        self._cache.clear()

    def apply(self, optimizer: Any, gradients: Any, variables: Any) -> Any:
        """`optimizer.apply` outside of a program."""
        if variables is None:
            variables = keras_compat.trained_variables(optimizer)
        arrays = [None if g is None else _to_numpy(g) for g in gradients]
        result = StepResult(None, [Applied(optimizer, list(variables), arrays)])
        self.push(Plan([], [], {}, {}), result)
        return optimizer.iterations

    def push(self, plan: Plan, result: StepResult) -> None:
        """Sends the servers what a step has come to, and waits until they have it."""
        execution = self.worker.execution
        steps, local = execution.pushes(
            plan, result, self.next_update(), self.task.done
        )
        self.merge_local(local)
        execution.servers.finish_steps(execution.servers.begin_steps(steps))
        self._cache.clear()

    def merge_local(self, changes: dict[int, np.ndarray]) -> None:
        """Adds changes of variables that no server has."""
        for number, change in changes.items():
            self.local[number] = self.local.get(number, 0) + change

    # Programs

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a function as a program: pull, compute, push."""
        if self.worker.in_program:
            return fn(*args, **kwargs)
        program, batch = self.worker.function_program(fn, (args, kwargs), self.numbers)
        with self.worker.inside_program():
            plan = self.worker.execution.plan(program, batch)
        servers = self.worker.execution.servers
        pulled = servers.finish_steps(servers.begin_steps(plan.pulls))
        result = self.worker.compute(self, program, plan, pulled, batch)
        self.push(plan, result)
        return keras.tree.map_structure(_to_tensor, result.outputs)


class WorkerHost:
    """Where a worker's variables have their values: the closure under way."""

    def __init__(self, worker: Worker):
        self._worker = worker

    @property
    def is_local(self) -> bool:
        return self._worker.in_program

    def _closure(self) -> Closure:
        closure = self._worker.closure
        assert closure is not None, "outside of a closure"
        return closure

    def read(self, variable: Any) -> Any:
        return self._closure().read(variable)

    def read_slice(self, variable: Any, index: Any) -> Any:
        return self.read(variable)[index]

    def write(self, variable: Any, value: Any) -> None:
        self._closure().write(variable, _to_numpy(value))

    def add(self, variable: Any, delta: Any) -> Any:
        self._closure().add(variable, _to_numpy(delta))
        return variable.value

    def is_large(self, variable: Any) -> bool:
        return False

    def pieces(self, variable: Any) -> Iterator[tuple[int, Any]]:
        yield 0, self.read(variable)

    def write_rows(self, variable: Any, start: int, rows: Any) -> None:
        value = np.array(self.read(variable))
        value[start : start + len(rows)] = rows
        self.write(variable, value)

    def place(self, variable: Any) -> str:
        return "on parameter servers"

    def create(self, variable: Any, value: Any) -> None:
        raise AssertionError("variables of workers are made by the coordinator")

    create_with = create


class Worker:
    """Runs tasks, one after the other, in the thread that calls `work`.

    Args:
        index: int, the number of this worker.
        connection: to the coordinator.
        execution: the servers, the variables and the backend.
        incarnation: int, counts the processes that have been this worker.
        max_ahead: int, tasks of which the next one's pull may travel with the last
            one's push.
    """

    def __init__(
        self,
        index: int,
        connection: Connection,
        execution: Execution,
        incarnation: int,
    ):
        self.index = index
        self.execution = execution
        self.receiver = execution.receiver
        self.receiver.host = WorkerHost(self)
        self.closure: Closure | None = None
        self.in_program = True  # Until a closure runs.
        self._connection = connection
        self._incarnation = incarnation
        self._definitions: dict[int, Definition] = {}
        self._functions: dict[int, Any] = {}
        self._programs: dict[Any, Program] = {}
        self._kept: list[Any] = []
        self._resources: dict[int, Resource] = {}
        self._values: dict[int, Any] = {}
        self._tasks: collections.deque[Task] = collections.deque()
        self._prepared: tuple[Task, int, Plan, dict[int, Any]] | None = None
        self._is_stopped = False

    # Messages

    def work(self) -> None:
        """Takes tasks until told to stop."""
        self._post("hello", (self.index, self._incarnation, os.getpid()))
        while not self._is_stopped:
            self._receive(60.0 if not self._tasks else 0.0)
            while self._tasks and not self._is_stopped:
                self._do(self._tasks.popleft())
                self._receive(0.0)

    def _post(self, kind: str, value: Any) -> None:
        self._connection.post((0, (kind, value)))

    def _receive(self, timeout: float) -> None:
        """Takes in what has arrived; waits for the first message only."""
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
            elif kind == "cancel":
                self._tasks.clear()
            elif kind == "stop":
                self._is_stopped = True
                return
            timeout = 0.0

    # Tasks

    def _do(self, task: Task) -> None:
        start = time.monotonic()
        definition = self._definitions[task.definition]
        try:
            function = self._function(definition)
            self._load_local(task)
            closure = Closure(self, task, definition.variables)
            self.closure = closure
            if definition.kind == "call":
                value = self._call(closure, function)
                steps = max(1, closure.steps)
            else:
                value = self._model_steps(closure, definition)
                steps = len(task.arguments)
            outcome = Outcome(
                task.number,
                value,
                None,
                closure.local,
                time.monotonic() - start,
                steps,
                self.execution.servers.traffic,
            )
        except Exception as error:
            outcome = Outcome(task.number, error=_portable(error, self.index))
            self._prepared = None
        finally:
            self.closure = None
            self.in_program = True
        try:
            self._post("outcome", outcome)
        except Exception as error:
            failed = Outcome(task.number, error=_portable(error, self.index))
            self._post("outcome", failed)

    def _function(self, definition: Definition) -> Any:
        number = definition.number
        if number not in self._functions:
            self._functions[number] = load(
                definition.blob, self.receiver, definition.generation
            )
        return self._functions[number]

    def _load_local(self, task: Task) -> None:
        for number, value in task.local.items():
            if number in self.receiver.variables:
                self.execution.engine.set_value(self.receiver.variables[number], value)

    def _call(self, closure: Closure, function: Callable[..., Any]) -> Any:
        args, kwargs = load(
            closure.task.arguments, self.receiver, closure.task.generation
        )
        args, kwargs = self._resolved((args, kwargs))
        self.in_program = False
        strategy = self.receiver.strategy()
        with strategy.scope(), keras_compat.applying_through(closure.apply):
            value = function(*args, **kwargs)
        return keras.tree.map_structure(_portable_value, value)

    def _resolved(self, structure: Any) -> Any:
        if isinstance(structure, Reference):
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
                make = load(resource.blob, self.receiver, resource.generation)
                self._values[number] = make()
        return self._values[number]

    def _model_steps(self, closure: Closure, definition: Definition) -> Any:
        """A model's steps on one batch or on several; push and next pull are one."""
        program = self._model_program(definition)
        batches = closure.task.arguments
        outputs = []
        for i, batch in enumerate(batches):
            if self._prepared is not None and self._prepared[:2] == (closure.task, i):
                plan, pulled = self._prepared[2:]
            else:
                plan = self.execution.plan(program, batch)
                servers = self.execution.servers
                pulled = servers.finish_steps(servers.begin_steps(plan.pulls))
            self._prepared = None
            result = self.compute(closure, program, plan, pulled, batch)
            outputs.append(result.outputs)
            self._push_and_pull(closure, plan, result, i)
            if i + 1 < len(batches):
                self._advance_local(closure)
        if definition.kind == "predict":
            return outputs
        return outputs[-1]

    def _advance_local(self, closure: Closure) -> None:
        """Lets metrics go on from where the last step left them."""
        for number, change in closure.local.items():
            value = closure.task.local[number] + change
            self.execution.engine.set_value(self.receiver.variables[number], value)

    def _push_and_pull(
        self, closure: Closure, plan: Plan, result: StepResult, i: int
    ) -> None:
        """One message to each server: this step's updates, the next one's values."""
        execution = self.execution
        pushes, local = execution.pushes(
            plan, result, closure.next_update(), closure.task.done
        )
        closure.local = (
            local
            if i == 0
            else {
                n: _sum(closure.local.get(n), local.get(n))
                for n in {*closure.local, *local}
            }
        )
        following = self._following(closure.task, i)
        if following is None:
            execution.servers.finish_steps(execution.servers.begin_steps(pushes))
            return
        task, index, program = following
        next_plan = execution.plan(program, task.arguments[index])
        servers = {*pushes, *next_plan.pulls}
        steps = {s: merge(pushes.get(s), next_plan.pulls.get(s)) for s in servers}
        pulled = execution.servers.finish_steps(execution.servers.begin_steps(steps))
        self._prepared = (task, index, next_plan, pulled)

    def _following(self, task: Task, i: int) -> tuple[Task, int, Program] | None:
        """The next step, if it is known already and is a model's."""
        if i + 1 < len(task.arguments):
            definition = self._definitions[task.definition]
            return task, i + 1, self._model_program(definition)
        self._receive(0.0)
        if not self._tasks:
            return None
        following = self._tasks[0]
        definition = self._definitions[following.definition]
        if definition.kind == "call" or not following.arguments:
            return None
        return following, 0, self._model_program(definition)

    def _model_program(self, definition: Definition) -> Program:
        if definition.number not in self._programs:
            model = self._function(definition)
            engine = self.execution.engine
            variables = self.execution.variables(definition.variables)
            body = engine.model_body(model, definition.kind)
            self._programs[definition.number] = engine.program(
                body, variables, definition.kind == "train"
            )
        return self._programs[definition.number]

    def function_program(
        self, fn: Callable[..., Any], arguments: Any, numbers: tuple[int, ...]
    ) -> tuple[Program, Any]:
        """The program of a function, and the arrays among its arguments."""
        leaves = keras.tree.flatten(arguments)
        is_array = [_is_array(leaf) for leaf in leaves]
        rest = [None if a else x for a, x in zip(is_array, leaves, strict=True)]
        shape = keras.tree.map_structure(lambda leaf: 0, arguments)
        key = (id(fn), repr(shape), repr(rest))
        if key not in self._programs:
            self._kept.append(fn)

            def body(arrays: Any) -> Any:
                found = iter(arrays)
                filled = [
                    next(found) if a else x for a, x in zip(is_array, rest, strict=True)
                ]
                args, kwargs = keras.tree.pack_sequence_as(arguments, filled)
                return fn(*args, **kwargs)

            variables: ProgramVariables = self.execution.variables(numbers)
            self._programs[key] = self.execution.engine.program(body, variables, True)
        batch = [_to_numpy(leaf) for a, leaf in zip(is_array, leaves, strict=True) if a]
        return self._programs[key], batch

    def compute(
        self, closure: Closure, program: Program, plan: Plan, pulled: Any, batch: Any
    ) -> StepResult:
        """Runs a program on what was pulled."""
        closure.steps += 1
        with self.inside_program():
            self.execution.fill(program, plan, pulled)
            try:
                return program.run(batch, plan.positions)
            except OtherLookupsError:
                # Nothing has been sent; this step begins again, with a closer look.
                program.foresee_nothing()
                again = self.execution.plan(program, batch)
                plan.ids, plan.positions = again.ids, again.positions
                plan.pulls, plan.dense = again.pulls, again.dense
                servers = self.execution.servers
                pulled = servers.finish_steps(servers.begin_steps(plan.pulls))
                self.execution.fill(program, plan, pulled)
                return program.run(batch, plan.positions)

    @contextlib.contextmanager
    def inside_program(self) -> Iterator[None]:
        """Variables have values of their own, instead of asking the servers."""
        before, self.in_program = self.in_program, True
        try:
            yield
        finally:
            self.in_program = before


def _sum(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def beat(address: str, keys: Keys | None, index: Any, incarnation: int) -> None:
    """Tells the coordinator that this process lives, until it ends."""
    connection = Connection(address, keys, "the coordinator")
    while True:
        connection.post((0, ("beat", (index, incarnation))))
        time.sleep(BEAT_SECONDS)


def start_beating(
    address: str, keys: Keys | None, index: Any, incarnation: int
) -> None:
    """Begins `beat` in a thread that ends with the process."""
    threading.Thread(
        target=beat, args=(address, keys, index, incarnation), daemon=True
    ).start()


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _to_numpy(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    return np.asarray(keras.ops.convert_to_numpy(value))


def _to_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return keras.ops.convert_to_tensor(value)
    return value


def _portable_value(value: Any) -> Any:
    """What a closure returns, with arrays of NumPy."""
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        return _to_numpy(value)
    return value


def _portable(error: Exception, index: int) -> Exception:
    text = "".join(traceback.format_exception(error))
    try:
        copy = cloudpickle.loads(cloudpickle.dumps(error))
        if type(copy) is not type(error):
            raise TypeError
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(f"Raised on worker {index}:\n{text}")
    result: Exception = copy
    return result

"""How a worker runs steps: find the rows, pull, compute, push."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_strategies import keras_compat
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.parameter_server.engines.step_engine import (
    Applied,
    Engine,
    Program,
    StepResult,
    bucket,
)
from keras_strategies.parameter_server.variables.optimizer_wrappers import (
    has_dynamic_scale,
    innermost,
)
from keras_strategies.parameter_server.variables.sharded_variable import ShardedVariable
from keras_strategies.parameter_server.wire.object_pickling import Receiver
from keras_strategies.parameter_server.wire.row_arrays import empty_aligned, pad_rows
from keras_strategies.parameter_server.wire.server_connections import Servers
from keras_strategies.parameter_server.wire.step_messages import (
    Pulled,
    ScaleReport,
    Step,
    UpdateId,
)
from keras_strategies.parameter_server.wire.variable_description import (
    Described,
    is_sharded,
)
from keras_strategies.parameter_server.worker.gradient_transforms import (
    judged,
    prepared,
    shared_out,
)
from keras_strategies.parameter_server.worker.row_positions import Places, checked_ids


class WorkerReceiver(Receiver):
    """Makes variables whose values come from the servers step by step.

    Args:
        engine: the backend's.
    """

    def __init__(self, engine: Engine):
        super().__init__()
        self._engine = engine
        self._strategy: Any = None
        self.variables: dict[int, Any] = {}
        self.described: dict[int, Described] = {}
        self._numbers: dict[int, int] = {}
        #: Keeps values where closures use variables outside of programs.
        self.host: Any = None

    def forget(self) -> None:
        """Begins as at first, for a coordinator whose numbers mean other things."""
        for known in (
            self.variables,
            self.described,
            self._numbers,
            self.objects,
            self.generations,
        ):
            known.clear()

    def strategy(self) -> Any:
        return self._strategy

    def function(self, original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._strategy.run(original, args, kwargs)

        return run

    def set_strategy(self, strategy: Any) -> None:
        """Says what stands for the coordinator's strategy."""
        self._strategy = strategy

    def variable(self, described: Described) -> Any:
        number = described.number
        if number not in self.variables:
            made = self._engine.new_variable(
                described.path, described.trainable, described.dtype, described.shape
            )
            keras_compat.host_made_variable(made, self.host)
            if is_sharded(described):
                keras_compat.mix_in(made, ShardedVariable)
            self.variables[number] = made
            self._numbers[id(made)] = number
        self.variables[number].trainable = described.trainable
        self.variables[number].regularizer = described.regularizer
        self.described[number] = described
        return self.variables[number]

    def describe(self, variable: Any) -> Described:
        """What the coordinator said of a variable."""
        try:
            return self.described[self._numbers[id(variable)]]
        except KeyError:
            raise InvalidArgumentError(
                f"Variable {variable.path!r} was made on the worker, so no parameter "
                "server has it. Make variables in the strategy's scope, before they "
                "are used in a scheduled function."
            ) from None


@dataclass
class ProgramVariables:
    """The variables of one program: which are tables, and which travel whole."""

    tables: list[Any]
    others: list[Any]

    def become_dense(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            self.tables = [v for v in self.tables if v is not variable]
            self.others.append(variable)


@dataclass
class Plan:
    """What a step pulls, and where its rows will be.

    Args:
        ids: pairs of a table and the rows that it is asked for, sorted.
        lookups: for each lookup its table and ids.
        positions: for each lookup, places among these rows.
        pulls: what each server is asked for.
        dense: for each server the variables and first rows of what it sends whole.
    """

    ids: list[tuple[Any, np.ndarray]] = field(default_factory=list)
    lookups: list[tuple[Any, np.ndarray]] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    pulls: dict[int, Step] = field(default_factory=dict)
    dense: dict[int, list[tuple[Any, int, int]]] = field(default_factory=dict)

    def is_of(self, program: Program) -> bool:
        """Whether the program still has the tables that it had."""
        tables = program.variables.tables
        return len(tables) == len(self.ids) and all(
            table is other for (table, _), other in zip(self.ids, tables, strict=True)
        )


class Execution:
    """Runs programs against the servers.

    Args:
        servers: the servers.
        receiver: the worker's variables.
        engine: the backend's.
    """

    def __init__(self, servers: Servers, receiver: WorkerReceiver, engine: Engine):
        self.servers = servers
        self.receiver = receiver
        self.engine = engine
        self._places = Places()

    def variables(self, numbers: Sequence[int]) -> ProgramVariables:
        """Which variables a program may use, by their numbers."""
        tables: list[Any] = []
        others: list[Any] = []
        for number in numbers:
            described = self.receiver.described[number]
            variable = self.receiver.variables[number]
            if described.kind == "slot":
                continue
            may_be_table = (
                described.kind == "weight"
                and len(described.shape) == 2
                and "float" in described.dtype
                and described.regularizer is None
            )
            (tables if may_be_table else others).append(variable)
        return ProgramVariables(tables, others)

    def plan(self, program: Program, batch: Any) -> Plan:
        """Finds out what a step needs."""
        lookups = program.lookups(batch)
        described = self.receiver.describe
        ids: list[tuple[Any, np.ndarray]] = []
        positions: list[Any] = [None] * len(lookups)
        for table in program.variables.tables:
            rows = described(table).shape[0]
            asked = [i for i, (t, _) in enumerate(lookups) if t is table]
            wanted = [checked_ids(lookups[i][1], rows, table) for i in asked]
            found, places = self._places.find(wanted, rows)
            ids.append((table, found))
            for i, where in zip(asked, places, strict=True):
                positions[i] = where.reshape(lookups[i][1].shape)
        whole: dict[int, list[tuple[Any, int, int]]] = {}
        for variable in program.variables.others:
            about = described(variable)
            if about.kind == "local":
                continue
            for part in about.parts[: 1 if about.kind == "scalar" else None]:
                whole.setdefault(part.server, []).append(
                    (variable, part.start, part.stop)
                )
        rows_of: dict[int, list[Any]] = {}
        for table, found in ids:
            about = described(table)
            for part, low, high in _cut(about, found):
                if low < high:
                    key = (about.number, part.start)
                    # Of several parts, the worker pads what they are put together to.
                    count = self._padded(found) if len(about.parts) == 1 else high - low
                    rows_of.setdefault(part.server, []).append(
                        (key, found[low:high] - part.start, count)
                    )
        pulls = {
            server: Step(
                pull=tuple(
                    (described(v).number, start)
                    for v, start, _ in whole.get(server, ())
                ),
                pull_rows=tuple(rows_of.get(server, ())),
            )
            for server in {*whole, *rows_of}
        }
        return Plan(ids, lookups, positions, pulls, whole)

    def _padded(self, ids: np.ndarray) -> int:
        """How many rows a window has."""
        return bucket(len(ids)) if self.engine.pads_rows else len(ids)

    def fill(self, program: Program, plan: Plan, pulled: dict[int, Pulled]) -> None:
        """Gives the variables what has been pulled."""
        engine, described = self.engine, self.receiver.describe
        parts: dict[int, list[tuple[int, np.ndarray]]] = {}
        for server, wanted in plan.dense.items():
            for (variable, start, _), value in zip(
                wanted, pulled[server].dense, strict=True
            ):
                parts.setdefault(id(variable), []).append((start, value))
        for variable in program.variables.others:
            pulled_parts = parts.get(id(variable))
            if pulled_parts:
                pulled_parts.sort(key=lambda pair: pair[0])
                arrays = [array for _, array in pulled_parts]
                whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
                engine.set_value(variable, whole)
        answers = {server: iter(pulled[server].rows) for server in pulled}
        for table, found in plan.ids:
            about = described(table)
            count = self._padded(found)
            pieces = [
                next(answers[part.server])
                for part, low, high in _cut(about, found)
                if low < high
            ]
            if len(pieces) == 1:
                rows = pad_rows(pieces[0], count)
            else:
                dtype = pieces[0].dtype if pieces else np.dtype("float32")
                rows = empty_aligned((count, *about.shape[1:]), dtype)
                rows[len(found) :] = 0
                if pieces:
                    np.concatenate(pieces, out=rows[: len(found)])
            engine.set_value(table, rows)

    def pushes(
        self, plan: Plan, result: StepResult, update: UpdateId, done: int
    ) -> tuple[dict[int, Step], dict[int, np.ndarray]]:
        """What a step's result means for the servers, and for metrics.

        Returns:
            A step for each server, and changes of variables that no server has.
        """
        describe = self.receiver.describe
        count = len(self.servers)
        updates: dict[int, list[Any]] = {i: [] for i in range(count)}
        adds: dict[int, list[Any]] = {i: [] for i in range(count)}
        writes: dict[int, list[Any]] = {i: [] for i in range(count)}
        scales: dict[int, list[ScaleReport]] = {i: [] for i in range(count)}
        local: dict[int, np.ndarray] = {}
        ids = {id(table): found for table, found in plan.ids}
        for applied in result.applied:
            if has_dynamic_scale(applied.optimizer):
                server, report, applied = self._unscaled(applied)
                scales[server].append(report)
                if not report.is_finite:
                    continue
            for own in shared_out(applied):
                self._divide(own, ids, updates)
            if keras_compat.optimizers_of(applied.optimizer):
                # The optimizers that it shares variables out to count for themselves.
                about = describe(applied.optimizer.iterations)
                one = np.ones((), about.dtype)
                for part in about.parts:
                    adds[part.server].append(((about.number, part.start), one))
        for variable, after in result.changed:
            about = describe(variable)
            before = self.engine.get_value(variable)
            if about.kind == "local":
                local[about.number] = _difference(after, before)
                continue
            if np.array_equal(after, before):
                continue
            for part in about.parts:
                cut = slice(part.start, part.stop) if about.shape else ...
                key = (about.number, part.start)
                if after.dtype == bool:
                    writes[part.server].append((key, after[cut]))
                else:
                    adds[part.server].append((key, _difference(after, before)[cut]))
        steps = {
            server: Step(
                update=update,
                done=done,
                optimizers=tuple(updates[server]),
                adds=tuple(adds[server]),
                writes=tuple(writes[server]),
                scales=tuple(scales[server]),
            )
            for server in range(count)
            # Every server is to know the name of an update that nothing came of: its
            # closure may run again, with another scale.
            if result.applied or adds[server] or writes[server]
        }
        return steps, local

    def _divide(
        self,
        applied: Applied,
        ids: Mapping[int, np.ndarray],
        updates: dict[int, list[Any]],
    ) -> None:
        """Appends to each server's updates what it is to make of gradients.

        Args:
            applied: of one optimizer that updates variables itself.
            ids: the rows of tables, by the `id` of the variable.
            updates: by server.
        """
        optimizer, count = applied.optimizer, len(self.servers)
        number = self.receiver_number(optimizer)
        gradients = prepared(optimizer, applied.gradients)
        dense: dict[int, list[Any]] = {i: [] for i in range(count)}
        rows: dict[int, list[Any]] = {i: [] for i in range(count)}
        for variable, gradient in zip(applied.variables, gradients, strict=True):
            about = self.receiver.describe(variable)
            if gradient is None:
                continue
            if id(variable) in ids:
                found = ids[id(variable)]
                for part, low, high in _cut(about, found):
                    key = (about.number, part.start)
                    own = gradient[low:high] if len(about.parts) > 1 else gradient
                    rows[part.server].append((key, found[low:high] - part.start, own))
                continue
            for part in about.parts:
                key = (about.number, part.start)
                own = gradient
                if len(about.parts) > 1:
                    own = gradient[part.start : part.stop]
                dense[part.server].append((key, own))
        for server in range(count):
            updates[server].append((number, dense[server], rows[server]))

    def _unscaled(self, applied: Applied) -> tuple[int, ScaleReport, Applied]:
        """Which server hears what of a scaled loss, and what its gradients mean."""
        optimizer = applied.optimizer
        about = self.receiver.describe(optimizer.dynamic_scale)
        used = applied.scale
        if used is None:
            used = self.engine.get_value(optimizer.dynamic_scale)
        report, gradients = judged(
            optimizer, applied.gradients, used, self.receiver.describe
        )
        inner = Applied(innermost(optimizer), applied.variables, gradients)
        return about.parts[0].server, report, inner

    def receiver_number(self, made: Any) -> int:
        """The number that an object came with."""
        for number, found in self.receiver.objects.items():
            if found is made:
                return number
        raise InvalidArgumentError(
            f"Optimizer {made.name!r} was made on the worker. Make it in the "
            "strategy's scope, before it is used in a scheduled function."
        )


def _cut(about: Described, ids: np.ndarray) -> list[tuple[Any, int, int]]:
    """Which of sorted ids are in each part of a variable."""
    if len(about.parts) == 1:
        return [(about.parts[0], 0, len(ids))]
    bounds = np.searchsorted(ids, [part.start for part in about.parts[1:]])
    lows = [0, *bounds.tolist()]
    highs = [*bounds.tolist(), len(ids)]
    return list(zip(about.parts, lows, highs, strict=True))


def _difference(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    if after.dtype == bool:
        return after
    return np.asarray(after - before.astype(after.dtype))

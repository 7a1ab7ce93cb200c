"""Steps on a worker: find the rows, pull, compute, push."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.variables.creation import mix_in
from keras_strategies.keras_compat.variables.hosted_variables import (
    VariableHost,
    host_variable,
)
from keras_strategies.parameter_server.engines.engine_interface import (
    OptimizerCall,
    ParameterServerEngine,
    StepProgram,
    StepResult,
    StepVariables,
    bucket,
)
from keras_strategies.parameter_server.variables.dtype_sizes import bytes_per_element
from keras_strategies.parameter_server.variables.object_pickling import (
    UnpicklingContext,
)
from keras_strategies.parameter_server.variables.sharded_variable import ShardedVariable
from keras_strategies.parameter_server.wire.arrays.row_arrays import (
    empty_aligned,
    pad_rows,
)
from keras_strategies.parameter_server.wire.server_connections import (
    ServerConnections,
    array_dtype,
)
from keras_strategies.parameter_server.wire.step_messages import (
    StepReply,
    StepRequest,
    UpdateId,
)
from keras_strategies.parameter_server.wire.variable_description import (
    VariableDescription,
    is_sharded,
)
from keras_strategies.parameter_server.worker.gradient_transforms import (
    clip,
)
from keras_strategies.parameter_server.worker.row_positions import (
    RowPositions,
    validate_ids,
)

#: Bytes of a table from which pulling it in full in each step is worth a warning.
_LARGE_TABLE_BYTES = 16 << 20
#: Rows of a table for each of its columns; kernels of dense layers have fewer.
_TABLE_RATIO = 16


class WorkerVariables(UnpicklingContext):
    """A worker's variables; their values are pulled for each step.

    Args:
        engine: the backend's.
    """

    def __init__(self, engine: ParameterServerEngine):
        super().__init__()
        self._engine = engine
        self._strategy: Any = None
        self.by_number: dict[int, Any] = {}
        self._descriptions: dict[int, VariableDescription] = {}
        self._numbers: dict[int, int] = {}
        #: Host of variables that tasks use outside of programs; None without tasks.
        self.host: VariableHost | None = None

    def reset(self) -> None:
        """Discards all variables, for a new coordinator with other numbers."""
        for known in (
            self.by_number,
            self._descriptions,
            self._numbers,
            self.objects,
            self.generations,
        ):
            known.clear()

    def release(self, numbers: Sequence[int]) -> None:
        """Discards variables that the coordinator no longer has."""
        for number in numbers:
            self._descriptions.pop(number, None)
            self._numbers.pop(id(self.by_number.pop(number, None)), None)

    def strategy(self) -> Any:
        return self._strategy

    def function(self, original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._strategy.run(original, args, kwargs)

        return run

    def set_strategy(self, strategy: Any) -> None:
        """Sets the worker's substitute for the coordinator's strategy."""
        self._strategy = strategy

    def variable(self, description: VariableDescription) -> Any:
        number = description.number
        if number not in self.by_number:
            made = self._engine.new_variable(
                description.path,
                description.trainable,
                description.dtype,
                description.shape,
            )
            if self.host is not None:
                host_variable(made, self.host)
            if is_sharded(description):
                mix_in(made, ShardedVariable)
            self.by_number[number] = made
            self._numbers[id(made)] = number
        self.by_number[number].trainable = description.trainable
        self.by_number[number].regularizer = description.regularizer
        self._descriptions[number] = description
        return self.by_number[number]

    def description(self, number: int) -> VariableDescription:
        """The description of the variable with a number."""
        return self._descriptions[number]

    def describe(self, variable: Any) -> VariableDescription:
        """The coordinator's description of a variable."""
        try:
            return self._descriptions[self._numbers[id(variable)]]
        except KeyError:
            raise InvalidArgumentError(
                f"Variable {variable.path!r} was created on the worker, so no "
                "parameter server has it. Create variables in the strategy's scope, "
                "before a scheduled function uses them."
            ) from None


@dataclass
class PullPlan:
    """Values that a step pulls, and positions of its lookups among them.

    Args:
        ids: pairs of a table and its looked-up rows, sorted.
        lookups: for each lookup its table and ids.
        positions: for each lookup its positions among these rows.
        pulls: the request to each server.
        dense: for each server the variables that it sends in full, and their rows.
    """

    ids: list[tuple[Any, np.ndarray]] = field(default_factory=list)
    lookups: list[tuple[Any, np.ndarray]] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    pulls: dict[int, StepRequest] = field(default_factory=dict)
    dense: dict[int, list[tuple[Any, int, int]]] = field(default_factory=dict)

    def matches(self, program: StepProgram) -> bool:
        """Whether the program still has the tables of this plan."""
        tables = program.variables.tables
        return len(tables) == len(self.ids) and all(
            table is other for (table, _), other in zip(self.ids, tables, strict=True)
        )


class StepExecution:
    """Execution of step programs against the servers.

    Args:
        servers: connections to the servers.
        variables: the worker's variables.
        engine: the backend's.
    """

    def __init__(
        self,
        servers: ServerConnections,
        variables: WorkerVariables,
        engine: ParameterServerEngine,
    ):
        self.servers = servers
        self.variables = variables
        self.engine = engine
        self._places = RowPositions()
        self._full_tables: dict[str, int] = {}

    def take_full_tables(self) -> dict[str, int]:
        """Bytes of large tables that steps have pulled in full since the last call."""
        found, self._full_tables = self._full_tables, {}
        return found

    def step_variables(self, numbers: Sequence[int]) -> StepVariables:
        """The variables that a program may use, by their numbers."""
        tables: list[Any] = []
        others: list[Any] = []
        for number in numbers:
            description = self.variables.description(number)
            variable = self.variables.by_number[number]
            if description.kind == "slot":
                continue
            may_be_table = (
                description.kind == "weight"
                and len(description.shape) == 2
                and ("float" in description.dtype or description.is_idle)
                and description.regularizer is None
            )
            (tables if may_be_table else others).append(variable)
        return StepVariables(tables, others)

    def plan(self, program: StepProgram, batch: Any) -> PullPlan:
        """The pull plan of a batch."""
        lookups = program.lookups(batch)
        describe = self.variables.describe
        ids: list[tuple[Any, np.ndarray]] = []
        positions: list[Any] = [None] * len(lookups)
        for table in program.variables.tables:
            rows = describe(table).shape[0]
            own_lookups = [i for i, (t, _) in enumerate(lookups) if t is table]
            wanted = [validate_ids(lookups[i][1], rows, table) for i in own_lookups]
            found, places = self._places.find(wanted, rows)
            ids.append((table, found))
            for i, where in zip(own_lookups, places, strict=True):
                positions[i] = where.reshape(lookups[i][1].shape)
        dense: dict[int, list[tuple[Any, int, int]]] = {}
        for variable in program.variables.others:
            description = describe(variable)
            if description.kind == "local":
                continue
            self._note_full_table(description)
            for shard in description.shards[
                : 1 if description.kind == "scalar" else None
            ]:
                dense.setdefault(shard.server, []).append(
                    (variable, shard.start, shard.stop)
                )
        rows_of: dict[int, list[Any]] = {}
        for table, found in ids:
            description = describe(table)
            for shard, low, high in _rows_by_shard(description, found):
                if low < high:
                    key = (description.number, shard.start)
                    # With several shards, the worker pads the concatenated rows.
                    count = (
                        self._padded(found)
                        if len(description.shards) == 1
                        else high - low
                    )
                    rows_of.setdefault(shard.server, []).append(
                        (key, found[low:high] - shard.start, count)
                    )
        pulls = {
            server: StepRequest(
                pull=tuple(
                    (describe(v).number, start) for v, start, _ in dense.get(server, ())
                ),
                pull_rows=tuple(rows_of.get(server, ())),
            )
            for server in {*dense, *rows_of}
        }
        return PullPlan(ids, lookups, positions, pulls, dense)

    def _note_full_table(self, description: VariableDescription) -> None:
        """Notes a large variable that has many more rows than columns."""
        if description.kind != "weight" or len(description.shape) != 2:
            return
        rows, columns = description.shape
        nbytes = rows * columns * bytes_per_element(description.dtype)
        if nbytes >= _LARGE_TABLE_BYTES and rows >= _TABLE_RATIO * columns:
            self._full_tables[description.path] = nbytes

    def _padded(self, ids: np.ndarray) -> int:
        """Number of rows of a padded window."""
        return bucket(len(ids)) if self.engine.pads_rows else len(ids)

    def load_values(
        self, program: StepProgram, plan: PullPlan, pulled: dict[int, StepReply]
    ) -> None:
        """Loads the pulled values into the variables."""
        engine, describe = self.engine, self.variables.describe
        shards: dict[int, list[tuple[int, np.ndarray]]] = {}
        for server, wanted in plan.dense.items():
            for (variable, start, _), value in zip(
                wanted, pulled[server].dense, strict=True
            ):
                shards.setdefault(id(variable), []).append((start, value))
        for variable in program.variables.others:
            pulled_shards = shards.get(id(variable))
            if pulled_shards:
                pulled_shards.sort(key=lambda pair: pair[0])
                arrays = [array for _, array in pulled_shards]
                value = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
                engine.set_value(variable, value)
        answers = {server: iter(pulled[server].rows) for server in pulled}
        for table, found in plan.ids:
            description = describe(table)
            count = self._padded(found)
            pieces = [
                next(answers[shard.server])
                for shard, low, high in _rows_by_shard(description, found)
                if low < high
            ]
            if len(pieces) == 1:
                rows = pad_rows(pieces[0], count)
            else:
                dtype = pieces[0].dtype if pieces else array_dtype(description)
                rows = empty_aligned((count, *description.shape[1:]), dtype)
                rows[len(found) :] = 0
                if pieces:
                    np.concatenate(pieces, out=rows[: len(found)])
            engine.set_value(table, rows)

    def split_result(
        self, plan: PullPlan, result: StepResult, update: UpdateId, done: int
    ) -> tuple[dict[int, StepRequest], dict[int, np.ndarray]]:
        """Splits the result of a step by server.

        Returns:
            A request for each server, and changes of variables that are on no server.
        """
        describe = self.variables.describe
        count = len(self.servers)
        updates: dict[int, list[Any]] = {i: [] for i in range(count)}
        adds: dict[int, list[Any]] = {i: [] for i in range(count)}
        writes: dict[int, list[Any]] = {i: [] for i in range(count)}
        local: dict[int, np.ndarray] = {}
        ids = {id(table): found for table, found in plan.ids}
        for call in result.optimizer_calls:
            self._split_updates(call, ids, updates)
        for variable, after in result.changed:
            description = describe(variable)
            before = self.engine.get_value(variable)
            if description.kind == "local":
                local[description.number] = _difference(after, before)
                continue
            if np.array_equal(after, before):
                continue
            for shard in description.shards:
                rows = slice(shard.start, shard.stop) if description.shape else ...
                key = (description.number, shard.start)
                if after.dtype == bool:
                    writes[shard.server].append((key, after[rows]))
                else:
                    adds[shard.server].append((key, _difference(after, before)[rows]))
        steps = {
            server: StepRequest(
                update=update,
                done=done,
                optimizers=tuple(updates[server]),
                adds=tuple(adds[server]),
                writes=tuple(writes[server]),
            )
            for server in range(count)
            # Servers record the names of empty updates too.
            if result.optimizer_calls or adds[server] or writes[server]
        }
        return steps, local

    def _split_updates(
        self,
        call: OptimizerCall,
        ids: Mapping[int, np.ndarray],
        updates: dict[int, list[Any]],
    ) -> None:
        """Appends the gradients of an optimizer call to each server's updates.

        Args:
            call: of one optimizer that updates variables itself.
            ids: the rows of tables, by the `id` of the variable.
            updates: by server.
        """
        optimizer, count = call.optimizer, len(self.servers)
        number = self.optimizer_number(optimizer)
        gradients = clip(optimizer, call.gradients)
        dense: dict[int, list[Any]] = {i: [] for i in range(count)}
        rows: dict[int, list[Any]] = {i: [] for i in range(count)}
        for variable, gradient in zip(call.variables, gradients, strict=True):
            description = self.variables.describe(variable)
            if gradient is None:
                continue
            if id(variable) in ids:
                found = ids[id(variable)]
                for shard, low, high in _rows_by_shard(description, found):
                    key = (description.number, shard.start)
                    own = (
                        gradient[low:high] if len(description.shards) > 1 else gradient
                    )
                    rows[shard.server].append((key, found[low:high] - shard.start, own))
                continue
            for shard in description.shards:
                key = (description.number, shard.start)
                own = gradient
                if len(description.shards) > 1:
                    own = gradient[shard.start : shard.stop]
                dense[shard.server].append((key, own))
        for server in range(count):
            updates[server].append((number, dense[server], rows[server]))

    def optimizer_number(self, made: Any) -> int:
        """The number of an unpickled optimizer."""
        for number, found in self.variables.objects.items():
            if found is made:
                return number
        raise InvalidArgumentError(
            f"Optimizer {made.name!r} was created on the worker. Create it "
            "in the strategy's scope, before a scheduled function uses it."
        )


def _rows_by_shard(
    description: VariableDescription, ids: np.ndarray
) -> list[tuple[Any, int, int]]:
    """The range of sorted ids in each shard of a variable."""
    if len(description.shards) == 1:
        return [(description.shards[0], 0, len(ids))]
    bounds = np.searchsorted(ids, [shard.start for shard in description.shards[1:]])
    lows = [0, *bounds.tolist()]
    highs = [*bounds.tolist(), len(ids)]
    return list(zip(description.shards, lows, highs, strict=True))


def _difference(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    if after.dtype == bool:
        return after
    return np.asarray(after - before.astype(after.dtype))

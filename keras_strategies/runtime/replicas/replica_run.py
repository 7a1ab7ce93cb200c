"""`Strategy.run` on separate replicas: their tasks and assignments."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from keras_strategies.keras_compat.optimizers.optimizer_parts import is_overwritten
from keras_strategies.keras_compat.thread_state import outside_stateless_scopes
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime import context
from keras_strategies.runtime.data_parallel.replica_executor import LayerCallDriver
from keras_strategies.runtime.drivers import RunDriver
from keras_strategies.runtime.random_numbers.row_draws import (
    DrawsOfRun,
    OwnRows,
    RowDraws,
    drawing,
    rows_of_arguments,
)
from keras_strategies.runtime.replica_context import ReplicaContext
from keras_strategies.runtime.replicas.collectives import ReplicaCollectives
from keras_strategies.runtime.replicas.gradient_sums import (
    largest_over_replicas,
    rounded,
    sums_over_replicas,
    sums_over_workers,
)
from keras_strategies.runtime.replicas.mixed_rows import MixedRows
from keras_strategies.runtime.replicas.replica_set import ReplicaSet
from keras_strategies.runtime.replicas.tensor_primitives import TensorPrimitives
from keras_strategies.runtime.state import run_state
from keras_strategies.runtime.state.local_values import LocalValues, ValueStorage
from keras_strategies.runtime.state.run_state import (
    CopyRecord,
    CreatedVariables,
    RunState,
)
from keras_strategies.types import ReduceOp
from keras_strategies.values import DistributedValues, PerReplica, select_replica

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

#: Sent by a worker where no argument of a replica has rows.
_NO_ROWS = -1
#: Returns the rows of all replicas of a run, an empty list without any.
RowsOfRun = Callable[[], Sequence[Any]]


class ReplicaRun(RunDriver):
    """Functions on the replicas of one strategy, each with a state of its own.

    Args:
        strategy: the strategy.
        primitives: the functions of the framework's tensors.
        storage: how the engine stores the values of on-read variables.
        layer_calls: how the engine traces layer calls; None if it does not.
    """

    def __init__(
        self,
        strategy: StrategyCore,
        primitives: TensorPrimitives,
        storage: ValueStorage,
        layer_calls: LayerCallDriver | None = None,
    ):
        self.strategy = strategy
        self.placement = strategy.placement
        self._primitives = primitives
        self._storage = storage
        self._layer_calls = layer_calls
        self.workers_changed()

    def workers_changed(self) -> None:
        self.replica_set = ReplicaSet(
            self._primitives, self.placement.replica_counts, self.placement.workers
        )
        self.on_read_values = LocalValues(
            self.replica_set, self.placement, self._storage
        )
        self._mixed_rows = (
            None
            if self._layer_calls is None
            else MixedRows(self.strategy, self._layer_calls)
        )

    # Implemented by engines.

    @abc.abstractmethod
    def copier(self, replica_id: int) -> Callable[[Any], Any]:
        """A function that returns the value of a variable for a local replica."""

    def assigned_value(self, variable: Any, value: Any) -> Any:
        """The value that a replica reads from a variable after assigning `value`."""
        return value

    def on_replica(self, replica_id: int) -> contextlib.AbstractContextManager[Any]:
        """Entered around the function on a local replica."""
        return contextlib.nullcontext()

    def seeing_draws(self, state: RunState) -> contextlib.AbstractContextManager[Any]:
        """Context in which the engine sees the draws of a function on a replica."""
        return contextlib.nullcontext()

    def merged(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around functions of `merge_call`."""
        return contextlib.nullcontext()

    def updating(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around updates of variables, which have no gradient."""
        return contextlib.nullcontext()

    def outside_replicas(self, value: Any) -> Any:
        """A replica's value, for code that may change it in place."""
        return value

    def version(self, variable: Any) -> Any:
        """A number that changes with the value of a variable; None if unknown."""
        return None

    # Runs.

    def rows_of(
        self, args: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]
    ) -> RowsOfRun:
        """The rows of all replicas in a run. Workers call it equally often."""
        own = rows_of_arguments(list(zip(args, kwargs, strict=True)))
        workers = self.replica_set.workers
        if workers is None:
            return lambda: own
        counts = self.replica_set.counts.by_worker
        sent = own or [_NO_ROWS] * len(self.placement.replicas)
        every = self.replica_set.primitives.all_lengths(sent, workers, counts)
        found = [] if _NO_ROWS in every else list(map(int, every))
        return lambda: found

    def tasks(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        rows: RowsOfRun,
        collectives: ReplicaCollectives,
        merging: MergeContext,
        made: CreatedVariables,
    ) -> list[Callable[[], Any]]:
        """The call of each local replica, in its context; states are in `merging`."""
        found = []
        layers = self._layers_of_run(args, kwargs, rows)
        for i, (own_args, own_kwargs) in enumerate(zip(args, kwargs, strict=True)):
            replica_id = self.replica_set.counts.first + i
            replica = ReplicaContext(self.strategy, replica_id, collectives)
            state = self._state(i, replica, made, merging)
            merging.states.append(state)
            draws = self._draws(replica_id, rows)
            task = self._task(
                i, fn, own_args, own_kwargs, replica, state, draws, layers(i)
            )
            found.append(task)
        return found

    def _layers_of_run(
        self,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        rows: RowsOfRun,
    ) -> Callable[[int], Callable[[], contextlib.AbstractContextManager[None]]]:
        """The context of layer calls of a local replica, by its number."""
        own = rows_of_arguments(list(zip(args, kwargs, strict=True)))
        if self._mixed_rows is None or not own:
            return lambda i: contextlib.nullcontext
        every: Sequence[int] = ()
        if self.knows_rows(own):
            every = rows()
            if not every:
                return lambda i: contextlib.nullcontext
        run = self._mixed_rows.of_run(every)
        return lambda i: functools.partial(run.on_replica, own[i])

    def knows_rows(self, own: Sequence[Any]) -> bool:
        """Whether the numbers of rows of all replicas are known."""
        return True

    def _draws(self, replica_id: int, rows: RowsOfRun) -> DrawsOfRun:
        def own() -> OwnRows | None:
            every = rows()
            return OwnRows.of(every, replica_id) if every else None

        return DrawsOfRun(own, self.strategy.partitions_draws)

    def _state(
        self,
        i: int,
        replica: ReplicaContext,
        made: CreatedVariables,
        merging: MergeContext,
    ) -> RunState:
        return RunState(
            replica,
            self.copier(i),
            self.on_read_values.get,
            made,
            self.assigned_value,
            None if merging.left is None else merging.left.replicas[i],
        )

    def _task(
        self,
        i: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        replica: ReplicaContext,
        state: RunState,
        draws: RowDraws,
        layers: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> Callable[[], Any]:
        def run() -> Any:
            with (
                context.on_replica(replica),
                state.scope(),
                self.on_replica(i),
                layers(),
                drawing(draws),
                self.seeing_draws(state),
            ):
                return fn(*args, **kwargs)

        return run

    def commit(self, merging: MergeContext) -> None:
        """Assigns the replicas' values to variables."""
        if merging.left is not None:
            merging.left.sum(self._sums_of_left)
        workers, states = self.replica_set.workers, merging.states
        updated = {k: v for state in states for k, (v, _) in state.updates.items()}
        variables = list(updated.values())
        with self.updating():
            columns = [self._assigned(states, variable) for variable in variables]
            everywhere = self._on_all_workers(variables, columns)
            if workers is not None:
                workers.use_unconfirmed()
            merging.written += variables
            for variable, own, every in zip(
                variables, columns, everywhere, strict=True
            ):
                if run_state.is_local(variable):
                    self.on_read_values.commit(variable, own, every)
                else:
                    total = run_state.merged(variable, every)
                    self.replica_set.primitives.assign(variable, total)
        for state in states:
            state.forget(variables)

    def _assigned(self, states: Sequence[RunState], variable: Any) -> list[Any]:
        """Values assigned by local replicas; with workers, one for each replica."""
        if run_state.is_local(variable):
            return [state.read(variable) for state in states]
        key = id(variable)
        having = [state.updates[key][1] for state in states if key in state.updates]
        if self.replica_set.workers is None or len(having) == len(states):
            return having
        before = self.replica_set.primitives.read(variable)
        return [state.updates.get(key, (variable, before))[1] for state in states]

    def _on_all_workers(
        self, variables: Sequence[Any], columns: Sequence[Sequence[Any]]
    ) -> list[list[Any]]:
        """The values of all replicas, each on the device of the variable."""
        to_device_of = self.replica_set.primitives.to_device_of
        return self.replica_set.all_values(
            [
                [to_device_of(value, raw_value(variable)) for value in column]
                for variable, column in zip(variables, columns, strict=True)
            ]
        )

    # Called by Keras in a run.

    def apply_gradients(
        self,
        apply: Callable[[Sequence[Any], Sequence[Any] | None], Any],
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        aggregate: bool,
    ) -> None:
        replica = context.current_replica()
        assert replica is not None

        def update(strategy: StrategyCore, gradients: Sequence[Any]) -> None:
            with self.updating():
                if aggregate:
                    own = self._summed(gradients)
                else:
                    own = [select_replica(0, gradient) for gradient in gradients]
                apply(own, variables)

        replica.merge_call(update, args=(list(gradients),))

    def _summed(self, gradients: Sequence[Any]) -> list[Any]:
        """Sums over all replicas; a gradient is equal on them, or a `PerReplica`."""
        ops, lead = self.replica_set.primitives, self.placement.variables
        count = len(self.placement.replicas)
        columns = [
            gradient.values
            if isinstance(gradient, DistributedValues)
            else [gradient] * count
            for gradient in gradients
        ]
        columns = [
            [None if part is None else ops.to_device(part, lead) for part in column]
            for column in columns
        ]
        own = sums_over_replicas(ops, columns)
        total = sums_over_workers(ops, own, self.replica_set.workers)
        pairs = zip(total, gradients, strict=True)
        return [rounded(ops, each, gradient) for each, gradient in pairs]

    def _sums_of_left(
        self, variables: Sequence[Any], columns: Sequence[list[Any]]
    ) -> list[Any]:
        """Sums of gradients over all replicas; the largest of new values."""
        rows = [PerReplica(column) for column in columns]
        is_new = list(map(is_overwritten, variables))
        with self.updating():
            added = [row for row, new in zip(rows, is_new, strict=True) if not new]
            sums = iter(self._summed(added))
            return [
                self._largest(variable, row.values) if new else next(sums)
                for variable, row, new in zip(variables, rows, is_new, strict=True)
            ]

    def _largest(self, variable: Any, values: Sequence[Any]) -> Any:
        found = largest_over_replicas(
            self.replica_set.primitives, values, raw_value(variable)
        )
        workers = self.replica_set.workers
        if workers is None:
            return found
        return workers.all_reduce(ReduceOp.MAX, [found])[0]

    def local_values(self, variable: Any) -> Sequence[Any]:
        first = self.replica_set.counts.first
        replicas = range(len(self.placement.replicas))
        values = [self.on_read_values.get(variable, first + i) for i in replicas]
        return list(map(self.outside_replicas, values))

    def variable_assigned(self, variable: Any) -> None:
        self.on_read_values.assigned(variable)


class LeftBehind(Protocol):
    """Gradients that replicas leave on variables during a run."""

    @property
    def replicas(self) -> Sequence[CopyRecord]:
        """For each local replica the record of its copies of variables."""

    def sum(self, sums: Callable[[Sequence[Any], Sequence[list[Any]]], Any]) -> None:
        """Adds what the replicas have left to the variables' gradients.

        Args:
            sums: a callable of variables and of columns with a gradient of each
                replica, which returns their sums over all replicas.
        """

    def set_aside(self) -> None:
        """Called after functions outside of replicas."""


class MergeContext:
    """Context of functions of `merge_call`: they read and assign the variables.

    Args:
        run: the run of the replicas.
        left: what the replicas leave on variables; None for nothing.
    """

    def __init__(self, run: ReplicaRun, left: LeftBehind | None = None):
        self._run = run
        self.left = left
        #: The states of the local replicas.
        self.states: list[RunState] = []
        #: The variables that replicas and functions have written, of those they read.
        self.written: list[Any] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        version = self._run.version
        with outside_stateless_scopes(), self._run.merged():
            self._run.commit(self)
            read = {id(v): v for state in self.states for v in state.variables_read()}
            before = {key: version(variable) for key, variable in read.items()}
            try:
                yield
            finally:
                changed = [
                    variable
                    for key, variable in read.items()
                    if before[key] is None or version(variable) != before[key]
                ]
                self.written += changed
                for state in self.states:
                    state.forget(changed)
            if self.left is not None:
                self.left.set_aside()

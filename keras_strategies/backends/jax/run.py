"""`Strategy.run` on JAX: replicas are one program over a mesh.

# Two ways to trace replicas

*Sharded.* `jax.shard_map` over the replicas' devices: the function is traced once, and
each device runs its own part. The replica's number is a traced scalar there.

*Side by side.* Where replicas have different shapes, as in an uneven last batch, or
where the function's Python depends on the replica's number, the function is traced
once for each replica, all of them into one program. Every device computes the whole of
it then: right in every case, but no faster than one device.
"""

from __future__ import annotations

import abc
import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import keras
import numpy as np
from jax import lax
from jax import numpy as jnp

from keras_strategies import context, keras_compat
from keras_strategies.backends import run_scope
from keras_strategies.backends.base import Communicator
from keras_strategies.backends.jax.arguments import Columns
from keras_strategies.backends.jax.closures import function_key
from keras_strategies.backends.jax.devices import jax_device
from keras_strategies.backends.jax.lockstep import meet, run_in_lockstep
from keras_strategies.backends.jax.state import (
    Cell,
    Given,
    Layout,
    LocalCell,
    LocalStacks,
    ProgramScope,
    TraceScope,
    VariableCell,
    check_sees_all,
    is_stacked,
)
from keras_strategies.backends.run_scope import LocalValues, RunScope
from keras_strategies.errors import ContextError, GatherError
from keras_strategies.types import ReduceOp
from keras_strategies.values import (
    PerReplica,
    flatten,
    map_structure,
    regroup,
    select_replica,
)

if TYPE_CHECKING:
    from keras_strategies.strategies.base import Strategy

REPLICA_AXIS = "replica"


class _NeedsOwnTraceError(Exception):
    """Replicas of this function cannot be one trace."""


class _TraceLocals(LocalValues):
    """Reads on-read values in a trace; they are written when the replicas end."""

    def __init__(self, read: Callable[[Any, int], Any]):
        self._read = read

    def get(self, variable: Any, replica_id: int) -> Any:
        return self._read(variable, replica_id)

    def commit(self, variable: Any, values: Sequence[Any]) -> None:
        raise NotImplementedError

    def assigned(self, variable: Any, value: Any) -> None:
        raise NotImplementedError


class Replicas(Communicator):
    """The replicas of one run, and what all of them do together."""

    @abc.abstractmethod
    def apply(
        self, gradients: list[Any], aggregate: bool, update: Callable[[list[Any]], None]
    ) -> None:
        """Sums gradients over replicas and updates the variables of all of them."""

    @abc.abstractmethod
    def value_and_grad(
        self, loss_fn: Callable[[list[Any]], Any], values: list[Any]
    ) -> Any:
        """As `jax.value_and_grad(loss_fn, has_aux=True)(values)`."""


class ReplicaScope(RunScope):
    """What one replica, or one traced for all, sees of the variables.

    Args:
        replica: the replica's context.
        copy: gives the value of a variable that is not local.
        local: gives the value of an on-read variable.
        replicas: what the replica and the others communicate through.
        parent: the scope that this one is inside of, on the same replica.
    """

    def __init__(
        self,
        replica: context.ReplicaContext,
        copy: Callable[[Any], Any],
        local: Callable[[Any, int], Any],
        replicas: Replicas,
        parent: ReplicaScope | None = None,
    ):
        super().__init__(replica, copy, _TraceLocals(local))
        self.replicas = replicas
        self._parent = parent
        # Variables that have been given one value for all replicas.
        self._agreed: set[int] = set()

    def keep(self, variable: Any, value: Any, agreed: bool = False) -> None:
        """Gives the variable a value as it is; `agreed` if all replicas have it."""
        self._set(variable, value)
        self._agreed.discard(id(variable))
        if agreed:
            self._agreed.add(id(variable))

    def add_update(self, update: tuple[Any, Any]) -> None:
        super().add_update(update)
        self._agreed.discard(id(update[0]))

    def agrees_on(self, variable: Any) -> bool:
        """Whether a variable is known to have one value on all replicas."""
        if run_scope.is_local(variable):
            return False
        if id(variable) in self.updates:
            return id(variable) in self._agreed or run_scope.is_aggregated(variable)
        if self._parent is not None:
            return self._parent.agrees_on(variable)
        return keras_compat.seed_offset(variable, 1) == 0

    def nested(self, given: Given) -> ReplicaScope:
        """A scope inside this one, whose updates `take_over` brings out."""

        def copy(variable: Any) -> Any:
            value = given.get(variable)
            return self.get_current_value(variable) if value is None else value

        return ReplicaScope(
            self.replica,
            copy,
            lambda variable, replica_id: self.get_current_value(variable),
            self.replicas,
            parent=self,
        )

    def updated_values(self) -> list[Any]:
        """The new values, in the order of their first assignment."""
        return [jnp.asarray(value) for _, value in self.updates.values()]

    def take_over(self, inner: ReplicaScope, values: Sequence[Any]) -> None:
        """The updates of a scope inside, whose new values these are."""
        for (variable, _), value in zip(inner.updates.values(), values, strict=True):
            self.keep(variable, value, agreed=id(variable) in inner._agreed)


class MergeScope(keras.StatelessScope):
    """Cross-replica context inside replicas: one value of each variable for all.

    Args:
        values: gives a variable's values on the replicas.
        assign: gives all replicas a variable's new value.
    """

    def __init__(
        self,
        values: Callable[[Any], list[Any]],
        assign: Callable[[Any, Any], None],
    ):
        super().__init__(collect_losses=True, initialize_variables=False)
        self._values = values
        self._assign = assign

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) not in self.state_mapping:
            values = self._values(variable)
            if values[0] is None:
                return None
            self.state_mapping[id(variable)] = one_value(variable, values)
        return self.state_mapping[id(variable)]

    def add_update(self, update: tuple[Any, Any]) -> None:
        super().add_update(update)
        self._assign(*update)


def one_value(variable: Any, values: Sequence[Any]) -> Any:
    """What replicas' values of a variable are in cross-replica context."""
    if len(values) == 1:
        return values[0]
    if run_scope.is_local(variable):
        return run_scope.together(variable, values)
    return run_scope.merged(variable, values)


def current_replica_scope() -> ReplicaScope:
    scope = keras_compat.current_stateless_scope()
    assert isinstance(scope, ReplicaScope)
    return scope


class JaxRun:
    """Runs functions on the replicas of one strategy.

    A program is about the replicas of all workers, whose devices are those of its
    mesh; what goes in and comes out is that of the local ones.

    Args:
        strategy: the strategy.
        devices: the devices of all replicas.
        mesh: a mesh whose first axis has the replicas; None for one that has no
            other. Along the others XLA cuts what a replica computes, by the
            variables' layouts.
        own: gives the sharding that a variable has; None where all are whole.
    """

    def __init__(
        self,
        strategy: Strategy,
        devices: Sequence[jax.Device],
        mesh: jax.sharding.Mesh | None = None,
        own: Callable[[Any], jax.sharding.Sharding] | None = None,
    ):
        self.strategy = strategy
        placement = strategy.placement
        self.count = len(devices)
        if mesh is None:
            mesh = jax.sharding.Mesh(np.array(devices), (REPLICA_AXIS,))
        self.mesh = mesh
        self.axis = mesh.axis_names[0]
        split = jax.NamedSharding(self.mesh, jax.P(self.axis))
        home = jax_device(placement.variables)
        at_home = placement.mirrored or placement.mesh is not None
        self.layout = Layout(
            jax.NamedSharding(self.mesh, jax.P()),
            split,
            None if at_home else jax.sharding.SingleDeviceSharding(home),
            own,
        )
        self.local_stacks = LocalStacks(self.count, split)
        # What sharded functions are known to read, and which cannot be sharded.
        self._known: dict[Any, dict[Any, Cell]] = {}
        self._own_traces: set[Any] = set()

    def __call__(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        """The replicas' results, inside of a trace."""
        scope = keras_compat.current_stateless_scope()
        root = scope.root if isinstance(scope, TraceScope) else None
        if root is None:
            raise ContextError(
                "`run` was called where JAX traces or differentiates a function that "
                "is not a `ks.function`. Call it outside, and differentiate in the "
                "replica function, with `ks.value_and_grad`."
            )
        check_sees_all(root, self.strategy)
        root.strategies[id(self.strategy)] = self.strategy
        columns = Columns.of([list(own) for own in args], list(kwargs))
        key = (function_key(fn), columns.signature)
        if self.count == 1 or not columns.even or key in self._own_traces:
            return _SideBySide(self, scope, fn)(columns)
        try:
            return self._sharded(key, scope, root, fn, columns)
        except Exception as error:
            # Whatever Python makes of a traced replica number, a branch, a shape, an
            # index; what is wrong in any case is raised again.
            results = _SideBySide(self, scope, fn)(columns)
            self._own_traces.add(key)
            _warn_of_own_traces(fn, error)
            return results

    def _sharded(
        self,
        key: Any,
        scope: TraceScope,
        root: ProgramScope,
        fn: Callable[..., Any],
        columns: Columns,
    ) -> list[Any]:
        cells = self._known.get(key, {})
        while True:
            body = _Sharded(self, fn, columns, list(cells.values()))
            program = body.program()
            inputs = body.inputs(scope, root)
            results = (program if cells else _abstractly(program))(*inputs)
            if not body.missing:
                break
            cells = {**cells, **body.missing}
        if not cells:
            results = program(*inputs)
        if len(self._known) < 1000:
            self._known[key] = cells
        return body.finish(scope, root, results)


def _abstractly(program: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: jax.eval_shape(program, *inputs)


def _warn_of_own_traces(fn: Callable[..., Any], error: Exception) -> None:
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    reason = f"{type(error).__name__}: {error}".split("\n")[0]
    warnings.warn_explicit(
        f"The Python of {fn.__qualname__!r} depends on the replica that it runs on, so "
        "that its replicas are not one program. On JAX every device then computes all "
        "of them, one after the other. With `keras.ops.where` or `keras.ops.cond` in "
        "place of Python's `if`, each device computes its own alone. What did not "
        f"work: {reason}",
        UserWarning,
        code.co_filename,
        code.co_firstlineno,
    )


class _Alone(Communicator):
    """The only replica: what it has is what all have."""

    def all_reduce(self, replica_id: int, op: ReduceOp, value: Any) -> Any:
        return map_structure(keras.ops.convert_to_tensor, value)

    def all_gather(self, replica_id: int, value: Any, axis: int) -> Any:
        return map_structure(keras.ops.convert_to_tensor, value)

    def merge_call(
        self,
        replica_id: int,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        replica = context.current_replica()
        assert replica is not None
        with context.merged_replicas(replica.strategy):
            return merge_fn(replica.strategy, *args, **kwargs)


def run_alone(
    strategy: Strategy,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a function on the only replica, whose device has the variables too."""
    scope = keras_compat.current_stateless_scope()
    root = scope.root if isinstance(scope, TraceScope) else None
    if root is not None:
        root.strategies[id(strategy)] = strategy
    with context.on_replica(context.ReplicaContext(strategy, 0, _Alone())):
        return fn(*args, **kwargs)


class _ShardedContext(context.ReplicaContext):
    """The replica context of a program that all replicas run."""

    @property
    def devices(self) -> tuple[str, ...]:
        """tuple of str: one program is traced for all of these."""
        return self._strategy.extended.worker_devices


class _Sharded(Replicas):
    """A function that is traced once and run by each device."""

    def __init__(
        self, run: JaxRun, fn: Callable[..., Any], columns: Columns, cells: list[Cell]
    ):
        self._run = run
        self._axis = run.axis
        self._fn = fn
        self._columns = columns
        self._cells = cells
        self._blocks: dict[Any, Any] = {}
        # Traced values that are the same on all replicas, by identity.
        self._agreed: dict[int, Any] = {}
        self._whole_inputs: dict[int, int] = {}
        self.missing: dict[Any, Cell] = {}
        self._written: list[Cell] = []
        self._written_stacks: list[Cell] = []
        self._result: Any = None

    # Around the trace.

    def program(self) -> Callable[..., Any]:
        along, whole = jax.P(self._axis), jax.P()
        return jax.shard_map(
            self._body,
            mesh=self._run.mesh,
            in_specs=(whole, along, whole, along),
            out_specs=(whole, along, whole, along),
            axis_names={self._axis},
            # So that the gradient of an all-reduce is the same all-reduce.
            check_vma=False,
        )

    def inputs(self, scope: TraceScope, root: ProgramScope) -> tuple[Any, ...]:
        state = [c for c in self._cells if isinstance(c, VariableCell)]
        stacks = [c for c in self._cells if not isinstance(c, VariableCell)]
        return (
            [scope.read(cell) for cell in state],
            [scope.read(cell) for cell in stacks],
            [jnp.asarray(value) for value in self._columns.whole],
            [root.joined(parts) for parts in self._columns.parts],
        )

    def finish(
        self, scope: TraceScope, root: ProgramScope, results: tuple[Any, ...]
    ) -> list[Any]:
        """Writes the new state; one result for each replica."""
        whole, joined, values, stacks = results
        for cell, value in zip(self._written, values, strict=True):
            scope.write(cell, value)
        for cell, value in zip(self._written_stacks, stacks, strict=True):
            scope.write(cell, value)
        count = self._run.count
        parts = [
            root.split(array, count, stacked)
            for array, stacked in zip(joined, self._stacked, strict=True)
        ]

        def leaf(own: tuple[str, Any], replica_id: int) -> Any:
            kind, value = own
            if kind == "static":
                return value
            if kind == "input":
                return self._columns.whole[value]
            return whole[value] if kind == "whole" else parts[value][replica_id]

        return [
            map_structure(lambda own, i=i: leaf(own.value, i), self._result)
            for i in range(count)
        ]

    # Inside the trace.

    def _body(
        self, state: list[Any], stacks: list[Any], whole: list[Any], parts: list[Any]
    ) -> tuple[list[Any], ...]:
        for cell, value in zip(self._cells_in_order(), [*state, *stacks], strict=True):
            self._blocks[cell.key] = value
        self._whole_inputs = {id(value): i for i, value in enumerate(whole)}
        self._agreed.update({id(value): value for value in whole})
        self._replica_id = lax.axis_index(self._axis)
        replica = _ShardedContext(
            self._run.strategy,
            self._replica_id,  # type: ignore[arg-type]
            self,
        )
        self._scope = ReplicaScope(replica, self._copy, self._local, self)
        args, kwargs = self._columns.build(whole, parts)
        with context.on_replica(replica), self._scope:
            result = self._fn(*args, **kwargs)
            outputs = self._sorted_outputs(result)
        return (*outputs, *self._new_state())

    def _cells_in_order(self) -> list[Cell]:
        state = [c for c in self._cells if isinstance(c, VariableCell)]
        return state + [c for c in self._cells if not isinstance(c, VariableCell)]

    def _read(self, cell: Cell) -> Any:
        value = self._blocks.get(cell.key)
        if value is None:
            found = cell.spec()
            if found is None:
                return None
            self.missing[cell.key] = cell
            shape = found.shape
            if isinstance(cell, LocalCell):
                shape = (1, *shape[1:])
            value = self._blocks[cell.key] = jnp.zeros(shape, found.dtype)
        return value

    def _copy(self, variable: Any) -> Any:
        value = self._read(VariableCell(variable))
        return with_seed_offset(variable, value, self._replica_id)

    def _local(self, variable: Any, replica_id: Any) -> Any:
        block = self._read(LocalCell(variable, self._run.local_stacks))
        return None if block is None else block[0]

    def _sorted_outputs(self, result: Any) -> tuple[list[Any], list[Any]]:
        whole: list[Any] = []
        joined: list[Any] = []
        self._stacked: list[bool] = []

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array):
                return Leaf(("static", leaf))
            if id(leaf) in self._whole_inputs:
                return Leaf(("input", self._whole_inputs[id(leaf)]))
            if id(leaf) in self._agreed or not isinstance(leaf, jax.core.Tracer):
                whole.append(leaf)
                return Leaf(("whole", len(whole) - 1))
            self._stacked.append(is_stacked(leaf))
            joined.append(leaf[None] if is_stacked(leaf) else leaf)
            return Leaf(("part", len(joined) - 1))

        self._result = map_structure(place, result)
        return whole, joined

    def _new_state(self) -> tuple[list[Any], list[Any]]:
        values, stacks = [], []
        self._written, self._written_stacks = [], []
        for variable, value in self._scope.updates.values():
            if run_scope.is_local(variable):
                self._written_stacks.append(LocalCell(variable, self._run.local_stacks))
                stacks.append(value[None])
            self._written.append(VariableCell(variable))
            values.append(one_value(variable, self._values_of(self._scope, variable)))
        return values, stacks

    def _values_of(self, scope: ReplicaScope, variable: Any) -> list[Any]:
        """A variable's values on the replicas; one if that is the same for all."""
        value = scope.get_current_value(variable)
        if value is None or scope.agrees_on(variable):
            return [value]
        return self._everywhere(value)

    def _everywhere(self, value: Any) -> list[Any]:
        gathered = lax.all_gather(value, self._axis)
        return [gathered[i] for i in range(self._run.count)]

    # Collectives.

    def all_reduce(self, replica_id: int, op: ReduceOp, value: Any) -> Any:
        return map_structure(lambda leaf: _all_reduce(op, leaf, self._axis), value)

    def all_gather(self, replica_id: int, value: Any, axis: int) -> Any:
        def gather(leaf: Any) -> Any:
            leaf = keras.ops.convert_to_tensor(leaf)
            check_axis([leaf.shape], axis)
            return lax.all_gather(leaf, self._axis, axis=axis % leaf.ndim, tiled=True)

        return map_structure(gather, value)

    def merge_call(
        self,
        replica_id: int,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        def gathered(leaf: Any) -> Any:
            if not isinstance(leaf, jax.core.Tracer) or id(leaf) in self._agreed:
                return leaf
            return PerReplica(self._everywhere(leaf))

        args, kwargs = map_structure(gathered, (tuple(args), dict(kwargs)))
        with self._merged():
            result = merge_fn(self._run.strategy, *args, **kwargs)
        return map_structure(self._own, result)

    def _own(self, leaf: Any) -> Any:
        """This replica's part of what a merged function returned."""
        if isinstance(leaf, PerReplica):
            parts = leaf.values
            if not all(isinstance(part, jax.Array) for part in parts) or (
                len({(part.shape, part.dtype) for part in parts}) > 1
            ):
                raise _NeedsOwnTraceError
            return jnp.stack(parts)[self._replica_id]
        if isinstance(leaf, jax.core.Tracer):
            self._agreed[id(leaf)] = leaf
        return leaf

    @contextlib.contextmanager
    def _merged(self) -> Iterator[None]:
        scope = current_replica_scope()

        def assign(variable: Any, value: Any) -> None:
            if run_scope.is_local(variable):
                parts = run_scope.parts(variable, value, self._run.count)
                scope.keep(variable, jnp.stack(parts)[self._replica_id])
            else:
                scope.keep(variable, value, agreed=True)

        merge = MergeScope(lambda v: self._values_of(scope, v), assign)
        with context.merged_replicas(self._run.strategy), merge:
            yield

    def apply(
        self, gradients: list[Any], aggregate: bool, update: Callable[[list[Any]], None]
    ) -> None:
        if aggregate:
            present = [g for g in gradients if g is not None]
            summed = iter(lax.psum(present, self._axis))
            gradients = [None if g is None else next(summed) for g in gradients]
        with self._merged():
            update(gradients)

    def value_and_grad(
        self, loss_fn: Callable[[list[Any]], Any], values: list[Any]
    ) -> Any:
        return jax.value_and_grad(loss_fn, has_aux=True)(values)


class Leaf:
    """A leaf of a structure, whatever it holds."""

    def __init__(self, value: Any):
        self.value = value


class _SideBySide(Replicas):
    """A function that is traced for each replica, all into one program."""

    def __init__(self, run: JaxRun, scope: TraceScope, fn: Callable[..., Any]):
        self._run = run
        self._scope = scope
        self._fn = fn

    def __call__(self, columns: Columns) -> list[Any]:
        keras_compat.has_deferred_variables()  # One list for all threads.
        scopes, tasks = [], []
        for i in range(self._run.count):
            replica = context.ReplicaContext(self._run.strategy, i, self)
            scope = ReplicaScope(replica, self._copier(i), self._local, self)
            scopes.append(scope)
            tasks.append(self._task(columns.rows[i], replica, scope))
        results = run_in_lockstep(tasks)
        self._commit(scopes)
        return results

    def _task(
        self,
        call: tuple[Any, Any],
        replica: context.ReplicaContext,
        scope: ReplicaScope,
    ) -> Callable[[], Any]:
        def run() -> Any:
            with context.on_replica(replica), scope:
                return self._fn(*call[0], **call[1])

        return run

    def _copier(self, replica_id: int) -> Callable[[Any], Any]:
        def copy(variable: Any) -> Any:
            value = self._scope.read(VariableCell(variable))
            return with_seed_offset(variable, value, replica_id)

        return copy

    def _local(self, variable: Any, replica_id: int) -> Any:
        stack = self._scope.read(LocalCell(variable, self._run.local_stacks))
        return None if stack is None else stack[replica_id]

    def _commit(self, scopes: Sequence[ReplicaScope]) -> None:
        for key in dict.fromkeys(key for scope in scopes for key in scope.updates):
            having = [scope for scope in scopes if key in scope.updates]
            variable = having[0].updates[key][0]
            if run_scope.is_local(variable):
                values = [scope.get_current_value(variable) for scope in scopes]
                cell = LocalCell(variable, self._run.local_stacks)
                self._scope.write(cell, jnp.stack(values))
            else:
                values = [scope.updates[key][1] for scope in having]
                if all(scope.agrees_on(variable) for scope in having):
                    values = values[:1]
            self._scope.write(VariableCell(variable), one_value(variable, values))

    # Collectives.

    def all_reduce(self, replica_id: int, op: ReduceOp, value: Any) -> Any:
        leaves = [keras.ops.convert_to_tensor(leaf) for leaf in flatten(value)]

        def merge(every: list[list[Any]]) -> list[Any]:
            reduced = [_reduced(op, list(c)) for c in zip(*every, strict=True)]
            return [reduced] * len(every)

        return _packed(value, meet("all_reduce", leaves, merge))

    def all_gather(self, replica_id: int, value: Any, axis: int) -> Any:
        leaves = [keras.ops.convert_to_tensor(leaf) for leaf in flatten(value)]

        def merge(every: list[list[Any]]) -> list[Any]:
            columns = [list(column) for column in zip(*every, strict=True)]
            for column in columns:
                check_axis([part.shape for part in column], axis)
            gathered = [jnp.concatenate(column, axis) for column in columns]
            return [gathered] * len(every)

        return _packed(value, meet("all_gather", leaves, merge))

    def merge_call(
        self,
        replica_id: int,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        strategy = self._run.strategy

        def merge(every: list[Any]) -> list[Any]:
            merged_args, merged_kwargs = regroup([call for call, _ in every])
            with self._merged([scope for _, scope in every]):
                result = merge_fn(strategy, *merged_args, **merged_kwargs)
            return [select_replica(i, result) for i in range(len(every))]

        call = (tuple(args), dict(kwargs))
        return meet("merge_call", (call, current_replica_scope()), merge)

    @contextlib.contextmanager
    def _merged(self, scopes: Sequence[ReplicaScope]) -> Iterator[None]:
        def values(variable: Any) -> list[Any]:
            found = [scope.get_current_value(variable) for scope in scopes]
            agree = all(scope.agrees_on(variable) for scope in scopes)
            return found[:1] if agree else found

        def assign(variable: Any, value: Any) -> None:
            if run_scope.is_local(variable):
                parts = run_scope.parts(variable, value, len(scopes))
            else:
                parts = [value] * len(scopes)
            for scope, part in zip(scopes, parts, strict=True):
                scope.keep(variable, part, agreed=not run_scope.is_local(variable))

        merge = MergeScope(values, assign)
        with context.merged_replicas(self._run.strategy), merge:
            yield

    def apply(
        self, gradients: list[Any], aggregate: bool, update: Callable[[list[Any]], None]
    ) -> None:
        def merge(every: list[Any]) -> list[Any]:
            columns = zip(*(own for own, _ in every), strict=True)
            total = [_sum(list(c)) if aggregate else c[0] for c in columns]
            with self._merged([scope for _, scope in every]):
                update(total)
            return [None] * len(every)

        meet("optimizer.apply", (gradients, current_replica_scope()), merge)

    def value_and_grad(
        self, loss_fn: Callable[[list[Any]], Any], values: list[Any]
    ) -> Any:
        """The gradient of all replicas' losses, of which they ask together.

        What replicas exchange while they compute their losses is part of one
        differentiated function thereby.
        """
        replica = context.current_replica()
        assert replica is not None

        def task(values: list[Any]) -> Any:
            with context.on_replica(replica):
                return loss_fn(values)

        state = keras_compat.thread_state()

        def merge(every: list[Any]) -> list[Any]:
            def total(all_values: list[list[Any]]) -> tuple[Any, Any]:
                tasks = [
                    _with_state(state, task, values)
                    for (task, _, state), values in zip(every, all_values, strict=True)
                ]
                results = run_in_lockstep(tasks)
                losses = [loss for loss, _ in results]
                return sum(losses[1:], start=losses[0]), results

            differentiated = jax.value_and_grad(total, has_aux=True)
            (_, results), gradients = differentiated([values for _, values, _ in every])
            return list(zip(results, gradients, strict=True))

        return meet("value_and_grad", (task, values, state), merge)


def _with_state(
    state: dict[str, Any], task: Callable[[list[Any]], Any], values: list[Any]
) -> Callable[[], Any]:
    def run() -> Any:
        with keras_compat.with_thread_state(state):
            return task(values)

    return run


def with_seed_offset(variable: Any, value: Any, replica_id: Any) -> Any:
    """A seed's state, different on each replica; anything else as it is."""
    step = keras_compat.seed_offset(variable, 1)
    if value is None or not step:
        return value
    # Modulo 2^32, of which the 2^31 of `seed_offset` is a divisor.
    product = jnp.asarray(replica_id, "uint32") * np.uint32(step)
    offset = (product & np.uint32(2**31 - 1)).astype(value.dtype)
    return value.at[0].add(offset)


def check_axis(shapes: Sequence[tuple[int, ...]], axis: int) -> None:
    rank = len(shapes[0])
    rests = {s[: axis % max(rank, 1)] + s[axis % max(rank, 1) + 1 :] for s in shapes}
    if not -rank <= axis < rank or len(rests) > 1 or len({*map(len, shapes)}) > 1:
        raise GatherError(
            f"`all_gather` along axis {axis} needs values whose shapes differ along "
            f"that axis only. Found shapes {[tuple(shape) for shape in shapes]}."
        )


def _packed(structure: Any, leaves: Sequence[Any]) -> Any:
    rest = iter(leaves)
    return map_structure(lambda _: next(rest), structure)


def _sum(parts: list[Any]) -> Any:
    present = [part for part in parts if part is not None]
    return sum(present[1:], start=present[0]) if present else None


_SHARDED = {
    ReduceOp.SUM: lax.psum,
    ReduceOp.MEAN: lax.pmean,
    ReduceOp.MIN: lax.pmin,
    ReduceOp.MAX: lax.pmax,
}
_STACKED: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: jnp.sum,
    ReduceOp.MEAN: jnp.mean,
    ReduceOp.MIN: jnp.min,
    ReduceOp.MAX: jnp.max,
}


def _all_reduce(op: ReduceOp, leaf: Any, axis: str) -> Any:
    leaf = keras.ops.convert_to_tensor(leaf)
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return _SHARDED[op](leaf, axis)
    return _without_gradient(op, lambda x: _SHARDED[op](x, axis))(leaf)


def _reduced(op: ReduceOp, parts: list[Any]) -> Any:
    if len({part.shape for part in parts}) > 1:
        raise GatherError(
            "`all_reduce` combines values of one shape. Found shapes "
            f"{[tuple(part.shape) for part in parts]}."
        )
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return _STACKED[op](jnp.stack(parts), axis=0).astype(
            parts[0].dtype if op is ReduceOp.SUM else None
        )
    reduce = _without_gradient(op, lambda x: _STACKED[op](x, axis=0))
    return reduce(jnp.stack(parts))


def _without_gradient(
    op: ReduceOp, reduce: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """A reduction that refuses to be differentiated, as on the other backends."""
    function = jax.custom_jvp(reduce)

    def jvp(primals: Any, tangents: Any) -> Any:
        if isinstance(tangents[0], jax.custom_derivatives.SymbolicZero):
            return function(*primals), tangents[0]
        _refuse_gradient(op)

    function.defjvp(jvp, symbolic_zeros=True)
    return function


def _refuse_gradient(op: ReduceOp) -> NoReturn:
    raise GatherError(
        f"`all_reduce` with {op.name} has no gradient. Use SUM or MEAN, or stop the "
        "gradient of its argument."
    )

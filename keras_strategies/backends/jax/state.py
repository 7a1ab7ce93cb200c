"""Keras state in compiled programs: what a function reads goes in, what it assigns
comes out.

# How state is found

A function is traced with the variables that it is known to read as inputs. Where it
reads another one, the trace goes on with zeros in its place, notes it, and is done
again with that variable as an input too. The first trace knows none; the second one
is usually the last. What comes out new, is what was assigned.

Variables that the function makes are made without a value, as Keras does it in a
`StatelessScope`, and get it between two traces.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras
from jax import numpy as jnp

from keras_strategies import keras_compat
from keras_strategies.backends import run_scope
from keras_strategies.backends.jax.placing import put_all, put_one

if TYPE_CHECKING:
    from keras_strategies.backends.jax.workers import JaxWorkers
    from keras_strategies.strategies.base import Strategy

# Held by its cell, and by the call of `sys.getrefcount`.
_REFERENCES_OF_A_CELL = 2


class Cell(abc.ABC):
    """A place that holds one array of state."""

    def __init__(self, variable: Any):
        self.variable = variable

    @property
    @abc.abstractmethod
    def key(self) -> Any:
        """What equal cells have in common."""

    @abc.abstractmethod
    def spec(self) -> jax.ShapeDtypeStruct | None:
        """The array's shape and dtype; None before the variable has a value."""

    @abc.abstractmethod
    def get(self) -> jax.Array:
        """The array; not while something is traced, since it may have to be made."""

    @abc.abstractmethod
    def set(self, value: jax.Array) -> None: ...


class VariableCell(Cell):
    """A variable's value."""

    @property
    def key(self) -> Any:
        return id(self.variable)

    def spec(self) -> jax.ShapeDtypeStruct | None:
        raw = keras_compat.raw_value(self.variable)
        return None if raw is None else jax.ShapeDtypeStruct(raw.shape, raw.dtype)

    def get(self) -> jax.Array:
        return keras_compat.raw_value(self.variable)

    def set(self, value: jax.Array) -> None:
        keras_compat.set_raw_value(self.variable, value)


class LocalStacks:
    """The values of on-read variables on the replicas of one strategy.

    Each is one array of shape `(replicas, ...)`, split over the devices. It is made
    from the variable's value when it is first needed, and dropped when the variable
    is assigned outside of `run`.

    Args:
        count: int, how many replicas there are.
        split: the sharding of an array whose first axis is split over them.
    """

    def __init__(self, count: int, split: jax.sharding.Sharding):
        self.count = count
        self._split = split
        self._stacks: dict[int, tuple[weakref.ref[Any], jax.Array]] = {}

    def get(self, variable: Any) -> jax.Array:
        reference, stack = self._stacks.get(id(variable), (None, None))
        if stack is not None and reference is not None and reference() is variable:
            return stack
        whole = keras_compat.raw_value(variable)
        self.set(variable, put_one(self.parts(variable, whole), self._split))
        return self._stacks[id(variable)][1]

    def set(self, variable: Any, stack: jax.Array) -> None:
        key = id(variable)
        gone = weakref.ref(variable, lambda _: self._stacks.pop(key, None))
        self._stacks[key] = (gone, stack)

    def drop(self, variable: Any) -> None:
        self._stacks.pop(id(variable), None)

    def parts(self, variable: Any, whole: Any) -> jax.Array:
        return jnp.stack(run_scope.parts(variable, jnp.asarray(whole), self.count))


class LocalCell(Cell):
    """An on-read variable's values on all replicas."""

    def __init__(self, variable: Any, stacks: LocalStacks):
        super().__init__(variable)
        self._stacks = stacks

    @property
    def key(self) -> Any:
        return (id(self.variable), "local")

    def spec(self) -> jax.ShapeDtypeStruct | None:
        raw = keras_compat.raw_value(self.variable)
        if raw is None:
            return None
        return jax.ShapeDtypeStruct((self._stacks.count, *raw.shape), raw.dtype)

    def get(self) -> jax.Array:
        return self._stacks.get(self.variable)

    def set(self, value: jax.Array) -> None:
        self._stacks.set(self.variable, value)


def stacks_of(variable: Any) -> LocalStacks | None:
    """Where a variable's values on replicas are kept; None where it has but one."""
    strategy = keras_compat.strategy_of(variable)
    if strategy is None or not run_scope.is_local(variable):
        return None
    return strategy.trainer.local_stacks


class Given:
    """Values of variables that a scope has in place of those around it.

    Args:
        variables: sequence of variables.
        values: their values.
    """

    def __init__(self, variables: Sequence[Any] = (), values: Sequence[Any] = ()):
        self._values = {id(v): x for v, x in zip(variables, values, strict=True)}
        # The variables that were asked for, by id.
        self.read: set[int] = set()

    def get(self, variable: Any) -> Any:
        if id(variable) in self._values:
            self.read.add(id(variable))
        return self._values.get(id(variable))


class TraceScope(keras.StatelessScope):
    """State inside of a trace, in cross-replica context.

    Args:
        parent: the scope around this one, which is asked for what this one does not
            hold; None to read variables themselves.
        given: what is not to be looked up there.
    """

    def __init__(self, parent: keras.StatelessScope | None, given: Given | None = None):
        super().__init__(collect_losses=True, initialize_variables=False)
        self._parent = parent
        self._given = given or Given()
        self._values: dict[Any, Any] = {}
        self.reads: dict[Any, Cell] = {}
        self.written: dict[Any, Cell] = {}

    def read(self, cell: Cell) -> Any:
        """The value of a cell; None if its variable has none yet."""
        value = self._values.get(cell.key)
        if value is None:
            value = self._read_outside(cell)
            if value is not None:
                self._values[cell.key] = value
                self.reads[cell.key] = cell
        return value

    def _read_outside(self, cell: Cell) -> Any:
        if isinstance(cell, VariableCell):
            given = self._given.get(cell.variable)
            if given is not None:
                return given
        if isinstance(self._parent, TraceScope):
            return self._parent.read(cell)
        if self._parent is not None and isinstance(cell, VariableCell):
            found = self._parent.get_current_value(cell.variable)
            if found is not None:
                return found
        return None if cell.spec() is None else cell.get()

    def write(self, cell: Cell, value: Any) -> None:
        self._values[cell.key] = value
        self.written[cell.key] = cell

    def value(self, cell: Cell) -> Any:
        return self._values[cell.key]

    def get_current_value(self, variable: Any) -> Any:
        return self.read(VariableCell(variable))

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        self.write(VariableCell(variable), value)
        stacks = stacks_of(variable)
        if stacks is not None:
            self.write(LocalCell(variable, stacks), stacks.parts(variable, value))

    def updated_values(self) -> list[Any]:
        """The new values, in the order of their first assignment."""
        return [jnp.asarray(self._values[key]) for key in self.written]

    def commit(self, values: Sequence[Any]) -> None:
        """Gives the scope around this one, or the variables, the new values."""
        for cell, value in zip(self.written.values(), values, strict=True):
            if isinstance(self._parent, TraceScope):
                self._parent.write(cell, value)
            elif not isinstance(cell, VariableCell):
                cell.set(value)
            elif self._parent is not None:
                self._parent.add_update((cell.variable, value))
            else:
                cell.variable.assign(value)

    @property
    def root(self) -> ProgramScope | None:
        """The scope of the program that is being traced."""
        return self._parent.root if isinstance(self._parent, TraceScope) else None


class ProgramScope(TraceScope):
    """The outermost state of a program that is being traced.

    Args:
        known: the cells that the program has as inputs, and their values there.
        sees_all: bool, whether values of replicas have a component for each replica
            of all workers.
    """

    def __init__(self, known: Iterable[tuple[Cell, Any]], sees_all: bool = False):
        super().__init__(None)
        self.sees_all = sees_all
        for cell, value in known:
            self._values[cell.key] = value
        self.missing: dict[Any, Cell] = {}
        self.strategies: dict[int, Strategy] = {}
        self._origins: dict[tuple[int, ...], tuple[list[Any], Any]] = {}

    def _read_outside(self, cell: Cell) -> Any:
        found = cell.spec()
        if found is None:
            return None
        self.missing[cell.key] = cell
        return jnp.zeros(found.shape, found.dtype)

    @property
    def root(self) -> ProgramScope:
        return self

    def split(self, array: Any, count: int, stacked: bool) -> list[Any]:
        """The replicas' parts of an array, which `joined` will recognize."""
        parts = [array[i] for i in range(count)] if stacked else jnp.split(array, count)
        self._origins[tuple(map(id, parts))] = (parts, array)
        return parts

    def joined(self, parts: Sequence[Any]) -> Any:
        """One array of the replicas' parts, which have one shape."""
        found = self._origins.get(tuple(map(id, parts)))
        if found is not None:
            return found[1]
        parts = [jnp.asarray(part) for part in parts]
        return jnp.stack(parts) if is_stacked(parts[0]) else jnp.concatenate(parts)


def is_stacked(part: Any) -> bool:
    """Whether parts like this one are joined along an axis of their own."""
    return len(part.shape) == 0 or part.shape[0] == 0


class MissingStateError(Exception):
    """A trace has met state that it did not have as an input."""

    def __init__(self, scope: ProgramScope):
        super().__init__("state was found while tracing")
        self.scope = scope


class AllReplicasNeededError(BaseException):
    """A trace without other workers' values has met a strategy that has workers.

    It is traced again with them. A `BaseException`, since the user's code is between
    here and there.
    """

    def __init__(self, strategy: Strategy):
        super().__init__("workers were found while tracing")
        self.strategy = strategy


def check_sees_all(root: ProgramScope, strategy: Strategy) -> None:
    """Ends a trace that does not have the values of all of a strategy's replicas."""
    if strategy.workers is not None and not root.sees_all:
        raise AllReplicasNeededError(strategy)


class Layout:
    """Where a program runs.

    Args:
        whole: the sharding of an array that every replica has; None to leave arrays
            where they are.
        split: the sharding of an array whose first axis is split over replicas: along
            the first axis of its mesh.
        home: the sharding of variables, where that is elsewhere.
        own: gives the sharding of a variable, where they are not all alike.
    """

    def __init__(
        self,
        whole: jax.sharding.Sharding | None = None,
        split: jax.sharding.NamedSharding | None = None,
        home: jax.sharding.Sharding | None = None,
        own: Callable[[Any], jax.sharding.Sharding] | None = None,
    ):
        self.whole = whole
        self.split = split
        self.home = home
        self.own = own
        # For each replica the devices that have its part; the first one gives it out.
        self._rows: list[list[jax.Device]] = []
        if split is not None:
            devices = split.mesh.devices
            self._rows = [list(row) for row in devices.reshape(len(devices), -1)]

    def place_state(self, variables: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """The variables' arrays, where a program expects them."""
        if self.own is None:
            return self.place(arrays)
        found = list(arrays)
        for i, variable in enumerate(variables):
            own = self.own(variable)
            if found[i].sharding != own or not found[i].committed:
                found[i] = jax.device_put(found[i], own)
        return found

    def state_shardings(self, variables: Sequence[Any]) -> Any:
        """The shardings of variables that come out of a program."""
        if self.own is None:
            return self.whole
        return [self.own(variable) for variable in variables]

    @functools.cached_property
    def _own_rows(self) -> list[list[jax.Device]]:
        """The rows of this process."""
        own = jax.process_index()
        return [row for row in self._rows if row[0].process_index == own]

    def place(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays, where every replica has them; moved in one transfer."""
        whole = self.whole
        if whole is None:
            return list(arrays)
        return self._moved(
            arrays, lambda array: array.sharding == whole and array.committed
        )

    def place_inputs(self, arrays: Sequence[Any]) -> list[Any]:
        """As `place`, for what comes from outside of programs.

        What is on the only device may stay as it is. State may not: it comes out of a
        program with another sharding than it went in, and that is another program.
        """
        whole = self.whole
        if whole is None:
            return list(arrays)
        if len(whole.device_set) > 1:
            return self.place(arrays)
        return self._moved(
            arrays,
            lambda array: array.committed and array.devices() == whole.device_set,
        )

    def _moved(
        self, arrays: Sequence[Any], is_there: Callable[[jax.Array], bool]
    ) -> list[Any]:
        found = list(arrays)
        away = [
            i
            for i, array in enumerate(found)
            if not isinstance(array, jax.Array) or not is_there(array)
        ]
        if away:
            assert self.whole is not None
            moved = put_all([found[i] for i in away], self.whole)
            for i, array in zip(away, moved, strict=True):
                found[i] = array
        return found

    def join(self, parts: Sequence[Any]) -> Any:
        """One array of the replicas' parts, each of which goes to its device.

        The parts are those of this process, as `part_shards` and `own_shards` are;
        the other ones', of the same shape, are where those processes are.
        """
        if self.split is None:
            return jnp.stack(parts) if is_stacked(parts[0]) else jnp.concatenate(parts)
        if is_stacked(parts[0]):
            parts = [jnp.expand_dims(part, 0) for part in parts]
        rows = parts[0].shape[0] * len(self._rows)
        shape = (rows, *parts[0].shape[1:])
        devices = [device for row in self._own_rows for device in row]
        width = len(self._own_rows[0])
        parts = [part for part in parts for _ in range(width)]
        if not all(
            isinstance(part, jax.Array)
            and part.committed
            and part.devices() == {device}
            for part, device in zip(parts, devices, strict=True)
        ):
            parts = jax.device_put(parts, devices)
        return jax.make_array_from_single_device_arrays(shape, self.split, parts)

    def own_shards(self, arrays: Sequence[jax.Array]) -> list[Any]:
        """Of the n-th array, which all devices have, what is on the n-th of them."""
        if self.split is None:
            return list(arrays)
        found = []
        for array, row in zip(arrays, self._rows, strict=True):
            if row[0].process_index != jax.process_index():
                continue
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            found.append(shards[row[0]])
        return found

    def part_shards(self, array: jax.Array, count: int, stacked: bool) -> list[Any]:
        """The replicas' parts of a program's result, each on its device."""
        if self.split is None:
            parts = jnp.split(array, count)
        else:
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            parts = [shards[row[0]] for row in self._own_rows]
        return [jnp.squeeze(part, 0) for part in parts] if stacked else parts


# Plain results, results split over replicas, and new state, the same two kinds.
Results = tuple[list[Any], list[Any], list[Any], list[Any]]


class Program:
    """A compiled function of arrays, with Keras state threaded through.

    Args:
        function: callable of lists of plain and of joined arrays, which returns the
            same two; traced once or twice.
        layout: gives the layout for the strategies that were met in the trace.
        workers: the workers that call it together; None where there is one.
    """

    def __init__(
        self,
        function: Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]],
        layout: Callable[[ProgramScope], Layout],
        workers: JaxWorkers | None = None,
    ):
        self._workers = workers
        self._function = function
        self._choose_layout = layout
        self._cells: dict[Any, Cell] = {}
        self._donated: list[Cell] = []
        self._kept: list[Cell] = []
        self._new: list[Cell] = []
        # The variables that will come out new, for each of which a layout is needed.
        self._expected: list[Any] = []
        self._new_stacks: list[Cell] = []
        self._jitted: Callable[..., Results] | None = None
        self.layout = Layout()

    def __call__(
        self, plain: list[Any], parts: list[Sequence[Any]]
    ) -> tuple[list[Any], list[Any]]:
        """The function's results; variables have their new values then.

        Args:
            plain: arrays.
            parts: for each array that is split, the replicas' parts.
        """
        while self._jitted is None:
            self._discover(plain, parts)
        try:
            return self._run(plain, parts)
        except MissingStateError as missing:
            # The function took another way than in the traces before.
            self._extend(missing.scope)
            return self(plain, parts)

    def _discover(self, plain: list[Any], parts: list[Sequence[Any]]) -> None:
        joined = [_joined_shape(own, self._replicas(own)) for own in parts]
        state = [cell.spec() for cell in self._cells.values()]
        self._donated, self._kept = [], list(self._cells.values())
        scopes: list[ProgramScope] = []

        def trace(*inputs: Any) -> Results:
            results = self._trace([], *inputs)
            scopes.append(self._scope)
            return results

        try:
            jax.eval_shape(trace, state, [_shape(a) for a in plain], joined)
            scope = scopes[0]
        except MissingStateError as missing:
            scope = missing.scope
        self._extend(scope)

    def _replicas(self, parts: Sequence[Any]) -> int:
        """How many replicas there are, of which these parts are the local ones'."""
        return len(parts) if self._workers is None else self._workers.share.total

    def _extend(self, scope: ProgramScope) -> None:
        """Prepares the program for the state that a trace has met."""
        made = keras_compat.initialize_deferred_variables(_scope_of)
        if self._workers is not None:
            _share([cell.variable for cell in scope.missing.values()])
        self._cells.update(scope.missing)
        cells = self._cells.items()
        self._donated = [cell for key, cell in cells if key in scope.written]
        self._kept = [cell for key, cell in cells if key not in scope.written]
        self.layout = layout = self._choose_layout(scope)
        self._expected = _variables(scope.written.values())
        self._jitted = None
        if made:
            return
        self._jitted = jax.jit(
            self._trace,
            donate_argnums=0,
            out_shardings=(
                layout.whole,
                layout.split,
                layout.state_shardings(self._expected),
                layout.split,
            ),
        )

    def _trace(
        self,
        donated: list[Any],
        kept: list[Any],
        plain: list[Any],
        joined: list[Any],
    ) -> Results:
        cells = [*self._donated, *self._kept]
        known = zip(cells, [*donated, *kept], strict=True)
        scope = ProgramScope(known, self._workers is not None)
        with scope:
            results, split_results = self._function(plain, joined)
        if scope.missing or keras_compat.has_deferred_variables():
            raise MissingStateError(scope)
        self._scope = scope
        written = scope.written.values()
        if self.layout.own is not None and not _same_objects(
            _variables(written), self._expected
        ):
            raise MissingStateError(scope)
        self._new = [cell for cell in written if isinstance(cell, VariableCell)]
        self._new_stacks = [c for c in written if not isinstance(c, VariableCell)]
        values = [jnp.asarray(scope.value(cell)) for cell in self._new]
        stacks = [jnp.asarray(scope.value(cell)) for cell in self._new_stacks]
        return results, split_results, values, stacks

    def _run(
        self, plain: list[Any], parts: list[Sequence[Any]]
    ) -> tuple[list[Any], list[Any]]:
        assert self._jitted is not None
        layout = self.layout
        plain = layout.place_inputs(plain)
        joined = [layout.join(own) for own in parts]
        kept = self._state(self._kept)
        # As in `steps.noting`: no interrupt between the call and the list.
        done: list[Results] = []
        try:
            donated = _unshared(self._donated)
            donated = self._placed(self._donated, donated)
            with self._exchange():
                done.extend(map(self._jitted, (donated,), (kept,), (plain,), (joined,)))
                if self._workers is not None:
                    # What fails of the others' absence fails here.
                    jax.block_until_ready(done[0])
        finally:
            if done:
                self._keep(done[0])
        return done[0][0], done[0][1]

    def _exchange(self) -> contextlib.AbstractContextManager[Any]:
        if self._workers is None:
            return contextlib.nullcontext()
        return self._workers.exchange()

    def _state(self, cells: list[Cell]) -> list[Any]:
        return self._placed(cells, [cell.get() for cell in cells])

    def _placed(self, cells: list[Cell], arrays: list[Any]) -> list[Any]:
        if self.layout.split is None:
            return self.layout.place(arrays)
        mine = [i for i, cell in enumerate(cells) if isinstance(cell, VariableCell)]
        placed = self.layout.place_state(
            [cells[i].variable for i in mine], [arrays[i] for i in mine]
        )
        for i, array in zip(mine, placed, strict=True):
            arrays[i] = array
        return arrays

    def _keep(self, results: Results) -> None:
        _, _, values, stacks = results
        if self.layout.home is not None:
            values = jax.device_put(values, self.layout.home)
        for cell, value in zip(self._new, values, strict=True):
            cell.set(value)
        for cell, value in zip(self._new_stacks, stacks, strict=True):
            cell.set(value)


def _variables(cells: Iterable[Cell]) -> list[Any]:
    return [cell.variable for cell in cells if isinstance(cell, VariableCell)]


def _same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return list(map(id, one)) == list(map(id, other))


def _unshared(cells: list[Cell]) -> list[Any]:
    """Arrays that a program may write over: those that somebody else holds, copied."""
    arrays: list[Any] = []
    for cell in cells:
        shared = sys.getrefcount(cell.get()) > _REFERENCES_OF_A_CELL
        arrays.append(jnp.copy(cell.get()) if shared else cell.get())
    return arrays


def _share(variables: Sequence[Any]) -> None:
    """Gives variables that are used for the first time the chief's values."""
    by_strategy: dict[int, tuple[Any, list[Any]]] = {}
    for variable in {id(v): v for v in variables}.values():
        strategy = keras_compat.strategy_of(variable)
        if strategy is not None and strategy.workers is not None:
            by_strategy.setdefault(id(strategy), (strategy, []))[1].append(variable)
    for strategy, found in by_strategy.values():
        strategy.trainer.share_variables(found, all_of_them=False)


def _scope_of(variable: Any) -> Any:
    strategy = keras_compat.strategy_of(variable)
    return None if strategy is None else strategy.trainer.scope()


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


def _joined_shape(parts: Sequence[Any], count: int) -> jax.ShapeDtypeStruct:
    shape = tuple(parts[0].shape)
    joined = (count, *shape) if is_stacked(parts[0]) else (count * shape[0], *shape[1:])
    return jax.ShapeDtypeStruct(joined, jax.dtypes.canonicalize_dtype(parts[0].dtype))

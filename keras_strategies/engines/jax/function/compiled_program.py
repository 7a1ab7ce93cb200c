"""Compiled functions with Keras state threaded through as inputs and outputs.

# Discovery of state

A function is traced with the variables that it is known to read as inputs. A read of
another variable yields zeros, the variable is noted, and the function is traced again
with it as an input. The first trace starts without variables; the second one is usually
the last. Assigned variables are outputs.

Variables created by the function have no value in the trace, as in any Keras
`StatelessScope`, and are initialized between two traces.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import numpy as jnp

from keras_strategies.communication.communicator import is_fixed
from keras_strategies.engines.jax.function.program_sharding import ProgramSharding
from keras_strategies.engines.jax.function.state_refs import StateRef, VariableRef
from keras_strategies.engines.jax.function.trace_state import (
    MAX_TRACES,
    MissingStateError,
    ProgramState,
    is_stacked,
)
from keras_strategies.engines.jax.function.traced_executables import (
    TracedExecutables,
)
from keras_strategies.engines.jax.recorded_results import call_recorded
from keras_strategies.engines.jax.workers.awaited_program import AwaitedProgram
from keras_strategies.errors import ContextError
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.deferred import (
    deferred_variables,
    has_deferred_variables,
    initialize_deferred_variables,
)
from keras_strategies.runtime.state.run_state import CREATE_ONCE
from keras_strategies.runtime.state.variable_sync import sync_variables

if TYPE_CHECKING:
    from keras_strategies.engines.jax.workers.jax_workers import JaxCommunicator

# Plain results, results split over replicas, and new state, the same two kinds.
Results = tuple[list[Any], list[Any], list[Any], list[Any]]


class CompiledProgram:
    """A compiled function of arrays, with Keras state threaded through.

    Args:
        function: callable of lists of plain and of joined arrays, which returns the
            same two; traced once or twice.
        choose_sharding: returns the shardings for a trace's strategies and variables.
        workers: the workers of the program; None without a cluster.
        executables: where given, the function is traced in each call.
    """

    def __init__(
        self,
        function: Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]],
        choose_sharding: Callable[[ProgramState], ProgramSharding],
        workers: JaxCommunicator | None = None,
        executables: TracedExecutables | None = None,
    ):
        self._workers = workers
        self._executables = executables
        self._function = function
        self._choose_sharding = choose_sharding
        self._refs: dict[Any, StateRef] = {}
        self._donated: list[StateRef] = []
        self._kept: list[StateRef] = []
        self._new: list[StateRef] = []
        # The variables among the outputs: `jax.jit` needs their shardings in advance.
        self._expected: list[Any] = []
        self._new_stacks: list[StateRef] = []
        # The variables that the last trace created.
        self._made: list[Any] = []
        self._jitted: Callable[..., Results] | None = None
        self.sharding = ProgramSharding()

    def __call__(
        self, plain: list[Any], parts: list[Sequence[Any]]
    ) -> tuple[list[Any], list[Any]]:
        """Runs the function, and assigns the variables their new values.

        Args:
            plain: arrays.
            parts: for each array that is sharded over replicas, the components.
        """
        self._made = []
        for _ in range(MAX_TRACES):
            if self._jitted is None:
                self._discover(plain, parts)
                continue
            try:
                return self._run(plain, parts)
            except MissingStateError as missing:
                # The function took another branch than in the traces before.
                self._extend(missing.state)
        raise ContextError(
            f"A function was traced {MAX_TRACES} times, and each trace read or created "
            f"variables that no earlier trace had. {CREATE_ONCE}"
        )

    def _discover(self, plain: list[Any], parts: list[Sequence[Any]]) -> None:
        workers = self._workers
        total = None if workers is None else workers.replica_counts.total
        joined = [_joined_shape(own, total or len(own)) for own in parts]
        state = [ref.spec() for ref in self._refs.values()]
        self._donated, self._kept = [], list(self._refs.values())
        states: list[ProgramState] = []

        def trace(*inputs: Any) -> Results:
            results = self._trace([], *inputs)
            states.append(self._last_trace)
            return results

        try:
            jax.eval_shape(trace, state, [_shape(a) for a in plain], joined)
            program = states[0]
        except MissingStateError as missing:
            program = missing.state
        except Exception:
            # Layers built before the error are usable.
            initialize_deferred_variables(_scope_of)
            raise
        self._extend(program)

    def _extend(self, program: ProgramState) -> None:
        """Adds the state that a trace read, created or assigned to the program."""
        made = deferred_variables()
        initialize_deferred_variables(_scope_of)
        self._check_made(made, program)
        if self._workers is not None:
            _broadcast_from_chief([ref.variable for ref in program.missing.values()])
        self._refs.update(program.missing)
        # What a function that is traced in each call assigns is known afterwards.
        donated = program.written if self._executables is None else {}
        refs = self._refs.items()
        self._donated = [ref for key, ref in refs if key in donated]
        self._kept = [ref for key, ref in refs if key not in donated]
        self.sharding = sharding = self._choose_sharding(program)
        self._expected = _variables(program.written.values())
        self._jitted = None
        if made:
            return
        out_shardings = (
            sharding.replicated,
            sharding.split,
            sharding.state_shardings(self._expected),
            sharding.split,
        )
        if self._executables is not None:
            self._jitted = functools.partial(self._trace_and_run, out_shardings)
            return
        workers = self._elastic_workers
        self._jitted = jax.jit(
            self._trace,
            # Not where a failed call is rolled back.
            donate_argnums=0 if workers is None else (),
            out_shardings=out_shardings,
        )
        if workers is not None:
            self._jitted = AwaitedProgram(workers, self._jitted)

    def _trace_and_run(self, out_shardings: Any, *args: Any) -> Results:
        assert self._executables is not None
        # A new function each time: JAX keeps the trace of one that it knows.
        results: Results = self._executables.run(
            lambda *given: self._trace(*given),
            out_shardings,
            args,
            self._elastic_workers,
        )
        return results

    def _forget_unused(self) -> None:
        """Drops state that the trace of this call did not use, as of another model."""
        trace = self._last_trace
        used = trace.used | trace.written.keys()
        if self._executables is None or self._refs.keys() <= used:
            return
        self._refs = {key: ref for key, ref in self._refs.items() if key in used}
        self._kept = list(self._refs.values())

    def _check_made(self, made: list[Any], program: ProgramState) -> None:
        """Raises if each trace creates variables and the next one does not use them."""
        before, self._made = self._made, made
        if not made or list(map(_kind, before)) != list(map(_kind, made)):
            return
        refs = (*program.reads.values(), *program.written.values())
        used = {id(ref.variable) for ref in (*refs, *program.missing.values())}
        if not any(id(variable) in used for variable in before):
            paths = ", ".join(repr(variable.path) for variable in made)
            raise ContextError(
                "A function compiled by `run` or `ks.function` creates new variables "
                f"in each trace: {paths}. {CREATE_ONCE}"
            )

    def _trace(
        self,
        donated: list[Any],
        kept: list[Any],
        plain: list[Any],
        joined: list[Any],
    ) -> Results:
        refs = [*self._donated, *self._kept]
        known = zip(refs, [*donated, *kept], strict=True)
        state = ProgramState(known, self._workers is not None)
        with state.scope():
            results, split_results = self._function(plain, joined)
        if state.missing or has_deferred_variables():
            raise MissingStateError(state)
        self._last_trace = state
        written = state.written.values()
        if self.sharding.sharding_of is not None and not _same_objects(
            _variables(written), self._expected
        ):
            raise MissingStateError(state)
        self._new = [ref for ref in written if isinstance(ref, VariableRef)]
        self._new_stacks = [c for c in written if not isinstance(c, VariableRef)]
        values = [jnp.asarray(state.value(ref)) for ref in self._new]
        stacks = [jnp.asarray(state.value(ref)) for ref in self._new_stacks]
        return results, split_results, values, stacks

    def _run(
        self, plain: list[Any], parts: list[Sequence[Any]]
    ) -> tuple[list[Any], list[Any]]:
        assert self._jitted is not None
        sharding = self.sharding
        plain = sharding.place(plain)
        joined = [sharding.join(own) for own in parts]
        kept = self._state(self._kept)
        if self._elastic_workers is None:
            donated = self._placed(self._donated, _unshared(self._donated))
        else:
            donated = self._state(self._donated)
        with self._exchange():
            arguments = (donated, kept, plain, joined)
            found: Results = call_recorded(self._jitted, arguments, self._commit)
            if self._workers is not None:
                # So that a lost worker raises here, and not at a later read.
                jax.block_until_ready(found)
        self._forget_unused()
        return found[0], found[1]

    @property
    def _elastic_workers(self) -> JaxCommunicator | None:
        """The communicator, if a failed call is rolled back and repeated."""
        return None if is_fixed(self._workers) else self._workers

    def _exchange(self) -> contextlib.AbstractContextManager[Any]:
        if self._workers is None:
            return contextlib.nullcontext()
        return self._workers.exchange()

    def _state(self, refs: list[StateRef]) -> list[Any]:
        return self._placed(refs, [ref.get() for ref in refs])

    def _placed(self, refs: list[StateRef], arrays: list[Any]) -> list[Any]:
        if self.sharding.split is None:
            return self.sharding.place(arrays)
        mine = [i for i, ref in enumerate(refs) if isinstance(ref, VariableRef)]
        placed = self.sharding.place_state(
            [refs[i].variable for i in mine], [arrays[i] for i in mine]
        )
        for i, array in zip(mine, placed, strict=True):
            arrays[i] = array
        return arrays

    def _commit(self, results: Results) -> None:
        _, _, values, stacks = results
        if self.sharding.home is not None:
            values = jax.device_put(values, self.sharding.home)
        refs = (*self._new, *self._new_stacks)
        for ref, value in zip(refs, (*values, *stacks), strict=True):
            ref.set(value)


def _kind(variable: Any) -> Any:
    return (tuple(variable.shape), variable.dtype)


def _variables(refs: Iterable[StateRef]) -> list[Any]:
    return [ref.variable for ref in refs if isinstance(ref, VariableRef)]


def _same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return list(map(id, one)) == list(map(id, other))


def _references(arrays: list[Any]) -> Iterable[int]:
    """The reference counts of arrays, including references by this list and call."""
    return map(sys.getrefcount, arrays)


def _references_of_unshared() -> int:
    holder = [object()]
    return next(iter(_references(list(holder))))


def _unshared(refs: list[StateRef]) -> list[Any]:
    """Arrays to donate: copies of those with references from elsewhere.

    A reference that the user holds, such as `array = variable.value`, stays valid.
    """
    alone = _references_of_unshared()
    arrays = [ref.get() for ref in refs]
    shared = [i for i, count in enumerate(_references(arrays)) if count > alone]
    for i in shared:
        arrays[i] = jnp.copy(arrays[i])
    return arrays


def _broadcast_from_chief(variables: Sequence[Any]) -> None:
    """Broadcasts the chief's values of variables at their first use."""
    by_strategy: dict[int, tuple[Any, list[Any]]] = {}
    for variable in {id(v): v for v in variables}.values():
        strategy = strategy_of(variable)
        if strategy is None or strategy.workers is None:
            continue
        # A worker that alone compiles a function again has nothing to exchange.
        if variable not in strategy.synced_variables:
            by_strategy.setdefault(id(strategy), (strategy, []))[1].append(variable)
    for strategy, found in by_strategy.values():
        sync_variables(strategy, found)


def _scope_of(variable: Any) -> Any:
    strategy = strategy_of(variable)
    return None if strategy is None else strategy.drivers.fit.scope()


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


def _joined_shape(parts: Sequence[Any], count: int) -> jax.ShapeDtypeStruct:
    shape = tuple(parts[0].shape)
    joined = (count, *shape) if is_stacked(parts[0]) else (count * shape[0], *shape[1:])
    return jax.ShapeDtypeStruct(joined, jax.dtypes.canonicalize_dtype(parts[0].dtype))

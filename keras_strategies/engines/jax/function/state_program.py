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

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import numpy as jnp

from keras_strategies import keras_compat
from keras_strategies.engines.jax.function.program_sharding import Layout
from keras_strategies.engines.jax.function.state_refs import Cell, VariableCell
from keras_strategies.engines.jax.function.trace_scopes import (
    MAX_TRACES,
    MissingStateError,
    ProgramScope,
    is_stacked,
)
from keras_strategies.errors import ContextError
from keras_strategies.runtime.run_scope import MAKE_ONCE

if TYPE_CHECKING:
    from keras_strategies.engines.jax.workers.jax_workers import JaxWorkers

# Held by its cell, and by the call of `sys.getrefcount`.
_REFERENCES_OF_A_CELL = 2

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
        # The variables that the last trace has made.
        self._made: list[Any] = []
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
        self._made = []
        for _ in range(MAX_TRACES):
            if self._jitted is None:
                self._discover(plain, parts)
                continue
            try:
                return self._run(plain, parts)
            except MissingStateError as missing:
                # The function took another way than in the traces before.
                self._extend(missing.scope)
        raise ContextError(
            f"A function was traced {MAX_TRACES} times, and each trace read or made "
            f"variables that the traces before had not. {MAKE_ONCE}"
        )

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
        except Exception:
            # What was built before the error can be used.
            keras_compat.initialize_deferred_variables(_scope_of)
            raise
        self._extend(scope)

    def _replicas(self, parts: Sequence[Any]) -> int:
        """How many replicas there are, of which these parts are the local ones'."""
        return len(parts) if self._workers is None else self._workers.share.total

    def _extend(self, scope: ProgramScope) -> None:
        """Prepares the program for the state that a trace has met."""
        made = keras_compat.deferred_variables()
        keras_compat.initialize_deferred_variables(_scope_of)
        self._check_made(made, scope)
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

    def _check_made(self, made: list[Any], scope: ProgramScope) -> None:
        """Raises if a function makes its variables in each trace, for none to use."""
        before, self._made = self._made, made
        if not made or list(map(_kind, before)) != list(map(_kind, made)):
            return
        cells = (*scope.reads.values(), *scope.written.values())
        used = {id(cell.variable) for cell in (*cells, *scope.missing.values())}
        if not any(id(variable) in used for variable in before):
            paths = ", ".join(repr(variable.path) for variable in made)
            raise ContextError(
                "A function that `run` or `ks.function` compiles makes new variables "
                f"each time that it is traced: {paths}. {MAKE_ONCE}"
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
        # As in `compiled_steps.noting`: no interrupt between the call and the list.
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


def _kind(variable: Any) -> Any:
    return (tuple(variable.shape), variable.dtype)


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

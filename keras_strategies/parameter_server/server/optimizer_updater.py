"""Optimizer updates on a parameter server, by Keras's own optimizers.

The variables of an unpickled optimizer are *templates* without values.
`optimizer.apply` runs in a `StatelessScope` that assigns the templates the values of
one update: complete shards, or only the rows that a batch has looked up. The backend
compiles it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.models.keras_classes import uses_only_builtin_keras
from keras_strategies.keras_compat.optimizers.optimizer_classes import plain_optimizer
from keras_strategies.keras_compat.optimizers.optimizer_parts import (
    disable_clipping,
    keeps_without_gradient,
    set_weight_decay,
    updates_rows,
)
from keras_strategies.keras_compat.optimizers.updates import (
    iterations_variable,
    update_without_conditions,
)
from keras_strategies.keras_compat.thread_state import values_scope
from keras_strategies.keras_compat.variables.creation import set_variable_shape
from keras_strategies.parameter_server.engines.engine_interface import (
    ParameterServerEngine,
    bucket,
)
from keras_strategies.parameter_server.server.optimizer_spec import OptimizerSpec
from keras_strategies.parameter_server.server.variable_store import VariableStore
from keras_strategies.parameter_server.wire.arrays.row_arrays import (
    pad_rows,
    take_rows,
)
from keras_strategies.parameter_server.wire.step_messages import Key

#: Number of variables up to which a program updates them together with rows.
_MOST_WITH_ROWS = 16


class ShardUpdate(NamedTuple):
    """The update of a shard.

    Args:
        key: the shard.
        gradient: its gradient; with `ids` that of these rows, optionally padded.
        ids: the updated rows, sorted and unique; None for all.
    """

    key: Key
    gradient: np.ndarray
    ids: np.ndarray | None = None


class OptimizerUpdater:
    """Applies one optimizer's updates to a store.

    Args:
        spec: the optimizer.
        store: the variables.
        engine: compiles the updates.
    """

    def __init__(
        self, spec: OptimizerSpec, store: VariableStore, engine: ParameterServerEngine
    ):
        self.spec = spec
        self._store = store
        self._engine = engine
        self._programs: dict[Any, Callable[..., Any]] = {}
        optimizer = spec.optimizer
        self._uses_only_builtin_keras = uses_only_builtin_keras(optimizer)
        self._updates_rows = updates_rows(optimizer)
        plain_optimizer(optimizer)
        # Workers have clipped: only they have the gradients of all variables.
        if not optimizer.gradient_accumulation_steps:
            disable_clipping(optimizer)
        optimizer.loss_scale_factor = None
        update_without_conditions(optimizer)
        decays = {id(spec.templates[v]): d for v, d in spec.decays.items()}
        set_weight_decay(optimizer, decays)
        for number, constraint in spec.constraints.items():
            spec.templates[number].constraint = constraint
        # Rows of the unsharded variables; None for scalars.
        self._rows: dict[int, int | None] = {}
        self._checked: set[Key] = set()
        for number in (*spec.slots, *(s for ss in spec.slots.values() for s in ss)):
            template = spec.templates[number]
            shape = tuple(template.shape)
            self._rows[number] = shape[0] if shape else None
            if shape:
                set_variable_shape(template, (None, *shape[1:]))
        # Accumulation and moving averages also change rows without a gradient.
        self._changes_other_rows = (
            optimizer.use_ema
            or bool(optimizer.gradient_accumulation_steps)
            or (spec.exact_rows and not self._keeps_other_rows())
        )

    def _keeps_other_rows(self) -> bool:
        decays = self.spec.optimizer.weight_decay and any(self.spec.decays.values())
        return not decays and keeps_without_gradient(self.spec.optimizer)

    def _program(self, numbers: tuple[int, ...]) -> Callable[..., Any]:
        """The compiled update of some variables."""
        if numbers not in self._programs:
            self._programs[numbers] = self._engine.compile_update(
                self._update(numbers), self._uses_only_builtin_keras
            )
        return self._programs[numbers]

    def _update(self, numbers: tuple[int, ...]) -> Callable[..., Any]:
        """The update of some variables as a pure function."""
        spec = self.spec
        variables = [spec.templates[n] for n in numbers]
        slots = [[spec.templates[s] for s in spec.slots[n]] for n in numbers]
        scalars = [spec.templates[n] for n in spec.scalars]

        def update(scalar_values: Any, values: Any, kept: Any, grads: Any) -> Any:
            mapping = [
                *zip(scalars, scalar_values, strict=True),
                *zip(variables, values, strict=True),
            ]
            for own, own_values in zip(slots, kept, strict=True):
                mapping += zip(own, own_values, strict=True)
            with values_scope(mapping) as scope:
                spec.optimizer.apply(list(grads), variables)
            get = scope.get_current_value
            return (
                [get(v) for v in scalars],
                [get(v) for v in variables],
                [[get(v) for v in own] for own in slots],
            )

        return update

    def apply(
        self,
        dense: Sequence[tuple[Key, np.ndarray | None]],
        rows: Sequence[tuple[Key, np.ndarray, np.ndarray]],
    ) -> None:
        """Applies one step of the optimizer.

        Args:
            dense: pairs of a shard and its gradient.
            rows: for each shard of a table its looked-up rows, sorted and unique,
                counted from its first row, and their gradients, `(n, ...)`,
                optionally padded with zeros.
        """
        store, spec = self._store, self.spec
        scalars = [store.get((number, 0)) for number in spec.scalars]
        # All updates of this step use the same scalars.
        after: list[np.ndarray] | None = None
        full = [ShardUpdate(key, g) for key, g in dense if g is not None]
        tables = []
        for key, ids, gradients in rows:
            if self._needs_all_rows(key):
                full.append(self._as_dense(key, ids, gradients))
            elif len(ids):
                tables.append(ShardUpdate(key, gradients, ids))
        for key, gradient, _ in full:
            if key not in self._checked:
                self._check_unsharded(key, gradient)
                self._checked.add(key)
        for group in update_groups(full, tables):
            after = self._apply_group(group, scalars)
        if after is None:
            after = self._count_step(scalars)
        for number, value in zip(spec.scalars, after, strict=True):
            store.write((number, 0), np.asarray(value))

    def _apply_group(
        self, group: Sequence[ShardUpdate], scalars: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Runs the program of some updates; returns the scalars after it."""
        store = self._store
        # The key of each shard and those of its slots.
        keys = [
            [key, *((s, key[1]) for s in self.spec.slots[key[0]])]
            for key, _, _ in group
        ]
        given = [
            [self._given(key, update.ids) for key in own]
            for own, update in zip(keys, group, strict=True)
        ]
        after: list[np.ndarray]
        after, values, slots = self._program(tuple(update.key[0] for update in group))(
            [np.array(s) for s in scalars],
            [arrays[0] for arrays in given],
            [arrays[1:] for arrays in given],
            [self._padded(update) for update in group],
        )
        for update, own, value, kept in zip(group, keys, values, slots, strict=True):
            for key, new in zip(own, [value, *kept], strict=True):
                if update.ids is None:
                    store.replace(key, new)
                else:
                    store.write_rows(key, update.ids, new[: len(update.ids)])
        return after

    def _given(self, key: Key, ids: np.ndarray | None) -> np.ndarray:
        """What the program of an update takes of a shard."""
        if ids is not None:
            return take_rows(self._store.get(key), ids, self._count(ids))
        if self._engine.updates_in_place:
            self._store.before_change(key)
        return self._store.get(key)

    def _padded(self, update: ShardUpdate) -> np.ndarray:
        if update.ids is None:
            return update.gradient
        return pad_rows(update.gradient, self._count(update.ids))

    def _count(self, ids: np.ndarray) -> int:
        """Number of rows of a program."""
        return bucket(len(ids)) if self._engine.pads_rows else len(ids)

    def _needs_all_rows(self, key: Key) -> bool:
        return (
            self._changes_other_rows
            or key[0] in self.spec.constraints
            or not self._updates_rows
        )

    def _check_unsharded(self, key: Key, array: np.ndarray) -> None:
        """Raises if a variable that is updated in full is sharded."""
        template = self.spec.templates[key[0]]
        rows = self._rows[key[0]]
        if rows is None or len(array) == rows or self._updates_rows:
            return
        raise InvalidArgumentError(
            f"Optimizer {type(self.spec.optimizer).__name__} may compute with all rows "
            f"of a variable at once, and this server has {len(array)} of the {rows} "
            f"rows of {template.path!r}. Let `variable_partitioner` return 1 for its "
            "shape, or use one of Keras's that update each row alone, such as Adam."
        )

    def _as_dense(
        self, key: Key, ids: np.ndarray, gradients: np.ndarray
    ) -> ShardUpdate:
        dense = np.zeros_like(self._store.get(key))
        dense[ids] = gradients[: len(ids)]
        return ShardUpdate(key, dense)

    def _count_step(self, scalars: list[np.ndarray]) -> list[np.ndarray]:
        """The scalars after a step without gradients for this server."""
        optimizer = self.spec.optimizer
        step = iterations_variable(optimizer)
        return [
            value + 1 if self.spec.templates[number] is step else value
            for number, value in zip(self.spec.scalars, scalars, strict=True)
        ]


def update_groups(
    full: Sequence[ShardUpdate], tables: Sequence[ShardUpdate]
) -> list[list[ShardUpdate]]:
    """Groups of updates, one program for each group.

    Args:
        full: updates of complete shards. Shards of one variable share a template, so
            each is in a group of its own.
        tables: updates of rows. A program is compiled for each number of rows, so only
            that of a single table contains other updates, and only a few.
    """
    groups: list[list[ShardUpdate]] = []
    taken: list[set[int]] = []
    for update in full:
        number = update.key[0]
        for group, numbers in zip(groups, taken, strict=True):
            if number not in numbers:
                group.append(update)
                numbers.add(number)
                break
        else:
            groups.append([update])
            taken.append({number})
    if len(groups) == len(tables) == 1 and len(full) <= _MOST_WITH_ROWS:
        return [[*full, *tables]]
    return [*groups, *([table] for table in tables)]

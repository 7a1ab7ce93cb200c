"""Optimizer updates on a parameter server, by Keras's own optimizers.

The variables of an unpickled optimizer are *templates* without values.
`optimizer.apply` runs in a `StatelessScope` that assigns the templates the values of
one update: complete shards, or only the rows that a batch has looked up. The backend
compiles it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.models.keras_classes import is_of_keras
from keras_strategies.keras_compat.optimizers.optimizer_classes import plain_optimizer
from keras_strategies.keras_compat.optimizers.optimizer_parts import (
    set_weight_decay,
    stop_clipping,
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
    put_rows,
    take_rows,
)
from keras_strategies.parameter_server.wire.step_messages import Key


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
        self._by_rows: dict[int, bool] = {}
        optimizer = spec.optimizer
        self._is_of_keras = is_of_keras(optimizer)
        plain_optimizer(optimizer)
        # Workers have clipped: only they have the gradients of all variables.
        if not optimizer.gradient_accumulation_steps:
            stop_clipping(optimizer)
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
            if shape and number not in spec.whole:
                set_variable_shape(template, (None, *shape[1:]))
        # Accumulation and moving averages also change rows without a gradient.
        self._row_programs_change_others = (
            optimizer.use_ema
            or bool(optimizer.gradient_accumulation_steps)
            or (spec.exact_rows and self._changes_without_gradient())
        )

    def _changes_without_gradient(self) -> bool:
        """Whether rows with a gradient of zero change, found by a trial update."""
        for number in self.spec.slots:
            template = self.spec.templates[number]
            if not tuple(template.shape) or not _is_float(template):
                continue
            if self._has_unsharded_slots(number):
                continue
            value, kept, gradient = self._numbers(number)
            gradient[...] = 0
            before = [value.copy(), *(k.copy() for k in kept)]
            found = self._trial_update(number, value, kept, gradient)
            if not all(map(np.array_equal, before, found)):
                return True
        return False

    def _updates_rows_independently(self, number: int) -> bool:
        """Whether rows are updated independently, found by a trial update.

        False for optimizers that use the norm of a variable, such as `Lamb`, or the
        variable as a matrix, such as `Muon`.
        """
        if self._has_unsharded_slots(number):
            return False
        if number not in self._by_rows:
            if not _is_float(self.spec.templates[number]):
                return True
            together = self._trial_update(number, *self._numbers(number))
            value, kept, gradient = self._numbers(number)
            alone = self._trial_update(
                number, value[:2], [k[:2] for k in kept], gradient[:2]
            )
            self._by_rows[number] = all(
                np.allclose(own, every[:2], rtol=1e-4, atol=1e-7)
                for own, every in zip(alone, together, strict=True)
            )
        return self._by_rows[number]

    def _has_unsharded_slots(self, number: int) -> bool:
        return not self.spec.whole.isdisjoint(self.spec.slots[number])

    def _numbers(self, number: int) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        """Random values of four rows of a variable, its slots and a gradient."""
        random = np.random.default_rng(0)
        part = (4, *self.spec.templates[number].shape[1:])
        value = random.normal(size=part).astype("float32")
        kept = [
            random.uniform(0.1, 1, part).astype("float32")
            for _ in self.spec.slots[number]
        ]
        return value, kept, random.normal(size=part).astype("float32")

    def _trial_update(
        self,
        number: int,
        value: np.ndarray,
        kept: list[np.ndarray],
        gradient: np.ndarray,
    ) -> list[np.ndarray]:
        """A variable and its slots after an update of random values."""
        scalars = [np.array(self._store.get((s, 0))) for s in self.spec.scalars]
        _, [after], [others] = self._program((number,))(
            scalars, [value], [kept], [gradient]
        )
        return [after, *others]

    def _program(self, numbers: tuple[int, ...]) -> Callable[..., Any]:
        """The compiled update of some variables."""
        if numbers not in self._programs:
            self._programs[numbers] = self._engine.compile_update(
                self._update(numbers), self._is_of_keras
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
        present = [(key, gradient) for key, gradient in dense if gradient is not None]
        whole = [table for table in rows if self._needs_all_rows(table[0])]
        present += [self._as_dense(*table) for table in whole]
        rows = [table for table in rows if not self._needs_all_rows(table[0])]
        for key, gradient in present:
            if key not in self._checked:
                self._check_unsharded(key, gradient)
                self._checked.add(key)
        # Shards of one variable share a template, so each is in a group of its own.
        for group in _distinct_variables(present):
            keys = [key for key, _ in group]
            numbers = tuple(number for number, _ in keys)
            slots = [[(s, start) for s in spec.slots[n]] for n, start in keys]
            after, values, kept = self._program(numbers)(
                [np.array(s) for s in scalars],
                [store.get(key) for key in keys],
                [[store.get(s) for s in own] for own in slots],
                [gradient for _, gradient in group],
            )
            for key, value in zip(keys, values, strict=True):
                store.arrays[key] = value
            for own, own_values in zip(slots, kept, strict=True):
                for key, value in zip(own, own_values, strict=True):
                    store.arrays[key] = value
        for key, ids, gradients in rows:
            if len(ids):
                after = self._apply_rows(key, ids, gradients, scalars)
        if after is None:
            after = self._count_step(scalars)
        for number, value in zip(spec.scalars, after, strict=True):
            store.write((number, 0), np.asarray(value))

    def _needs_all_rows(self, key: Key) -> bool:
        return (
            self._row_programs_change_others
            or key[0] in self.spec.constraints
            or not self._updates_rows_independently(key[0])
        )

    def _check_unsharded(self, key: Key, array: np.ndarray) -> None:
        """Raises if a variable that is updated in full is sharded."""
        template = self.spec.templates[key[0]]
        rows = self._rows[key[0]]
        if (
            rows is None
            or len(array) == rows
            or self._updates_rows_independently(key[0])
        ):
            return
        raise InvalidArgumentError(
            f"Optimizer {type(self.spec.optimizer).__name__} computes with all rows of "
            f"a variable at once, and this server has {len(array)} of the {rows} rows "
            f"of {template.path!r}. Let `variable_partitioner` return 1 for its shape, "
            "or use an optimizer that updates each row independently, such as Adam."
        )

    def _apply_rows(
        self, key: Key, ids: np.ndarray, gradients: np.ndarray, scalars: Any
    ) -> list[np.ndarray]:
        number, start = key
        table = self._store.own(key)
        slots = [self._store.own((s, start)) for s in self.spec.slots[number]]
        count = bucket(len(ids)) if self._engine.pads_rows else len(ids)

        after: list[np.ndarray]
        after, [values], [kept] = self._program((number,))(
            [np.array(s) for s in scalars],
            [take_rows(table, ids, count)],
            [[take_rows(slot, ids, count) for slot in slots]],
            [pad_rows(gradients, count)],
        )
        for array, new in zip([table, *slots], [values, *kept], strict=True):
            put_rows(array, ids, new[: len(ids)])
        return after

    def _as_dense(
        self, key: Key, ids: np.ndarray, gradients: np.ndarray
    ) -> tuple[Key, np.ndarray]:
        whole = np.zeros_like(self._store.get(key))
        whole[ids] = gradients[: len(ids)]
        return key, whole

    def _count_step(self, scalars: list[np.ndarray]) -> list[np.ndarray]:
        """The scalars after a step without gradients for this server."""
        optimizer = self.spec.optimizer
        step = iterations_variable(optimizer)
        return [
            value + 1 if self.spec.templates[number] is step else value
            for number, value in zip(self.spec.scalars, scalars, strict=True)
        ]


def _distinct_variables(
    pairs: Sequence[tuple[Key, np.ndarray]],
) -> list[list[tuple[Key, np.ndarray]]]:
    """Groups of updates without two shards of one variable."""
    groups: list[list[tuple[Key, np.ndarray]]] = []
    taken: list[set[int]] = []
    for key, gradient in pairs:
        for group, numbers in zip(groups, taken, strict=True):
            if key[0] not in numbers:
                group.append((key, gradient))
                numbers.add(key[0])
                break
        else:
            groups.append([(key, gradient)])
            taken.append({key[0]})
    return groups


def _is_float(variable: Any) -> bool:
    return "float32" in str(variable.dtype)

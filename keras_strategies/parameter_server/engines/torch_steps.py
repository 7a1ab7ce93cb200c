"""A worker's steps on Torch: eager, or as recorded graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from keras_strategies.engines.torch.compat import tree_flatten
from keras_strategies.keras_compat.optimizers.applying import applying_through
from keras_strategies.keras_compat.thread_state import values_scope
from keras_strategies.keras_compat.variables.lookups import lookups_through
from keras_strategies.keras_compat.variables.values import (
    raw_value,
    set_raw_value,
    stored_dtype,
)
from keras_strategies.parameter_server.engines.engine_interface import (
    Body,
    CompilableStep,
    LookupMismatchError,
    OptimizerCall,
    OptimizerCallRecorder,
    StepProgram,
    StepResult,
    StepVariables,
    assigned_tables,
    changed_in,
    regularized_scope,
)
from keras_strategies.parameter_server.engines.torch_arrays import as_array, on_device
from keras_strategies.parameter_server.engines.torch_graphs import (
    GraphRecorder,
    NotRecordableError,
    TensorGraph,
)


class TorchStepProgram(StepProgram):
    """Steps as recorded graphs of Keras's own code, or eager steps.

    Lookups are predicted from the batch. The first batch runs through the step without
    updates, which records the ids. If the ids of each lookup are an array of the batch,
    they are read from later batches directly. The step compares them; after a mismatch,
    each batch runs twice.
    """

    def __init__(self, body: Body, variables: StepVariables, gradients: bool):
        super().__init__(body, variables, gradients)
        # For each lookup its table and the index of the batch's leaf with its ids.
        self._origins: list[tuple[Any, int]] | None = None
        # By structure of the batch.
        self._recorders: dict[Any, GraphRecorder] = {}
        self._may_predict = True

    def lookups(self, batch: Any) -> list[tuple[Any, np.ndarray]]:
        if not self.variables.tables:
            return []
        leaves = keras.tree.flatten(batch)
        if self._origins is not None:
            return [(table, leaves[i]) for table, i in self._origins]
        found = self._run_for_lookups(batch)
        origins = [(table, _matching_leaf(leaves, ids)) for table, ids in found]
        if self._may_predict and all(i is not None for _, i in origins):
            self._origins = origins  # type: ignore[assignment]
        return found

    def _run_for_lookups(self, batch: Any) -> list[tuple[Any, np.ndarray]]:
        """Runs the step with zeros for rows, and discards its other results."""
        while True:
            found: list[tuple[Any, np.ndarray]] = []

            def take(x: Any, indices: Any, axis: Any, found: Any = found) -> Any:
                if axis != 0 or not self._is_table(x):
                    return NotImplemented
                ids = keras.ops.convert_to_tensor(indices)
                found.append((x, as_array(ids).copy()))
                shape = (*ids.shape, *x.shape[1:])
                rows = keras.ops.zeros(shape, dtype=x.dtype)
                return rows.requires_grad_(rows.is_floating_point())

            tables = list(self.variables.tables)
            for table in tables:
                set_stub(table)
            with (
                torch.set_grad_enabled(True),
                regularized_scope(self.variables) as scope,
                lookups_through(take),
                applying_through(OptimizerCallRecorder()),
                _TableReads(tables) as reads,
            ):
                self.body(_tensors(batch))
            read = reads.found() or assigned_tables(scope, self.variables)
            self._clear_gradients()
            if not read:
                return found
            self.variables.mark_dense(read)

    def _is_table(self, x: Any) -> bool:
        return any(x is table for table in self.variables.tables)

    def _clear_gradients(self) -> None:
        for variable in (*self.variables.tables, *self.variables.others):
            raw = raw_value(variable)
            if raw is not None:
                raw.grad = None

    def run(
        self,
        batch: Any,
        lookups: Sequence[tuple[Any, np.ndarray]],
        positions: Sequence[np.ndarray],
    ) -> StepResult:
        is_predicted = self._origins is not None or not lookups
        if isinstance(self.body, CompilableStep) and is_predicted:
            found = self._run_recorded(batch, positions)
            if found is not None:
                return found
        return self._run_eagerly(batch, lookups, positions)

    def _run_recorded(
        self, batch: Any, positions: Sequence[np.ndarray]
    ) -> StepResult | None:
        """Runs the step's graph, if there is one for this batch."""
        # Only for the key: `keras.tree` makes no structure that can be compared.
        _, structure = tree_flatten(batch)
        leaves = keras.tree.flatten(batch)
        present = [leaf is not None for leaf in leaves]
        key = (len(positions), structure, tuple(present))
        if key not in self._recorders:
            self._recorders[key] = self._recorder(batch, present, len(positions))
        variables = [*self.variables.tables, *self.variables.others]
        inputs = [
            *(on_device(where) for where in positions),
            *(keras.ops.convert_to_tensor(leaf) for leaf in leaves if leaf is not None),
            *(raw_value(variable) for variable in variables),
        ]
        graph = self._recorders[key].graph(inputs)
        if graph is None:
            return None
        _, outputs, gradients, changed = graph(*inputs, convert=as_array)
        _, calls, changed_variables = graph.note
        return StepResult(
            outputs,
            [
                OptimizerCall(call.optimizer, call.variables, own)
                for call, own in zip(calls, gradients, strict=True)
            ],
            list(zip(changed_variables, changed, strict=True)),
        )

    def _recorder(self, batch: Any, present: list[bool], lookups: int) -> GraphRecorder:
        variables = [*self.variables.tables, *self.variables.others]

        def step(*inputs: torch.Tensor) -> tuple[Any, Any]:
            """The step as a function of positions, the batch and variables."""
            given = iter(inputs)
            places = [next(given) for _ in range(lookups)]
            leaves = [next(given) if there else None for there in present]
            values = []
            for variable, value in zip(variables, given, strict=True):
                trains = variable.trainable and value.is_floating_point()
                values.append(value.detach().requires_grad_(trains))
            remaining = iter(places)
            looked_up: list[tuple[Any, torch.Tensor]] = []

            def take(x: Any, indices: Any, axis: Any) -> Any:
                if axis != 0 or not self._is_table(x):
                    return NotImplemented
                looked_up.append((x, keras.ops.convert_to_tensor(indices)))
                return _rows(x.value, next(remaining))

            recorder = OptimizerCallRecorder()
            with (
                torch.set_grad_enabled(self.gradients),
                values_scope(zip(variables, values, strict=True)) as scope,
                lookups_through(take),
                applying_through(recorder),
            ):
                outputs = self.body(keras.tree.pack_sequence_as(batch, leaves))
            changed = []
            for variable, value in zip(variables, values, strict=True):
                after = scope.get_current_value(variable)
                if after is not value:
                    changed.append((variable, after))
            gradients = [list(call.gradients) for call in recorder.calls]
            result = (
                [ids for _, ids in looked_up],
                outputs,
                gradients,
                [after for _, after in changed],
            )
            tables = [table for table, _ in looked_up]
            return result, (tables, recorder.calls, [v for v, _ in changed])

        def check(graph: TensorGraph) -> None:
            """Checks that the ids of the graph's lookups are the predicted leaves."""
            tables = graph.note[0]
            leaves = [i for i, there in enumerate(present) if there]
            origins = []
            for i, table in enumerate(tables):
                place = graph.input_index(i)
                # The first inputs are positions.
                leaf = None if place is None else leaves[place - lookups]
                origins.append((table, leaf))
            expected = self._origins or []
            if len(origins) != len(expected) or not all(
                table is other and i == j
                for (table, i), (other, j) in zip(origins, expected, strict=True)
            ):
                raise NotRecordableError(
                    "the ids of a lookup are not an array of the batch"
                )

        is_requested = isinstance(self.body, CompilableStep) and self.body.is_requested
        return GraphRecorder(step, check, is_requested)

    def _run_eagerly(
        self,
        batch: Any,
        lookups: Sequence[tuple[Any, np.ndarray]],
        positions: Sequence[np.ndarray],
    ) -> StepResult:
        places: Iterator[tuple[Any, Any]] = iter(
            list(zip(lookups, positions, strict=True))
        )

        def take(x: Any, indices: Any, axis: Any) -> Any:
            if axis != 0 or not self._is_table(x):
                return NotImplemented
            ids = as_array(keras.ops.convert_to_tensor(indices))
            table: Any
            (table, expected), where = next(places, ((None, np.empty(0)), ids))
            if table is not x or not np.array_equal(ids, expected):
                raise LookupMismatchError
            return _rows(x.value, on_device(where))

        variables = [*self.variables.tables, *self.variables.others]
        self._clear_gradients()
        recorder = OptimizerCallRecorder()
        with (
            torch.set_grad_enabled(self.gradients),
            regularized_scope(self.variables) as scope,
            lookups_through(take),
            applying_through(recorder),
        ):
            outputs = self.body(_tensors(batch))
        changed = []
        for variable in variables:
            after = changed_in(scope, variable)
            if after is not None:
                changed.append((variable, as_array(after)))
        calls = [
            OptimizerCall(
                call.optimizer, call.variables, [as_array(g) for g in call.gradients]
            )
            for call in recorder.calls
        ]
        self._clear_gradients()
        outputs = keras.tree.map_structure(as_array, outputs)
        return StepResult(outputs, calls, changed)

    def disable_lookup_prediction(self) -> None:
        self._may_predict = False
        self._origins = None
        self._recorders.clear()


def _rows(window: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The rows of a window at positions, `(*positions.shape, columns)`.

    On CPUs, only the gradient of `index_select` with int64 indices sums rows without a
    call of a kernel for each; on accelerators that of `embedding` is deterministic.
    """
    if window.device.type != "cpu":
        return torch.nn.functional.embedding(positions, window)
    rows = window.index_select(0, positions.reshape(-1).long())
    return rows.reshape(*positions.shape, *window.shape[1:])


def _matching_leaf(leaves: list[Any], ids: np.ndarray) -> int | None:
    for i, leaf in enumerate(leaves):
        if (
            leaf is not None
            and np.shape(leaf) == ids.shape
            and np.array_equal(leaf, ids)
        ):
            return i
    return None


class _TableReads(TorchFunctionMode):
    """Records the tables that a step uses other than by lookups.

    Args:
        tables: variables with their stubs.
    """

    def __init__(self, tables: Sequence[Any]):
        super().__init__()
        self._tables = {id(raw_value(table)): table for table in tables}
        self._read: dict[int, Any] = {}

    def found(self) -> list[Any]:
        """The tables that were read."""
        return list(self._read.values())

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _METADATA_ONLY:
            for leaf in keras.tree.flatten((args, kwargs)):
                table = self._tables.get(id(leaf))
                if table is not None:
                    self._read[id(leaf)] = table
        return func(*args, **kwargs)


# Functions that do not read values: attributes, and gradients by a table.
_METADATA_ONLY = frozenset(
    ("__get__", "__set__", "grad", "dim", "size", "numel", "is_floating_point")
)


def set_stub(variable: Any) -> None:
    """Sets a value of the variable's shape that takes no memory."""
    shape = tuple(variable.shape)
    dtype = stored_dtype(variable)
    stub = keras.ops.zeros((1,) * len(shape), dtype=dtype).expand(shape)
    trains = variable.trainable and stub.is_floating_point()
    set_raw_value(variable, torch.nn.Parameter(stub, requires_grad=trains))


def _tensors(batch: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), batch
    )

"""Parameter servers and their workers on Torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from keras_strategies import keras_compat
from keras_strategies.backends.parameter_server import (
    Applied,
    Body,
    Engine,
    OtherLookupsError,
    Program,
    Sink,
    StepResult,
    Variables,
    changed_in,
    regularized_scope,
)


class TorchProgram(Program):
    """Steps run eagerly. Ids are foreseen from where they came from in the batch.

    The first batch goes through the step once without updates, which shows the ids.
    Where each lookup's ids are an array of the batch, later batches are asked directly;
    the step checks that it was so, and a batch for which it was not runs as the first.
    """

    def __init__(self, body: Body, variables: Variables, gradients: bool):
        super().__init__(body, variables, gradients)
        # For each lookup the table and the leaf of the batch that its ids are.
        self._origins: list[tuple[Any, int]] | None = None
        self._may_foresee = True
        self._foreseen: list[tuple[Any, np.ndarray]] = []

    def lookups(self, batch: Any) -> list[tuple[Any, np.ndarray]]:
        if not self.variables.tables:
            self._foreseen = []
            return []
        leaves = keras.tree.flatten(batch)
        if self._origins is not None:
            found = [(table, leaves[i]) for table, i in self._origins]
        else:
            found = self._explore(batch)
            origins = [(table, _leaf_like(leaves, ids)) for table, ids in found]
            if self._may_foresee and all(i is not None for _, i in origins):
                self._origins = origins  # type: ignore[assignment]
        self._foreseen = found
        return found

    def _explore(self, batch: Any) -> list[tuple[Any, np.ndarray]]:
        """Runs the step on zeros for rows, and forgets all else that it does."""
        while True:
            found: list[tuple[Any, np.ndarray]] = []

            def take(x: Any, indices: Any, axis: Any, found: Any = found) -> Any:
                if axis != 0 or not self._is_table(x):
                    return NotImplemented
                ids = keras.ops.convert_to_tensor(indices)
                found.append((x, ids.detach().cpu().numpy().copy()))
                shape = (*ids.shape, *x.shape[1:])
                rows = keras.ops.zeros(shape, dtype=x.dtype)
                return rows.requires_grad_(rows.is_floating_point())

            tables = list(self.variables.tables)
            for table in tables:
                ENGINE.set_whole_stub(table)
            with (
                torch.set_grad_enabled(True),
                regularized_scope(self.variables),
                keras_compat.lookups_through(take),
                keras_compat.applying_through(Sink()),
                _Reads(tables) as reads,
            ):
                self.body(_tensors(batch))
            read = reads.found()
            self._clear_gradients()
            if not read:
                return found
            self.variables.become_dense(read)

    def _is_table(self, x: Any) -> bool:
        return any(x is table for table in self.variables.tables)

    def _clear_gradients(self) -> None:
        for variable in (*self.variables.tables, *self.variables.others):
            raw = keras_compat.raw_value(variable)
            if raw is not None:
                raw.grad = None

    def run(self, batch: Any, positions: Sequence[np.ndarray]) -> StepResult:
        places: Iterator[tuple[Any, Any]] = iter(
            list(zip(self._foreseen, positions, strict=True))
        )

        def take(x: Any, indices: Any, axis: Any) -> Any:
            if axis != 0 or not self._is_table(x):
                return NotImplemented
            ids = keras.ops.convert_to_tensor(indices).detach().cpu().numpy()
            table: Any
            (table, expected), where = next(places, ((None, np.empty(0)), None))
            if table is not x or not np.array_equal(ids, expected):
                raise OtherLookupsError
            # Its gradient adds up rows in one pass, which that of an index does not.
            return torch.nn.functional.embedding(torch.from_numpy(where), x.value)

        variables = [*self.variables.tables, *self.variables.others]
        self._clear_gradients()
        sink = Sink()
        with (
            torch.set_grad_enabled(self.gradients),
            regularized_scope(self.variables) as scope,
            keras_compat.lookups_through(take),
            keras_compat.applying_through(sink),
        ):
            outputs = self.body(_tensors(batch))
        changed = []
        for variable in variables:
            after = changed_in(scope, variable)
            if after is not None:
                changed.append((variable, _numpy(after)))
        applied = [
            Applied(a.optimizer, a.variables, [_numpy(g) for g in a.gradients])
            for a in sink.applied
        ]
        self._clear_gradients()
        outputs = keras.tree.map_structure(_numpy, outputs)
        return StepResult(outputs, applied, changed)

    def foresee_nothing(self) -> None:
        self._may_foresee = False
        self._origins = None


def _leaf_like(leaves: list[Any], ids: np.ndarray) -> int | None:
    for i, leaf in enumerate(leaves):
        if (
            leaf is not None
            and np.shape(leaf) == ids.shape
            and np.array_equal(leaf, ids)
        ):
            return i
    return None


class _Reads(TorchFunctionMode):
    """Notes the tables that take part in a step other than by lookups.

    Args:
        tables: variables with the stubs that stand for them.
    """

    def __init__(self, tables: Sequence[Any]):
        super().__init__()
        self._tables = {id(keras_compat.raw_value(table)): table for table in tables}
        self._read: dict[int, Any] = {}

    def found(self) -> list[Any]:
        """The tables that were read."""
        return list(self._read.values())

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _NO_READS:
            for leaf in keras.tree.flatten((args, kwargs)):
                table = self._tables.get(id(leaf))
                if table is not None:
                    self._read[id(leaf)] = table
        return func(*args, **kwargs)


# What asks for no numbers: attributes, and gradients with respect to a table.
_NO_READS = frozenset(
    ("__get__", "__set__", "grad", "dim", "size", "numel", "is_floating_point")
)


def _tensors(batch: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), batch
    )


def _numpy(value: Any) -> Any:
    """An array on the memory of a tensor, where NumPy knows its dtype."""
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            return keras.ops.convert_to_numpy(value)
        return value.detach().cpu().numpy()
    return value if value is None else np.asarray(value)


class _Writable:
    """Says that the memory of an array may be written to.

    Messages are read-only to NumPy, which Torch does not know. They are nobody else's:
    what is written into one is lost with it.
    """

    def __init__(self, array: np.ndarray):
        about = array.__array_interface__
        self._array = array
        self.__array_interface__ = {**about, "data": (about["data"][0], False)}


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor on the memory of an array, where Torch knows its dtype."""
    if str(array.dtype) == "bfloat16" or not array.flags.c_contiguous:
        tensor: torch.Tensor = keras.ops.convert_to_tensor(array)
        return tensor
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))
    return torch.from_numpy(array)


def _array_again(array: np.ndarray, tensor: torch.Tensor) -> np.ndarray:
    """The array whose memory a tensor was made on, if it still is on it.

    Another array on it would hold the tensor, and that this one, update after update.
    """
    if tensor.data_ptr() == array.__array_interface__["data"][0]:
        return array
    found: np.ndarray = _numpy(tensor)
    return found


class TorchEngine(Engine):
    """Tensors share the memory of arrays; updates are in place."""

    updates_in_place = True

    def install(self) -> None:
        keras_compat.hook_torch_layers()

    def program(self, body: Body, variables: Variables, gradients: bool) -> Program:
        return TorchProgram(body, variables, gradients)

    def new_variable(
        self, path: str, trainable: bool, dtype: str, shape: tuple[int, ...]
    ) -> Any:
        made = super().new_variable(path, trainable, dtype, shape)
        self.set_whole_stub(made)
        return made

    def set_value(self, variable: Any, value: np.ndarray) -> None:
        tensor = keras.ops.convert_to_tensor(_tensor(value), dtype=variable._dtype)
        trains = variable.trainable and tensor.is_floating_point()
        raw = keras_compat.raw_value(variable)
        # Torch remembers the shape of what a gradient was once asked for.
        if raw is not None and raw.dtype == tensor.dtype and raw.shape == tensor.shape:
            raw.data = tensor
            return
        keras_compat.set_raw_value(
            variable, torch.nn.Parameter(tensor, requires_grad=trains)
        )

    def set_whole_stub(self, variable: Any) -> None:
        """A value of the whole shape that takes no memory."""
        shape = tuple(variable.shape)
        stub = keras.ops.zeros((1,) * len(shape), dtype=variable._dtype).expand(shape)
        trains = variable.trainable and stub.is_floating_point()
        keras_compat.set_raw_value(
            variable, torch.nn.Parameter(stub, requires_grad=trains)
        )

    def get_value(self, variable: Any) -> np.ndarray:
        return np.asarray(_numpy(keras_compat.raw_value(variable)))

    def compile_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def run(scalars: Any, values: Any, slots: Any, gradients: Any) -> Any:
            given = keras.tree.map_structure(
                lambda a: None if a is None else _tensor(a),
                (scalars, values, slots, gradients),
            )
            with torch.no_grad():
                found = update(*given)
            new_scalars, *others = found
            return (
                keras.tree.map_structure(_numpy, new_scalars),
                *keras.tree.map_structure(_array_again, [values, slots], others),
            )

        return run


ENGINE = TorchEngine()

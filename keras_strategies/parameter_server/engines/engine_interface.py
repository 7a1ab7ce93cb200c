"""Interface between parameter servers and a framework.

A step on a worker has two programs. The first one finds the rows that a batch looks up;
it runs ahead of the step. The second one is the step itself on the pulled rows: the
value of a table is a *window*, its looked-up rows, and lookups use positions in the
window instead of ids. The gradient of a table therefore has one row per id, summed by
the framework.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.optimizers.optimizer_parts import trained_variables
from keras_strategies.keras_compat.thread_state import (
    current_stateless_scope,
    values_scope,
)
from keras_strategies.keras_compat.variables.creation import (
    OpenShape,
    make_variable,
    set_variable_shape,
)
from keras_strategies.keras_compat.variables.values import raw_value

#: Number of elements up to which a variable without a value has its shape.
_SMALL_SIZE = 16

#: A step: callable of a batch that may use variables, apply optimizers and look up
#: rows; returns values for the coordinator.
Body = Callable[[Any], Any]


@dataclass
class OptimizerCall:
    """A call of `optimizer.apply` in a step.

    Args:
        optimizer: the Keras optimizer.
        variables: its arguments.
        gradients: their gradients, NumPy arrays after the step; None for no gradient.
            For a table, gradients of the window's rows.
    """

    optimizer: Any
    variables: list[Any]
    gradients: list[Any]


@dataclass
class StepResult:
    """The result of a step.

    Args:
        outputs: the body's return value, with NumPy arrays.
        optimizer_calls: its calls of `optimizer.apply`.
        changed: pairs of a variable and its new value, a NumPy array.
    """

    outputs: Any
    optimizer_calls: list[OptimizerCall] = field(default_factory=list)
    changed: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass
class StepVariables:
    """The variables that a step may use.

    Args:
        tables: list of embedding tables, of which only the looked-up rows are pulled.
        others: list of variables that are pulled in full.
    """

    tables: list[Any]
    others: list[Any]

    def mark_dense(self, variables: Sequence[Any]) -> None:
        """From now on pulls and pushes these tables in full."""
        for variable in variables:
            self.tables = [v for v in self.tables if v is not variable]
            self.others.append(variable)


class LookupMismatchError(Exception):
    """A step made other lookups than `StepProgram.lookups` predicted."""


class CompilableStep:
    """A model's step to compile, for backends that do not always compile.

    Args:
        step: `train_step`, `test_step` or `predict_step` of a model.
        is_requested: bool, whether the model was compiled with `jit_compile=True`.
    """

    def __init__(self, step: Body, is_requested: bool):
        self._step = step
        self.is_requested = is_requested

    def __call__(self, batch: Any) -> Any:
        return self._step(batch)


class StepProgram(abc.ABC):
    """A step, compiled for a worker.

    Args:
        body: the step.
        variables: the variables that it may use.
        gradients: bool, whether it may apply optimizers.
    """

    def __init__(self, body: Body, variables: StepVariables, gradients: bool):
        self.body = body
        self.variables = variables
        self.gradients = gradients

    @abc.abstractmethod
    def lookups(self, batch: Any) -> list[tuple[Any, np.ndarray]]:
        """The rows that a batch looks up.

        Args:
            batch: structure of NumPy arrays.

        Returns:
            A pair of a table and ids, an integer array of any shape, for each lookup,
            in the order of the step.
        """

    @abc.abstractmethod
    def run(
        self,
        batch: Any,
        lookups: Sequence[tuple[Any, np.ndarray]],
        positions: Sequence[np.ndarray],
    ) -> StepResult:
        """Runs the step.

        Args:
            batch: structure of NumPy arrays.
            lookups: the result of `lookups` for this batch.
            positions: for each lookup, positions in the table's window.

        Raises:
            LookupMismatchError: if it makes other lookups than predicted.
        """

    def disable_lookup_prediction(self) -> None:  # noqa: B027
        """From now on runs the first program for each batch."""


class ParameterServerEngine(abc.ABC):
    """A framework's implementation of steps and updates."""

    #: Whether programs are compiled for static shapes, so that rows are padded.
    pads_rows = False
    #: Whether compiled updates are in place.
    updates_in_place = False

    @property
    def most_rows(self) -> int:
        """int, rows of a table up to which each has an id in programs."""
        return 2**63 - 1

    def is_tracing(self) -> bool:
        """Whether a program is being traced."""
        return current_stateless_scope() is not None or self.in_program()

    def in_program(self) -> bool:
        """Whether the framework traces a program in this thread."""
        return False

    def install(self) -> None:  # noqa: B027
        """Installs hooks for this backend; may be called repeatedly."""

    def expanded(self, value: Any) -> tuple[Any, list[Any]] | None:
        """The type and the components of a composite tensor; None for other values."""
        return None

    def is_framework_variable(self, value: Any) -> bool:
        """Whether a value is a variable of the framework, not of Keras."""
        return False

    def tensor_state(self, tensor: Any) -> Any:
        """Equal as long as a tensor has not changed in place; None if none does."""
        return None

    def composed(self, spec: Any, components: Sequence[Any]) -> Any:
        """The composite tensor of a type and components, tensors or NumPy arrays."""
        raise NotImplementedError

    @abc.abstractmethod
    def model_body(self, model: Any, kind: str) -> Body:
        """Keras's step of a model, for `kind` "train", "test" or "predict"."""

    @abc.abstractmethod
    def on_cpu(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps a server or a coordinator on the CPU, in this thread.

        Accelerators are hidden from the process for good, so that their memory is left
        to workers, unless the framework is in use already.
        """

    @abc.abstractmethod
    def program(
        self, body: Body, variables: StepVariables, gradients: bool
    ) -> StepProgram:
        """Creates the program of a body."""

    def new_variable(
        self, path: str, trainable: bool, dtype: str, shape: tuple[int, ...]
    ) -> Any:
        """Creates a variable of a worker, without a value."""
        # Keras reads the seeds of metrics when it traces a step, before values are
        # pulled.
        is_small = math.prod(shape) <= _SMALL_SIZE
        empty = np.zeros(shape if is_small else [min(n, 1) for n in shape], "float32")
        made = make_variable(path, trainable, dtype, empty)
        set_variable_shape(made, OpenShape(shape))
        self.replace_storage(made, shape)
        return made

    def replace_storage(self, variable: Any, shape: tuple[int, ...]) -> None:  # noqa: B027
        """Gives a new variable of a worker another tensor for its values."""

    @abc.abstractmethod
    def set_value(self, variable: Any, value: np.ndarray) -> None:
        """Sets a worker's value of a variable; a window may have any number of rows."""

    @abc.abstractmethod
    def get_value(self, variable: Any) -> np.ndarray:
        """The value of a worker's variable."""

    @abc.abstractmethod
    def compile_update(
        self, update: Callable[..., Any], uses_only_builtin_keras: bool
    ) -> Callable[..., Any]:
        """Compiles an optimizer's update for a server.

        Args:
            update: pure function of tensors, `(scalars, values, slots, gradients)`,
                lists but for `slots`, a list of lists; returns new scalars, values
                and slots.
            uses_only_builtin_keras: bool, whether it calls only Keras's code.

        Returns:
            A callable of NumPy arrays that returns NumPy arrays. It may overwrite the
            arrays of `values` and `slots` and return them.
        """


class TracedOutputs:
    """Outputs of a traced step: tensors, and other Python objects.

    Args:
        structure: the step's return value.
        is_tensor: callable of a leaf, whether the program computes it.

    Attributes:
        tensors: list, the leaves that the program computes.
    """

    def __init__(self, structure: Any, is_tensor: Callable[[Any], bool]):
        leaves = keras.tree.flatten(structure)
        self._computed = [is_tensor(leaf) for leaf in leaves]
        self.tensors = [
            leaf for leaf, own in zip(leaves, self._computed, strict=True) if own
        ]
        self._rest = [
            None if own else leaf
            for leaf, own in zip(leaves, self._computed, strict=True)
        ]
        self._structure = keras.tree.map_structure(lambda leaf: 0, structure)

    def filled(self, arrays: Sequence[Any]) -> Any:
        """The structure with arrays instead of tensors."""
        given = iter(arrays)
        leaves = [
            next(given) if own else leaf
            for leaf, own in zip(self._rest, self._computed, strict=True)
        ]
        return keras.tree.pack_sequence_as(self._structure, leaves)


class OptimizerCallRecorder:
    """Records calls of `optimizer.apply` instead of running them."""

    def __init__(self) -> None:
        self.calls: list[OptimizerCall] = []

    def __call__(self, optimizer: Any, gradients: Any, variables: Any) -> Any:
        if variables is None:
            variables = trained_variables(optimizer)
        self.calls.append(OptimizerCall(optimizer, list(variables), list(gradients)))
        return optimizer.iterations


def regularized_scope(variables: StepVariables) -> Any:
    """A `StatelessScope` with the values of regularized variables.

    Keras reads these from the scope, and others from the variables.
    """
    everything = (*variables.tables, *variables.others)
    return values_scope(
        (variable, raw_value(variable))
        for variable in everything
        if variable.regularizer is not None
    )


def changed_in(scope: Any, variable: Any) -> Any:
    """The value assigned to a variable in a scope; None without one."""
    value = scope.get_current_value(variable)
    return None if value is raw_value(variable) else value


def assigned_tables(scope: Any, variables: StepVariables) -> list[Any]:
    """The tables to which a step has assigned values in a scope."""
    return [v for v in variables.tables if changed_in(scope, v) is not None]


class _Writable:
    """Array interface of a read-only array that declares its memory writable."""

    def __init__(self, array: np.ndarray):
        about = array.__array_interface__
        self._array = array
        self.__array_interface__ = {**about, "data": (about["data"][0], False)}


def writable(array: np.ndarray) -> np.ndarray:
    """A writable view of an array, for frameworks without read-only memory.

    Arrays of messages are read-only in NumPy, but used by nothing else: writes to them
    are lost.
    """
    return array if array.flags.writeable else np.asarray(_Writable(array))


def bucket(rows: int) -> int:
    """Number of rows of a padded array: four sizes per power of two.

    >>> [bucket(n) for n in (0, 1, 9, 13, 100)]
    [8, 8, 10, 14, 112]
    """
    size = 8
    while size < rows:
        step = size // 4
        for padded in range(size, 2 * size, step):
            if padded >= rows:
                return padded
        size *= 2
    return size

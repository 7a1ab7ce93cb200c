"""Interface of the tensor functions of a framework that combine replicas."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from keras_strategies.communication.communicator import Communicator
from keras_strategies.devices import Device
from keras_strategies.types import ReduceOp


def is_float(tensor: Any) -> bool:
    """Whether a tensor has a dtype that gradients have."""
    return any(kind in str(tensor.dtype) for kind in ("float", "complex"))


class SparseGradients(abc.ABC):
    """Gradients of tables in the form of rows and their indices."""

    @abc.abstractmethod
    def is_sparse(self, gradient: Any) -> bool:
        """Whether a gradient is rows of a table."""

    @abc.abstractmethod
    def join(self, gradients: Sequence[Any]) -> Any:
        """The sum of gradients that are all sparse: their rows, concatenated."""

    @abc.abstractmethod
    def gather(self, gradient: Any, workers: Communicator) -> Any:
        """The rows of all workers."""


class TensorPrimitives(abc.ABC):
    """Tensor functions of a framework that combine the values of replicas."""

    #: Gradients that are rows of tables; None where all gradients are tensors.
    sparse: SparseGradients | None = None

    #: `row_parts(parts, row_split, caller, device)` is a tensor of the global batch
    #: (see `RowParts`), without gradient, from a part of each local replica. None where
    #: tensors of the global batch are always joined.
    row_parts: Callable[..., Any] | None = None

    def may_have_gradient(self, tensor: Any) -> bool:
        """Whether a gradient of a tensor may be computed."""
        return True

    @abc.abstractmethod
    def concatenate(self, tensors: Sequence[Any], axis: int = 0) -> Any:
        """Concatenates tensors of one device."""

    @abc.abstractmethod
    def split(self, tensor: Any, sizes: Sequence[Any], axis: int = 0) -> list[Any]:
        """Splits a tensor into parts of these sizes."""

    @abc.abstractmethod
    def reshape(self, tensor: Any, shape: Sequence[int]) -> Any:
        """Reshapes a tensor; one size may be -1."""

    @abc.abstractmethod
    def move_axis(self, tensor: Any, source: int, destination: int) -> Any:
        """Moves an axis of a tensor to another position."""

    @abc.abstractmethod
    def reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> Any:
        """Reduces tensors of one device, in their order."""

    @abc.abstractmethod
    def add(self, tensors: Sequence[Any]) -> Any:
        """Adds tensors of one device, in their order."""

    @abc.abstractmethod
    def widened(self, tensor: Any) -> Any:
        """A tensor or sparse gradient, in float32 if it is of half precision."""

    @abc.abstractmethod
    def cast(self, tensor: Any, dtype: Any) -> Any:
        """A tensor or sparse gradient in a dtype of the framework."""

    @abc.abstractmethod
    def to_device(self, tensor: Any, device: Device) -> Any:
        """A tensor on a device."""

    @abc.abstractmethod
    def read(self, variable: Any) -> Any:
        """A copy of the value of a `keras.Variable`, without gradient."""

    def read_with_gradient(self, variable: Any, like: Any) -> Any:
        """The value of a `keras.Variable`, of which a gradient can be computed.

        Only for engines with data-parallel calls.

        Args:
            variable: the variable.
            like: a copy of it, perhaps in another dtype.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def assign(self, variable: Any, value: Any) -> None:
        """Assigns a `keras.Variable` without calling the hooks of assignments."""

    @abc.abstractmethod
    def to_device_of(self, tensor: Any, other: Any) -> Any:
        """A tensor on the device of another one."""

    @abc.abstractmethod
    def all_lengths(
        self, lengths: Sequence[Any], workers: Communicator, counts: Sequence[int]
    ) -> list[Any]:
        """Lengths of the replicas of all workers.

        Args:
            lengths: those of the local replicas.
            workers: the communicator between workers.
            counts: the number of replicas of each worker.
        """

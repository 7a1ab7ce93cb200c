"""`ShardedVariable` and its shards."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_strategies.errors import InvalidTypeError
from keras_strategies.keras_compat.variables.hosted_variables import host_of


class VariableShard:
    """Consecutive rows of a `ShardedVariable`, on one parameter server.

    Attributes:
        name: str, the variable's path and the number of the shard.
        device: str, the parameter server, such as
            `"/job:ps/replica:0/task:1/device:CPU:0"`.
        shape: tuple of int.
        dtype: str.
    """

    def __init__(self, variable: Any, number: int, device: str, start: int, stop: int):
        self._variable = variable
        self._rows = slice(start, stop)
        self.name = f"{variable.path}/part_{number}"
        self.device = device
        self.shape = (stop - start, *variable.shape[1:])
        self.dtype: str = variable.dtype

    @property
    def value(self) -> Any:
        """The rows, a tensor of shape `shape`."""
        return self._variable[self._rows]

    def numpy(self) -> np.ndarray:
        """The rows, a NumPy array."""
        return np.asarray(keras.ops.convert_to_numpy(self.value))

    def assign(self, value: Any) -> None:
        """Assigns the rows.

        Args:
            value: array or tensor of shape `shape`.
        """
        rows = np.broadcast_to(keras.ops.convert_to_numpy(value), self.shape)
        host = host_of(self._variable)
        host.write_pieces(self._variable, [(self._rows.start, rows)])

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        found = self.numpy()
        return found if dtype is None else found.astype(dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return (
            f"<VariableShard {self.name} rows [{self._rows.start}:{self._rows.stop}], "
            f"shape={self.shape}, dtype={self.dtype}, device={self.device}>"
        )


class ShardedVariable:
    """A `keras.Variable` that is sharded along its first axis over parameter servers.

    Variables become one where the `variable_partitioner` of a `ParameterServerStrategy`
    returns more than one shard. They are used as any variable: conversion to tensors
    and arrays, `len` and slices are those of the unsharded variable, and a slice reads
    only its rows. Keras's files contain one variable, for any number of shards.

    Example:

    >>> partitioner = ks.experimental.partitioners.FixedShardsPartitioner(2)
    >>> strategy = ks.ParameterServerStrategy(variable_partitioner=partitioner)
    >>> with strategy.scope():
    ...     table = keras.Variable(np.zeros((10, 4)))
    >>> isinstance(table, ks.ShardedVariable)
    True
    >>> [shard.shape for shard in table.variables]
    [(5, 4), (5, 4)]
    """

    def __init__(self, *args: Any, **kwargs: Any):
        raise InvalidTypeError(
            "ShardedVariable cannot be called. Create a `keras.Variable(...)` in the "
            "scope of a ks.ParameterServerStrategy with a `variable_partitioner`: it "
            "becomes a ShardedVariable."
        )

    @property
    def variables(self) -> list[VariableShard]:
        """list of `VariableShard`, in the order of their rows."""
        variable: Any = self
        places = host_of(variable).places(variable)
        return [
            VariableShard(variable, i, device, start, stop)
            for i, (device, start, stop) in enumerate(places)
        ]

    @property
    def device(self) -> str:
        """Not available: the shards are on different devices."""
        variable: Any = self
        raise AttributeError(
            f"Variable {variable.path!r} has {len(self.variables)} shards on different "
            "devices. Use `variable.variables[i].device`."
        )

"""Reads of variables that are sharded over the devices of several workers.

JAX reads only arrays with all shards in the process. So a variable with shards on other
workers is gathered when it is read, in a collective call of all workers. A variable
with all shards on each worker's devices is assembled locally.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from keras_strategies.engines.jax.array_placement import (
    put_by_shards,
    put_one,
    spans_processes,
)
from keras_strategies.engines.jax.workers.jax_workers import JaxCommunicator
from keras_strategies.keras_compat.variables.values import IdMap, raw_value
from keras_strategies.runtime.state.chief_reads import ChiefReads
from keras_strategies.runtime.state.cross_worker_values import (
    AssignedValue,
    check_equal_values,
)


class CrossWorkerShards:
    """Access to the sharded variables of one strategy.

    Args:
        workers: variables are sharded over the devices of these workers.
    """

    # The most recent object of this process, for variables made outside of any scope,
    # such as some optimizer slots: the workers are the same.
    last: ClassVar[weakref.ref[CrossWorkerShards] | None] = None

    def __init__(self, workers: JaxCommunicator):
        self._workers = workers
        # On the chief, while it saves a model.
        self._reads: ChiefReads | None = None
        CrossWorkerShards.last = weakref.ref(self)

    def read(self, variable: Any, array: jax.Array) -> Any:
        """A variable's full value, a NumPy array.

        Args:
            variable: the `keras.Variable`.
            array: its value, sharded over workers.

        Raises:
            WorkerError: if another worker does not read the variable.
        """
        if self._reads is not None:
            found = self._reads.read(variable)
            if found is not None:
                return found
        own = assemble(array)
        return self._gathered(variable.path, array) if own is None else own

    def _gathered(self, path: str, array: jax.Array) -> Any:
        workers = self._workers
        # The barrier names an absent worker; XLA would wait for it.
        workers.group.barrier(
            f"the read of {path!r}, which is sharded over the workers and is read by "
            "all of them at once"
        )
        with workers.exchange():
            replicated = jax.NamedSharding(array.sharding.mesh, jax.P())  # type: ignore[attr-defined]
            found = jax.jit(lambda value: value, out_shardings=replicated)(array)
            return np.asarray(found.addressable_data(0))

    @contextlib.contextmanager
    def reading(self, variables: Sequence[Any]) -> Iterator[None]:
        """Entered on all workers while the chief reads variables in the block."""
        group = self._workers.group
        reads = ChiefReads(
            group,
            [v for v in variables if _is_on_other_workers(raw_value(v))],
            lambda variable: self._gathered(variable.path, raw_value(variable)),
        )
        try:
            self._reads = reads if group.is_chief else None
            with reads.open():
                yield
        finally:
            self._reads = None

    def check(self, variables: Sequence[Any]) -> None:
        """Checks that workers assigned equal values to sharded variables."""
        arrays = [raw_value(variable) for variable in variables]
        own = [_assigned.get(array) for array in arrays]
        check_equal_values(self._workers.group, variables, own)
        for array in arrays:
            _assigned.discard(array)


# The values that arrays were made from, until workers have compared them. The output of
# a program has none: it is equal on all workers.
_assigned: IdMap[AssignedValue] = IdMap()


def place_variable(
    array: Any, sharding: jax.sharding.Sharding, dtype: Any = None
) -> jax.Array:
    """Places a variable's value, and records what workers compare of a sharded one.

    Args:
        array: JAX or NumPy array.
        sharding: that of the variable.
        dtype: that of the variable, to which a NumPy array is converted.
    """
    placed: jax.Array
    if isinstance(array, np.ndarray):
        placed = put_by_shards(array, sharding, dtype or array.dtype)
    else:
        placed = put_one(array, sharding)
    if is_sharded_over_workers(placed):
        _assigned.set(placed, AssignedValue(np.asarray(array)))
    return placed


def is_sharded_over_workers(array: Any) -> bool:
    """Whether an array has devices of several workers and is not replicated."""
    return spans_processes(array) and not array.is_fully_replicated


def _is_on_other_workers(array: Any) -> bool:
    """Whether this worker lacks shards of an array."""
    return is_sharded_over_workers(array) and _missing(array) > 0


def _is_sharded(array: Any) -> bool:
    is_array = isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
    return is_array and not array.is_fully_replicated


def assemble(array: jax.Array) -> Any:
    """A sharded array's value if this worker has all shards; None otherwise."""
    if _missing(array):
        return None
    found = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        found[shard.index] = np.asarray(shard.data)
    return found


def _missing(array: jax.Array) -> int:
    """The numbers of a sharded array that this worker lacks."""
    own = {str(shard.index): shard.data.size for shard in array.addressable_shards}
    return int(array.size - sum(own.values()))


def variable_reader(
    shards_of: Callable[[Any], CrossWorkerShards | None],
) -> Callable[[Any, Any], Any]:
    """A reader of variables for Keras; it returns None where JAX is to read.

    Of a sharded array JAX would keep the value that it reads.
    """

    def read(variable: Any, array: Any) -> Any:
        if not _is_sharded(array):
            return None
        if not spans_processes(array):
            return assemble(array)
        shards = shards_of(variable)
        if shards is None and CrossWorkerShards.last is not None:
            shards = CrossWorkerShards.last()
        return assemble(array) if shards is None else shards.read(variable, array)

    return read

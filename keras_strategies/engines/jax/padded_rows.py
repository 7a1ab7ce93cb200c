"""Arrays of any number of rows, sharded over a mesh.

# Uneven shards

Shards of a JAX array are equal. A value inside a program need not divide: XLA gives
each device as many rows as the first has, pads the last ones, and excludes the padding
from what is computed. So 63 rows on two devices are an array of 64, of which a program
uses 63: it slices off the padding and constrains the sharding of the rest. No device
receives rows of another one. Outputs are padded again in the program, and lose the
padding on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from keras_strategies.engines.jax.array_placement import host_copy, put_one

_Static = tuple[int, jax.NamedSharding]


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class PaddedRows:
    """An array whose rows are sharded, with padding after the last one.

    JAX sees its array, and Keras a tensor of the true shape.

    Args:
        array: array of shape `(padded, ...)`.
        rows: int, the number of rows without padding.
        sharding: the sharding of the rows.
    """

    array: Any
    rows: int
    sharding: jax.NamedSharding

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        return (self.rows, *self.array.shape[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.array.dtype

    def true_rows(self) -> jax.Array:
        """The rows without padding: sharded in a program, elsewhere replicated."""
        if isinstance(self.array, jax.core.Tracer):
            rows = self.array[: self.rows]
            return jax.lax.with_sharding_constraint(rows, self.sharding)
        return _replicated_rows(self.array, self.rows, self.sharding.mesh)

    def tree_flatten(self) -> tuple[tuple[Any], _Static]:
        """The children and the static data, for JAX."""
        return (self.array,), (self.rows, self.sharding)

    @classmethod
    def tree_unflatten(cls, static: _Static, children: tuple[Any]) -> PaddedRows:
        """The inverse of `tree_flatten`, for JAX."""
        return cls(children[0], *static)


def _replicated_rows(array: Any, rows: int, mesh: Any) -> jax.Array:
    # An eager slice of a sharded array is one of JAX's arrays too, with equal shards.
    replicated = jax.NamedSharding(mesh, jax.P())
    return jax.jit(_first, static_argnums=1, out_shardings=replicated)(array, rows)


def _first(array: Any, rows: int) -> Any:
    return array[:rows]


def is_padded(leaf: Any) -> bool:
    """Whether a leaf of a batch is a `PaddedRows`."""
    return isinstance(leaf, PaddedRows)


def without_padding(structure: Any) -> Any:
    """A batch with the true rows of its arrays."""
    return jax.tree.map(
        lambda leaf: leaf.true_rows() if is_padded(leaf) else leaf,
        structure,
        is_leaf=is_padded,
    )


def padded_length(rows: int, count: int) -> int:
    """The number of rows with padding, a multiple of the number of devices.

    >>> padded_length(63, 2), padded_length(64, 2), padded_length(1, 4)
    (64, 64, 4)
    """
    return -(-rows // count) * count


def padded_sizes(rows: int, count: int) -> list[int]:
    """The number of rows on each device, without padding.

    >>> padded_sizes(64, 2), padded_sizes(10, 4), padded_sizes(1, 2)
    ([32, 32], [3, 3, 3, 1], [1, 0])
    """
    most = padded_length(rows, count) // count
    return [max(0, min(most, rows - start * most)) for start in range(count)]


def put_padded(array: Any, sharding: jax.NamedSharding) -> PaddedRows:
    """Shards an array's rows over a mesh.

    Args:
        array: NumPy or JAX array of shape `(rows, ...)`, with one row or more.
        sharding: the sharding of the rows.
    """
    rows = array.shape[0]
    if isinstance(array, jax.Array):
        return PaddedRows(_moved(array, sharding), rows, sharding)
    shape = (_length(rows, sharding), *array.shape[1:])

    def read(index: Any) -> Any:
        # Only the rows are in memory.
        start, stop, _ = index[0].indices(shape[0])
        missing = stop - max(start, min(stop, rows))
        return with_zeros(host_copy(array[index]), missing)

    placed = jax.make_array_from_callback(shape, sharding, read)
    return PaddedRows(placed, rows, sharding)


def _length(rows: int, sharding: jax.NamedSharding) -> int:
    return padded_length(rows, sharding.mesh.shape[sharding.spec[0]])


def _moved(array: jax.Array, sharding: jax.NamedSharding) -> Any:
    """An array on the mesh: padded, or replicated for a program that shards it."""
    is_on_mesh = array.sharding.device_set == sharding.device_set
    if is_on_mesh or not array.is_fully_addressable:
        return put_one(array, jax.NamedSharding(sharding.mesh, jax.P()))
    missing = _length(array.shape[0], sharding) - array.shape[0]
    return put_one(with_zeros(array, missing), sharding)


def with_zeros(array: Any, count: int) -> Any:
    """An array with rows of zeros at its end."""
    if not count:
        return array
    widths = [(0, count)] + [(0, 0)] * (array.ndim - 1)
    return (jnp if isinstance(array, jax.Array) else np).pad(array, widths)


def pad_outputs(outputs: Any, sharding: jax.NamedSharding) -> Any:
    """In a program: outputs with their first axis sharded, others replicated.

    Args:
        outputs: structure of arrays.
        sharding: the sharding of rows.
    """
    replicated = jax.NamedSharding(sharding.mesh, jax.P())

    def padded(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if not leaf.ndim or not leaf.shape[0]:
            return jax.lax.with_sharding_constraint(leaf, replicated)
        rows = leaf.shape[0]
        sharded = jax.lax.with_sharding_constraint(leaf, sharding)
        every = with_zeros(sharded, _length(rows, sharding) - rows)
        return PaddedRows(
            jax.lax.with_sharding_constraint(every, sharding), rows, sharding
        )

    return jax.tree.map(padded, outputs)


# Outputs on the host

#: Callable of this worker's rows and the number of rows of each worker; returns the
#: rows of all workers, in their order.
GatherRows = Callable[[Any, Sequence[int]], Any]


def outputs_on_host(outputs: Any, gather_rows: GatherRows | None = None) -> Any:
    """A program's outputs, with sharded rows as NumPy arrays without padding.

    Args:
        outputs: structure of arrays and of `PaddedRows`.
        gather_rows: gathers rows from other workers; None without a cluster.
    """
    return jax.tree.map(
        lambda leaf: _on_host(leaf, gather_rows) if is_padded(leaf) else leaf,
        outputs,
        is_leaf=is_padded,
    )


def _on_host(padded: PaddedRows, gather_rows: GatherRows | None) -> Any:
    if padded.array.is_fully_addressable:
        return np.asarray(padded.array)[: padded.rows]
    assert gather_rows is not None
    return _gathered(padded.array, gather_rows)[: padded.rows]


def _gathered(array: jax.Array, gather_rows: GatherRows) -> Any:
    """The rows of an array on the devices of several workers, on the host of each."""
    # Each shard once, also where several devices have it, from the first worker.
    owners: dict[int, int] = {}
    device: Any
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        start = index[0].start or 0
        owners[start] = min(
            device.process_index, owners.get(start, device.process_index)
        )
    order = sorted(owners, key=lambda start: (owners[start], start))
    length = array.shape[0] // len(order)
    own = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    process = jax.process_index()
    shards = [own[start] for start in order if owners[start] == process]
    empty = np.empty((0, *array.shape[1:]), array.dtype)
    counts = [
        length * sum(owner == worker for owner in owners.values())
        for worker in range(jax.process_count())
    ]
    rows = np.asarray(gather_rows(np.concatenate([empty, *shards]), counts))
    blocks = rows.reshape(len(order), length, *rows.shape[1:])
    return blocks[np.argsort(order)].reshape(rows.shape)

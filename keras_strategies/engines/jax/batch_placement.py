"""Transfer of batches to the devices of a strategy."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies.engines.jax.array_placement import host_copy, put, spans_processes
from keras_strategies.engines.jax.padded_rows import (
    PaddedRows,
    is_padded,
    padded_length,
    padded_sizes,
    put_padded,
    with_zeros,
)
from keras_strategies.engines.jax.strategy_distribution import splits
from keras_strategies.engines.jax.unread_rows import UnreadRows, is_unread
from keras_strategies.engines.jax.workers.jax_workers import JaxCommunicator
from keras_strategies.keras_compat.models.input_adapters import BatchPlacer, own_part
from keras_strategies.runtime.batch_prefetch import compared_ahead, prefetch_one
from keras_strategies.runtime.row_splits import check_batch
from keras_strategies.runtime.worker_batch import WorkerBatch


class JaxBatchPlacer(abc.ABC):
    """Transfers batches, structures of arrays, to the devices of a strategy."""

    #: Whether arrays of batches may be `UnreadRows`.
    reads_own_rows = False
    unread = UnreadRows

    @abc.abstractmethod
    def place(self, batch: Any) -> Any:
        """The batch on the devices; arrays already there are not copied."""

    @abc.abstractmethod
    def batches(
        self, batches: Iterable[Any], steps: int | None = None
    ) -> Iterator[Any]:
        """The batches on the devices, transferred at or before `next`.

        After `steps`, the next batch is not read before it is asked for.
        """

    def _begin(self, batch: Any) -> Callable[[], Any]:
        # The transfer is asynchronous: programs wait for their inputs.
        placed = self.place(batch)
        return lambda: placed


class MeshPlacer(JaxBatchPlacer):
    """Shards each array over a mesh by its rows.

    An array whose rows the number of devices does not divide becomes a `PaddedRows`;
    one without rows is replicated. On a mesh with other axes, along which variables are
    sharded, uneven rows are replicated too: XLA computes gradients of sharded tables
    from uneven shards of ids wrong.

    Args:
        mesh: a mesh; rows are sharded along its first axis.
        workers: those that have its devices, and compare each global batch; None for
            one process.
    """

    def __init__(self, mesh: jax.sharding.Mesh, workers: JaxCommunicator | None = None):
        self._workers = workers
        self.reads_own_rows = workers is not None
        self.use_mesh(mesh)

    def _compare(self, batch: Any) -> None:
        if self._workers is not None:
            self._workers.steps.check_batch(batch)

    def use_mesh(self, mesh: jax.sharding.Mesh) -> None:
        """Shards later batches over another mesh."""
        axis = mesh.axis_names[0]
        self._pads = len(mesh.axis_names) == 1
        self._size = mesh.shape[axis]
        self._split = jax.NamedSharding(mesh, jax.P(axis))
        self._replicated = jax.NamedSharding(mesh, jax.P())
        self._ahead = mesh.devices.flat[0].platform != "cpu"

    def place(self, batch: Any) -> Any:
        if isinstance(batch, WorkerBatch):
            assert self._workers is not None
            self._workers.steps.check_rows(sum(batch.every), batch.order)
            if batch.every:
                return self._of_workers(batch)
            batch = batch.batch
        check_batch(batch)
        if not any(map(spans_processes, jax.tree.leaves(batch))):
            self._compare(batch)
        # In JAX, None has no leaves, and the components of a sparse array are leaves.
        leaves, structure = jax.tree.flatten(batch, is_leaf=is_padded)
        return jax.tree.unflatten(structure, self._put(leaves))

    def _of_workers(self, batch: WorkerBatch) -> Any:
        """A batch of which each worker has its own rows.

        Rows that are those of their device, as `padded_sizes` splits them, stay where
        they are. Others have to move, since shards of an array are equal.
        """
        workers = self._workers
        assert workers is not None
        counts = workers.replica_counts
        rows = [sum(each) for each in counts.split(batch.every)]
        total = sum(rows)
        if batch.every != padded_sizes(total, len(batch.every)) or not self._pads:
            workers.steps.await_checks()
            joined = jax.tree.map(
                lambda leaf: workers.gather_rows_on_host(leaf, rows), batch.batch
            )
            return self.place(joined)
        check_batch(batch.batch)
        first, length = sum(rows[: counts.worker]), padded_length(total, self._size)

        def placed(leaf: Any) -> Any:
            def read(index: Any) -> Any:
                start, stop, _ = index[0].indices(length)
                found = host_copy(leaf[start - first : stop - first])
                return with_zeros(found, stop - start - len(found))

            shape = (length, *leaf.shape[1:])
            array = jax.make_array_from_callback(shape, self._split, read)
            return array if length == total else PaddedRows(array, total, self._split)

        return jax.tree.map(placed, batch.batch)

    def _put(self, leaves: Sequence[Any]) -> list[Any]:
        """Arrays on the mesh, in one transfer except for padded ones."""
        arrays = [leaf if is_padded(leaf) else _as_array(leaf) for leaf in leaves]
        is_uneven = [self._is_uneven(array.shape) for array in arrays]
        even = [a for a, uneven in zip(arrays, is_uneven, strict=True) if not uneven]
        shardings = [self._sharding(array.shape) for array in even]
        even = [
            np.asarray(array) if to is self._replicated and is_unread(array) else array
            for array, to in zip(even, shardings, strict=True)
        ]
        placed = iter(put(even, shardings))
        return [
            self._padded(array) if uneven else next(placed)
            for array, uneven in zip(arrays, is_uneven, strict=True)
        ]

    def _is_uneven(self, shape: Sequence[int]) -> bool:
        return self._pads and len(shape) > 0 and shape[0] % self._size > 0

    def _sharding(self, shape: tuple[int, ...]) -> jax.NamedSharding:
        return self._split if splits(shape, self._size) else self._replicated

    def _padded(self, array: Any) -> PaddedRows:
        return array if is_padded(array) else put_padded(array, self._split)

    @property
    def row_sharding(self) -> jax.NamedSharding:
        """The sharding of the rows of a batch."""
        return self._split

    def abstract(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """What `place` makes of an array, with a `jax.ShapeDtypeStruct` in it."""
        if not self._is_uneven(shape):
            sharding = self._sharding(shape)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        padded = (padded_length(shape[0], self._size), *shape[1:])
        array = jax.ShapeDtypeStruct(padded, dtype, sharding=self._split)
        return PaddedRows(array, shape[0], self._split)

    def batches(
        self, batches: Iterable[Any], steps: int | None = None
    ) -> Iterator[Any]:
        workers = None if self._workers is None else self._workers.steps
        if workers is not None and (workers.compares or self._ahead):
            yield from compared_ahead(batches, self.place, workers, steps)
        elif self._ahead:
            yield from prefetch_one(batches, self._begin, steps)
        else:
            yield from map(self.place, batches)


class DevicePlacer(JaxBatchPlacer):
    """Transfers batches to one device."""

    def __init__(self, device: jax.Device):
        self._device = device
        self._is_cpu = device.platform == "cpu"

    def place(self, batch: Any) -> Any:
        return jax.tree.map(self._place_leaf, batch)

    def _place_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            # This device is the default one in the strategy's scope.
            return jax.device_put(host_copy(leaf))
        if leaf.devices() == {self._device}:
            return leaf
        return jax.device_put(leaf, self._device)

    def batches(
        self, batches: Iterable[Any], steps: int | None = None
    ) -> Iterator[Any]:
        if self._is_cpu:
            return (self.place(batch) for batch in batches)
        return prefetch_one(batches, self._begin, steps)


class HostBatches:
    """Returns batches unchanged, for steps that place them themselves."""

    reads_own_rows = True
    unread = UnreadRows

    def place(self, batch: Any) -> Any:
        """The batch."""
        return batch

    def batches(
        self, batches: Iterable[Any], steps: int | None = None
    ) -> Iterator[Any]:
        """The batches."""
        return iter(batches)


class BuildingBatches:
    """Batches on the host while a model is called to build it, then placed ones.

    Args:
        placer: the placer of the batches of steps.
        is_building: returns whether the model is not built yet.
    """

    unread = UnreadRows

    def __init__(self, placer: BatchPlacer, is_building: Callable[[], bool]):
        self._placer = placer
        self._is_building = is_building

    @property
    def reads_own_rows(self) -> bool:
        """Whether arrays of batches may be `UnreadRows`."""
        return self._placer.reads_own_rows and not self._is_building()

    def batches(
        self, batches: Iterable[Any], steps: int | None = None
    ) -> Iterator[Any]:
        """The batches; of a `WorkerBatch` this worker's rows, which build a model."""
        if self._is_building():
            return map(own_part, batches)
        return self._placer.batches(batches, steps)


def _as_array(leaf: Any) -> Any:
    is_array = isinstance(leaf, (jax.Array, np.ndarray)) or is_unread(leaf)
    return leaf if is_array else np.asarray(leaf)

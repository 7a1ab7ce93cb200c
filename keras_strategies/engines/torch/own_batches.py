"""Batches of `fit`, `evaluate` and `predict` with this worker's rows only."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import torch

from keras_strategies.engines.torch.cuda_batches import (
    BatchPrefetcher,
    CudaMover,
    Mover,
)
from keras_strategies.engines.torch.data_parallel.row_parts import (
    TorchRowParts,
    row_parts,
)
from keras_strategies.engines.torch.devices import moved, torch_device
from keras_strategies.engines.torch.tensor_primitives import PRIMITIVES
from keras_strategies.keras_compat.models.input_adapters import (
    is_array_adapter,
    own_batches,
)
from keras_strategies.keras_compat.structures import leaves_of, with_leaves
from keras_strategies.loaders.loader_rows import (
    LoaderRows,
    can_read_rows,
)
from keras_strategies.runtime.batch_prefetch import compared_ahead
from keras_strategies.runtime.data_parallel.row_parts import RowPartsCaller
from keras_strategies.runtime.placement import Placement
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.worker_batch import WorkerBatch, WorkerRows


class OwnBatchPlacer:
    """Reads own rows where the input allows it, and puts them on their replicas.

    Those of elastic workers stay on the host until their step, which reads them again
    if the group has changed.

    Args:
        placement: the devices of replicas, with several workers.
        caller: the data-parallel calls of the strategy.
        others: what places batches with all rows.
    """

    def __init__(
        self,
        placement: Placement,
        caller: RowPartsCaller,
        others: BatchPrefetcher,
    ):
        assert placement.workers is not None
        self._workers = placement.workers
        workers = placement.workers
        self._rows = WorkerRows(lambda: workers.replica_counts)
        self._caller = caller
        self._others = others
        self._home = torch_device(placement.variables)
        self._devices = [torch_device(device) for device in placement.replicas]
        self._movers = [_mover(device) for device in self._devices]
        self._loaders: weakref.WeakKeyDictionary[Any, LoaderRows] = (
            weakref.WeakKeyDictionary()
        )

    def batches(self, batches: Any, adapter: Any = None) -> Iterator[Any]:
        """A pass over the batches.

        Args:
            batches: the loader of Keras or the user, which is read from now on.
            adapter: Keras's adapter of the user's input.
        """
        separate = own_batches(adapter)
        if separate is not None:
            # As a pass of Keras begins: by a draw of Torch's.
            iter(batches)
            return self._moved(separate)
        if is_array_adapter(adapter):
            rows = LoaderRows(batches, self._workers, self._rows, True)
            return self._moved(rows.begin())
        if can_read_rows(batches):
            if batches not in self._loaders:
                rows = LoaderRows(batches, self._workers, self._rows)
                self._loaders[batches] = rows
            return self._moved(self._loaders[batches].begin())
        return self._others.batches(batches)

    def place(self, batch: Any) -> Any:
        """A batch with this worker's rows on their replicas; others unchanged."""
        if isinstance(batch, WorkerBatch):
            return self._begin(batch.of(self._workers.replica_counts))()
        return batch

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        if not self._workers.actions.is_fixed:
            return batches
        return self._checked(batches)

    def _checked(self, batches: Iterator[Any]) -> Iterator[Any]:
        steps = self._workers.steps
        if self._home.type == "cuda":
            for arrive in compared_ahead(batches, self._begin_checked, steps):
                yield arrive()
            return
        for batch in batches:
            yield self._begin_checked(batch)()
        steps.check_end()
        steps.await_checks()

    def _begin_checked(self, batch: Any) -> Callable[[], Any]:
        if isinstance(batch, WorkerBatch):
            self._workers.steps.check_rows(sum(batch.every), batch.order)
        return self._begin(batch)

    def _begin(self, batch: Any) -> Callable[[], Any]:
        if not isinstance(batch, WorkerBatch):
            return lambda: batch
        if not batch.every:
            return lambda: batch.batch
        row_split = RowSplit.over(PRIMITIVES, batch.every, self._workers)
        if row_split is None:
            return lambda: self._joined(batch)
        leaves = [_on_host(leaf) for leaf in leaves_of(batch.batch)]
        columns = [_split(leaf, row_split.sizes) for leaf in leaves]
        arrivals = [
            move([column[i] for column in columns])
            for i, move in enumerate(self._movers[: len(row_split.sizes)])
        ]

        def arrive() -> Any:
            arrived = [each() for each in arrivals]
            found = [
                None if parts[0] is None else self._row_parts(parts, row_split)
                for parts in zip(*arrived, strict=True)
            ]
            return with_leaves(batch.batch, found)

        return arrive

    def _row_parts(
        self, parts: tuple[torch.Tensor, ...], row_split: RowSplit
    ) -> TorchRowParts:
        tensor = row_parts(parts, row_split, self._caller, self._home)
        tensor.layer = _no_layer
        return tensor

    def _joined(self, batch: WorkerBatch) -> Any:
        """All rows, of a batch of which a worker has none."""
        counts = self._workers.replica_counts
        rows = [sum(each) for each in counts.split(batch.every)]

        def joined(leaf: Any) -> Any:
            if leaf is None:
                return None
            tensor = _on_host(leaf).to(self._home)
            return self._workers.gather_rows(tensor, rows)

        return keras.tree.map_structure(joined, batch.batch, none_is_leaf=True)


def _no_layer() -> None:
    return None


def _on_host(leaf: Any) -> Any:
    """A tensor for an array, as Keras converts it; others unchanged."""
    if leaf is None or isinstance(leaf, torch.Tensor):
        return leaf
    with keras.device("cpu"):
        return keras.ops.convert_to_tensor(leaf)


def _split(leaf: Any, sizes: list[int]) -> list[Any]:
    return [None] * len(sizes) if leaf is None else list(torch.split(leaf, sizes))


def _mover(device: torch.device) -> Mover:
    if device.type == "cuda":
        return CudaMover(device)
    return lambda leaves: lambda: [_moved(leaf, device) for leaf in leaves]


def _moved(leaf: Any, device: torch.device) -> Any:
    return None if leaf is None else moved(leaf, device)
